"""The readers-writer lock that keeps trainers' threads and captures of the state apart.

The rules stand in :mod:`ckpipe.lock_state`. Here is what makes them wait: one condition, under
which the pure state is replaced, and which everybody who waits looks at again after each change.
Nobody polls, with one exception. A hold can be left behind by a thread that ended, or by an
optimizer step that raised, since hooks after the step do not run then. Nothing announces either,
so whoever waits while somebody is mutating takes a look every :data:`LOOK_SECONDS`.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial

import anyio

from ckpipe._lock_parties import (
    CaptureToken,
    Deadline,
    LockStatistics,
    LockUse,
    Party,
    capture_misused,
    mutation_misused,
    timed_out,
)
from ckpipe._threads import FrameMark, thread_of
from ckpipe.lock_state import LockState, Request, Side, Transition, arrive, blocks_itself, leave

LOOK_SECONDS = 0.05
"""How often one who waits looks for holds that were left behind."""

_BRACKET = "disallow_state_dict_read()"


class StateLock:
    """A readers-writer lock: trainers change the state, captures read it, never at the same time.

    Several captures share the lock. A waiting trainer goes before new captures, those that run
    finish first; a capture that many trainers in turn have overtaken goes once before them.
    Trainers are served in the order in which they came. A thread that ends, or an optimizer
    step that raises, leaves nothing held. Any number of pipelines and other readers may share
    one lock. All methods may be called from any thread.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._state = LockState()
        self._parties: dict[int, Party] = {}
        self._wakers: dict[int, Callable[[], object]] = {}
        self._tickets = itertools.count(1)
        self._here = threading.local()

    # ---- the trainer's side ----

    @contextmanager
    def mutating(self, timeout: float | None = None) -> Iterator[None]:
        """Holds captures off while the calling thread changes the state.

        Re-entrant on the same thread. The hold belongs to the thread: what other threads do in
        the meantime, also on behalf of this one, is not covered by it.

        Args:
            timeout: Seconds to wait for captures and other trainers; None waits for them all.

        Raises:
            LockMisuse: If this thread is capturing the state itself.
            StateLockTimeout: If a timeout was given and has passed; nothing is held then.
        """
        party = self._trainer("mutating()")
        self._acquire(party, timeout)
        try:
            yield
        finally:
            self._leave(party.request.ticket)

    def disallow_state_dict_read(self, timeout: float | None = None) -> None:
        """Takes the mutating side for the calling thread, until it allows reading again.

        For loops that bracket their own mutation. Does nothing if this thread has disallowed
        reading already. Each thread has its own bracket, and reading is possible when all are
        open; a bracket also ends with its thread.

        Args:
            timeout: Seconds to wait for captures and other trainers; None waits for them all.

        Raises:
            LockMisuse: If this thread is capturing the state itself.
            StateLockTimeout: If a timeout was given and has passed; reading is still allowed
                then, and the call may be repeated.
        """
        if self._bracket() is None:
            self._acquire(self._trainer(_BRACKET), timeout)

    def allow_state_dict_read(self) -> None:
        """Ends what :meth:`disallow_state_dict_read` began on the calling thread, if it did."""
        ticket = self._bracket()
        if ticket is not None:
            self._leave(ticket)

    @property
    def state_dict_read_allowed(self) -> bool:
        """Whether the calling thread allows reading: it has no bracket of its own open."""
        return self._bracket() is None

    # ---- the pipeline's side ----

    @contextmanager
    def capturing(self, timeout: float | None = None) -> Iterator[None]:
        """Holds trainers off while the calling thread reads the state.

        Args:
            timeout: Seconds to wait for trainers; None waits for as long as it takes.

        Raises:
            LockMisuse: If this thread is changing the state itself.
            StateLockTimeout: If the timeout has passed; says who holds the lock since when.
        """
        token = self.acquire_capture(timeout)
        try:
            yield
        finally:
            self.release_capture(token)

    def acquire_capture(
        self, timeout: float | None = None, *, thread: int | None = None
    ) -> CaptureToken:
        """Begins a capture and blocks until it may read the state.

        Args:
            timeout: Seconds to wait for trainers; None waits for as long as it takes.
            thread: The identifier of the thread that asked for the save and may be waiting for
                it. None: the calling thread, which then counts as capturing itself.

        Returns:
            What ends the capture, from any thread.

        Raises:
            LockMisuse: If the thread concerned is changing the state.
            StateLockTimeout: If the timeout has passed; says who holds the lock since when.
        """
        fresh = threading.current_thread() if thread is None else object()
        party = self._capture(self._capture_owner() or fresh, thread)
        self._acquire(party, timeout)
        return CaptureToken(party.request)

    async def acquire_capture_async(
        self, timeout: float | None = None, *, thread: int | None = None
    ) -> CaptureToken:
        """Begins a capture, and waits for it without a thread.

        A call that is cancelled holds nothing and waits for nothing afterwards. The capture
        belongs to no thread; the thread of the running asyncio loop may not change the state
        meanwhile, as the loop could not go on to release it.

        Args:
            timeout: Seconds to wait for trainers; None waits for as long as it takes.
            thread: The identifier of the thread that asked for the save; None: this thread.

        Returns:
            What ends the capture, from any thread.

        Raises:
            LockMisuse: If the thread concerned, or the loop's thread, is changing the state.
            StateLockTimeout: If the timeout has passed; says who holds the lock since when.
        """
        party = self._capture(object(), thread, home=threading.current_thread())
        ticket, deadline = party.request.ticket, Deadline(timeout)
        wake, loop = asyncio.Event(), asyncio.get_running_loop()
        try:
            with self._changed:
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
        return CaptureToken(party.request)

    @asynccontextmanager
    async def capturing_async(
        self, timeout: float | None = None, *, thread: int | None = None
    ) -> AsyncIterator[CaptureToken]:
        """Holds trainers off while a task reads the state; see :meth:`acquire_capture_async`."""
        token = await self.acquire_capture_async(timeout, thread=thread)
        try:
            yield token
        finally:
            self.release_capture(token)

    def release_capture(self, token: CaptureToken) -> None:
        """Ends a capture. Does nothing if it has ended already."""
        self._leave(token.ticket)

    @contextmanager
    def capturing_here(self, token: CaptureToken) -> Iterator[None]:
        """Says that the calling thread does the work of a capture that was begun elsewhere.

        What the state's own methods do on this thread then counts as part of the capture:
        guarded optimizers do not lock, further captures are granted at once, and
        :meth:`mutating` raises instead of waiting for ever. Does not release the capture.
        """
        owners: list[object] = self._here.__dict__.setdefault("owners", [])
        owners.append(token.owner)
        try:
            yield
        finally:
            owners.pop()

    def check_capture_allowed(self, thread: int | None = None) -> None:
        """Raises if a thread could not wait for a capture now because it would wait for itself.

        Args:
            thread: The identifier of the thread; None: the calling one.

        Raises:
            LockMisuse: If the thread is changing the state.
        """
        with self._changed:
            self._reap()
            self._refuse_deadlock(self._capture(object(), thread))

    def captures_here(self) -> bool:
        """Whether the calling thread is doing a capture at this moment."""
        with self._changed:
            owners = (threading.current_thread(), self._capture_owner())
            held = (held for held in self._state.holding if held.side is Side.CAPTURING)
            return any(request.owner in owners for request in held)

    # ---- optimizer steps ----

    def enter_step(self, key: object, mark: FrameMark, purpose: str) -> None:
        """Takes the mutating side for as long as a frame of the calling thread runs.

        Args:
            key: Names the kind of step; the same for :meth:`leave_step`.
            mark: The frame of the step. The hold ends with it even if nobody lets go.
            purpose: What the step is, for messages.

        Raises:
            LockMisuse: If the loop of this thread holds a capture.
        """
        with self._changed:
            for party in self._steps(key):
                # A frame begins its step once; a known mark is that of a dead frame at the
                # same address.
                if party.mark == mark:
                    self._leave(party.request.ticket)
        self._acquire(self._trainer(purpose, key=key, mark=mark), None)

    def leave_step(self, key: object) -> None:
        """Ends the innermost step of this key on the calling thread, if there is one."""
        with self._changed:
            self._reap()
            for party in self._steps(key)[-1:]:
                self._leave(party.request.ticket)

    def step_in_progress(self, key: object) -> bool:
        """Whether a step of this key runs or waits to begin on any thread."""
        with self._changed:
            self._reap()
            return any(party.key is key for party in self._parties.values())

    # ---- what a person can see ----

    def statistics(self) -> LockStatistics:
        """Who holds the lock and who waits for it, as plain data."""
        with self._changed:
            return LockStatistics(self._uses(self._state.holding), self._uses(self._state.waiting))

    def __repr__(self) -> str:
        now = self.statistics()
        text = ", ".join(map(str, now.holders))
        waiting = f" | {len(now.waiters)} waiting" if now.waiters else ""
        return f"<StateLock [{text or 'free'}{waiting}]>"

    def _uses(self, requests: tuple[Request, ...]) -> tuple[LockUse, ...]:
        return tuple(self._parties[request.ticket].use() for request in requests)

    # ---- requests ----

    def _trainer(self, purpose: str, *, key: object = None, mark: FrameMark | None = None) -> Party:
        thread = threading.current_thread()
        request = Request(next(self._tickets), Side.MUTATING, thread)
        return Party(request, purpose, thread, thread.ident, mark, key)

    def _capture(
        self, owner: object, thread: int | None, home: threading.Thread | None = None
    ) -> Party:
        saver = threading.current_thread() if thread is None else thread_of(thread)
        request = Request(next(self._tickets), Side.CAPTURING, owner, saver, home)
        return Party(request, "capture", saver, saver.ident if saver else thread)

    def _capture_owner(self) -> object | None:
        """Whose capture the calling thread works for, of those begun elsewhere."""
        owners = getattr(self._here, "owners", None)
        return owners[-1] if owners else None

    def _bracket(self) -> int | None:
        """The ticket of the calling thread's bracket: the hold itself is the only record of it."""
        me = threading.current_thread()
        with self._changed:
            mine = (t for t, p in self._parties.items() if p.purpose == _BRACKET and p.thread is me)
            return next(mine, None)

    def _steps(self, key: object) -> list[Party]:
        me = threading.current_thread()
        return [p for p in self._parties.values() if p.key is key and p.thread is me]

    # ---- waiting ----

    def _acquire(self, party: Party, timeout: float | None) -> None:
        deadline = Deadline(timeout)
        with self._changed:
            try:
                self._enter(party)
                while (seconds := self._look(party, deadline)) is not None:
                    self._changed.wait(None if seconds == math.inf else seconds)
            except BaseException:
                self._leave(party.request.ticket)
                raise

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
        ticket = party.request.ticket
        with self._changed:
            if not self._state.holds(ticket):
                self._reap()
            if self._state.holds(ticket):
                return None
            if deadline.seconds_left <= 0:
                holders = [self._parties[held.ticket] for held in self._state.holding]
                raise timed_out(party, deadline.timeout, holders)
            look = math.inf if self._state.mutator is None else LOOK_SECONDS
            return min(look, deadline.seconds_left)

    def _refuse_deadlock(self, party: Party) -> None:
        capturing = party.request.side is Side.CAPTURING
        if not capturing and self.captures_here():
            raise mutation_misused(party.name, party.purpose)
        if blocks_itself(self._state, party.request):
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


__all__ = ["LOOK_SECONDS", "CaptureToken", "LockStatistics", "LockUse", "StateLock"]
