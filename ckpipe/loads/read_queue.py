"""Which lane of a load reads what next."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import anyio

from ckpipe.loads.load_planning import Read


class ReadQueue:
    """Reads that wait for a lane, in their order; all lanes are on one thread.

    Args:
        groups: Reads that follow one another, which are looked at together: the store may have
            them in memory.
    """

    def __init__(self, groups: Iterable[list[Read]]) -> None:
        self._groups, self._single = deque(groups), deque[Read]()
        self._doubtful, self._settled = 0, anyio.Event()

    async def next(self) -> Read | list[Read] | None:
        """A read; or a group, which must be settled; or None once nothing is left."""
        while not self._single and not self._groups:
            if not self._doubtful:
                return None
            await self._settled.wait()
        if self._single:
            return self._single.popleft()
        self._doubtful += 1
        return self._groups.popleft()

    def divide(self, groups: Iterable[list[Read]]) -> None:
        """Notes that parts of a group are to be looked at instead of the whole, by any lane."""
        self._groups.extend(groups)
        self.settle()

    def settle(self, rest: Iterable[Read] = ()) -> None:
        """Notes that a group was seen to, but for some of its reads, which any lane may take."""
        self._single.extend(rest)
        self._doubtful -= 1
        self._settled.set()
        self._settled = anyio.Event()


__all__ = ["ReadQueue"]
