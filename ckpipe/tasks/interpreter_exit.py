"""Call a function when the program ends, and say whether an exception ends it.

``atexit`` comes after all threads that a program has to wait for. A child process of
multiprocessing that was forked ends without it, but calls the finalizers of multiprocessing.
"""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.util
import sys
from collections.abc import Callable

from ckpipe.tasks.to_thread import use_reserve_if_no_thread_starts


def call_at_exit(function: Callable[[BaseException | None], None]) -> Callable[[], None]:
    """Have a function called when the program ends, before those that were registered earlier.

    Args:
        function: Takes the exception that ends the program; None for a normal end.

    Returns:
        A function that takes it off again.
    """

    def end() -> None:
        use_reserve_if_no_thread_starts()
        function(_ending_exception())

    if multiprocessing.parent_process() is None:
        atexit.register(end)
        return lambda: atexit.unregister(end)
    finalizer = multiprocessing.util.Finalize(None, end, exitpriority=100)
    return finalizer.cancel


def _ending_exception() -> BaseException | None:
    """The exception that nothing has caught; ``sys.exit`` is a normal end."""
    error = sys.exc_info()[1]  # multiprocessing ends a child while it is being handled
    if error is None and not hasattr(sys, "ps1"):  # an interactive session goes on after one
        error = getattr(sys, "last_value", None)
    return None if isinstance(error, SystemExit) else error


__all__ = ["call_at_exit"]
