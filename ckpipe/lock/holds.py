"""Decide who holds the state lock: requests, and the rules that let them in and end them.

:class:`LockState` decides, and :class:`~ckpipe.lock.state_lock.StateLock` waits and wakes.

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

import enum
import inspect
import math
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from types import CodeType, FrameType

from ckpipe.errors import LockMisuse
from ckpipe.interpreter import gc_paused

LOOK_SECONDS = 0.05
"""Seconds between two checks of a waiter for holds that were left behind."""

PATIENCE = 16
"""Number of mutations that may be granted ahead of a waiting capture."""


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


def _top_frame(thread: int) -> FrameType | None:
    """Return the innermost frame of a thread; None if it runs no Python.

    ``sys._current_frames`` holds a lock of the interpreter, and may start a garbage collection. If
    a finalizer then lets another thread run that starts a thread, both wait for ever: CPython
    issue 106883. So no collection may begin in it.
    """
    if thread == threading.get_ident():
        return sys._getframe(1)
    with gc_paused():
        return sys._current_frames().get(thread)


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
        revoked: Whether a trainer has preempted it; it ends once no thread reads.
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

    def is_over(self) -> bool:
        """Tell whether a capture was preempted and is not read, or a mutation was left behind.

        A mutation is left behind if its thread ended or its step raised.
        """
        if self.side is Side.CAPTURING:
            return self.revoked and not self.readers
        keeper = self.home or self.thread
        if not isinstance(keeper, threading.Thread) or self.ident is None:
            return False
        if not keeper.is_alive():
            return True
        # No variable for the frame: it could close a reference cycle.
        return self.mark is not None and self.mark.is_gone(_top_frame(self.ident))

    def use(self) -> LockUse:
        """Return plain data about it, as of now."""
        seconds = time.monotonic() - self.since
        return LockUse(self.side.value, self.name, self.ident, self.purpose, seconds)


class LockState:
    """Decide who may hold the lock: a state machine without waiting, waking and clock.

    A request arrives, is granted at once or later, and leaves. It leaves in the same way after a
    release, a timeout or a cancellation, so none of these can leave more behind than another.
    :meth:`settle` makes all decisions. The rules:

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
        """Add a request, which must cause no deadlock."""
        (self.holding if self._enters_again(hold) else self.waiting).append(hold)

    def leave(self, hold: Hold) -> None:
        """End a request; does nothing if it is unknown or has ended."""
        for requests in (self.holding, self.waiting):
            if hold in requests:
                requests.remove(hold)

    def settle(self, now: float) -> float:
        """Preempt captures, end the holds that are over, and let in the waiters that may enter.

        Args:
            now: The time by the monotonic clock.

        Returns:
            Seconds after which it must be called again, if no request arrives or leaves before.
        """
        trainers, captures = self.waiting_for(Side.MUTATING), self.waiting_for(Side.CAPTURING)
        due = self._preemption_due(trainers)
        if due <= now:
            for held in self.holding:
                held.revoked = True
            due = math.inf
        self.holding = [held for held in self.holding if not held.is_over()]
        if not captures:
            self.passed = 0
        # One grant is enough, as a grant to one side excludes the other.
        if captures and self.mutator is None and (not trainers or self.passed >= PATIENCE):
            self.passed = 0
            self._grant(captures, now)
        elif trainers and not self.holding:
            self.passed += bool(captures)
            self._grant(trainers[:1], now)
        return due - now if self.mutator is None else LOOK_SECONDS

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
                return changes_while_capturing(hold)
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

    def _preemption_due(self, trainers: list[Hold]) -> float:
        """Return when a waiting step may preempt the captures; never if one is not deferred."""
        steps = [each for each in trainers if each.home is None]
        if not steps:
            return math.inf
        ends = (max(each.deferred_at, steps[0].since) + each.grace for each in self.holding)
        return max(ends, default=math.inf)

    def _enters_again(self, hold: Hold) -> bool:
        again = [held for held in self.holding if held.side is hold.side]
        if hold.side is Side.MUTATING:
            return any(held.owner in (hold.owner, hold.within) for held in again)
        waits = {hold.owner, hold.saver} - {None}
        return any(held.owner in waits or held.home == hold.owner for held in again)

    def _grant(self, granted: list[Hold], now: float) -> None:
        self.waiting = [each for each in self.waiting if each not in granted]
        self.holding += granted
        for hold in granted:
            hold.since = now


def changes_while_capturing(hold: Hold) -> LockMisuse:
    """Return the error of a thread that would wait for its own capture."""
    return LockMisuse(
        f"Thread {hold.name!r} cannot change the state ({hold.purpose}) while it is capturing it "
        "itself: it would wait for its own capture",
        hint="End the capture first; a state_dict method must not change the state",
    )
