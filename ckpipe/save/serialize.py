"""Stage 4: compute the checksums that the copy did not, and collect those of all blocks.

The copy has written the bytes in the layout of the file, so serialization has no other work.

NaN are counted here too, beside the upload, once all is copied: beside the copy, both would take
longer. If the copy waits for memory, each batch is counted (note 82 of ``docs/design.md``).

The manifest has a checksum for each mebibyte of each entry. A store that verifies each request gets
the checksum of the whole block, which is combined from those and from the few bytes between
entries.
"""

from __future__ import annotations

import contextlib
import time
from array import array
from collections import Counter
from collections.abc import Sequence

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from ckpipe import threads
from ckpipe.format.checksum import ChunkSums, crc32c_of_each
from ckpipe.format.data_file import DataFiles
from ckpipe.memory.native import address_of, count_nan_each
from ckpipe.save.context import StoreContext
from ckpipe.save.links import digest_of
from ckpipe.save.record import UNKNOWN, FilledBlock, SaveRecord

BATCH_BLOCKS = 16
"""Most blocks in one call of a thread, as far as they are ready: each call takes the GIL several
times."""

_ON_LOOP_SPANS, _ON_LOOP_BYTES = 256, 64 << 10
"""Most ranges of entries, and bytes in which NaN are counted, that are handled without a thread."""


async def run(
    save: SaveRecord,
    context: StoreContext,
    inbox: MemoryObjectReceiveStream[FilledBlock],
    out: MemoryObjectSendStream[FilledBlock],
) -> None:
    """Pass blocks on once their checksums are known; store those of all entries in the record."""
    sums: ChunkSums | None = None
    nan, settings = Counter[int](), context.settings.nan
    async with inbox, out:
        resting: list[FilledBlock] = []
        uncounted: list[FilledBlock] = []
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
            unmoved = []
            if settings.check:
                uncounted += batch
            for each in batch:
                each.users += settings.check
                if save.base is None or not save.base.has_checksums(files, each):
                    await out.send(each)
                elif save.waits or not save.resting_digest(each.plan):
                    unmoved.append(each)
                else:  # beside the copy, digests would slow both down
                    resting.append(each)
            await _digest(save, unmoved, out)
            if save.waits:  # for the memory of these
                nan += await _counted(save, uncounted, settings.ignore)
        await _digest(save, resting, out)
        nan += await _counted(save, uncounted, settings.ignore)
        if not save.copied.is_set():
            await anyio.sleep_forever()  # the copy has failed, and its error cancels this
        assert save.files is not None
        save.checksums = (sums or ChunkSums(save.files.sum_table)).finished()
        save.nan = tuple(sorted(nan.items()))


async def _digest(
    save: SaveRecord, blocks: Sequence[FilledBlock], out: MemoryObjectSendStream[FilledBlock]
) -> None:
    """Digest blocks whose checksums are those of the base, and pass them on."""
    for first in range(0, len(blocks), BATCH_BLOCKS):
        batch = blocks[first : first + BATCH_BLOCKS]
        with save.clock.timing("serialize"):
            digests = await threads.run_sync(_digests_of, batch)
        for each, digest in zip(batch, digests, strict=True):
            save.digests[each.plan.file, each.plan.offset] = digest
            each.rests = save.resting_digest(each.plan) == digest
            await out.send(each)


def _digests_of(blocks: Sequence[FilledBlock]) -> list[str]:
    return [digest_of(each.data) for each in blocks]


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


async def _counted(
    save: SaveRecord, blocks: list[FilledBlock], ignore: tuple[str, ...]
) -> Counter[int]:
    """Count the NaN of each entry in blocks, end their use, and clear the list."""
    nan = Counter[int]()
    for first in range(0, len(blocks), BATCH_BLOCKS):
        batch, files = blocks[first : first + BATCH_BLOCKS], save.files
        assert files is not None
        with save.clock.timing("serialize"):
            if sum(each.plan.nbytes for each in batch) > _ON_LOOP_BYTES:
                nan += await threads.run_sync(_nan_of, files, batch, ignore)
            else:
                nan += _nan_of(files, batch, ignore)
        for each in batch:
            each.release()
    blocks.clear()
    return nan


def _nan_of(
    files: DataFiles, blocks: Sequence[FilledBlock], ignore: tuple[str, ...]
) -> Counter[int]:
    """Count the NaN of each entry in one call."""
    entries, sources, sizes, dtypes = (array("q") for _ in range(4))
    for each in blocks:
        ranges = files.floats(each.plan, ignore)
        if ranges.entries:
            base = address_of(each.data)
            sources.extend(base + begin for begin in ranges.begins)
            entries += ranges.entries
            sizes += ranges.sizes
            dtypes += ranges.dtypes
    nan = Counter[int]()
    for entry, found in zip(entries, count_nan_each(sources, sizes, dtypes), strict=True):
        if found:
            nan[entry] += found
    return nan
