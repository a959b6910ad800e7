"""A backend that fails, stops or does something else at chosen operations."""

from __future__ import annotations

import enum
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from anyio.lowlevel import checkpoint

from ckpipe.backend import Backend
from ckpipe.testing.gate import Gate
from ckpipe.testing.wrapping import Operation, Result, WrappedBackend


class Landing(enum.Enum):
    """Whether the operation at which a fault strikes has taken effect."""

    BEFORE = "before"
    """It has not: the request never arrived."""

    AFTER = "after"
    """It has, and the caller does not hear of it: the response was lost."""


Where = int | str | Callable[[Operation], bool]
"""Which operations: the one of this number (from 1), those of this verb, or those that match."""

Action = Callable[[Operation], object] | Gate | BaseException


@dataclass
class _Fault:
    where: Where
    action: Action
    landing: Landing
    nth: int
    times: int | None
    seen: int = 0

    def strikes(self, number: int, operation: Operation) -> bool:
        if not self._matches(number, operation):
            return False
        self.seen += 1
        return self.seen >= self.nth and (self.times is None or self.seen < self.nth + self.times)

    def _matches(self, number: int, operation: Operation) -> bool:
        if isinstance(self.where, int):
            return number == self.where
        if isinstance(self.where, str):
            return operation.verb == self.where
        return self.where(operation)


class FaultyBackend(WrappedBackend):
    """Counts the operations on a backend, and makes chosen ones fail, stop or call something.

    Faults may be set, and the log read, in any thread and while operations run. A fault strikes
    at the ``nth`` operation that matches, counted from when it was set, and ``times`` times in a
    row of matching ones; ``times=None`` is always from then on.

    Args:
        inner: The backend that does the work.
    """

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self._lock = threading.Lock()
        self._faults: list[_Fault] = []
        self._log: list[Operation] = []

    def __repr__(self) -> str:
        return f"<FaultyBackend {self.inner!r} [{len(self._log)} operations]>"

    @property
    def operations(self) -> tuple[Operation, ...]:
        """All operations that were begun, in order; the first has the number 1."""
        with self._lock:
            return tuple(self._log)

    def fail(
        self,
        error: BaseException,
        where: Where,
        landing: Landing = Landing.BEFORE,
        *,
        nth: int = 1,
        times: int | None = 1,
    ) -> None:
        """Raises an error at an operation, before it lands or after it has landed."""
        self._add(_Fault(where, error, landing, nth, times))

    def call(
        self,
        action: Callable[[Operation], object],
        where: Where,
        landing: Landing = Landing.BEFORE,
        *,
        nth: int = 1,
        times: int | None = 1,
    ) -> None:
        """Calls a function on the backend's event loop, then lets a cancellation take effect.

        So a test can cancel a scope at an operation, or kill its process there. Before the
        operation a cancellation stops it; after it has landed, its result is lost.
        """
        self._add(_Fault(where, action, landing, nth, times))

    def pause(self, where: Where, landing: Landing = Landing.BEFORE, *, nth: int = 1) -> Gate:
        """Stops at an operation until the gate that is returned is released."""
        gate = Gate()
        gate.hold()
        self._add(_Fault(where, gate, landing, nth, 1))
        return gate

    def heal(self) -> None:
        """Forgets all faults; who is paused stays so until its gate is released."""
        with self._lock:
            self._faults.clear()

    def _add(self, fault: _Fault) -> None:
        with self._lock:
            self._faults.append(fault)

    async def around(self, operation: Operation, call: Callable[[], Awaitable[Result]]) -> Result:
        faults = self._begin(operation)
        await _strike(faults, operation, Landing.BEFORE)
        result = await call()
        await _strike(faults, operation, Landing.AFTER)
        return result

    def _begin(self, operation: Operation) -> list[_Fault]:
        with self._lock:
            self._log.append(operation)
            return [one for one in self._faults if one.strikes(len(self._log), operation)]


async def _strike(faults: list[_Fault], operation: Operation, landing: Landing) -> None:
    for fault in faults:
        if fault.landing is not landing:
            continue
        if isinstance(fault.action, BaseException):
            raise fault.action
        if isinstance(fault.action, Gate):
            await fault.action.passed()
        else:
            fault.action(operation)
            await checkpoint()
