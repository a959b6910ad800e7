"""Calls of the user's own code, such as ``state_dict``, by the pipeline."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ckpipe.errors import UsageError

LEAVING = (SystemExit, KeyboardInterrupt)
"""What is raised to end a program; where a coroutine lets it pass, its event loop ends."""


@contextmanager
def user_code(what: str, label: str) -> Iterator[None]:
    """Keeps an attempt to leave the program from ending the pipeline's loop with all its saves.

    Errors pass as they are. ``SystemExit`` and its like mean the thread that they are raised on,
    which is seldom the caller's here. Only an interruption of the main thread, where Ctrl-C is
    raised in whatever runs just then, passes too.

    Args:
        what: What is called.
        label: Where in the state.

    Raises:
        UsageError: If the code raised what is no error.
    """
    try:
        yield
    except Exception:
        raise
    except BaseException as signal:
        if isinstance(signal, KeyboardInterrupt) and _is_main_thread():
            raise
        raise no_way_out(what, signal, label) from signal


def no_way_out(what: str, signal: BaseException, label: str = "") -> UsageError:
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


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
