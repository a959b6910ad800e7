"""Settings of the interpreter while saves and loads run: garbage collector, switch interval, CPUs.

Walking a state of many thousand tensors makes several small objects for each. The garbage
collector wakes up again and again while they pile up, looks at every object of the program and
finds nothing to free: measured, that doubles the time. So it is paused.

A thread that wants the GIL from one that never lets it go has to wait for the switch interval, by
default 5 ms (``sys.setswitchinterval``). A save takes the GIL more than a hundred times for each
GiB, most of them one after the other, so that beside a loop of plain Python it lasts a third
longer than it has to. What the loop loses is the Python that a save runs, which is as much in
either case. Of a save in a worker process the trainer hears in a few such waits, which took 20 to
40 ms. The lanes of a load begin beside the match, which is plain Python for 15 to 25 ms.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

_lock = threading.Lock()
_pauses = 0
_was_enabled = False


@contextmanager
def gc_paused() -> Iterator[None]:
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
def gc_paused_at_first(seconds: float = 1.0) -> Iterator[None]:
    """The same for work that may take longer, of which the pause covers the first seconds.

    Most objects that work makes die with it, without the collector if that has not seen them. To be
    entered and left on a running event loop.

    Args:
        seconds: How long the pause lasts at the most.
    """
    with ExitStack() as pause:
        pause.enter_context(gc_paused())
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


SWITCH_SECONDS = 0.001
"""How long a thread may keep the interpreter from others meanwhile."""


class _Turns:
    """The count of calls that want a short switch interval, and the interval to put back."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._wanted = 0
        self._before = self._set = 0.0

    def shorten(self, seconds: float) -> None:
        if not self._wanted:
            self._before = sys.getswitchinterval()
        if sys.getswitchinterval() > seconds:
            sys.setswitchinterval(seconds)
            self._set = sys.getswitchinterval()
        self._wanted += 1

    def put_back(self) -> None:
        self._wanted -= 1
        # Somebody else may have set it meanwhile, who knows better.
        if not self._wanted and sys.getswitchinterval() == self._set:
            sys.setswitchinterval(self._before)

    def begin_child(self) -> None:
        """A forked child has none of the threads that would put it back."""
        self.lock = threading.Lock()
        if self._wanted:
            self._wanted = 1
            self.put_back()


_turns = _Turns()
os.register_at_fork(after_in_child=_turns.begin_child)


@contextmanager
def short_switch_interval(seconds: float | None = SWITCH_SECONDS) -> Iterator[None]:
    """Lower the switch interval of the GIL, unless it is as low already; for any thread.

    The interval of before is back once no thread wants a lower one, unless it was set meanwhile.

    Args:
        seconds: How long a thread may keep the GIL from others; None leaves the interval alone.
    """
    if seconds is None:
        yield
        return
    with _turns.lock:
        _turns.shorten(seconds)
    try:
        yield
    finally:
        with _turns.lock:
            _turns.put_back()


def available_cpus(environment: Mapping[str, str] = os.environ) -> int:
    """Processors that this process may run on, shared fairly with the other ranks of its machine.

    torch's number of threads does not tell: launchers set it to one for each rank, which is right
    while all of them compute and leaves all processors but one idle while a rank waits for a copy.

    Args:
        environment: Where a launcher says how many ranks there are: ``LOCAL_WORLD_SIZE``, as
            ``torchrun`` and most others set it.

    Returns:
        At least one.
    """
    told = environment.get("LOCAL_WORLD_SIZE", "")
    ranks = int(told) if told.isdecimal() else 1
    return max(1, _usable() // max(1, ranks))


def _usable() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # there is none outside Linux
        return os.cpu_count() or 1
