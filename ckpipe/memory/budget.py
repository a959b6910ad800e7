"""The bound on staging memory: a budget in bytes that saves share, and one save's reservation.

anyio limits the number of tasks, not a weighted sum, and wakes waiters with different amounts in no
promised order; hence a small budget of our own. It serves requests in the order of their arrival
(FIFO): small requests do not overtake a large one at the head, so it cannot starve.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container

import anyio

from ckpipe.memory.arena import Arena, Block

COLD_BLOCK_PATIENCE_SECONDS = 0.01
"""Seconds to wait for a touched block before fresh memory is used: about the cost of touching."""


class ByteBudget:
    """A number of bytes to hand out, first come, first served.

    Args:
        capacity: The number of bytes; may be raised later.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self._waiters: deque[tuple[int, anyio.Event]] = deque()
        """The waiting requests: the amount of each, and the event that tells of its grant."""

    @property
    def waiting(self) -> int:
        """The number of waiting requests."""
        return len(self._waiters)

    def acquire_nowait(self, amount: int, *, first: bool = False) -> None:
        """Take bytes at once.

        Args:
            amount: The number of bytes.
            first: Whether to go before the waiting requests.

        Raises:
            ValueError: If the amount exceeds the capacity, so that waiting is in vain.
            anyio.WouldBlock: If it would have to wait.
        """
        if amount > self.capacity:
            raise ValueError(f"{amount} bytes can never be had of {self.capacity}")
        if (self._waiters and not first) or self.used + amount > self.capacity:
            raise anyio.WouldBlock
        self.used += amount

    async def acquire(self, amount: int) -> None:
        """Take bytes after all earlier requests. A cancelled call has taken none.

        Raises:
            ValueError: If the amount exceeds the capacity.
        """
        try:
            self.acquire_nowait(amount)
            return
        except anyio.WouldBlock:
            granted = anyio.Event()
            waiter = amount, granted
            self._waiters.append(waiter)
        try:
            await granted.wait()
        except BaseException:
            if granted.is_set():
                self.release(amount)
            else:
                self._waiters.remove(waiter)
                self._grant()
            raise

    def release(self, amount: int) -> None:
        """Give bytes back, and wake the requests that can be served now."""
        self.used -= amount
        self._grant()

    def raise_capacity(self, capacity: int) -> None:
        """Make the budget larger; a smaller number changes nothing."""
        self.capacity = max(self.capacity, capacity)
        self._grant()

    def _grant(self) -> None:
        while self._waiters and self.used + self._waiters[0][0] <= self.capacity:
            amount, granted = self._waiters.popleft()
            self.used += amount
            granted.set()


class BlockReservation:
    """The blocks that one save may hold, drawn and given back block by block.

    A save that needs more blocks than its reservation reuses them as its uploads finish. Blocks
    that it will not need again go back to the budget at once.

    Args:
        budget: The budget; the caller has acquired ``reserved`` blocks from it.
        arena: The pool of the blocks.
        reserved: Blocks that the save may hold at a time.
        needed: Blocks that it will take in all.
    """

    def __init__(self, budget: ByteBudget, arena: Arena, *, reserved: int, needed: int) -> None:
        self._budget, self._arena = budget, arena
        self._reserved, self._needed = reserved, needed
        self._held: set[Block] = set()
        self._given = anyio.Event()
        arena.reserve(min(reserved, needed))

    @property
    def blocks(self) -> int:
        """Blocks that are in use, and that it has yet to hand out."""
        return len(self._held) + self._needed

    @property
    def held(self) -> int:
        """Blocks in use."""
        return len(self._held)

    @property
    def short(self) -> bool:
        """Tell whether waiting for a block to come back is the fastest way to the next block."""
        return len(self._held) >= self._reserved or not self._arena.touched_blocks

    @property
    def waits(self) -> bool:
        """Tell whether the copy is faster if blocks are given back during it."""
        return not self.is_whole or self._arena.touched_blocks < self._needed

    @property
    def is_whole(self) -> bool:
        """Tell whether the save may hold all its blocks at the same time."""
        return self._reserved >= self.blocks

    def take_all(self) -> list[Block]:
        """Take all blocks that the save needs, at once; the reservation must be whole."""
        assert self.is_whole
        return self._draw(self._needed)

    async def take(self, at_most: int) -> list[Block]:
        """Wait for one block; take more, up to a limit, only if they are there without waiting."""
        patient = True
        while True:
            # Other saves may take blocks during each wait, so each iteration checks anew.
            room = self._reserved - len(self._held)
            touched = self._arena.touched_blocks
            if room <= 0:
                await self._given.wait()
            elif not touched and self._held and patient:
                patient = False
                with anyio.move_on_after(COLD_BLOCK_PATIENCE_SECONDS):
                    await self._given.wait()
            else:
                return self._draw(min(at_most, room, touched or 1))

    def _draw(self, count: int) -> list[Block]:
        blocks = [self._arena.take() for _ in range(count)]
        self._held.update(blocks)
        self._needed -= count
        return blocks

    def take_back(self, block: Block, *, first: bool = False) -> bool:
        """Take a given-back block again with its old content; return False if that is impossible.

        It counts towards the budget again, and :meth:`give` returns it.

        Args:
            block: The block.
            first: Whether the save goes before the requests that wait for memory, as it is older.
        """
        size = self._arena.block_bytes
        try:
            self._budget.acquire_nowait(size, first=first)
        except (anyio.WouldBlock, ValueError):
            return False
        if not self._arena.take_back(block):
            self._budget.release(size)
            return False
        self._reserved += 1
        self._held.add(block)
        return True

    def give(self, block: Block) -> None:
        """Return a block to the pool after all its bytes are written to the store."""
        self._held.remove(block)
        self._arena.give(block)
        self._shrink()
        self._given.set()
        self._given = anyio.Event()

    def close(self, *, keep: Container[Block] = ()) -> None:
        """Give all remaining blocks back. No thread may use them any more.

        Args:
            keep: Blocks that are still read; :meth:`give` gets them later.
        """
        for block in [each for each in self._held if each not in keep]:
            self._held.remove(block)
            self._arena.give(block)
        self._needed = 0
        self._shrink()

    def _shrink(self) -> None:
        spare = self._reserved - max(0, self._needed) - len(self._held)
        if spare > 0:
            self._reserved -= spare
            self._budget.release(spare * self._arena.block_bytes)
