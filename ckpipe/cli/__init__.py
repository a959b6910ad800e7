"""The command ``ckpipe``: inspect checkpoints and clean up, without opening a pipeline.

Importing ``ckpipe`` does not import this package, which needs the extra ``cli`` for all but help
and version. A command that cannot write its output ends with a separate exit code.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from types import FrameType

from ckpipe.cli.commands import INSTALL, drop, open_closed_streams, plain_help, version_text

_INTERRUPTED, _CRASHED = 130, 70

_SHOW_CURSOR = b"\r\x1b[2K\x1b[?25h"
"""Bytes that wipe the progress line, and show the cursor, which that line hides."""


def main() -> None:
    """Run the command with the arguments of this process, and exit with its code."""
    open_closed_streams()
    try:
        sys.exit(_run(sys.argv[1:]))
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("typer", "rich"):
            _crashed()
        words = set(sys.argv[1:])
        if words & {"-h", "--help", "--version"}:
            asks_help = bool(words & {"-h", "--help"})
            sys.stdout.write(plain_help() if asks_help else version_text("--json" in words) + "\n")
            sys.exit(0)
        sys.stderr.write(f"error: the command needs more packages: {INSTALL}\n")
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    except Exception:
        _crashed()


def _run(arguments: list[str]) -> int:
    # Packages take up to two seconds to import, and some do not survive an exception there. So an
    # interrupt ends the process at once, before any work has begun.
    unhandled = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if unhandled:
        signal.signal(signal.SIGINT, _leave)
    try:
        from ckpipe.cli.app import make_app, run

        app = make_app(arguments)
    finally:
        if unhandled:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    return run(arguments, app)


def _leave(number: int, frame: FrameType | None) -> None:
    if sys.stderr.isatty():
        os.write(sys.stderr.fileno(), _SHOW_CURSOR)
    os._exit(_INTERRUPTED)


def _crashed() -> None:
    # Python's own code for this is 1, which means here that a check found damage.
    try:
        traceback.print_exc()
    except OSError:
        drop(sys.stderr)
    sys.exit(_CRASHED)
