"""The mutating side of a state lock as loads take it: on an event loop, for a caller elsewhere.

A load writes from many threads and ends on a loop, so its hold belongs to no thread. Only if its
caller is changing the state already is it part of that. It waits for as long as it takes, also for
deferred captures, which it does not break: a load can wait, where a step cannot.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import anyio

from ckpipe.locking._lock_parties import Party
from ckpipe.locking._lock_queue import LockQueue
from ckpipe.locking.lock_state import Request, Side

_FENCE_SECONDS = 0.001
"""How often one who waits for devices asks them."""


@dataclass(frozen=True, slots=True)
class LoadCaller:
    """Who asked for a load.

    Args:
        thread: The thread.
        blocking: Whether it does nothing else until the load has ended.
        owner: On whose behalf the thread changes the state, if it does.
        inside: The holds that it does so in.
        serve: Does what the load wants of the thread, where that comes to wait for the lock.
    """

    thread: threading.Thread
    blocking: bool
    owner: object
    inside: frozenset[int]
    serve: Callable[[], object] | None = None


class LoadsSide(LockQueue):
    """What loads do with the lock."""

    def load_caller(
        self, *, blocking: bool, serve: Callable[[], object] | None = None
    ) -> LoadCaller:
        """The calling thread as one that asks for a load.

        Args:
            blocking: Whether it does nothing else until the load has ended.
            serve: Does what the load wants of it, where it comes to wait for the lock.

        Raises:
            LockMisuse: If the load would wait for this thread, which is capturing the state.
        """
        thread = threading.current_thread()
        owner = self._mutation_owner() or thread
        with self._changed:
            self._reap()
            mutations = [each for each in self._state.holding if each.side is Side.MUTATING]
            inside = frozenset(each.ticket for each in mutations if each.owner == owner)
            caller = LoadCaller(thread, blocking, owner, inside, serve)
            self._refuse_deadlock(self._load(caller))
        return caller

    async def acquire_load(self, caller: LoadCaller) -> Request:
        """Takes the mutating side for a load, and waits for it without a thread.

        A call that is cancelled holds nothing and waits for nothing afterwards. What devices
        still read of the state is waited for as well.

        Args:
            caller: Who asked for the load.

        Returns:
            What :meth:`release_load` ends, on any thread.

        Raises:
            LockMisuse: If the lock would wait for the caller.
        """
        here = threading.current_thread()
        request = (await self._acquire_async(lambda: self._load(caller, here), None)).request
        try:
            while True:
                if self._fences_passed():
                    return request
                await anyio.sleep(_FENCE_SECONDS)
        except BaseException:
            self._leave(request.ticket)
            raise

    def _load(self, caller: LoadCaller, keeper: threading.Thread | None = None) -> Party:
        held = any(self._state.holds(ticket) for ticket in caller.inside)
        thread = caller.thread
        request = Request(
            next(self._tickets),
            Side.MUTATING,
            owner=object(),
            saver=thread if caller.blocking else None,
            home=keeper,
            within=caller.owner if held else None,
        )
        return Party(request, "load()", thread, thread.ident, keeper=keeper, serve=caller.serve)

    def release_load(self, request: Request) -> None:
        """Ends what :meth:`acquire_load` began. Does nothing if it has ended already."""
        self._leave(request.ticket)

    @contextmanager
    def loading_here(self, request: Request) -> Iterator[None]:
        """Says that the calling thread does the work of a load.

        What the state's own methods do on this thread is then part of the load: guarded
        optimizers, :meth:`StateLock.mutating` and :meth:`StateLock.capturing` do not wait for
        it, and saves raise.
        """
        mutators: list[object] = self._here.__dict__.setdefault("mutators", [])
        mutators.append(request.owner)
        try:
            yield
        finally:
            mutators.pop()


__all__ = ["LoadCaller", "LoadsSide"]
