"""Keeping the garbage collector from looking at objects that are all still needed.

Walking a state of many thousand tensors makes several small objects for each. The collector
wakes up again and again while they pile up, looks at every object of the program and finds
nothing to free: measured, that doubles the time.
"""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

_lock = threading.Lock()
_pauses = 0
_was_enabled = False


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pauses automatic collections, for all threads, while many objects are made and none dies.

    For work of less than a second. Pauses may overlap; after the last one the collector is what
    it was before the first.
    """
    _pause()
    try:
        yield
    finally:
        _resume()


@contextmanager
def collector_paused_at_first(seconds: float = 1.0) -> Iterator[None]:
    """The same for work that may take longer, of which the pause covers the first seconds.

    Most objects that work makes die with it, without the collector if that has not seen them. To be
    entered and left on a running event loop.

    Args:
        seconds: How long the pause lasts at the most.
    """
    with ExitStack() as pause:
        pause.enter_context(collector_paused())
        late = asyncio.get_running_loop().call_later(seconds, pause.close)
        try:
            yield
        finally:
            late.cancel()


def _pause() -> None:
    global _pauses, _was_enabled
    with _lock:
        if _pauses == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _pauses += 1


def _resume() -> None:
    global _pauses
    with _lock:
        _pauses -= 1
        if _pauses == 0 and _was_enabled:
            gc.enable()


def _begin_child() -> None:
    """A forked child has none of the threads that would end their pauses."""
    global _lock, _pauses
    _lock = threading.Lock()
    if _pauses:
        _pauses = 1
        _resume()


os.register_at_fork(after_in_child=_begin_child)
