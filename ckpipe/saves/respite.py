"""A pause between a save and what follows it, so that no step of a trainer feels both.

Theory. What runs beside a training loop in one process takes the interpreter from it. A save with
all that follows its commit falls into one step, where steps are short, and makes that one step
longer than any other. Removing old checkpoints is in nobody's way a moment later, in another step.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator

import anyio

RESPITE_SECONDS = 0.1


class Respite:
    """Lets a loop that trains have the interpreter for itself for a while.

    Args:
        seconds: How long; 0 where nobody trains.
    """

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds
        self._over, self._done, self._changed = anyio.Event(), anyio.Event(), anyio.Event()
        self._busy = False
        self._unwanted = self._later = self._newest = 0

    @contextlib.asynccontextmanager
    async def before(self) -> AsyncIterator[bool]:
        """What is done inside is done after its seconds, or :meth:`end`, and once at a time.

        Inside :meth:`skipped` it is done at once.

        Yields:
            Whether to do it. Of several that wait while it is being done the one that came last
            does it for all, so that none are left over where saves come faster.
        """
        self._later += 1
        try:
            if self._seconds and not self._unwanted:
                with anyio.move_on_after(self._seconds):
                    await self._over.wait()
            self._newest = number = self._newest + 1
            self._change()
            while self._busy and number == self._newest:
                await self._changed.wait()
            if number != self._newest:
                yield False
                return
            self._busy = True
            try:
                yield True
            finally:
                self._busy = False
                self._change()
        finally:
            self._later -= 1
            if not self._later:
                self._done.set()
                self._done = anyio.Event()

    def _change(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    def end(self) -> None:
        """Ends what is being waited for, as when the next save begins to write."""
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

    async def passed(self) -> bool:
        """Waits for all that was put off; returns whether there was anything."""
        if not self._later:
            return False
        with self.skipped():
            await self._done.wait()
        return True


__all__ = ["RESPITE_SECONDS", "Respite"]
