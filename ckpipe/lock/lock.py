"""The readers-writer lock that keeps trainers' threads and captures of the state apart.

The rules stand in :mod:`ckpipe.lock.lock_state`. Here is the waiting: one condition, under
which the pure state is replaced, and which every waiter looks at again after each change. There is
no polling, with one exception. A hold can be left behind by a thread that ended, or by an
optimizer step that raised, since hooks after the step do not run then. Nothing announces either,
so a waiter takes a look every :data:`LOOK_SECONDS` while there is a mutation.

A *deferred* capture reads on while the trainer is in its forward and backward pass. What is left
of it is what only a holder of the mutating side changes, so nothing but such a holder waits, and
not for ever: after the capture's grace it takes the lock, and the capture is worthless.

A load writes from many threads and ends on a loop, so its hold belongs to no thread. Only if its
caller is changing the state already is it part of that. It waits for as long as it takes, also for
deferred captures, which it does not break: a load can wait, where a step cannot.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio

from ckpipe.errors import SettingsError, UsageError
from ckpipe.lock.lock_state import (
    LockState,
    Request,
    Side,
    Transition,
    arrive,
    blocks_itself,
    defer,
    leave,
    revocable,
    stops_a_load,
    waits_already,
)
from ckpipe.lock.waiters import (
    CaptureToken,
    Deadline,
    Fence,
    FrameMark,
    LockStatistics,
    LockUse,
    Waiter,
    capture_misused,
    loop_misused,
    mutation_misused,
    nested_misused,
    revoked,
    thread_of,
    timed_out,
)

LOOK_SECONDS = 0.05
"""How often one who waits looks for holds that were left behind."""


class LockQueue:
    """Lets requests in as :mod:`ckpipe.lock.lock_state` decides, and keeps who made them."""

    def __init__(self) -> None:
        self._begin()
        _queues.add(self)

    def _begin(self) -> None:
        self._changed = threading.Condition()
        self._state = LockState()
        self._waiters: dict[int, Waiter] = {}
        self._wakers: dict[int, Callable[[], object]] = {}
        self._tickets = itertools.count(1)
        self._here = threading.local()
        self._fences: list[Fence] = []

    def captures_here(self) -> bool:
        """Tell whether the calling thread is doing a capture at this moment."""
        with self._changed:
            owners = (threading.current_thread(), self._capture_owner())
            held = (held for held in self._state.holding if held.side is Side.CAPTURING)
            return any(request.owner in owners for request in held)

    # ---- requests ----

    def _trainer(
        self, purpose: str, *, key: object = None, mark: FrameMark | None = None
    ) -> Waiter:
        thread = threading.current_thread()
        owner = self._mutation_owner() or thread
        request = Request(next(self._tickets), Side.MUTATING, owner)
        return Waiter(request, purpose, thread, thread.ident, mark, key)

    def _capture(
        self,
        owner: object,
        thread: int | None,
        home: threading.Thread | None = None,
        *,
        awaited: bool = True,
    ) -> Waiter:
        saver = threading.current_thread() if thread is None else thread_of(thread)
        waits = (self._mutation_owner() if thread is None else None) or saver
        request = Request(next(self._tickets), Side.CAPTURING, owner, waits, home, awaited=awaited)
        return Waiter(request, "capture", saver, saver.ident if saver else thread)

    def _capture_owner(self) -> object | None:
        """Whose capture the calling thread works for, of those begun elsewhere."""
        owners = getattr(self._here, "owners", None)
        return owners[-1] if owners else None

    def _mutation_owner(self) -> object | None:
        """Whose mutation the calling thread works for, of those begun elsewhere."""
        mutators = getattr(self._here, "mutators", None)
        return mutators[-1] if mutators else None

    # ---- waiting ----

    def _acquire(self, waiter: Waiter, timeout: float | None) -> None:
        deadline = Deadline(timeout)
        try:
            with self._changed:
                self._enter(waiter)
            while not self._waited(waiter, deadline):
                # A save or load that holds the lock may need this thread for its user code.
                for serve in self._wanted_here():
                    serve()
            if waiter.request.side is Side.MUTATING:
                self._pass_fences()
        except BaseException:
            self._leave(waiter.request.ticket)
            raise

    def _waited(self, waiter: Waiter, deadline: Deadline) -> bool:
        """Wait for a change; returns whether the request was granted."""
        with self._changed:
            seconds = self._look(waiter, deadline)
            if seconds is not None:
                seconds = min(seconds, LOOK_SECONDS) if self._wanted_here() else seconds
                self._changed.wait(None if seconds == math.inf else seconds)
            return seconds is None

    def _wanted_here(self) -> list[Callable[[], object]]:
        me = threading.current_thread()
        with self._changed:
            waiters = tuple(self._waiters.values())
        return [each.serve for each in waiters if each.serve is not None and each.thread is me]

    async def _acquire_async(self, make: Callable[[], Waiter], timeout: float | None) -> Waiter:
        """Waits without a thread; a call that is cancelled waits for nothing afterwards.

        Args:
            make: Makes the request, at the moment at which it comes in.
            timeout: Seconds to wait; None waits for as long as it takes.
        """
        ticket, deadline = 0, Deadline(timeout)
        wake, loop = asyncio.Event(), asyncio.get_running_loop()
        try:
            with self._changed:
                waiter = make()
                ticket = waiter.request.ticket
                self._wakers[ticket] = partial(loop.call_soon_threadsafe, wake.set)
                self._enter(waiter)
            while (seconds := self._look(waiter, deadline)) is not None:
                with anyio.move_on_after(seconds):
                    await wake.wait()
                wake.clear()
        except BaseException:
            self._leave(ticket)
            raise
        finally:
            with self._changed:
                self._wakers.pop(ticket, None)
        return waiter

    def _enter(self, waiter: Waiter) -> None:
        self._collect()
        self._refuse_deadlock(waiter)
        self._waiters[waiter.request.ticket] = waiter
        self._apply(arrive(self._state, waiter.request))

    def _look(self, waiter: Waiter, deadline: Deadline) -> float | None:
        """For how many seconds to wait before the next look; None once the request is granted.

        Raises:
            StateLockTimeout: If the deadline has passed.
        """
        ticket, grace_left = waiter.request.ticket, math.inf
        with self._changed:
            if not self._state.holds(ticket):
                self._collect()
                if waiter.request.side is Side.MUTATING and waiter.keeper is None:
                    grace_left = self._preempt(waiter)
            if self._state.holds(ticket):
                return None
            if deadline.seconds_left <= 0:
                holders = [self._waiters[held.ticket] for held in self._state.holding]
                raise timed_out(waiter, deadline.timeout, holders)
            look = math.inf if self._state.mutator is None else LOOK_SECONDS
            return min(look, grace_left, deadline.seconds_left)

    def _preempt(self, trainer: Waiter) -> float:
        """Takes the lock from deferred captures that a trainer has waited for long enough.

        Threads that are reading for them finish the piece they are at: what they read might be
        freed otherwise.

        Returns:
            For how many seconds to wait before that may be done; infinite if it need not.
        """
        captures = [self._waiters[held.ticket] for held in revocable(self._state)]
        left = max((capture.grace_left(trainer) for capture in captures), default=math.inf)
        if left > 0:
            return left
        for capture in captures:
            capture.revoked = True
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
        with self._changed:
            self._fences = [fence for fence in self._fences if not fence.passed()]
            return not self._fences

    def _refuse_deadlock(self, waiter: Waiter) -> None:
        capturing = waiter.request.side is Side.CAPTURING
        if not capturing and waiter.keeper is None and self.captures_here():
            raise mutation_misused(waiter.name, waiter.purpose)
        if blocks_itself(self._state, waiter.request):
            if stops_a_load(self._state, waiter.request):
                raise loop_misused(waiter.name, waiter.purpose)
            if waits_already(self._state, waiter.request):
                raise nested_misused(waiter.name, waiter.purpose)
            if not capturing:
                raise mutation_misused(waiter.name, waiter.purpose)
            held = self._waiters[self._state.holding[-1].ticket]
            raise capture_misused(held.name, held.purpose)

    def _collect(self) -> None:
        """Lets go of what was left behind by threads that ended and by steps that raised."""
        if self._state.mutator is None:
            return
        for held in self._state.holding:
            if self._waiters[held.ticket].is_over():
                self._leave(held.ticket)

    def _leave(self, ticket: int) -> None:
        with self._changed:
            if self._waiters.pop(ticket, None) is not None:
                self._apply(leave(self._state, ticket))

    def _apply(self, transition: Transition) -> None:
        self._state = transition.state
        for request in transition.granted:
            self._waiters[request.ticket].since = time.monotonic()
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


_FENCE_SECONDS = 0.001
"""How often one who waits for devices asks them."""


@dataclass(frozen=True, slots=True)
class LoadCaller:
    """The caller of a load.

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
    """The operations of loads on the lock."""

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
            self._collect()
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

    def _load(self, caller: LoadCaller, keeper: threading.Thread | None = None) -> Waiter:
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
        return Waiter(request, "load()", thread, thread.ident, keeper=keeper, serve=caller.serve)

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
        waiter = self._trainer("mutating()")
        try:
            self._acquire(waiter, timeout)  # inside: an interrupt may come the moment it returns
            yield
        finally:
            self._leave(waiter.request.ticket)

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
        """Tell whether the calling thread allows reading: it has no bracket of its own open."""
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
        waiter = self._capture_for(None)
        try:
            self._acquire(waiter, timeout)  # inside: an interrupt may come the moment it returns
            yield
        finally:
            self._leave(waiter.request.ticket)

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
        waiter = self._capture_for(thread)
        self._acquire(waiter, timeout)
        return CaptureToken(waiter.request)

    def _capture_for(self, thread: int | None) -> Waiter:
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
        waiter = self._capture(object(), thread, home=home, awaited=awaited)
        with self._changed:
            self._enter(waiter)
            if self._state.holds(waiter.request.ticket):
                return CaptureToken(waiter.request)
            self._leave(waiter.request.ticket)
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
        waiter = self._capture(object(), thread, home=here, awaited=awaited)
        waiter.serve = serve
        return CaptureToken((await self._acquire_async(lambda: waiter, timeout)).request)

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
            if token.ticket in self._waiters:
                self._fences.extend(fences)
                self._leave(token.ticket)

    # ---- captures that trainers need not wait for, up to a point ----

    def defer_capture(self, token: CaptureToken, grace: float) -> None:
        """Mark a capture as one that from now on reads only what does not change without the lock.

        A trainer that has waited for it for the grace takes the lock from it, unless another
        capture would keep the trainer waiting all the same. Does nothing if it has ended.

        Args:
            token: The capture.
            grace: Seconds that a trainer waits from now on.
        """
        with self._changed:
            waiter = self._waiters.get(token.ticket)
            if waiter is not None:
                waiter.deferred_at, waiter.grace = time.monotonic(), grace
                token.grace = grace
                self._state = defer(self._state, token.ticket)
                self._changed.notify_all()

    def begin_capture(self, token: CaptureToken) -> bool:
        """End the deferral of a capture; return False if it does not hold the lock any more."""
        with self._changed:
            waiter = self._waiters.get(token.ticket)
            if waiter is None or waiter.revoked:
                return False
            waiter.grace = token.grace = math.inf
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
            waiter = self._waiters.get(token.ticket)
            if waiter is None or waiter.revoked:
                raise revoked(token.grace)
            waiter.readers += 1
        try:
            yield
        finally:
            with self._changed:
                waiter.readers -= 1
                if waiter.revoked and not waiter.readers:
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
            self._collect()
            self._refuse_deadlock(self._capture(object(), thread))

    # ---- optimizer steps ----

    def enter_step(self, key: object, mark: FrameMark, purpose: str) -> None:
        """Takes the mutating side for as long as a frame of the calling thread runs.

        Args:
            key: Names the kind of step; the same for :meth:`leave_step`.
            mark: The frame of the step. The hold ends with it even if it is not released.
            purpose: What the step is, for messages.

        Raises:
            LockMisuse: If the loop of this thread holds a capture.
        """
        with self._changed:
            for waiter in self._steps(key):
                # A frame begins its step once; a known mark is that of a dead frame at the
                # same address.
                if waiter.mark == mark:
                    self._leave(waiter.request.ticket)
        self._acquire(self._trainer(purpose, key=key, mark=mark), None)

    def leave_step(self, key: object) -> None:
        """Ends the innermost step of this key on the calling thread, if there is one."""
        with self._changed:
            self._collect()
            for waiter in self._steps(key)[-1:]:
                self._leave(waiter.request.ticket)

    def step_in_progress(self, key: object) -> bool:
        """Tell whether a step of this key runs or waits to begin on any thread."""
        with self._changed:
            self._collect()
            return any(waiter.key is key for waiter in self._waiters.values())

    # ---- what a person can see ----

    def statistics(self) -> LockStatistics:
        """The holders of the lock and the waiters for it, as plain data."""
        with self._changed:
            return LockStatistics(self._uses(self._state.holding), self._uses(self._state.waiting))

    def __repr__(self) -> str:
        now = self.statistics()
        text = ", ".join(map(str, now.holders))
        waiting = f" | {len(now.waiters)} waiting" if now.waiters else ""
        return f"<StateLock [{text or 'free'}{waiting}]>"

    def _uses(self, requests: tuple[Request, ...]) -> tuple[LockUse, ...]:
        return tuple(self._waiters[request.ticket].use() for request in requests)

    def _bracket(self) -> int | None:
        """The ticket of the calling thread's bracket: the hold itself is the only record of it."""
        me = threading.current_thread()
        with self._changed:
            mine = (t for t, p in self._waiters.items() if p.purpose == _BRACKET and p.thread is me)
            return next(mine, None)

    def _steps(self, key: object) -> list[Waiter]:
        me = threading.current_thread()
        return [p for p in self._waiters.values() if p.key is key and p.thread is me]


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
    "LoadCaller",
    "LoadsSide",
    "LockQueue",
    "LockStatistics",
    "LockUse",
    "StateLock",
    "lock_of",
]
