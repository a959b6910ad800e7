"""A save's holds of the state lock, one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

import anyio

from ckpipe.locking.lock import CaptureToken, Fence, StateLock


class Turn:
    """One hold of the state lock, from the walk to the last copy or to a change of mind.

    A turn that is released but has not ended keeps the next one from beginning: nobody is held
    off while a plan is made or memory is waited for.

    Args:
        lock: The lock.
        token: What ends the hold.
    """

    def __init__(self, lock: StateLock, token: CaptureToken) -> None:
        self._lock, self.token = lock, token
        self.ended = anyio.Event()
        self.copied = False
        self._users = 0
        self._ending = False

    def release(self) -> None:
        """Lets trainers go on; for when no thread reads the state. May be called twice."""
        self._lock.release_capture(self.token)

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
        """Reads from now on only what nobody changes without the lock; see ``defer_capture``."""
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


__all__ = ["Turn"]
