"""Stage 4: computes the checksums of each block, while the block is on its way."""

from __future__ import annotations

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from ckpipe.checksum import chunk_spans, crc32c
from ckpipe.saving import FilledBlock, Save


async def run(
    save: Save,
    inbox: MemoryObjectReceiveStream[FilledBlock],
    out: MemoryObjectSendStream[FilledBlock],
) -> None:
    """Notes the checksum of every mebibyte of every entry, and passes the blocks on."""
    async with inbox, out:
        async for filled in inbox:
            with save.clock.timing("serialize", filled.plan.nbytes):
                pieces = await anyio.to_thread.run_sync(checksum_block, filled)
            assert save.sums is not None
            for piece in pieces:
                save.sums.add(*piece)
            await out.send(filled)


def checksum_block(filled: FilledBlock) -> list[tuple[int, int, int, int]]:
    """The checksums of the pieces of entries in a block: entry, start, end and CRC-32C."""
    view = filled.block.view
    return [
        (span.entry, lo, hi, crc32c(view[span.at + lo - span.lo : span.at + hi - span.lo]))
        for span in filled.plan.spans
        for _, lo, hi in chunk_spans(span.lo, span.hi)
    ]
