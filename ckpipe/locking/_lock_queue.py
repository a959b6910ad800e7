"""Those who hold a state lock and those who wait for it: one condition, and how it is waited on."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial

import anyio

from ckpipe.locking._lock_parties import (
    Deadline,
    Fence,
    Party,
    capture_misused,
    loop_misused,
    mutation_misused,
    nested_misused,
    timed_out,
)
from ckpipe.locking.lock_state import (
    LockState,
    Request,
    Side,
    Transition,
    arrive,
    blocks_itself,
    forfeitable,
    leave,
    stops_a_load,
    waits_already,
)
from ckpipe.tasks._threads import FrameMark, thread_of

LOOK_SECONDS = 0.05
"""How often one who waits looks for holds that were left behind."""


class LockQueue:
    """Lets requests in as :mod:`ckpipe.locking.lock_state` decides, and keeps who made them."""

    def __init__(self) -> None:
        self._begin()
        _queues.add(self)

    def _begin(self) -> None:
        self._changed = threading.Condition()
        self._state = LockState()
        self._parties: dict[int, Party] = {}
        self._wakers: dict[int, Callable[[], object]] = {}
        self._tickets = itertools.count(1)
        self._here = threading.local()
        self._fences: list[Fence] = []

    def captures_here(self) -> bool:
        """Whether the calling thread is doing a capture at this moment."""
        with self._changed:
            owners = (threading.current_thread(), self._capture_owner())
            held = (held for held in self._state.holding if held.side is Side.CAPTURING)
            return any(request.owner in owners for request in held)

    # ---- requests ----

    def _trainer(self, purpose: str, *, key: object = None, mark: FrameMark | None = None) -> Party:
        thread = threading.current_thread()
        owner = self._mutation_owner() or thread
        request = Request(next(self._tickets), Side.MUTATING, owner)
        return Party(request, purpose, thread, thread.ident, mark, key)

    def _capture(
        self,
        owner: object,
        thread: int | None,
        home: threading.Thread | None = None,
        *,
        awaited: bool = True,
    ) -> Party:
        saver = threading.current_thread() if thread is None else thread_of(thread)
        waits = (self._mutation_owner() if thread is None else None) or saver
        request = Request(next(self._tickets), Side.CAPTURING, owner, waits, home, awaited=awaited)
        return Party(request, "capture", saver, saver.ident if saver else thread)

    def _capture_owner(self) -> object | None:
        """Whose capture the calling thread works for, of those begun elsewhere."""
        owners = getattr(self._here, "owners", None)
        return owners[-1] if owners else None

    def _mutation_owner(self) -> object | None:
        """Whose mutation the calling thread works for, of those begun elsewhere."""
        mutators = getattr(self._here, "mutators", None)
        return mutators[-1] if mutators else None

    # ---- waiting ----

    def _acquire(self, party: Party, timeout: float | None) -> None:
        deadline = Deadline(timeout)
        try:
            with self._changed:
                self._enter(party)
            while not self._waited(party, deadline):
                # A save or load that holds the lock may need this thread for its user code.
                for serve in self._wanted_here():
                    serve()
            if party.request.side is Side.MUTATING:
                self._pass_fences()
        except BaseException:
            self._leave(party.request.ticket)
            raise

    def _waited(self, party: Party, deadline: Deadline) -> bool:
        """Wait for a change; returns whether the request was granted."""
        with self._changed:
            seconds = self._look(party, deadline)
            if seconds is not None:
                seconds = min(seconds, LOOK_SECONDS) if self._wanted_here() else seconds
                self._changed.wait(None if seconds == math.inf else seconds)
            return seconds is None

    def _wanted_here(self) -> list[Callable[[], object]]:
        me = threading.current_thread()
        with self._changed:
            parties = tuple(self._parties.values())
        return [each.serve for each in parties if each.serve is not None and each.thread is me]

    async def _acquire_async(self, make: Callable[[], Party], timeout: float | None) -> Party:
        """Waits without a thread; a call that is cancelled waits for nothing afterwards.

        Args:
            make: Makes the request, at the moment at which it comes in.
            timeout: Seconds to wait; None waits for as long as it takes.
        """
        ticket, deadline = 0, Deadline(timeout)
        wake, loop = asyncio.Event(), asyncio.get_running_loop()
        try:
            with self._changed:
                party = make()
                ticket = party.request.ticket
                self._wakers[ticket] = partial(loop.call_soon_threadsafe, wake.set)
                self._enter(party)
            while (seconds := self._look(party, deadline)) is not None:
                with anyio.move_on_after(seconds):
                    await wake.wait()
                wake.clear()
        except BaseException:
            self._leave(ticket)
            raise
        finally:
            with self._changed:
                self._wakers.pop(ticket, None)
        return party

    def _enter(self, party: Party) -> None:
        self._reap()
        self._refuse_deadlock(party)
        self._parties[party.request.ticket] = party
        self._apply(arrive(self._state, party.request))

    def _look(self, party: Party, deadline: Deadline) -> float | None:
        """For how many seconds to wait before the next look; None once the request is granted.

        Raises:
            StateLockTimeout: If the deadline has passed.
        """
        ticket, grace_left = party.request.ticket, math.inf
        with self._changed:
            if not self._state.holds(ticket):
                self._reap()
                if party.request.side is Side.MUTATING and party.keeper is None:
                    grace_left = self._press(party)
            if self._state.holds(ticket):
                return None
            if deadline.seconds_left <= 0:
                holders = [self._parties[held.ticket] for held in self._state.holding]
                raise timed_out(party, deadline.timeout, holders)
            look = math.inf if self._state.mutator is None else LOOK_SECONDS
            return min(look, grace_left, deadline.seconds_left)

    def _press(self, trainer: Party) -> float:
        """Takes the lock from deferred captures that a trainer has waited for long enough.

        Threads that are reading for them finish the piece they are at: what they read might be
        freed otherwise.

        Returns:
            For how many seconds to wait before that may be done; infinite if it need not.
        """
        captures = [self._parties[held.ticket] for held in forfeitable(self._state)]
        left = max((capture.grace_left(trainer) for capture in captures), default=math.inf)
        if left > 0:
            return left
        for capture in captures:
            capture.forfeited = True
            if not capture.readers:
                self._leave(capture.request.ticket)
        return math.inf

    def _pass_fences(self) -> None:
        """Has the calling thread's devices wait for the reads that were left to them."""
        with self._changed:
            if not self._fences_passed():
                for fence in self._fences:
                    fence.hold_back()

    def _fences_passed(self) -> bool:
        """Whether the reads that were left to devices are done."""
        with self._changed:
            self._fences = [fence for fence in self._fences if not fence.passed()]
            return not self._fences

    def _refuse_deadlock(self, party: Party) -> None:
        capturing = party.request.side is Side.CAPTURING
        if not capturing and party.keeper is None and self.captures_here():
            raise mutation_misused(party.name, party.purpose)
        if blocks_itself(self._state, party.request):
            if stops_a_load(self._state, party.request):
                raise loop_misused(party.name, party.purpose)
            if waits_already(self._state, party.request):
                raise nested_misused(party.name, party.purpose)
            if not capturing:
                raise mutation_misused(party.name, party.purpose)
            held = self._parties[self._state.holding[-1].ticket]
            raise capture_misused(held.name, held.purpose)

    def _reap(self) -> None:
        """Lets go of what was left behind by threads that ended and by steps that raised."""
        if self._state.mutator is None:
            return
        for held in self._state.holding:
            if self._parties[held.ticket].is_over():
                self._leave(held.ticket)

    def _leave(self, ticket: int) -> None:
        with self._changed:
            if self._parties.pop(ticket, None) is not None:
                self._apply(leave(self._state, ticket))

    def _apply(self, transition: Transition) -> None:
        self._state = transition.state
        for request in transition.granted:
            self._parties[request.ticket].since = time.monotonic()
        # Everybody looks again, not only those who were let in: one who waits for captures
        # must begin to look for dead holds once a trainer has taken their place.
        self._changed.notify_all()
        for ticket, wake in tuple(self._wakers.items()):
            try:
                wake()
            except RuntimeError:
                # The loop of one who waits was closed. That must not fail the one who lets go,
                # and nothing may be granted to a task that will never run again.
                del self._wakers[ticket]
                self._leave(ticket)


_queues: weakref.WeakSet[LockQueue] = weakref.WeakSet()


def _begin_in_child() -> None:
    """Frees all locks in a child that was forked: it has none of the threads that used them."""
    for queue in _queues:
        queue._begin()


os.register_at_fork(after_in_child=_begin_in_child)


__all__ = ["LOOK_SECONDS", "LockQueue"]
