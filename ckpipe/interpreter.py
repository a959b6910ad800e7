"""Guards of the interpreter while saves and loads run: garbage collector, switch interval, exits.

Garbage collector. The walk of a state of many thousand tensors makes several small objects for
each. Meanwhile the collector runs again and again, visits every object of the program and finds
nothing to free, which doubles the time. So it is paused.

Switch interval. A thread that requests the GIL from a thread that never releases it waits for the
switch interval, by default 5 ms (``sys.setswitchinterval``). A save takes the GIL more than a
hundred times for each GiB, mostly in sequence, so beside a loop of plain Python it lasts a third
longer than necessary. A shorter interval costs the loop nothing: it loses the time of the Python
that a save runs in either case. The messages of a worker process cost the trainer a few such waits,
20 to 40 ms together. The lanes of a load begin while the match runs, which is plain Python for 15
to 25 ms.
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
    """A number or flag of the process: lowered while a caller wants that, then put back.

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
        """Lower it in the block, unless it is as low already; callable on any thread."""
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
        # A value that other code has set meanwhile stays.
        if not self._wanted and self._get() == self._lowest:
            self._set(self._before)

    def _begin_child(self) -> None:
        """Put the value back in a forked child, which lacks the threads that would do so."""
        self._lock = threading.Lock()
        if self._wanted:
            self._wanted = 1
            self._put_back()


_collects = _Lowered(gc.isenabled, lambda on: gc.enable() if on else gc.disable())
_switch_interval = _Lowered(sys.getswitchinterval, sys.setswitchinterval)


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause automatic collections, for all threads, while many objects are made and none dies.

    For work of less than a second. Pauses may overlap; after the last one the collector is on or
    off as before the first. As a decorator it goes on until the function's own objects are gone.
    """
    with _collects.to(False):
        yield


SWITCH_SECONDS = 0.001
"""Switch interval of the GIL during saves and loads, in seconds."""


def short_switch_interval(
    seconds: float | None = SWITCH_SECONDS,
) -> AbstractContextManager[None]:
    """Lower the switch interval of the GIL, unless it is as low already; callable on any thread.

    The former interval is restored once no thread wants a lower one, unless other code has set it
    meanwhile.

    Args:
        seconds: Seconds that a thread may keep the GIL while others wait; None changes nothing.
    """
    return nullcontext() if seconds is None else _switch_interval.to(seconds)


def available_cpus(environment: Mapping[str, str] = os.environ) -> int:
    """Count the processors of this process, divided by the number of ranks on its machine.

    torch's number of threads is no measure: launchers set it to one for each rank. That is right
    while all ranks compute, but leaves all processors but one idle while a rank waits for a copy.

    Args:
        environment: The environment, in which a launcher sets ``LOCAL_WORLD_SIZE``, the number of
            ranks of the machine, as ``torchrun`` and most others do.

    Returns:
        The number, at least one.
    """
    try:
        cpus = len(os.sched_getaffinity(0))
    except AttributeError:  # there is none outside Linux
        cpus = os.cpu_count() or 1
    return max(1, cpus // local_ranks(environment))


def local_ranks(environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of ranks on this machine from ``LOCAL_WORLD_SIZE``; at least one."""
    told = environment.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(told)) if told.isdecimal() else 1


class _Thread(threading.local):
    calls = False


_this = _Thread()


@contextmanager
def on_calling_thread() -> Iterator[None]:
    """Let :func:`user_code` pass all exceptions: the pipeline's caller waits on this thread."""
    before, _this.calls = _this.calls, True
    try:
        yield
    finally:
        _this.calls = before


@contextmanager
def user_code(what: str, label: str) -> Iterator[None]:
    """Pass ``SystemExit``, ``KeyboardInterrupt`` and their like only where they reach the program.

    These are the thread that called the pipeline, and the main thread, where signals are handled.
    On a thread of the pipeline they would only end its event loop, with all its saves. Errors pass
    on any thread, with a note that names the label in the state.

    Args:
        what: The name of the code for errors.
        label: The label in the state; may be empty.

    Raises:
        UsageError: If the code raised such an exception on a thread of the pipeline.
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
    """Make the error that replaces an exception which would end the pipeline's loop.

    Args:
        what: The name of the code that raised it.
        signal: The exception.
        label: The label in the state; may be empty.
    """
    return UsageError(
        f"{what} raised {signal!r}, which cannot end the program from here",
        key=label or None,
        hint="Raise an Exception instead",
    )
