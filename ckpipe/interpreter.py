"""Guards of the interpreter while saves and loads run: garbage collector, switch interval, exits.

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

import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

from ckpipe.errors import UsageError


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
    try:
        cpus = len(os.sched_getaffinity(0))
    except AttributeError:  # there is none outside Linux
        cpus = os.cpu_count() or 1
    return max(1, cpus // local_ranks(environment))


def local_ranks(environment: Mapping[str, str] = os.environ) -> int:
    """Ranks that share this machine, as a launcher says in ``LOCAL_WORLD_SIZE``; at least one."""
    told = environment.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(told)) if told.isdecimal() else 1


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
