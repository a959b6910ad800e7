"""Stage 4: computes the checksums of each block, beside its upload."""

from __future__ import annotations

import anyio
from anyio.lowlevel import checkpoint_if_cancelled
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from ckpipe.checksum import ChunkSums, chunk_spans, crc32c
from ckpipe.delivery import B, Delivery, Filled


async def run(
    save: Delivery[B],
    inbox: MemoryObjectReceiveStream[B],
    out: MemoryObjectSendStream[list[int]],
) -> None:
    """Computes the checksum of every mebibyte of every entry, in the order of the entries."""
    sums: ChunkSums | None = None
    async with inbox, out:
        async for filled in inbox:
            sums = sums or _sums_of(save)
            with save.clock.summing(filled.plan):
                pieces = await anyio.to_thread.run_sync(checksum_block, filled)
            save.release(filled)
            for piece in pieces:
                sums.add(*piece)
        await checkpoint_if_cancelled()  # the stream ends early if the copy failed
        if save.cargo is not None:
            sums = sums or _sums_of(save)
            await out.send(sums.finished())


def _sums_of(save: Delivery[B]) -> ChunkSums:
    assert save.cargo is not None
    return ChunkSums(save.cargo.entry_sizes)


def checksum_block(filled: Filled) -> list[tuple[int, int, int, int]]:
    """The checksums of the pieces of entries in a block: entry, start, end and CRC-32C."""
    view = filled.data
    return [
        (span.entry, lo, hi, crc32c(view[span.at + lo - span.lo : span.at + hi - span.lo]))
        for span in filled.plan.spans
        for _, lo, hi in chunk_spans(span.lo, span.hi)
    ]
