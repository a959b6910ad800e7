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
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext


class _Lowered:
    """A number or flag of the process that is lowered while it is wanted low, then put back.

    Args:
        get: Returns it.
        set: Changes it.
    """

    def __init__(self, get: Callable[[], float], set: Callable[[float], None]) -> None:
        self._get, self._set = get, set
        self._lock = threading.Lock()
        self._wanted = 0
        self._before = self._lowest = get()
        os.register_at_fork(after_in_child=self._begin_child)

    @contextmanager
    def to(self, value: float) -> Iterator[None]:
        """Lower it, unless it is as low already; for any thread."""
        with self._lock:
            if not self._wanted:
                self._before = self._get()
            if self._get() > value:
                self._set(value)
                self._lowest = self._get()
            self._wanted += 1
        try:
            yield
        finally:
            with self._lock:
                self._put_back()

    def _put_back(self) -> None:
        self._wanted -= 1
        # Other code may have set it meanwhile, and knows better.
        if not self._wanted and self._get() == self._lowest:
            self._set(self._before)

    def _begin_child(self) -> None:
        """A forked child has none of the threads that would put it back."""
        self._lock = threading.Lock()
        if self._wanted:
            self._wanted = 1
            self._put_back()


_collects = _Lowered(gc.isenabled, lambda on: gc.enable() if on else gc.disable())
_switch_interval = _Lowered(sys.getswitchinterval, sys.setswitchinterval)


def gc_paused() -> AbstractContextManager[None]:
    """Pause automatic collections, for all threads, while many objects are made and none dies.

    For work of less than a second. Pauses may overlap; after the last one the collector is what
    it was before the first.
    """
    return _collects.to(False)


@contextmanager
def gc_paused_at_first(seconds: float = 1.0) -> Iterator[None]:
    """Pause collections for work that may take longer, during its first seconds.

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


SWITCH_SECONDS = 0.001
"""How long a thread may keep the GIL from others meanwhile."""


def short_switch_interval(
    seconds: float | None = SWITCH_SECONDS,
) -> AbstractContextManager[None]:
    """Lower the switch interval of the GIL, unless it is as low already; for any thread.

    The interval of before is back once no thread wants a lower one, unless it was set meanwhile.

    Args:
        seconds: How long a thread may keep the GIL from others; None leaves the interval alone.
    """
    return nullcontext() if seconds is None else _switch_interval.to(seconds)


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
    try:
        cpus = len(os.sched_getaffinity(0))
    except AttributeError:  # there is none outside Linux
        cpus = os.cpu_count() or 1
    return max(1, cpus // max(1, ranks))
