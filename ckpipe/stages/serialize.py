"""Stage 4: computes the checksums of each block, beside its upload."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import anyio
from anyio.lowlevel import checkpoint_if_cancelled
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from ckpipe.checksum import ChunkSums, chunk_spans, crc32c
from ckpipe.delivery import B, Delivery, Filled

BATCH_BLOCKS = 4
"""Blocks that are checksummed in one turn of a thread, if they are there. Every turn costs both
threads the interpreter several times; a block that waits for the rest of a few milliseconds of
work does not matter to who waits for its memory."""

Piece = tuple[int, int, int, int]
"""A part of an entry and its checksum: entry, start, end and CRC-32C."""


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
            batch = [filled, *_there_already(inbox)]
            with save.clock.timing("serialize", sum(each.plan.nbytes for each in batch)):
                found = await anyio.to_thread.run_sync(checksum_blocks, batch)
            for each, (pieces, began, ended) in zip(batch, found, strict=True):
                save.clock.summed(each.plan, began, ended)
                save.release(each)
                for piece in pieces:
                    sums.add(*piece)
        await checkpoint_if_cancelled()  # the stream ends early if the copy failed
        if save.cargo is not None:
            sums = sums or _sums_of(save)
            await out.send(sums.finished())


def _sums_of(save: Delivery[B]) -> ChunkSums:
    assert save.cargo is not None
    return ChunkSums(save.cargo.entry_sizes)


def _there_already(inbox: MemoryObjectReceiveStream[B]) -> Iterator[B]:
    """The blocks that go to the thread together with the first of a batch."""
    with contextlib.suppress(anyio.WouldBlock, anyio.EndOfStream):
        for _ in range(BATCH_BLOCKS - 1):
            yield inbox.receive_nowait()


def checksum_blocks(batch: list[B]) -> list[tuple[list[Piece], float, float]]:
    """The checksums of some blocks, each with when its work began and ended."""
    found = []
    for filled in batch:
        began = time.perf_counter()
        pieces = checksum_block(filled)
        found.append((pieces, began, time.perf_counter()))
    return found


def checksum_block(filled: Filled) -> list[Piece]:
    """The checksums of the pieces of entries in a block: entry, start, end and CRC-32C."""
    view = filled.data
    return [
        (span.entry, lo, hi, crc32c(view[span.at + lo - span.lo : span.at + hi - span.lo]))
        for span in filled.plan.spans
        for _, lo, hi in chunk_spans(span.lo, span.hi)
    ]
