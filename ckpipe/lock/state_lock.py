"""The readers-writer lock that keeps trainers' threads and captures of the state apart.

:class:`LockState` decides who may hold the lock, and knows neither threads nor waiting.
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

The theory of :class:`FrameMark`. A frame cannot be referenced weakly, and a strong reference would
keep its locals, and those of all its callers, alive. So a frame is remembered by its address and
its code. An address is reused once its frame is gone, and walking a stack allocates frame objects
itself, so the address alone would sooner or later match an unrelated frame. Address and code
together can match only another run of the same function at the same address; that mistake passes
as soon as that run ends.

The walk reads the stack of a thread that goes on running. It starts from the top of the stack at
one instant. A function that returns in the meantime keeps its link to the caller, so the walk still
meets all frames below. Only a generator drops that link when it yields. A walk that ends in the
frame of a generator has therefore proved nothing.
"""

from __future__ import annotations

import asyncio
import enum
import inspect
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import anyio

from ckpipe.errors import (
    CaptureTooSlow,
    LockMisuse,
    SettingsError,
    StateLockTimeout,
    UsageError,
)
from ckpipe.loop_thread import Caller

if TYPE_CHECKING:
    from ckpipe.memory.cuda import StreamFence

LOOK_SECONDS = 0.05
"""Seconds between two checks of a waiter for holds that were left behind."""

PATIENCE = 16
"""Number of mutations that may be granted ahead of a waiting capture."""

_FENCE_SECONDS = 0.001
"""Seconds between two queries of the devices by a load that waits for them."""

_BRACKET = "disallow_state_dict_read()"


# ---- requests and the state machine ----


class Side(enum.Enum):
    """The side of the lock that a request is for."""

    MUTATING = "mutating"
    """To change the state; excludes all other owners."""

    CAPTURING = "capturing"
    """To read the state; shared with other captures."""


@dataclass(frozen=True, slots=True)
class LockUse:
    """One holder of a state lock, or one waiter for it, as plain data.

    Args:
        side: ``"mutating"`` or ``"capturing"``.
        thread: The name of the thread that asked for it; of a capture, the saver's thread; of a
            load, its caller's.
        ident: That thread's identifier.
        purpose: The call that the thread made.
        seconds: Seconds since it got the lock, or since it began to wait.
    """

    side: str
    thread: str
    ident: int | None
    purpose: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.side} by {self.thread!r} for {self.seconds:.1f} s ({self.purpose})"


@dataclass(frozen=True, slots=True)
class LockStatistics:
    """The users of a state lock at one instant, oldest first."""

    holders: tuple[LockUse, ...]
    waiters: tuple[LockUse, ...]


_SUSPENDABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


@dataclass(frozen=True, slots=True)
class FrameMark:
    """A mark by which one frame is recognized without being kept alive."""

    address: int
    code: CodeType

    @classmethod
    def of(cls, frame: FrameType) -> FrameMark:
        """Return the mark of a frame that is running now."""
        return cls(id(frame), frame.f_code)

    def is_gone(self, top: FrameType | None) -> bool:
        """Tell whether the frame has provably left a stack.

        Args:
            top: The innermost frame of the stack; None for a thread that runs no Python.
        """
        last = None
        for last in callers(top):
            if id(last) == self.address and last.f_code is self.code:
                return False
        return last is None or not last.f_code.co_flags & _SUSPENDABLE


def callers(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and the frames that called it, innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


@dataclass(eq=False, slots=True, kw_only=True)
class Hold:
    """One request for the lock, from its arrival to its end.

    Args:
        side: The requested side of the lock.
        purpose: The call that requests it, for messages.
        thread: The thread concerned; None if Python's threading does not know it.
        ident: Its identifier.
        owner: The owner of the granted request, which may hold a side repeatedly; None: the
            request itself.
        saver: The thread that asked for it and may be waiting for its end, if that is not the
            owner; of a load, only if it waits without an event loop.
        home: Of a capture or a load, the thread without which it cannot be released.
        awaited: Of a capture, whether the saver does nothing else until it is granted. If not, the
            saver is the thread of a coroutine, which goes on with its work and finishes it.
        within: Of a load, the owner of the mutation that contains it. The load may outlive that
            mutation; the owner then waits for the load like any other.
        mark: Of an optimizer step, its frame; the hold lasts while that runs.
        key: Of an optimizer step, the hook that brackets it.
        serve: Of a load or a capture, runs its pending work on ``thread`` while that thread itself
            waits for the lock.
        wake: Wakes the task that waits for it.
        since: Time of its arrival, or of its grant, by the monotonic clock.
        grace: Of a deferred capture, the seconds that a trainer waits for it.
        deferred_at: Time of its deferral, by the monotonic clock.
        readers: Of a deferred capture, the number of threads that are reading now.
        revoked: Whether a trainer has preempted it, or is about to.
    """

    side: Side
    purpose: str = "capture"
    thread: threading.Thread | None = None
    ident: int | None = None
    owner: Hashable = None
    saver: Hashable = None
    home: Hashable = None
    awaited: bool = True
    within: Hashable = None
    mark: FrameMark | None = None
    key: object = None
    serve: Callable[[], object] | None = None
    wake: Callable[[], object] | None = None
    since: float = field(default_factory=time.monotonic)
    grace: float = math.inf
    deferred_at: float = 0.0
    readers: int = 0
    revoked: bool = False

    def __post_init__(self) -> None:
        if self.owner is None:
            self.owner = self

    @property
    def name(self) -> str:
        """The thread's name, for messages."""
        return self.thread.name if self.thread is not None else f"thread {self.ident}"

    @property
    def deferred(self) -> bool:
        """Tell whether a trainer may preempt it."""
        return self.grace < math.inf

    def is_over(self) -> bool:
        """Tell whether a mutation was left behind: its thread ended, or its step raised."""
        keeper = self.home or self.thread
        if not isinstance(keeper, threading.Thread) or self.ident is None:
            return False
        if not keeper.is_alive():
            return True
        # No variable for the frame: it could close a reference cycle.
        return self.mark is not None and self.mark.is_gone(sys._current_frames().get(self.ident))

    def grace_left(self, trainer: Hold) -> float:
        """Return how many more seconds a trainer waits for this deferred capture."""
        return max(self.deferred_at, trainer.since) + self.grace - time.monotonic()

    def use(self) -> LockUse:
        """Return plain data about it, as of now."""
        seconds = time.monotonic() - self.since
        return LockUse(self.side.value, self.name, self.ident, self.purpose, seconds)


class LockState:
    """Decide who may hold the lock: a state machine without threads and waiting.

    A request arrives, is granted at once or later, and leaves. It leaves in the same way after a
    release, a timeout or a cancellation, so none of these can leave more behind than another. The
    rules:

    * The holders are any number of captures, or any number of mutations of one owner and of loads
      within them, never both.
    * A waiting mutation goes before every capture that is not granted yet, so that a step waits
      only for captures that are already running.
    * Mutations are granted in the order of their arrival.
    * An owner that holds a side gets it again at once, before all waiters, since the waiters
      cannot be served before that owner is done. The same holds for a capture if the thread that
      waits for it itself captures, or is needed to release a capture.
    * Several trainers that pass the lock to each other without a gap would starve a capture. After
      :data:`PATIENCE` of them have gone first, the waiting captures go once.
    * A trainer that has waited for *deferred* captures for too long may preempt them, but only if
      that lets the trainer in: while another capture holds the lock, preemption gains nothing.
    * The *home* thread of a load may not wait for the lock while such a load holds it or waits for
      it.
    """

    def __init__(self) -> None:
        self.holding: list[Hold] = []
        """The granted requests, oldest first; all of one side."""
        self.waiting: list[Hold] = []
        """The other requests, in the order of their arrival."""
        self.passed = 0
        """Number of mutations granted ahead of a waiting capture since a capture was granted."""

    @property
    def everyone(self) -> list[Hold]:
        """The holders, and after them the waiters."""
        return [*self.holding, *self.waiting]

    @property
    def mutator(self) -> Hashable | None:
        """The owner of the mutating side, or None without one."""
        first = self.holding[0] if self.holding else None
        return first.owner if first is not None and first.side is Side.MUTATING else None

    def waiting_for(self, side: Side) -> list[Hold]:
        """Return the requests that wait for one side, in the order of their arrival."""
        return [each for each in self.waiting if each.side is side]

    def arrive(self, hold: Hold) -> None:
        """Grant a request if possible, else let it wait; it must cause no deadlock."""
        if self._enters_again(hold):
            self._grant([hold])
        else:
            self.waiting.append(hold)
            self._settle()

    def leave(self, hold: Hold) -> None:
        """End a request; does nothing if it is unknown or has ended."""
        for requests in (self.holding, self.waiting):
            if hold in requests:
                requests.remove(hold)
        self._settle()

    def deadlock(self, hold: Hold) -> LockMisuse | None:
        """Return the error to raise if a new request would wait for a thread that waits for it.

        There are three cases. The request blocks the thread without which a load cannot end. It
        queues behind a mutation for which its own thread, interrupted, waits. Or it waits for a
        hold of its own thread.
        """
        if self._enters_again(hold):
            return None
        mutating = hold.side is Side.MUTATING
        threads = {hold.owner, hold.saver} - {None}
        trainers = self.waiting_for(Side.MUTATING)
        holders = [held for held in self.holding if held.side is Side.MUTATING]
        stopped = threads if mutating else {hold.owner}
        if any(each.home in stopped for each in (*holders, *trainers)):
            return LockMisuse(
                f"Thread {hold.name!r} cannot wait for the state lock ({hold.purpose}) while a "
                "load on its event loop fills the state: each would wait for the other",
                hint="Do it in another thread; a hook that is a plain function has one of its own",
            )
        if mutating and any(each.owner in threads for each in trainers):
            return LockMisuse(
                f"Thread {hold.name!r} cannot wait for the state lock ({hold.purpose}) while it "
                "waits to change the state already: it would wait behind its own request",
                hint="Have the signal handler set a flag, and do it after the step or mutating()",
            )
        if mutating:
            captures = [held for held in self.holding if held.side is Side.CAPTURING]
            if any(held.owner in threads or held.home in threads for held in captures):
                return _changes_while_capturing(hold)
            return None
        waits = {hold.owner, hold.saver if hold.awaited else None, hold.home} - {None}
        if any(held.owner in waits for held in holders):
            held = self.holding[-1]
            return LockMisuse(
                f"The state cannot be captured for thread {held.name!r} while this thread itself "
                f"is changing it ({held.purpose}): each would wait for the other",
                hint="Save after leaving mutating(), after the step, or after "
                "allow_state_dict_read()",
            )
        return None

    def revocable(self) -> list[Hold]:
        """Return the captures that the waiting trainer has to preempt to be let in.

        Returns:
            All holders of the lock; none if trainers hold it, no trainer waits, or one of the
            captures is not deferred.
        """
        hurried = self.waiting_for(Side.MUTATING) and all(each.deferred for each in self.holding)
        return list(self.holding) if hurried else []

    def _enters_again(self, hold: Hold) -> bool:
        again = [held for held in self.holding if held.side is hold.side]
        if hold.side is Side.MUTATING:
            return any(held.owner in (hold.owner, hold.within) for held in again)
        waits = {hold.owner, hold.saver} - {None}
        return any(held.owner in waits or held.home == hold.owner for held in again)

    def _settle(self) -> None:
        """Grant all requests that may be granted now; one pass is enough, as a grant to one side
        excludes the other."""
        trainers, captures = self.waiting_for(Side.MUTATING), self.waiting_for(Side.CAPTURING)
        if not captures:
            self.passed = 0
        if captures and self.mutator is None and (not trainers or self.passed >= PATIENCE):
            self.passed = 0
            self._grant(captures)
        elif trainers and not self.holding:
            self.passed += bool(captures)
            self._grant(trainers[:1])

    def _grant(self, granted: list[Hold]) -> None:
        self.waiting = [each for each in self.waiting if each not in granted]
        for hold in granted:
            hold.since = time.monotonic()
            self.holding.append(hold)


def _changes_while_capturing(hold: Hold) -> LockMisuse:
    return LockMisuse(
        f"Thread {hold.name!r} cannot change the state ({hold.purpose}) while it is capturing it "
        "itself: it would wait for its own capture",
        hint="End the capture first; a state_dict method must not change the state",
    )


# ---- the lock ----


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

    @property
    def state_dict_read_allowed(self) -> bool:
        """Tell whether the calling thread allows reading: it has no open bracket of its own."""
        return self._bracket() is None

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
        hold = self._thread_capture(None)
        try:
            self._acquire(hold, timeout)  # inside: an interrupt may come as soon as it returns
            yield
        finally:
            self._leave(hold)

    def acquire_capture(self, timeout: float | None = None, *, thread: int | None = None) -> Hold:
        """Begin a capture and block until it may read the state.

        Args:
            timeout: Seconds to wait for trainers; None waits for as long as it takes.
            thread: The identifier of the thread that asked for the save and may be waiting for
                it. None: the calling thread, which then counts as capturing itself.

        Returns:
            The capture; any thread may end it with :meth:`release_capture`.

        Raises:
            LockMisuse: If the thread concerned is changing the state.
            StateLockTimeout: If the timeout has passed; the message names the holders and times.
        """
        hold = self._thread_capture(thread)
        self._acquire(hold, timeout)
        return hold

    async def acquire_capture_async(
        self,
        timeout: float | None = None,
        *,
        thread: int | None = None,
        awaited: bool = True,
        serve: Callable[[], object] | None = None,
    ) -> Hold:
        """Begin a capture, and wait for it without blocking a thread.

        A cancelled call holds nothing and waits for nothing afterwards. The capture belongs to no
        thread. The thread of the running asyncio loop may not change the state meanwhile, as the
        loop could not go on to release the capture.

        Args:
            timeout: Seconds to wait for trainers; None waits for as long as it takes.
            thread: The identifier of the thread that asked for the save; None: this thread.
            awaited: Whether that thread does nothing else meanwhile. A capture for a coroutine
                waits for the current work of its thread, such as a step of another task.
            serve: Runs the pending work of the capture on that thread, which calls it whenever it
                waits for the lock itself.

        Returns:
            The capture; any thread may end it with :meth:`release_capture`.

        Raises:
            LockMisuse: If the loop's thread is changing the state, or the thread concerned is and
                waits for the capture.
            StateLockTimeout: If the timeout has passed; the message names the holders and times.
        """
        here = threading.current_thread()
        hold = self._capture(thread, home=here, awaited=awaited, serve=serve)
        await self._acquire_async(hold, timeout)
        return hold

    @asynccontextmanager
    async def capturing_async(
        self, timeout: float | None = None, *, thread: int | None = None
    ) -> AsyncIterator[Hold]:
        """Exclude trainers while a task reads the state; see :meth:`acquire_capture_async`."""
        hold = await self.acquire_capture_async(timeout, thread=thread)
        try:
            yield hold
        finally:
            self.release_capture(hold)

    def release_capture(self, hold: Hold, *, fences: Iterable[StreamFence] = ()) -> None:
        """End a capture. Does nothing if it has ended already.

        Args:
            hold: The capture.
            fences: Reads that devices have not finished yet. Trainers are let in at once; their
                devices wait for these reads.
        """
        with self._changed:
            if hold in self._state.holding:
                self._fences.extend(fences)
                self._leave(hold)

    def check_capture_allowed(self, thread: int | None = None) -> None:
        """Raise if a thread that waits for a capture now would wait for itself.

        Args:
            thread: The identifier of the thread; None: the calling one.

        Raises:
            LockMisuse: If the thread is changing the state.
        """
        with self._changed:
            self._collect()
            self._refuse_deadlock(self._capture(thread))

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
            self._collect()
            for hold in [each for each in self._mine() if each.key is key][-1:]:
                self._leave(hold)

    def step_in_progress(self, key: object) -> bool:
        """Tell whether a step of this key runs or waits to begin on any thread."""
        with self._changed:
            self._collect()
            return any(each.key is key for each in self._state.everyone)

    def captures_here(self) -> bool:
        """Tell whether the calling thread is doing a capture at this moment."""
        with self._changed:
            owners = (threading.current_thread(), self._works_for(Side.CAPTURING))
            held = (held for held in self._state.holding if held.side is Side.CAPTURING)
            return any(each.owner in owners for each in held)

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

    def _thread_capture(self, ident: int | None) -> Hold:
        hold = self._capture(ident)
        me = threading.current_thread() if ident is None else hold
        hold.owner = self._works_for(Side.CAPTURING) or me
        return hold

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
            raise _changes_while_capturing(hold)
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
            while not self._waited(hold, timeout):
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

    def _waited(self, hold: Hold, timeout: float | None) -> bool:
        """Wait for a change; return whether the request is granted."""
        with self._changed:
            seconds = self._look(hold, timeout)
            if seconds is not None:
                seconds = min(seconds, LOOK_SECONDS) if self._wanted_here() else seconds
                self._changed.wait(None if seconds == math.inf else seconds)
            return seconds is None

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
            self._collect()
            self._refuse_deadlock(hold)
            self._state.arrive(hold)
            self._tell_all()

    def _look(self, hold: Hold, timeout: float | None) -> float | None:
        """Return the seconds to wait before the next check; None once the request is granted.

        Raises:
            StateLockTimeout: If the timeout has passed.
        """
        grace_left = math.inf
        with self._changed:
            if hold in self._state.waiting:
                self._collect()
                if hold.side is Side.MUTATING and hold.home is None:
                    grace_left = self._preempt(hold)
            if hold in self._state.holding:
                return None
            limit = math.inf if timeout is None else timeout
            left = hold.since + limit - time.monotonic()
            if left <= 0:
                raise self._timed_out(hold, limit)
            look = math.inf if self._state.mutator is None else LOOK_SECONDS
            return min(look, grace_left, left)

    def _preempt(self, trainer: Hold) -> float:
        """Preempt deferred captures for which a trainer has waited long enough.

        Threads that read for them finish their current read first: its memory might be freed
        otherwise.

        Returns:
            Seconds to wait until preemption is allowed; infinite if it is not needed.
        """
        captures = self._state.revocable()
        left = max((capture.grace_left(trainer) for capture in captures), default=math.inf)
        if left > 0:
            return left
        for capture in captures:
            capture.revoked = True
            if not capture.readers:
                self._leave(capture)
        return math.inf

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

    def _collect(self) -> None:
        """Release the holds of threads that ended and of steps that raised."""
        if self._state.mutator is not None:
            for held in [each for each in self._state.holding if each.is_over()]:
                self._leave(held)

    def _leave(self, hold: Hold) -> None:
        with self._changed:
            if hold in self._state.everyone:
                self._state.leave(hold)
                self._tell_all()

    def _tell_all(self) -> None:
        """Wake all waiters, not only the granted ones: a waiter for captures must begin to look for
        dead holds once a trainer has replaced them.
        """
        self._changed.notify_all()
        for hold in self._state.everyone:
            try:
                if hold.wake is not None:
                    hold.wake()
            except RuntimeError:
                # The loop of a waiter was closed. That must not fail the releasing thread, and
                # nothing may be granted to a task that will never run again.
                hold.wake = None
                self._leave(hold)


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
        hold: The capture, if it was acquired already; None if the walk begins it.
    """

    def __init__(self, lock: StateLock, thread: int, hold: Hold | None = None) -> None:
        self._lock, self._thread, self._hold = lock, thread, hold
        self._home = threading.current_thread()
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

    async def wait(self, timeout: float, grace: float, serve: Callable[[], object]) -> None:
        """Wait for the lock and keep it for a walk that another thread has yet to begin.

        Args:
            timeout: Seconds to wait.
            grace: Seconds that a trainer waits for the walk to begin; then it takes the lock.
            serve: Begins the walk, if the walking thread waits for the lock itself.

        Raises:
            StateLockTimeout: If trainers held the lock for too long.
        """
        self._hold = await self._lock.acquire_capture_async(
            timeout, thread=self._thread, awaited=False, serve=serve
        )
        self.defer(grace)

    def release(self, fences: Iterable[StreamFence] = ()) -> None:
        """Let trainers go on, as no thread reads the state; their devices wait for the fences.

        May be called from any thread, and again.
        """
        self.released = True
        if self._hold is not None:
            self._lock.release_capture(self._hold, fences=fences)

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
                if hold.revoked and not hold.readers:
                    lock._leave(hold)

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
            lock._collect()
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
