"""An asyncio event loop that keeps the interpreter while nothing makes it wait.

Theory. Whoever lets go of the interpreter's lock beside a thread that computes gets it back after
the switch interval, 5 ms, and every such turn costs that thread a tenth of a millisecond. The loop
of asyncio lets go of it whenever it looks for events, also while callbacks are ready, and three
times for each callback that another thread hands it: that thread writes to a socket, and the loop
reads from it until it is empty. None of these calls ever waits, so here they keep the lock; only
a loop that has nothing to do lets go of it.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import select
import selectors
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TYPE_CHECKING, TypeAlias, TypeVar, TypeVarTuple

from ckpipe.tasks import to_thread

Result = TypeVar("Result")
Args = TypeVarTuple("Args")

if TYPE_CHECKING:
    Ready: TypeAlias = list[tuple[selectors.SelectorKey, int]]

_libc = ctypes.PyDLL(None)  # keeps the interpreter's lock, unlike ctypes.CDLL
_libc.poll.argtypes = (ctypes.c_void_p, ctypes.c_ulong, ctypes.c_int)
_libc.eventfd_read.argtypes = (ctypes.c_int, ctypes.c_void_p)
_libc.eventfd_write.argtypes = (ctypes.c_int, ctypes.c_uint64)


class _PollFd(ctypes.Structure):
    _fields_ = (
        ("fd", ctypes.c_int),
        ("events", ctypes.c_short),
        ("revents", ctypes.c_short),
    )


class _Selector(selectors.EpollSelector):
    """Looks whether there are events before it asks for them, if it shall not wait for any."""

    def __init__(self) -> None:
        super().__init__()
        self._itself = _PollFd(self.fileno(), select.POLLIN, 0)

    def select(self, timeout: float | None = None) -> Ready:
        asks_only = timeout is not None and timeout <= 0
        # A set of epoll(7) can itself be polled.
        if asks_only and not _libc.poll(ctypes.addressof(self._itself), 1, 0):
            return []
        return super().select(timeout)


class KeepingLoop(asyncio.SelectorEventLoop):
    """A loop whose callers from other threads wake it without letting go of the interpreter."""

    def __init__(self) -> None:
        # One thread may have it twice: the handler of a signal may wake within a call that wakes.
        self._waking = threading.RLock()
        self._bell: int | None = None
        self._rung = ctypes.c_uint64()
        super().__init__(_Selector())
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.add_reader(self._bell, self._heard)

    def _write_to_self(self) -> None:
        # What asyncio calls to wake a loop. One that has another name for it wakes by its socket.
        with self._waking:  # the number may be another file's once the loop is closed
            if self._bell is not None:
                _libc.eventfd_write(self._bell, 1)

    def _heard(self) -> None:
        _libc.eventfd_read(self._bell, ctypes.addressof(self._rung))

    def run_in_executor(
        self,
        executor: Executor | None,
        func: Callable[[*Args], Result],
        *args: *Args,
    ) -> asyncio.Future[Result]:
        """Call a function in a worker thread of anyio, unless an executor is named.

        The default executor takes no call any more while the interpreter ends.
        """
        if executor is not None:
            return super().run_in_executor(executor, func, *args)
        return self.create_task(to_thread.run_sync(func, *args, abandon_on_cancel=True))

    def close(self) -> None:
        if not self.is_running():
            with self._waking:
                bell, self._bell = self._bell, None
            if bell is not None:
                self.remove_reader(bell)
                os.close(bell)
        super().close()


__all__ = ["KeepingLoop"]
