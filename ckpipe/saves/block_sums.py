"""The checksums of a block, computed once for the two stages that need them.

The manifest has a checksum for each mebibyte of each entry, and a store that verifies what it is
sent wants one of the whole block. That one follows from the others and from the few bytes that lie
between entries. Whoever of the two stages comes first computes; the other waits.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

from ckpipe.format.cargo import Cargo
from ckpipe.format.checksum import Parts, combine, crc32c, crc32c_of_each

if TYPE_CHECKING:
    from ckpipe.saves.delivery import Filled

_ON_LOOP_BYTES, _ON_LOOP_PIECES = 1 << 18, 256


class BlockSums:
    """The checksums of one block; used on one event loop."""

    __slots__ = ("_ready", "began", "ended", "values")

    def __init__(self) -> None:
        self._ready: anyio.Event | None = None
        self.values: list[int] = []
        """Those of the pieces that its cuts name, in their order."""
        self.began = self.ended = 0.0
        """When they were computed, by ``time.perf_counter``."""

    def claim(self) -> bool:
        """Whether nobody has begun to compute them; who is told so computes them."""
        if self._ready is not None:
            return False
        self._ready = anyio.Event()
        return True

    def finish(self) -> None:
        """Tells who waits that they are computed."""
        assert self._ready is not None
        self._ready.set()

    async def wait(self) -> None:
        """Waits until they are computed, if they are not yet."""
        assert self._ready is not None
        if not self._ready.is_set():
            await self._ready.wait()


async def compute(cargo: Cargo, batch: Sequence[Filled]) -> None:
    """Computes the checksums of some blocks, in one turn of a worker thread.

    Blocks that somebody computes already are waited for instead. If computing fails, so does the
    save, and with it whoever waits.
    """
    mine = [filled for filled in batch if filled.sums.claim()]
    if mine:
        await anyio.to_thread.run_sync(_fill, cargo, mine)
        for filled in mine:
            filled.sums.finish()
    for filled in batch:
        await filled.sums.wait()


def _fill(cargo: Cargo, batch: list[Filled]) -> None:
    cuts = [cargo.cuts(filled.plan) for filled in batch]
    began = time.perf_counter()
    values = crc32c_of_each(
        [Parts(f.data, c.begins, c.ends) for f, c in zip(batch, cuts, strict=True)]
    )
    pace = (time.perf_counter() - began) / sum(filled.plan.nbytes for filled in batch)
    for filled, found in zip(batch, values, strict=True):
        filled.sums.began, filled.sums.values = began, found
        # Each is taken to have its part of the time.
        filled.sums.ended = began = began + filled.plan.nbytes * pace


async def block_checksum(cargo: Cargo, filled: Filled) -> int:
    """The CRC-32C of a whole block, from those of its pieces."""
    await compute(cargo, [filled])
    between = filled.plan.nbytes - sum(span.hi - span.lo for span in filled.plan.spans)
    if between > _ON_LOOP_BYTES or len(filled.sums.values) > _ON_LOOP_PIECES:
        return await anyio.to_thread.run_sync(joined, cargo, filled)
    return joined(cargo, filled)


def joined(cargo: Cargo, filled: Filled) -> int:
    """The CRC-32C of a whole block whose pieces have theirs."""
    view, cuts, at, total = filled.data, cargo.cuts(filled.plan), 0, 0
    for begin, end, value in zip(cuts.begins, cuts.ends, filled.sums.values, strict=True):
        if begin < at:  # no plan of ours; the bytes themselves tell in any case
            return crc32c(view)
        if begin > at:
            total = crc32c(view[at:begin], total)
        total, at = combine(total, value, end - begin), end
    return crc32c(view[at:], total) if at < len(view) else total


__all__ = ["BlockSums", "block_checksum", "compute", "joined"]
