"""Backends that wrap another and fail, stop or slow down at chosen operations.

Every operation on the wrapped backend goes through one method.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import anyio
from anyio.lowlevel import checkpoint

from ckpipe.backend import Backend
from ckpipe.store.wrapper import Operation, Result, WrappedBackend


class Gate:
    """Let tasks of any event loop pass, or hold them until a release.

    All methods but :meth:`passed` may be called in any thread. Nothing polls: a release wakes
    each waiter on its own loop.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._held = False
        self._waiters: dict[anyio.Event, asyncio.AbstractEventLoop] = {}

    def __repr__(self) -> str:
        return f"<Gate {'held' if self._held else 'open'}, {self.waiting} waiting>"

    @property
    def waiting(self) -> int:
        """The number of tasks that wait at the gate now."""
        with self._changed:
            return len(self._waiters)

    def hold(self) -> None:
        """Shut the gate for all tasks that arrive from now on."""
        with self._changed:
            self._held = True

    def release(self) -> None:
        """Open the gate, and let all waiting tasks pass."""
        with self._changed:
            self._held = False
            waiters, self._waiters = self._waiters, {}
        for event, loop in waiters.items():
            # A loop that was closed meanwhile has no task left to wake.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(event.set)

    def wait_until_held(self, count: int = 1, *, timeout: float = 30.0) -> None:
        """Block the calling thread until ``count`` tasks wait at the gate.

        Args:
            count: The number of tasks.
            timeout: The most seconds to wait.

        Raises:
            TimeoutError: If fewer tasks arrived in time.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._waiters) >= count, timeout):
                raise TimeoutError(f"{len(self._waiters)} of {count} tasks reached the gate")

    async def passed(self) -> None:
        """Wait until the gate is open."""
        event = anyio.Event()
        with self._changed:
            if not self._held:
                return
            self._waiters[event] = asyncio.get_running_loop()
            self._changed.notify_all()
        try:
            await event.wait()
        finally:
            with self._changed:
                self._waiters.pop(event, None)


class Landing(enum.Enum):
    """The effect of the operation at which a fault strikes: it lands, or it does not."""

    BEFORE = "before"
    """It does not land: the request never arrived."""

    AFTER = "after"
    """It lands, and the caller gets no answer: the response was lost."""


Where = int | str | Callable[[Operation], bool]
"""The operations: the one of this number (from 1), those of this verb, or those that match."""

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
        if isinstance(self.where, int):
            matches = number == self.where
        elif isinstance(self.where, str):
            matches = operation.verb == self.where
        else:
            matches = self.where(operation)
        if not matches:
            return False
        self.seen += 1
        return self.seen >= self.nth and (self.times is None or self.seen < self.nth + self.times)


class FaultyBackend(WrappedBackend):
    """Count the operations on a backend, and make chosen ones fail, stop or call a function.

    Faults may be set, and the log read, in any thread and while operations run. A fault strikes
    at the ``nth`` matching operation after it was set, and at ``times`` matching operations in a
    row; with ``times=None`` it strikes at all later ones.

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
        """All operations that have begun, in order; the first has the number 1."""
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
        """Raise an error at an operation, before it lands or after it has landed."""
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
        """Call a function on the backend's event loop, then let a cancellation take effect.

        So a test can cancel a scope at an operation, or kill its process there. A cancellation
        before the operation stops it. After the operation has landed, its result is lost.
        """
        self._add(_Fault(where, action, landing, nth, times))

    def pause(self, where: Where, landing: Landing = Landing.BEFORE, *, nth: int = 1) -> Gate:
        """Stop at an operation until the returned gate is released."""
        gate = Gate()
        gate.hold()
        self._add(_Fault(where, gate, landing, nth, 1))
        return gate

    def heal(self) -> None:
        """Forget all faults; a paused operation waits until its gate is released."""
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


class SlowBackend(WrappedBackend):
    """Delay the operations on a backend, and hold chosen ones until they are released.

    All operations share one link of ``bytes_per_second``. Each also waits for the latency. The gate
    needs no delays: a test holds, waits until an operation is held, looks, and releases. ``gate``
    may be used in any thread.

    Args:
        inner: The backend that does the work.
        bytes_per_second: The speed of the link; None for no limit.
        latency: The seconds that each operation waits first.
    """

    def __init__(
        self, inner: Backend, *, bytes_per_second: float | None = None, latency: float = 0.0
    ) -> None:
        super().__init__(inner)
        self.bytes_per_second = bytes_per_second
        self.latency = latency
        self.gate = Gate()
        self._held_verbs: frozenset[str] = frozenset()
        self._link_free_at = 0.0

    def __repr__(self) -> str:
        return f"<SlowBackend {self.inner!r} [{self.gate!r}]>"

    def hold(self, *verbs: str) -> None:
        """Hold operations from now on: those of these verbs, or all if no verb is given."""
        self._held_verbs = frozenset(verbs)
        self.gate.hold()

    def release(self) -> None:
        """Release held operations, and let all later ones pass."""
        self.gate.release()

    async def around(self, operation: Operation, call: Callable[[], Awaitable[Result]]) -> Result:
        if not self._held_verbs or operation.verb in self._held_verbs:
            await self.gate.passed()
        if delay := self._reserve(operation.size):
            await anyio.sleep(delay)
        return await call()

    def _reserve(self, size: int) -> float:
        """Take the link for ``size`` bytes; return the seconds until they are transferred."""
        if self.bytes_per_second is None:
            return self.latency
        now = anyio.current_time()
        self._link_free_at = max(now, self._link_free_at) + size / self.bytes_per_second
        return self.latency + self._link_free_at - now


__all__ = [
    "FaultyBackend",
    "Gate",
    "Landing",
    "Operation",
    "Result",
    "SlowBackend",
    "WrappedBackend",
]
