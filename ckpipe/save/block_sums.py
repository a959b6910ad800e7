"""The checksums of a block, computed once for the two stages that need them.

The manifest has a checksum for each mebibyte of each entry, and a store that verifies what it is
sent wants one of the whole block. That one follows from the others and from the few bytes that lie
between entries. Most are known since the block was copied. The first of the two stages computes the
others, and the other one waits: those of bytes that came from a device, were copied by torch or put
together from several tensors.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import anyio

from ckpipe import threads
from ckpipe.format.checksum import BlockCuts, Parts, combine, crc32c, crc32c_of_each
from ckpipe.format.data_file import DataFiles

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ckpipe.save.delivery import Filled

_ON_LOOP_BYTES, _ON_LOOP_PIECES = 1 << 18, 256


class BlockSums:
    """The checksums of one block; used on one event loop, but for what is learnt before."""

    __slots__ = ("_known", "_ready", "began", "ended", "values")

    def __init__(self) -> None:
        self._known: NDArray[np.int64] | None = None
        self._ready: anyio.Event | None = None
        self.values: list[int] = []
        """Those of the pieces that its cuts name, in their order."""
        self.began = self.ended = 0.0
        """When they were computed, by ``time.perf_counter``; 0 if all were known before."""

    def learn(self, count: int, slots: NDArray[np.int64], values: NDArray[np.uint32]) -> None:
        """Takes some that are known since the block was copied.

        Args:
            count: How many checksums the block has.
            slots: Which of them are known.
            values: What they are.
        """
        import numpy as np

        if self._known is None:
            self._known = np.full(count, _UNKNOWN, np.int64)
        self._known[slots] = values

    @property
    def all_known(self) -> bool:
        """Tell whether there is nothing to compute."""
        return self._known is not None and _UNKNOWN not in self._known

    @property
    def learnt(self) -> bytes:
        """All of them, for another process of this machine; empty if one is not known."""
        if self._known is None or not self.all_known:
            return b""
        return self._known.astype(_SENT).tobytes()

    def learn_all(self, learnt: bytes) -> None:
        """Takes what another process has learnt."""
        import numpy as np

        if learnt:
            self._known = np.frombuffer(learnt, _SENT).astype(np.int64)

    def unknown(self, data: memoryview, cuts: BlockCuts) -> Parts:
        """The sums that are still to be computed.

        Args:
            data: The block.
            cuts: The pieces of it that have checksums.
        """
        if self._known is None:
            return Parts(data, cuts.begins, cuts.ends)
        import numpy as np

        wanted = self._known == _UNKNOWN
        begins, ends = (np.asarray(each, np.int64)[wanted] for each in (cuts.begins, cuts.ends))
        return Parts(data, begins.tolist(), ends.tolist())

    def claim(self) -> bool:
        """Claim the computation; True for exactly one caller."""
        if self._ready is not None:
            return False
        self._ready = anyio.Event()
        return True

    def complete(self, values: Sequence[int]) -> None:
        """Takes those that were not known, in their order; for any thread."""
        if self._known is None:
            self.values = [*values]
            return
        self._known[self._known == _UNKNOWN] = values
        self.values = self._known.tolist()

    def finish(self) -> None:
        """Tells who waits that they are computed."""
        assert self._ready is not None
        self._ready.set()

    async def wait(self) -> None:
        """Waits until they are computed, if they are not yet."""
        assert self._ready is not None
        if not self._ready.is_set():
            await self._ready.wait()


_UNKNOWN = -1
_SENT = "u4"


async def compute(cargo: DataFiles, batch: Sequence[Filled]) -> None:
    """Computes the checksums of some blocks that are not known, in one turn of a worker thread.

    Blocks that are being computed already are waited for instead. If computing fails, so does the
    save, and with it all that wait.
    """
    mine = [filled for filled in batch if filled.sums.claim()]
    if mine:
        spans = sum(len(filled.plan.spans) for filled in mine)
        if spans <= _ON_LOOP_PIECES and all(filled.sums.all_known for filled in mine):
            _fill(cargo, mine)
        else:
            await threads.run_sync(_fill, cargo, mine)
        for filled in mine:
            filled.sums.finish()
    for filled in batch:
        await filled.sums.wait()


def _fill(cargo: DataFiles, batch: list[Filled]) -> None:
    for filled in batch:
        if filled.sums.all_known:
            filled.sums.complete(())
    wanting = [filled for filled in batch if not filled.sums.all_known]
    if not wanting:
        return
    began = time.perf_counter()
    parts = [filled.sums.unknown(filled.data, cargo.cuts(filled.plan)) for filled in wanting]
    values = crc32c_of_each(parts)
    sizes = [sum(each.ends) - sum(each.begins) for each in parts]
    pace = (time.perf_counter() - began) / max(1, sum(sizes))
    for filled, found, nbytes in zip(wanting, values, sizes, strict=True):
        filled.sums.complete(found)
        filled.sums.began = began
        # Each is taken to have its part of the time.
        filled.sums.ended = began = began + nbytes * pace


async def block_checksum(cargo: DataFiles, filled: Filled) -> int:
    """The CRC-32C of a whole block, from those of its pieces."""
    await compute(cargo, [filled])
    between = filled.plan.nbytes - sum(span.hi - span.lo for span in filled.plan.spans)
    if between > _ON_LOOP_BYTES or len(filled.sums.values) > _ON_LOOP_PIECES:
        return await threads.run_sync(joined, cargo, filled)
    return joined(cargo, filled)


def joined(cargo: DataFiles, filled: Filled) -> int:
    """The CRC-32C of a whole block whose pieces have theirs."""
    view, cuts, at, total = filled.data, cargo.cuts(filled.plan), 0, 0
    for begin, end, value in zip(cuts.begins, cuts.ends, filled.sums.values, strict=True):
        if begin < at:  # no plan of ours; the bytes themselves tell in any case
            return crc32c(view)
        if begin > at:
            total = crc32c(view[at:begin], total)
        total, at = combine(total, value, end - begin), end
    return crc32c(view[at:], total) if at < len(view) else total
