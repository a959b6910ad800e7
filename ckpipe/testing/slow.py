"""A backend behind a slow link, or behind a gate."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio

from ckpipe.backend import Backend
from ckpipe.testing.gate import Gate
from ckpipe.testing.wrapping import Operation, Result, WrappedBackend


class SlowBackend(WrappedBackend):
    """Delays the operations on a backend, and holds chosen ones until they are released.

    All operations share one link of so many bytes per second, and each waits for the latency
    besides. The gate needs no time at all: a test holds, waits until an operation is held, looks,
    and releases. ``gate`` may be used in any thread.

    Args:
        inner: The backend that does the work.
        bytes_per_second: The speed of the link; None for no limit.
        latency: What each operation waits first, in seconds.
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
        """Holds operations from now on: those of these verbs, or all if none is named."""
        self._held_verbs = frozenset(verbs)
        self.gate.hold()

    def release(self) -> None:
        """Lets what is held go on, and everything pass from now on."""
        self.gate.release()

    async def around(self, operation: Operation, call: Callable[[], Awaitable[Result]]) -> Result:
        if not self._held_verbs or operation.verb in self._held_verbs:
            await self.gate.passed()
        if delay := self._reserve(operation.size):
            await anyio.sleep(delay)
        return await call()

    def _reserve(self, size: int) -> float:
        """Takes the link for so many bytes, and returns in how many seconds they are through."""
        if self.bytes_per_second is None:
            return self.latency
        now = anyio.current_time()
        self._link_free_at = max(now, self._link_free_at) + size / self.bytes_per_second
        return self.latency + self._link_free_at - now
