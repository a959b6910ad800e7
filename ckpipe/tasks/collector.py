"""Keeping the garbage collector from looking at objects that are all still needed.

Walking a state of many thousand tensors makes several small objects for each. The collector
wakes up again and again while they pile up, looks at every object of the program and finds
nothing to free: measured, that doubles the time.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

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
