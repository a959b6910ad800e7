"""The readers-writer lock that keeps trainers' threads and captures of the state apart.

:class:`~ckpipe.lock.holds.LockState` decides who may hold the lock, and does not wait.
:class:`StateLock` waits: one condition variable guards that state, and each waiter checks it again
after each change. There is no polling, with one exception. A thread that ended, or an optimizer
step that raised, can leave a hold behind, since post-step hooks do not run then. Nothing announces
either event, so a waiter checks every :data:`LOOK_SECONDS` while there is a mutation.

A *deferred* capture reads on while the trainer is in its forward and backward pass. Only a holder
of the mutating side changes the tensors that it has yet to read, so only such a holder waits, and
not for ever: after the capture's grace it preempts the capture, which is worthless then.

A load writes from many threads and ends on an event loop, so its hold belongs to no thread. It is
part of a mutation only if its caller is changing the state already. It waits for as long as it
takes, also for deferred captures, which it does not preempt: a load can wait, where a step cannot.
"""

from __future__ import annotations

import asyncio
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio

from ckpipe.errors import CaptureTooSlow, SettingsError, StateLockTimeout, UsageError
from ckpipe.lock.holds import (
    LOOK_SECONDS,
    FrameMark,
    Hold,
    LockState,
    LockStatistics,
    Side,
    changes_while_capturing,
)
from ckpipe.loop_thread import Caller

if TYPE_CHECKING:
    from ckpipe.memory.cuda import StreamFence

_FENCE_SECONDS = 0.001
"""Seconds between two queries of the devices by a load that waits for them."""

_BRACKET = "disallow_state_dict_read()"


class StateLock:
    """A readers-writer lock: trainers change the state, captures read it, never at the same time.

    Several captures share the lock. A waiting trainer goes before new captures; running captures
    finish first. A capture that many trainers have overtaken goes once before them. Trainers are
    served in the order of their arrival. A load into a state counts as a trainer from its first
    look at the state to its end. A thread that ends, or an optimizer step that raises, leaves
    nothing held. Any number of pipelines and other readers may share one lock. All methods may be
    called from any thread.
    """

    def __init__(self) -> None:
        self._begin()
        _locks.add(self)

    def _begin(self) -> None:
        self._changed = threading.Condition()
        self._state = LockState()
        self._told: tuple[list[Hold], list[Hold]] = ([], [])
        self._here = threading.local()
        self._fences: list[StreamFence] = []

    # ---- mutations ----

    @contextmanager
    def mutating(self, timeout: float | None = None) -> Iterator[None]:
        """Exclude captures while the calling thread changes the state.

        Re-entrant on the same thread. The hold belongs to the thread: it does not cover changes by
        other threads in the meantime, also on behalf of this one, except loads that this thread
        asks for.

        Args:
            timeout: Seconds to wait for captures and other trainers; None waits for them all.

        Raises:
            LockMisuse: If this thread is capturing the state itself.
            StateLockTimeout: If a timeout was given and has passed; nothing is held then.
        """
        hold = self._mutation("mutating()")
        try:
            self._acquire(hold, timeout)  # inside: an interrupt may come as soon as it returns
            yield
        finally:
            self._leave(hold)

    def disallow_state_dict_read(self, timeout: float | None = None) -> None:
        """Take the mutating side for the calling thread, until it allows reading again.

        For loops that bracket their own mutation. Does nothing if this thread has disallowed
        reading already. Each thread has its own bracket; captures wait until all have ended. A
        bracket also ends with its thread.

        Args:
            timeout: Seconds to wait for captures and other trainers; None waits for them all.

        Raises:
            LockMisuse: If this thread is capturing the state itself.
            StateLockTimeout: If a timeout was given and has passed; reading is still allowed
                then, and the call may be repeated.
        """
        if self._bracket() is None:
            self._acquire(self._mutation(_BRACKET), timeout)

    def allow_state_dict_read(self) -> None:
        """End the calling thread's :meth:`disallow_state_dict_read`, if there is one."""
        hold = self._bracket()
        if hold is not None:
            self._leave(hold)

    def _bracket(self) -> Hold | None:
        """Return the calling thread's bracket; the hold is the only record of it."""
        return next((each for each in self._mine() if each.purpose == _BRACKET), None)

    def _mine(self) -> list[Hold]:
        """Return the requests that concern the calling thread."""
        me = threading.current_thread()
        with self._changed:
            return [each for each in self._state.everyone if each.thread is me]

    # ---- captures ----

    @contextmanager
    def capturing(self, timeout: float | None = None) -> Iterator[None]:
        """Exclude trainers while the calling thread reads the state.

        Within a load, in a ``state_dict`` of the state, it takes nothing: the load excludes
        trainers already.

        Args:
            timeout: Seconds to wait for trainers; None waits for as long as it takes.

        Raises:
            LockMisuse: If this thread is changing the state itself.
            StateLockTimeout: If the timeout has passed; the message names the holders and times.
        """
        if self._works_for(Side.MUTATING) is not None:
            yield
            return
        hold = self._capture(None)
        hold.owner = self._works_for(Side.CAPTURING) or threading.current_thread()
        try:
            self._acquire(hold, timeout)  # inside: an interrupt may come as soon as it returns
            yield
        finally:
            self._leave(hold)

    def check_capture_allowed(self) -> None:
        """Raise if the calling thread would wait for itself if it waited for a capture now.

        Raises:
            LockMisuse: If the thread is changing the state.
        """
        with self._changed:
            self._settle()
            self._refuse_deadlock(self._capture(None))

    # ---- optimizer steps ----

    def enter_step(self, key: object, mark: FrameMark, purpose: str) -> None:
        """Take the mutating side for as long as a frame of the calling thread runs.

        Args:
            key: Identifies the kind of step; the same for :meth:`leave_step`.
            mark: The frame of the step. The hold ends with it even if it is not released.
            purpose: A description of the step, for messages.

        Raises:
            LockMisuse: If the loop of this thread holds a capture.
        """
        for each in self._mine():
            # A frame begins its step once, so a known mark belongs to a dead frame at the same
            # address.
            if each.key is key and each.mark == mark:
                self._leave(each)
        hold = self._mutation(purpose)
        hold.key, hold.mark = key, mark
        self._acquire(hold, None)

    def leave_step(self, key: object) -> None:
        """End the innermost step of this key on the calling thread, if there is one."""
        with self._changed:
            self._settle()
            for hold in [each for each in self._mine() if each.key is key][-1:]:
                self._leave(hold)

    def step_in_progress(self, key: object) -> bool:
        """Tell whether a step of this key runs or waits to begin on any thread."""
        with self._changed:
            self._settle()
            return any(each.key is key for each in self._state.everyone)

    def captures_here(self) -> bool:
        """Tell whether the calling thread is doing a capture at this moment."""
        with self._changed:
            owners = (threading.current_thread(), self._works_for(Side.CAPTURING))
            held = (held for held in self._state.holding if held.side is Side.CAPTURING)
            return any(each.owner in owners for each in held)

    def mutates_here(self) -> bool:
        """Tell whether the calling thread holds the mutating side."""
        return any(each.side is Side.MUTATING for each in self._mine())

    # ---- statistics ----

    def statistics(self) -> LockStatistics:
        """Return the holders of the lock and the waiters for it, as plain data."""
        with self._changed:
            holders = tuple(each.use() for each in self._state.holding)
            return LockStatistics(holders, tuple(each.use() for each in self._state.waiting))

    def __repr__(self) -> str:
        now = self.statistics()
        text = ", ".join(map(str, now.holders))
        waiting = f" | {len(now.waiters)} waiting" if now.waiters else ""
        return f"<StateLock [{text or 'free'}{waiting}]>"

    # ---- requests ----

    def _mutation(self, purpose: str) -> Hold:
        thread = threading.current_thread()
        owner = self._works_for(Side.MUTATING) or thread
        return Hold(
            side=Side.MUTATING, purpose=purpose, thread=thread, ident=thread.ident, owner=owner
        )

    def _capture(self, ident: int | None, **fields: Any) -> Hold:
        """Make a capture that belongs to no thread, for the thread ``ident`` or this thread."""
        here, threads = threading.current_thread(), threading.enumerate()
        saver = here if ident is None else next((t for t in threads if t.ident == ident), None)
        waits = self._works_for(Side.MUTATING) if ident is None else None
        return Hold(
            side=Side.CAPTURING,
            thread=saver,
            ident=saver.ident if saver else ident,
            saver=waits or saver,
            **fields,
        )

    def _works_for(self, side: Side) -> Hashable | None:
        """Return the owner of the hold, begun elsewhere, for which the calling thread works."""
        holds: list[Hold] = getattr(self._here, "holds", [])
        return next((each.owner for each in reversed(holds) if each.side is side), None)

    @contextmanager
    def _working_for(self, hold: Hold) -> Iterator[None]:
        """Let the calling thread work for a hold that was begun elsewhere."""
        holds: list[Hold] = self._here.__dict__.setdefault("holds", [])
        holds.append(hold)
        try:
            yield
        finally:
            holds.pop()

    def _refuse_deadlock(self, hold: Hold) -> None:
        if hold.side is Side.MUTATING and hold.home is None and self.captures_here():
            raise changes_while_capturing(hold)
        error = self._state.deadlock(hold)
        try:
            if error is not None:
                raise error
        finally:
            del error  # else the cycle of error, traceback and frame keeps the caller's objects

    # ---- waiting ----

    def _acquire(self, hold: Hold, timeout: float | None) -> None:
        try:
            self._enter(hold)
            while True:
                with self._changed:
                    seconds = self._look(hold, timeout)
                    if seconds is None:
                        break
                    seconds = min(seconds, LOOK_SECONDS) if self._wanted_here() else seconds
                    self._changed.wait(min(seconds, threading.TIMEOUT_MAX))
                # A save or load that holds the lock may need this thread for its user code.
                for serve in self._wanted_here():
                    serve()
            if hold.side is Side.MUTATING and not self._fences_passed():
                with self._changed:
                    for fence in self._fences:
                        fence.hold_back()
        except BaseException:
            self._leave(hold)
            raise

    def _wanted_here(self) -> list[Callable[[], object]]:
        return [each.serve for each in self._mine() if each.serve is not None]

    async def _acquire_async(self, hold: Hold, timeout: float | None) -> None:
        """Wait without blocking a thread; a cancelled call waits for nothing afterwards."""
        wake, loop = asyncio.Event(), asyncio.get_running_loop()
        try:
            self._enter(hold)
            hold.wake = partial(loop.call_soon_threadsafe, wake.set)
            while (seconds := self._look(hold, timeout)) is not None:
                with anyio.move_on_after(seconds):
                    await wake.wait()
                wake.clear()
        except BaseException:
            self._leave(hold)
            raise
        finally:
            hold.wake = None

    def _enter(self, hold: Hold) -> None:
        with self._changed:
            self._settle()
            self._refuse_deadlock(hold)
            self._state.arrive(hold)
            self._settle()

    def _leave(self, hold: Hold) -> None:
        with self._changed:
            self._state.leave(hold)
            self._settle()

    def _look(self, hold: Hold, timeout: float | None) -> float | None:
        """Return the seconds to wait before the next check; None once the request is granted.

        Raises:
            StateLockTimeout: If the timeout has passed.
        """
        with self._changed:
            seconds = self._settle() if hold in self._state.waiting else math.inf
            if hold in self._state.holding:
                return None
            limit = math.inf if timeout is None else timeout
            left = hold.since + limit - time.monotonic()
            if left <= 0:
                raise self._timed_out(hold, limit)
            return min(seconds, left)

    def _settle(self) -> float:
        """Decide, and wake all waiters after a change; return the seconds until the next decision.

        All waiters, not only the granted ones: a waiter for captures must begin to look for dead
        holds once a trainer has replaced them.
        """
        with self._changed:
            seconds = self._state.settle(time.monotonic())
            now = ([*self._state.holding], [*self._state.waiting])
            if now == self._told:
                return seconds
            self._told = now
            self._changed.notify_all()
            for hold in self._state.everyone:
                try:
                    if hold.wake is not None:
                        hold.wake()
                except RuntimeError:
                    # The loop of a waiter was closed. That must not fail the releasing thread, and
                    # nothing may be granted to a task that will never run again.
                    self._state.leave(hold)
                    return self._settle()
            return seconds

    def _timed_out(self, hold: Hold, timeout: float) -> StateLockTimeout:
        held = "; ".join(
            f"thread {use.thread!r} has been {use.side} for {use.seconds:.1f} s ({use.purpose})"
            for use in self.statistics().holders
        )
        who = held or "no thread holds it, but others wait in front"
        if hold.side is Side.CAPTURING:
            hint = (
                "End the mutation sooner (leave mutating(), finish the step or call "
                "allow_state_dict_read()), or allow the capture more time"
            )
        else:
            hint = "Wait for longer, or without a limit; captures end when their copies are done"
        wanted = hold.side.value
        return StateLockTimeout(
            f"The state lock was not free for {wanted} within {timeout:g} s: {who}", hint=hint
        )

    def _fences_passed(self) -> bool:
        """Tell whether devices have finished all reads that captures left to them."""
        with self._changed:
            self._fences = [fence for fence in self._fences if not fence.passed()]
            return not self._fences


_locks: weakref.WeakSet[StateLock] = weakref.WeakSet()


def _begin_in_child() -> None:
    """Free all locks in a forked child: it has none of the threads that used them."""
    for lock in _locks:
        lock._begin()


os.register_at_fork(after_in_child=_begin_in_child)


# ---- the holds of saves and loads ----


class LockHold:
    """One save's hold of the state lock, from the walk to the last copy or until it is given up.

    A released hold excludes no thread, while a plan is made or memory is waited for. But the hold
    of the next save begins only after this one has ended.

    Create it on the event loop that ends it.

    Args:
        lock: The lock.
        thread: The identifier of the thread that asked for the save.
    """

    def __init__(self, lock: StateLock, thread: int) -> None:
        self._lock, self._thread = lock, thread
        self._home = threading.current_thread()
        self._hold: Hold | None = None
        self.ended = anyio.Event()
        self.released = self.copied = False
        self._users = 0
        self._ending = False

    def begin(self) -> bool:
        """Begin the walk on the calling thread; return False if the lock must be waited for.

        Raises:
            LockMisuse: If the thread that asked for the save is changing the state.
        """
        lock, state = self._lock, self._lock._state
        with lock._changed:
            hold = self._hold
            if hold is not None and hold in state.holding and not hold.revoked:
                hold.grace = math.inf
                return True
            self._hold = lock._capture(self._thread, home=self._home, awaited=False)
            lock._enter(self._hold)
            if self._hold in state.holding:
                return True
            lock._leave(self._hold)
            self._hold = None
            return False

    async def take(
        self, timeout: float, *, awaited: bool, serve: Callable[[], object] | None = None
    ) -> None:
        """Wait for the lock without blocking a thread.

        A cancelled call holds nothing and waits for nothing afterwards. The thread of the running
        loop may not change the state until the end, as the loop could not go on to end the hold.

        Args:
            timeout: Seconds to wait for trainers.
            awaited: Whether the thread that asked for the save does nothing else meanwhile. A
                capture for a coroutine waits for the current work of its thread, such as a step of
                another task.
            serve: Begins the walk, if the walking thread waits for the lock itself.

        Raises:
            LockMisuse: If the loop's thread is changing the state, or the thread concerned is and
                waits for the capture.
            StateLockTimeout: If trainers held the lock for too long.
        """
        hold = self._lock._capture(self._thread, home=self._home, awaited=awaited, serve=serve)
        await self._lock._acquire_async(hold, timeout)
        self._hold = hold

    def release(self, fences: Iterable[StreamFence] = ()) -> None:
        """Let trainers go on, as no thread reads the state; their devices wait for the fences.

        May be called from any thread, and again.
        """
        self.released = True
        lock, hold = self._lock, self._hold
        with lock._changed:
            if hold is not None and hold in lock._state.holding:
                lock._fences.extend(fences)
                lock._leave(hold)

    def end(self, *, copied: bool = False) -> None:
        """Let trainers go on and the next save begin, once no thread reads; may be called twice."""
        self._ending = True
        self.copied |= copied
        if not self._users and not self.ended.is_set():
            self.release()
            self.ended.set()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Postpone the end of the hold while a worker thread uses the state."""
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            if self._ending:
                self.end()

    def defer(self, grace: float) -> None:
        """Defer the capture: from now on it reads only tensors that cannot change without the lock.

        A trainer that has waited for the grace preempts it, unless another capture would keep the
        trainer waiting all the same. Does nothing if it has ended.

        Args:
            grace: Seconds that a trainer waits from now on.
        """
        with self._lock._changed:
            if self._hold is not None and self._hold in self._lock._state.holding:
                self._hold.deferred_at, self._hold.grace = time.monotonic(), grace
                self._lock._changed.notify_all()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Protect one read of a deferred state; trainers wait for its end.

        Raises:
            CaptureTooSlow: If a trainer has taken the lock from the capture, or it has ended.
        """
        hold, lock = self._hold, self._lock
        with lock._changed:
            if hold is None or hold not in lock._state.holding or hold.revoked:
                grace = math.inf if hold is None else hold.grace
                raise CaptureTooSlow(
                    f"A step waited {grace:g} s for the copy of the tensors that it changes, and "
                    "went on without it",
                    hint='Save with until="staged", raise lock.max_step_wait_seconds, or save '
                    "less often",
                )
            hold.readers += 1
        try:
            yield
        finally:
            with lock._changed:
                hold.readers -= 1
                if hold.revoked:
                    lock._settle()

    def here(self) -> AbstractContextManager[None]:
        """Let the calling thread work for the capture.

        Calls of the state's own methods on this thread then count as part of it: guarded
        optimizers do not lock, further captures are granted at once, and
        :meth:`StateLock.mutating` raises instead of waiting for ever.
        """
        assert self._hold is not None
        return self._lock._working_for(self._hold)


class LoadHold:
    """The hold of one load that fills a state. Create it on the thread of the load's caller.

    Args:
        lock: The lock of the state.
        caller: Runs user code on that thread; None if it runs elsewhere.

    Raises:
        LockMisuse: If the load would wait for that thread, which is capturing the state.
    """

    def __init__(self, lock: StateLock, caller: Caller | None) -> None:
        self._lock, self._thread = lock, threading.current_thread()
        self._saver = self._thread if caller is not None and caller.blocks else None
        self._serve = None if caller is None else caller.do_pending
        self._owner = lock._works_for(Side.MUTATING) or self._thread
        with lock._changed:
            lock._settle()
            mutations = [held for held in lock._state.holding if held.side is Side.MUTATING]
            self._inside = [held for held in mutations if held.owner == self._owner]
            lock._refuse_deadlock(self._request(None))
        self._hold: Hold | None = None

    def _request(self, home: threading.Thread | None) -> Hold:
        inside = any(each in self._lock._state.holding for each in self._inside)
        return Hold(
            side=Side.MUTATING,
            purpose="load()",
            thread=self._thread,
            ident=self._thread.ident,
            saver=self._saver,
            home=home,
            within=self._owner if inside else None,
            serve=self._serve,
        )

    @property
    def is_pending(self) -> bool:
        """Tell whether it is not taken yet, or has ended."""
        return self._hold is None

    async def take(self) -> None:
        """Wait until no other thread changes or reads the state; may be called again.

        A cancelled call holds nothing and waits for nothing afterwards. Unfinished reads of the
        state by devices are waited for as well.

        Raises:
            LockMisuse: If the lock would wait for the caller.
        """
        if self._hold is not None:
            return
        hold = self._request(threading.current_thread())
        await self._lock._acquire_async(hold, None)
        try:
            while True:
                if self._lock._fences_passed():
                    break
                await anyio.sleep(_FENCE_SECONDS)
        except BaseException:
            self._lock._leave(hold)
            raise
        self._hold = hold

    def here(self) -> AbstractContextManager[None]:
        """Let the calling thread work for the load, whose hold is taken.

        Calls of the state's own methods on this thread are then part of the load: guarded
        optimizers, :meth:`StateLock.mutating` and :meth:`StateLock.capturing` do not wait for
        it, and saves raise.
        """
        assert self._hold is not None
        return self._lock._working_for(self._hold)

    def end(self) -> None:
        """Let trainers and captures go on; may be called twice, also if it was never taken."""
        hold, self._hold = self._hold, None
        if hold is not None:
            self._lock._leave(hold)


def lock_of(state_lock: StateLock | None, fields: Mapping[str, Any]) -> StateLock:
    """Return the lock of a pipeline: the given one, or a new one.

    Raises:
        UsageError: If it is no lock.
        SettingsError: If a lock was passed as the setting ``lock``.
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
