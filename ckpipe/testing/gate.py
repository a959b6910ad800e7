"""A gate that tests hold shut from one thread while event loops in others wait at it."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import anyio


class Gate:
    """Lets tasks of any event loop pass, or holds them until it is released.

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
        """How many tasks wait at the gate now."""
        with self._changed:
            return len(self._waiters)

    def hold(self) -> None:
        """Shuts the gate for those that come from now on."""
        with self._changed:
            self._held = True

    def release(self) -> None:
        """Opens the gate, and lets all pass that wait at it."""
        with self._changed:
            self._held = False
            waiters, self._waiters = self._waiters, {}
        for event, loop in waiters.items():
            # A loop that was closed meanwhile has no task left to wake.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(event.set)

    def wait_until_held(self, count: int = 1, *, timeout: float = 30.0) -> None:
        """Blocks the calling thread until so many tasks wait at the gate.

        Args:
            count: How many tasks.
            timeout: For how many seconds at most.

        Raises:
            TimeoutError: If fewer came in time.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._waiters) >= count, timeout):
                raise TimeoutError(f"{len(self._waiters)} of {count} tasks reached the gate")

    async def passed(self) -> None:
        """Waits until the gate is open."""
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
