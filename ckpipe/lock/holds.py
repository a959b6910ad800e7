"""Hold the state lock for a save, one hold after the other, or for a load."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

import anyio

from ckpipe.lock.lock import CaptureToken, Fence, StateLock
from ckpipe.lock.lock_state import Request
from ckpipe.loop_thread import Caller


class LockHold:
    """One hold of the state lock, from the walk to the last copy or to a change of mind.

    A turn that is released but has not ended keeps the next one from beginning: no other thread is
    held off while a plan is made or memory is waited for.

    To be made on the event loop that ends it.

    Args:
        lock: The lock.
        thread: The identifier of the thread that asked for the save.
        token: What ends the hold; None if the walk begins it.
    """

    def __init__(self, lock: StateLock, thread: int, token: CaptureToken | None = None) -> None:
        self._lock, self._thread, self._token = lock, thread, token
        self._home = threading.current_thread()
        self.ended = anyio.Event()
        self.released = self.copied = False
        self._users = 0
        self._ending = False

    def begin(self) -> bool:
        """Begin the walk on the calling thread; return False if the lock must be waited for."""
        if self._token is None or not self._lock.begin_capture(self._token):
            self._token = self._lock.acquire_capture_nowait(
                thread=self._thread, home=self._home, awaited=False
            )
        return self._token is not None

    async def wait(self, timeout: float, grace: float, serve: Callable[[], object]) -> None:
        """Wait for the lock and keep it for a walk that another thread has still to begin.

        Args:
            timeout: Seconds to wait.
            grace: Seconds that a trainer waits for the walk to begin; it takes the lock then.
            serve: Begins the walk, if the thread that is to walk waits for the lock itself.

        Raises:
            StateLockTimeout: If trainers held the lock for too long.
        """
        self._token = await self._lock.acquire_capture_async(
            timeout, thread=self._thread, awaited=False, serve=serve
        )
        self._lock.defer_capture(self._token, grace)

    @property
    def token(self) -> CaptureToken:
        """The token that ends the hold, which has begun."""
        assert self._token is not None
        return self._token

    def release(self) -> None:
        """Lets trainers go on; for when no thread reads the state. May be called twice."""
        self.released = True
        if self._token is not None:
            self._lock.release_capture(self._token)

    def end(self, *, copied: bool = False) -> None:
        """Lets trainers and the next turn begin, once no thread reads; may be called twice."""
        self._ending = True
        self.copied |= copied
        if not self._users and not self.ended.is_set():
            self.release()
            self.ended.set()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keeps the hold although the turn may end: a worker thread is at the state."""
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            if self._ending:
                self.end()

    def defer(self, grace: float) -> None:
        """Read from now on only what does not change without the lock; see ``defer_capture``."""
        self._lock.defer_capture(self.token, grace)

    def reading(self) -> AbstractContextManager[None]:
        """Reads a piece of a state that was deferred; see :meth:`StateLock.reading`."""
        return self._lock.reading(self.token)

    def let_go(self, fences: Iterable[Fence]) -> None:
        """Lets trainers go on from any thread, their devices after these fences."""
        self._lock.release_capture(self.token, fences=fences)

    @contextmanager
    def here(self) -> Iterator[None]:
        """Marks the calling thread as capturing, so that guards on it keep quiet."""
        with self._lock.capturing_here(self.token):
            yield


class LoadHold:
    """The hold of one load that fills a state; to be made on its caller's thread.

    Args:
        lock: The lock of the state.
        caller: Runs user code on that thread; None if another does.

    Raises:
        LockMisuse: If the load would wait for that thread, which is capturing the state.
    """

    def __init__(self, lock: StateLock, caller: Caller | None) -> None:
        blocking = caller is not None and caller.blocks
        serve = None if caller is None else caller.do_pending
        self._lock, self._caller = lock, lock.load_caller(blocking=blocking, serve=serve)
        self._request: Request | None = None

    @property
    def is_pending(self) -> bool:
        """True until it is taken, and after it has ended."""
        return self._request is None

    async def take(self) -> None:
        """Wait until no other thread changes or reads the state; may be called again."""
        if self._request is None:
            self._request = await self._lock.acquire_load(self._caller)

    def here(self) -> AbstractContextManager[None]:
        """Marks the calling thread as one that works for the load, whose hold is taken."""
        assert self._request is not None
        return self._lock.loading_here(self._request)

    def end(self) -> None:
        """Lets trainers and captures go on; may be called twice, and if it was never taken."""
        request, self._request = self._request, None
        if request is not None:
            self._lock.release_load(request)
