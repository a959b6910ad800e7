"""Calls of the user's own code, such as ``state_dict``, by the pipeline."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ckpipe.errors import UsageError

LEAVING = (SystemExit, KeyboardInterrupt)
"""What is raised to end a program; where a coroutine lets it pass, its event loop ends."""


class _Thread(threading.local):
    calls = False


_this = _Thread()


@contextmanager
def on_calling_thread() -> Iterator[None]:
    """Have :func:`user_code` let everything pass, as the caller of the pipeline is waiting here."""
    before, _this.calls = _this.calls, True
    try:
        yield
    finally:
        _this.calls = before


@contextmanager
def user_code(what: str, label: str) -> Iterator[None]:
    """Let ``SystemExit`` and ``KeyboardInterrupt`` pass only where they reach the program.

    That is the thread that called the pipeline, and the main thread, where signals are handled. On
    a thread of the pipeline they would only end its event loop, with all its saves. Errors pass
    anywhere, with a note that says where in the state they come from.

    Args:
        what: What is called.
        label: Where in the state.

    Raises:
        UsageError: If the code raised what is no error, on a thread of the pipeline.
    """
    try:
        yield
    except Exception as error:
        if label:
            error.add_note(f"raised by {what} of {label!r}")
        raise
    except BaseException as signal:
        if _this.calls or threading.current_thread() is threading.main_thread():
            raise
        raise refuse_exit(what, signal, label) from signal


def refuse_exit(what: str, signal: BaseException, label: str = "") -> UsageError:
    """The error in place of what would end the program, or in truth the pipeline's loop.

    Args:
        what: What was called.
        signal: What it raised.
        label: Where in the state.
    """
    return UsageError(
        f"{what} raised {signal!r}, which cannot end the program from here",
        key=label or None,
        hint="Raise an Exception instead",
    )
