"""Stage 4: compute the checksums that the copy did not, and collect those of all blocks.

The copy has written the bytes in the layout of the file, so serialization has no other work.

The manifest has a checksum for each mebibyte of each entry. A store that verifies each request gets
the checksum of the whole block, which is combined from those and from the few bytes between
entries.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from ckpipe import threads
from ckpipe.format.checksum import ChunkSums, crc32c_of_each
from ckpipe.format.data_file import DataFiles
from ckpipe.save.record import UNKNOWN, FilledBlock, SaveRecord

BATCH_BLOCKS = 16
"""Most blocks in one call of a thread, as far as they are ready: each call takes the GIL several
times."""

_ON_LOOP_SPANS = 256
"""Most ranges of entries that are handled without a thread."""


async def run(
    save: SaveRecord,
    inbox: MemoryObjectReceiveStream[FilledBlock],
    out: MemoryObjectSendStream[FilledBlock],
) -> None:
    """Pass blocks on once their checksums are known; store those of all entries in the record."""
    sums: ChunkSums | None = None
    async with inbox, out:
        async for first in inbox:
            assert save.files is not None
            files, sums = save.files, sums or ChunkSums(save.files.sum_table)
            batch = [first]
            with contextlib.suppress(anyio.WouldBlock, anyio.EndOfStream):
                while len(batch) < BATCH_BLOCKS:
                    batch.append(inbox.receive_nowait())
            unknown = [each for each in batch if UNKNOWN in each.sums]
            began = time.perf_counter()
            with save.clock.timing("serialize", sum(each.plan.nbytes for each in unknown)):
                if unknown or sum(len(each.plan.spans) for each in batch) > _ON_LOOP_SPANS:
                    await threads.run_sync(_sum_up, files, sums, batch, unknown)
                else:
                    _sum_up(files, sums, batch, unknown)
            if unknown:
                save.clock.summed([each.plan for each in unknown], began, time.perf_counter())
            for each in batch:
                await out.send(each)
        if not save.copied.is_set():
            await anyio.sleep_forever()  # the copy has failed, and its error cancels this
        assert save.files is not None
        save.checksums = (sums or ChunkSums(save.files.sum_table)).finished()


def _sum_up(
    files: DataFiles,
    sums: ChunkSums,
    batch: Sequence[FilledBlock],
    unknown: Sequence[FilledBlock],
) -> None:
    """Compute unknown checksums in one call, then add all."""
    if unknown:
        parts = []
        for each in unknown:
            cuts, wanted = files.cuts(each.plan), (each.sums == UNKNOWN).nonzero()[0].tolist()
            begins, ends = ([column[n] for n in wanted] for column in (cuts.begins, cuts.ends))
            parts.append((each.data, begins, ends))
        for each, values in zip(unknown, crc32c_of_each(parts), strict=True):
            each.sums[each.sums == UNKNOWN] = values
    for each in batch:
        sums.add_block(files.cuts(each.plan), each.sums.tolist())
