"""The command ``ckpipe``: looks at checkpoints and keeps house, without opening a pipeline.

Importing ``ckpipe`` does not import this package, which needs the extra ``cli`` for all but help
and version: here is what needs no typer. A command that cannot write its output ends with a code
of its own.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from json import dumps
from types import FrameType
from typing import NamedTuple, TextIO

from ckpipe.version import __version__

INSTALL = "pip install 'ckpipe[cli]'"

ABOUT = """Looks at checkpoints and keeps house.

A URL is what a pipeline is given: a plain path, file:///path, s3://bucket/prefix, and so on.
"""

EPILOG = (
    "Exit codes: 0 all is well, 1 a check found damage or a difference, 2 the command or a name "
    "in it is wrong, 3 the store failed, 130 interrupted."
)


class Command(NamedTuple):
    """A command.

    Args:
        name: Its name.
        home: The module and the function in it whose parameters are the command's arguments.
        summary: What it does, in a line.
        needs: A module that it needs to do its work, and that takes seconds to import, as whatever
            needs torch does.
    """

    name: str
    home: str
    summary: str
    needs: str | None = None


COMMANDS = (
    Command("ls", "ls_info:list_", "List checkpoints, the newest first."),
    Command("info", "ls_info:info", "Show what a checkpoint holds."),
    Command(
        "verify",
        "reading:verify",
        "Read a checkpoint whole, check every byte.",
        "ckpipe.loading.reader",
    ),
    Command("diff", "reading:diff", "Compare two checkpoints.", "ckpipe.cli.diff"),
    Command("cp", "reading:cp", "Copy checkpoints to another store, verified."),
    Command(
        "export",
        "reading:export",
        "Write a checkpoint as other programs load it.",
        "ckpipe.export",
    ),
    Command("rm", "housekeeping:rm", "Delete a checkpoint."),
    Command("pin", "housekeeping:pin_", "Protect a checkpoint from retention."),
    Command("unpin", "housekeeping:unpin_", "End that protection."),
    Command("prune", "housekeeping:prune_", "Delete what the rules do not keep."),
    Command("sweep", "housekeeping:sweep_", "Remove what crashed runs left."),
    Command("bench", "bench:bench", "Measure machine and store; say what to set.", "torch"),
    Command("timeline", "timeline:timeline", "Show or draw where the time of a save went."),
)


def version_text(as_json: bool) -> str:
    """Name the version of the program."""
    return dumps({"version": __version__}) if as_json else f"ckpipe {__version__}"


def plain_help() -> str:
    """Write the help of the whole program without the packages of the extra ``cli``."""
    width = max(len(command.name) for command in COMMANDS)
    lines = (f"  {command.name:{width}}  {command.summary}\n" for command in COMMANDS)
    return (
        "Usage: ckpipe [OPTIONS] COMMAND [ARGS]...\n\n"
        f"{ABOUT}\n"
        f"The commands need packages that are not installed: {INSTALL}\n\n"
        f"Commands:\n{''.join(lines)}"
    )


OUTPUT_FAILED = 3
"""The exit code when the output could not be written."""

NOBODY_READS = 141
"""The exit code when the reader of a pipe went away: what a shell shows for SIGPIPE."""


def open_closed_streams() -> None:
    """Take the places of standard streams that are closed, which a store's file would take else.

    What is written to standard output fails then, and is not lost in silence.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            place = os.open(os.devnull, os.O_WRONLY if number == 2 else os.O_RDONLY)
            if place != number:
                os.dup2(place, number)
                os.close(place)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115  for good


def drop(stream: TextIO) -> None:
    """Keep the interpreter from writing what is left, and complaining, when it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


_INTERRUPTED, _CRASHED = 130, 70

_SHOW_CURSOR = b"\r\x1b[2K\x1b[?25h"
"""Wipes the line that says that the command is at work, and shows the cursor, which that hides."""


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
    with _leaving_at_once():
        from ckpipe.cli.app import make_app, run

        app = make_app(arguments)
    return run(arguments, app)


@contextmanager
def _leaving_at_once() -> Iterator[None]:
    """End the process at an interrupt, as long as nothing is begun.

    Packages take up to two seconds to import, and some of them do not survive an exception there.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(number: int, frame: FrameType | None) -> None:
    if sys.stderr.isatty():
        os.write(sys.stderr.fileno(), _SHOW_CURSOR)
    os._exit(_INTERRUPTED)


def _crashed() -> None:
    # Python's own code for this is 1, by which commands say that a check found damage.
    try:
        traceback.print_exc()
    except OSError:
        drop(sys.stderr)
    sys.exit(_CRASHED)
