"""Stage 4: puts the checksums of each block with the others, beside its upload.

Those that are not known since it was copied are computed first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import anyio
from anyio.lowlevel import checkpoint_if_cancelled
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from ckpipe.format.checksum import ChunkSums
from ckpipe.format.data_file import DataFiles
from ckpipe.save.delivery import B, Delivery, compute

BATCH_BLOCKS = 16
"""Blocks that are looked at in one turn of a thread, if they are there. Every turn costs both
threads the interpreter several times; a block that waits for the rest of a few milliseconds of
work does not matter to who waits for its memory."""


async def run(
    save: Delivery[B],
    inbox: MemoryObjectReceiveStream[B],
    out: MemoryObjectSendStream[list[int]],
) -> None:
    """Passes on the checksum of every mebibyte of every entry, in the order of the entries."""
    sums: ChunkSums | None = None
    async with inbox, out:
        async for filled in inbox:
            sums = sums or _sums_of(save)
            batch = [filled, *_there_already(inbox)]
            unknown = [each.plan.nbytes for each in batch if not each.sums.all_known]
            with save.clock.timing("serialize", sum(unknown)):
                await compute(_cargo(save), batch)
            for each in batch:
                if each.sums.ended:
                    save.clock.summed(each.plan, each.sums.began, each.sums.ended)
                save.release(each)
                sums.add_block(_cargo(save).cuts(each.plan), each.sums.values)
        await checkpoint_if_cancelled()  # the stream ends early if the copy failed
        if save.cargo is not None:
            sums = sums or _sums_of(save)
            await out.send(sums.finished())


def _sums_of(save: Delivery[B]) -> ChunkSums:
    return ChunkSums(_cargo(save).sum_table)


def _cargo(save: Delivery[B]) -> DataFiles:
    assert save.cargo is not None
    return save.cargo


def _there_already(inbox: MemoryObjectReceiveStream[B]) -> Iterator[B]:
    """The blocks that go to the thread together with the first of a batch."""
    with contextlib.suppress(anyio.WouldBlock, anyio.EndOfStream):
        for _ in range(BATCH_BLOCKS - 1):
            yield inbox.receive_nowait()
