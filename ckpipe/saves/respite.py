"""A pause between a save and what follows it, so that no step of a trainer feels both.

Theory. What runs beside a training loop in one process takes the interpreter from it. A save with
all that follows its commit falls into one step, where steps are short, and makes that one step
longer than any other. Removing old checkpoints is in nobody's way a moment later, in another step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import anyio

RESPITE_SECONDS = 0.1


class Respite:
    """Lets a loop that trains have the interpreter for itself for a while.

    Args:
        seconds: How long; 0 where nobody trains.
    """

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds
        self._over = anyio.Event()
        self._unwanted = 0

    async def take(self) -> None:
        """Waits for its seconds, or until :meth:`end`; not at all inside :meth:`skipped`."""
        if self._seconds and not self._unwanted:
            with anyio.move_on_after(self._seconds):
                await self._over.wait()

    def end(self) -> None:
        """Ends what is being waited for, as when the next save needs room."""
        self._over.set()
        self._over = anyio.Event()

    @contextlib.contextmanager
    def skipped(self) -> Iterator[None]:
        """Somebody waits for what comes after it."""
        self._unwanted += 1
        self.end()
        try:
            yield
        finally:
            self._unwanted -= 1


__all__ = ["RESPITE_SECONDS", "Respite"]
