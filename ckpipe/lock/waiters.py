"""The waiters and holders of a state lock: their threads and frames, and errors that name them.

The theory of :class:`FrameMark`. A frame cannot be referred to weakly, and a strong reference
would keep its locals, and those of all its callers, alive. So a frame is remembered by its address
and its code. An address is given out again once its frame is gone, and walking a stack allocates
frame objects itself, so the address alone would sooner or later be found again in a frame that has
nothing to do with the old one. Together with the code it can only be confused with another run of
the same function at the same address, which passes as soon as that run ends.

The walk looks at a thread that goes on running. What it starts from is the top of the stack at one
instant; a function that returns in the meantime keeps its link to the caller, so the walk still
meets everything below. Only a generator drops that link when it yields. A walk that ends in the
frame of a generator has therefore proved nothing.
"""

from __future__ import annotations

import inspect
import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Protocol

from ckpipe.errors import CaptureTooSlow, LockMisuse, StateLockTimeout
from ckpipe.lock.lock_state import Request, Side


@dataclass(frozen=True, slots=True)
class LockUse:
    """One holder of a state lock, or one who waits for it, as plain data.

    Args:
        side: ``"mutating"`` or ``"capturing"``.
        thread: The name of the thread that asked for it; of a capture, the saver's thread; of a
            load, its caller's.
        ident: That thread's identifier.
        purpose: What the thread called.
        seconds: For how long it has held the lock, or waited.
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


@dataclass(slots=True)
class Waiter:
    """One request and all that the lock remembers of it.

    Args:
        request: The request.
        purpose: What was called, for messages.
        thread: The thread concerned, None where it is not known to Python's threading.
        ident: Its identifier.
        mark: Of an optimizer step, the frame that holds on while it runs.
        key: Of an optimizer step, the hook that brackets it.
        since: When it came, or was let in, by the monotonic clock.
        grace: Of a deferred capture, for how many seconds a trainer waits for it.
        deferred_at: When it was deferred, by the monotonic clock.
        readers: Of a deferred capture, how many threads are reading just now.
        revoked: Whether a trainer has taken the lock from it, or is about to.
        keeper: Of a load, the thread whose event loop lets go of it.
        serve: Of a load or a capture, does what it wants of ``thread``, where that waits itself.
    """

    request: Request
    purpose: str
    thread: threading.Thread | None
    ident: int | None
    mark: FrameMark | None = None
    key: object = None
    since: float = field(default_factory=time.monotonic)
    grace: float = math.inf
    deferred_at: float = 0.0
    readers: int = 0
    revoked: bool = False
    keeper: threading.Thread | None = None
    serve: Callable[[], object] | None = None

    @property
    def name(self) -> str:
        """The thread's name for messages."""
        return self.thread.name if self.thread is not None else f"thread {self.ident}"

    def is_over(self) -> bool:
        """Tell whether the hold was left behind: its thread ended, or its step raised."""
        keeper = self.keeper or self.thread
        if keeper is None or self.ident is None:
            return False
        if not keeper.is_alive():
            return True
        # The frame goes straight into the call: kept in a variable here it could close a cycle.
        return self.mark is not None and self.mark.is_gone(sys._current_frames().get(self.ident))

    def grace_left(self, trainer: Waiter) -> float:
        """For how many more seconds a trainer waits for this deferred capture."""
        return max(self.deferred_at, trainer.since) + self.grace - time.monotonic()

    def use(self) -> LockUse:
        """Plain data about it, as of now."""
        seconds = time.monotonic() - self.since
        return LockUse(self.request.side.value, self.name, self.ident, self.purpose, seconds)


class CaptureToken:
    """One held capture; any thread may give it to :meth:`StateLock.release_capture`."""

    __slots__ = ("grace", "owner", "ticket")

    def __init__(self, request: Request) -> None:
        self.ticket, self.owner = request.ticket, request.owner
        self.grace = math.inf

    def __repr__(self) -> str:
        return f"<CaptureToken {self.ticket}>"


class Fence(Protocol):
    """Reads that a device still has to do, of memory that trainers may change afterwards."""

    def passed(self) -> bool:
        """Tell whether the reads are done."""
        ...

    def hold_back(self) -> None:
        """Lets no work that this thread gives to the device from now on begin before them."""
        ...


class Deadline:
    """An instant, given as seconds from now or as None for never."""

    def __init__(self, timeout: float | None) -> None:
        self.timeout = math.inf if timeout is None else timeout
        self._at = time.monotonic() + self.timeout

    @property
    def seconds_left(self) -> float:
        """The seconds until then; infinite for never."""
        return self._at - time.monotonic()


def timed_out(waiter: Waiter, timeout: float, holders: Iterable[Waiter]) -> StateLockTimeout:
    """The error for a request that was not granted in time: who has the lock, and since when."""
    held = "; ".join(
        f"thread {use.thread!r} has been {use.side} for {use.seconds:.1f} s ({use.purpose})"
        for use in (holder.use() for holder in holders)
    )
    who = held or "nobody holds it, and others wait in front"
    if waiter.request.side is Side.CAPTURING:
        hint = (
            "End the mutation sooner (leave mutating(), finish the step or call "
            "allow_state_dict_read()), or allow the capture more time"
        )
    else:
        hint = "Wait for longer, or without a limit; captures end when their copies are done"
    wanted = waiter.request.side.value
    return StateLockTimeout(
        f"The state lock was not free for {wanted} within {timeout:g} s: {who}", hint=hint
    )


def capture_misused(name: str, purpose: str) -> LockMisuse:
    """The error for a capture that the thread would have to wait for while it changes the state."""
    return LockMisuse(
        f"The state cannot be captured for thread {name!r} while this thread itself is changing "
        f"it ({purpose}): each would wait for the other",
        hint="Save after leaving mutating(), after the step, or after allow_state_dict_read()",
    )


def mutation_misused(name: str, purpose: str) -> LockMisuse:
    """The error for a mutation on a thread that has to let go of a capture first."""
    return LockMisuse(
        f"Thread {name!r} cannot change the state ({purpose}) while it is capturing it itself: "
        "it would wait for its own capture",
        hint="End the capture first; a state_dict method must not change the state",
    )


def loop_misused(name: str, purpose: str) -> LockMisuse:
    """The error for a thread that would stop the event loop that a load needs to end."""
    return LockMisuse(
        f"Thread {name!r} cannot wait for the state lock ({purpose}) while a load on its event "
        "loop fills the state: each would wait for the other",
        hint="Do it in another thread; a hook that is a plain function has one of its own",
    )


def nested_misused(name: str, purpose: str) -> LockMisuse:
    """The error for a thread that waits for the lock already, and was interrupted."""
    return LockMisuse(
        f"Thread {name!r} cannot wait for the state lock ({purpose}) while it waits to change the "
        "state already: its turn would come after its own",
        hint="Have the signal handler set a flag, and do it after the step or mutating()",
    )


def revoked(grace: float) -> CaptureTooSlow:
    """The error for a capture that a trainer has taken the lock from."""
    return CaptureTooSlow(
        f"A step waited {grace:g} s for the copy of what it changes, and went on without it",
        hint='Save with until="staged", raise lock.max_step_wait_seconds, or save less often',
    )


_SUSPENDABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


@dataclass(frozen=True, slots=True)
class FrameMark:
    """Recognizes one frame without keeping it alive."""

    address: int
    code: CodeType

    @classmethod
    def of(cls, frame: FrameType) -> FrameMark:
        """The mark of a frame that is running now."""
        return cls(id(frame), frame.f_code)

    def is_gone(self, top: FrameType | None) -> bool:
        """Tell whether the frame is proved to be off a stack.

        Args:
            top: The innermost frame of the stack; None for a thread that runs no Python.
        """
        last = None
        for last in callers(top):
            if id(last) == self.address and last.f_code is self.code:
                return False
        return last is None or not last.f_code.co_flags & _SUSPENDABLE


def callers(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame and the frames that called it, innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def thread_of(ident: int) -> threading.Thread | None:
    """The living thread with this identifier, if there is one that Python knows of."""
    return next((thread for thread in threading.enumerate() if thread.ident == ident), None)
