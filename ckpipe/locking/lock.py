"""The readers-writer lock that keeps trainers' threads and captures of the state apart.

The rules stand in :mod:`ckpipe.locking.lock_state`. Here is what makes them wait: one condition,
under which the pure state is replaced, and which everybody who waits looks at again after each
change. Nobody polls, with one exception. A hold can be left behind by a thread that ended, or by an
optimizer step that raised, since hooks after the step do not run then. Nothing announces either,
so whoever waits while somebody is mutating takes a look every :data:`LOOK_SECONDS`.

A *deferred* capture reads on while the trainer is in its forward and backward pass. What is left
of it is what only a holder of the mutating side changes, so nothing but such a holder waits, and
not for ever: after the capture's grace it takes the lock, and the capture is worthless.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from ckpipe.errors import SettingsError, UsageError
from ckpipe.locking._lock_loads import LoadsSide
from ckpipe.locking._lock_parties import (
    CaptureToken,
    Fence,
    LockStatistics,
    LockUse,
    Party,
    forfeited,
)
from ckpipe.locking._lock_queue import LOOK_SECONDS
from ckpipe.locking.lock_state import Request, defer
from ckpipe.tasks._threads import FrameMark

_BRACKET = "disallow_state_dict_read()"


class StateLock(LoadsSide):
    """A readers-writer lock: trainers change the state, captures read it, never at the same time.

    Several captures share the lock. A waiting trainer goes before new captures, those that run
    finish first; a capture that many trainers in turn have overtaken goes once before them.
    Trainers are served in the order in which they came. A load into a state counts as a trainer
    from its first look at it to its end. A thread that ends, or an optimizer step
    that raises, leaves nothing held. Any number of pipelines and other readers may share one
    lock. All methods may be called from any thread.
    """

    # ---- the trainer's side ----

    @contextmanager
    def mutating(self, timeout: float | None = None) -> Iterator[None]:
        """Holds captures off while the calling thread changes the state.

        Re-entrant on the same thread. The hold belongs to the thread: what other threads do in
        the meantime, also on behalf of this one, is not covered by it, but for loads that this
        thread asks for.

        Args:
            timeout: Seconds to wait for captures and other trainers; None waits for them all.

        Raises:
            LockMisuse: If this thread is capturing the state itself.
            StateLockTimeout: If a timeout was given and has passed; nothing is held then.
        """
        party = self._trainer("mutating()")
        try:
            self._acquire(party, timeout)  # inside: an interrupt may come the moment it returns
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

        Where a load calls it, in a ``state_dict`` of the state, the load holds them off already.

        Args:
            timeout: Seconds to wait for trainers; None waits for as long as it takes.

        Raises:
            LockMisuse: If this thread is changing the state itself.
            StateLockTimeout: If the timeout has passed; says who holds the lock since when.
        """
        if self._mutation_owner() is not None:
            yield
            return
        party = self._capture_for(None)
        try:
            self._acquire(party, timeout)  # inside: an interrupt may come the moment it returns
            yield
        finally:
            self._leave(party.request.ticket)

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
        party = self._capture_for(thread)
        self._acquire(party, timeout)
        return CaptureToken(party.request)

    def _capture_for(self, thread: int | None) -> Party:
        fresh = threading.current_thread() if thread is None else object()
        return self._capture(self._capture_owner() or fresh, thread)

    def acquire_capture_nowait(
        self,
        *,
        thread: int | None = None,
        home: threading.Thread | None = None,
        awaited: bool = True,
    ) -> CaptureToken | None:
        """Begins a capture if it may read the state this very moment, as no thread's own.

        Args:
            thread: The identifier of the thread that asked for the save; None: this thread.
            home: The thread whose event loop releases it; None: this thread.
            awaited: See :meth:`acquire_capture_async`.

        Returns:
            What ends the capture, from any thread; None if it would have to wait.

        Raises:
            LockMisuse: If the thread concerned is changing the state.
        """
        home = home or threading.current_thread()
        party = self._capture(object(), thread, home=home, awaited=awaited)
        with self._changed:
            self._enter(party)
            if self._state.holds(party.request.ticket):
                return CaptureToken(party.request)
            self._leave(party.request.ticket)
        return None

    async def acquire_capture_async(
        self,
        timeout: float | None = None,
        *,
        thread: int | None = None,
        awaited: bool = True,
        serve: Callable[[], object] | None = None,
    ) -> CaptureToken:
        """Begins a capture, and waits for it without a thread.

        A call that is cancelled holds nothing and waits for nothing afterwards. The capture
        belongs to no thread; the thread of the running asyncio loop may not change the state
        meanwhile, as the loop could not go on to release it.

        Args:
            timeout: Seconds to wait for trainers; None waits for as long as it takes.
            thread: The identifier of the thread that asked for the save; None: this thread.
            awaited: Whether that thread does nothing else meanwhile. What a coroutine has asked
                for waits for what its thread is at, such as a step of another task.
            serve: Does what the capture wants of that thread, which calls it when it comes to wait
                for the lock itself.

        Returns:
            What ends the capture, from any thread.

        Raises:
            LockMisuse: If the thread concerned, while it waits, or the loop's thread is changing
                the state.
            StateLockTimeout: If the timeout has passed; says who holds the lock since when.
        """
        here = threading.current_thread()
        party = self._capture(object(), thread, home=here, awaited=awaited)
        party.serve = serve
        return CaptureToken((await self._acquire_async(lambda: party, timeout)).request)

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

    def release_capture(self, token: CaptureToken, *, fences: Iterable[Fence] = ()) -> None:
        """Ends a capture. Does nothing if it has ended already.

        Args:
            token: The capture.
            fences: Reads that devices have not done yet. Trainers are let in at once, and their
                devices wait for these.
        """
        with self._changed:
            if token.ticket in self._parties:
                self._fences.extend(fences)
                self._leave(token.ticket)

    # ---- captures that trainers need not wait for, up to a point ----

    def defer_capture(self, token: CaptureToken, grace: float) -> None:
        """Says that from now on a capture reads only what nobody changes without the lock.

        A trainer that has waited for it for the grace takes the lock from it, unless another
        capture would keep the trainer waiting all the same. Does nothing if it has ended.

        Args:
            token: The capture.
            grace: Seconds that a trainer waits from now on.
        """
        with self._changed:
            party = self._parties.get(token.ticket)
            if party is not None:
                party.deferred_at, party.grace = time.monotonic(), grace
                token.grace = grace
                self._state = defer(self._state, token.ticket)
                self._changed.notify_all()

    def begin_capture(self, token: CaptureToken) -> bool:
        """End the deferral of a capture; return False if it does not hold the lock any more."""
        with self._changed:
            party = self._parties.get(token.ticket)
            if party is None or party.forfeited:
                return False
            party.grace = token.grace = math.inf
            self._state = defer(self._state, token.ticket, deferred=False)
            return True

    @contextmanager
    def reading(self, token: CaptureToken) -> Iterator[None]:
        """Reads a piece of the state for a deferred capture; trainers wait for its end.

        Args:
            token: The capture.

        Raises:
            CaptureTooSlow: If a trainer has taken the lock from the capture, or it has ended.
        """
        with self._changed:
            party = self._parties.get(token.ticket)
            if party is None or party.forfeited:
                raise forfeited(token.grace)
            party.readers += 1
        try:
            yield
        finally:
            with self._changed:
                party.readers -= 1
                if party.forfeited and not party.readers:
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

    def _bracket(self) -> int | None:
        """The ticket of the calling thread's bracket: the hold itself is the only record of it."""
        me = threading.current_thread()
        with self._changed:
            mine = (t for t, p in self._parties.items() if p.purpose == _BRACKET and p.thread is me)
            return next(mine, None)

    def _steps(self, key: object) -> list[Party]:
        me = threading.current_thread()
        return [p for p in self._parties.values() if p.key is key and p.thread is me]


def lock_of(state_lock: StateLock | None, fields: Mapping[str, Any]) -> StateLock:
    """The lock of a pipeline: the one that it was given, or a new one.

    Raises:
        UsageError: If it is something else.
        SettingsError: If it was given in the place of the settings of locks.
    """
    if isinstance(fields.get("lock"), StateLock):
        raise SettingsError(
            "The setting 'lock' says how long to wait for a lock", hint="Pass it as state_lock"
        )
    if not isinstance(state_lock, StateLock | None):
        raise UsageError(
            f"state_lock is a ckpipe.StateLock, not {state_lock!r:.100}",
            hint="Pass the lock of another pipeline, or a new ckpipe.StateLock()",
        )
    return StateLock() if state_lock is None else state_lock


__all__ = [
    "LOOK_SECONDS",
    "CaptureToken",
    "Fence",
    "LockStatistics",
    "LockUse",
    "StateLock",
    "lock_of",
]
