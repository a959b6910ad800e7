"""Copy a whole checkpoint from one store to another, of the same kind or not.

Theory. The copy has the name and the bytes of the original and is written in the same order: data
first, then manifests and group objects, the index last. So it is complete or absent wherever it
breaks off. Every byte is compared with the checksums of the index on its way, and a file becomes
visible only once all its bytes are verified. Another copy resumes an interrupted one: a file that
is there already is read and verified, and stays if it is right.

The header of a data file has one checksum, and every entry has one for each mebibyte, counted from
its own start. So a block of a file may contain only a part of a checksum's range. Each block is cut
at the boundaries of these ranges, and the checksums are combined, in whatever order blocks arrive.
"""

from __future__ import annotations

import mmap
from bisect import bisect_right
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import anyio
import anyio.to_thread

from ckpipe.backend import Backend, Upload, UploadLimits
from ckpipe.catalog.complete import Member, list_members, read_matching
from ckpipe.catalog.find import locate_errors, read_document, stat_or_none, write_summary_of
from ckpipe.errors import (
    ChecksumMismatch,
    CkpipeError,
    CommitConflict,
    MissingObject,
    ObjectNotFound,
    TruncatedObject,
    UsageError,
)
from ckpipe.format.checksum import (
    CHUNK_BYTES,
    BlockCuts,
    ChunkSums,
    SumTable,
    chunk_count,
    combine,
    crc32c_of_each,
)
from ckpipe.format.codec import MAX_STORED_BYTES
from ckpipe.format.entry_table import EntryTable
from ckpipe.format.manifest import ManifestDocument
from ckpipe.format.names import index_key, tombstone_key
from ckpipe.store.retry import (
    AimdLimiter,
    RetryPolicy,
    create_once,
    logging_policy,
    retrying,
    warn_of_damaged_transfer,
)
from ckpipe.threads import all_of, run_lanes
from ckpipe.types import CheckpointId, CopyResult

if TYPE_CHECKING:
    from ckpipe.settings import Settings

_PAGE = 4096

UseBlock = Callable[[int, memoryview], Awaitable[None]]
"""A function that uses a block of a file, given the block's offset."""


@dataclass(frozen=True, slots=True)
class CopySettings:
    """The settings of a copy.

    Args:
        policy: The retry policy for writes of blocks.
        lanes: Blocks on their way at the same time.
        block_bytes: The size of a block in bytes; raised to the least that the target accepts.
        on_bytes: Called with the size of each block written, and of each file found intact.
    """

    policy: RetryPolicy
    lanes: int = 4
    block_bytes: int = 16 << 20
    on_bytes: Callable[[int], None] = field(default=lambda nbytes: None)

    @classmethod
    def of(cls, settings: Settings, **options: Any) -> Self:
        """Return those of a pipeline's settings; a store that throttles gets fewer writes."""
        policy = replace(logging_policy(settings.upload), limiter=AimdLimiter())
        return cls(policy, settings.upload.lanes, settings.staging.block_bytes, **options)


async def copy_checkpoint(
    source: Backend, target: Backend, id: CheckpointId, settings: CopySettings
) -> CopyResult:
    """Copy a complete checkpoint, verified; another call goes on where this one stopped.

    A damaged data file on the target is replaced, once the source's bytes are verified. No other
    object there is ever overwritten.

    Args:
        source: The store of the checkpoint; only read.
        target: The store of the copy.
        id: The checkpoint.
        settings: The settings of the copy.

    Raises:
        UsageError: If the target has a tombstone of this checkpoint.
        CommitConflict: If the target has other metadata under the checkpoint's name.
        CorruptCheckpoint: If the source is damaged, its manifests included; the target stays
            incomplete.
        StoreError: If a store failed; the target stays incomplete.
    """
    document, index = await read_document(source, id, index_key(id), "index")
    if await stat_or_none(target, tombstone_key(id)) is not None:
        raise UsageError(
            "The checkpoint was deleted on the target, and its tombstone is still there",
            step=id.step,
            hint="Sweep the target once the tombstone is old enough, or copy elsewhere",
        )
    with suppress(ObjectNotFound):
        await _same(target, index_key(id), index)
    sizes: list[int] = []
    copied: list[int] = []
    for rank in range(len(document.parts)):
        data = EntryTable(document)
        data.join(rank)
        for number in range(len(data.files)):
            file = _FileCopy(source, target, id, data, number, settings)
            sizes.append(file.size)
            copied += [file.size] if await file.bring() else []
    await _copy_metadata(source, target, document, settings)
    await _create(target, index_key(id), index)
    await write_summary_of(target, document)
    return CopyResult(str(id), len(sizes), sum(sizes), len(copied), sum(copied))


async def _copy_metadata(
    source: Backend, target: Backend, index: ManifestDocument, settings: CopySettings
) -> None:
    """Copy manifests, then group objects: the index could be rebuilt from either."""

    async def copy(member: Member, key: str) -> None:
        await _create(target, key, await read_matching(source, index, member, key))

    listed = await list_members(source, index)
    for level in sorted({level for level, _ in listed}):
        of_level = [each for each in listed.items() if each[0][0] == level]
        await all_of([partial(copy, *each) for each in of_level], settings.lanes)


async def _create(target: Backend, key: str, data: bytes) -> None:
    if not await create_once(target, key, data):
        await _same(target, key, data)


async def _same(target: Backend, key: str, data: bytes) -> None:
    if await target.get(key, max_bytes=MAX_STORED_BYTES) != data:
        raise CommitConflict(
            "The target has different metadata under the name of this checkpoint",
            key=key,
            hint="Find out which of the two is the right one, and delete the other",
        )


class _FileCopy:
    """One data file that is being copied."""

    def __init__(
        self,
        source: Backend,
        target: Backend,
        id: CheckpointId,
        data: EntryTable,
        number: int,
        settings: CopySettings,
    ) -> None:
        self._source, self._target, self._settings = source, target, settings
        self._id, self._data, self._number = id, data, number
        self._rank = data.ranks[number]
        self._key, self.size = data.keys[number], data.files[number].size
        self._block_bytes = block_bytes_for(self.size, settings.block_bytes, target.limits)

    async def bring(self) -> bool:
        """Ensure that the target has the file; return whether it had to be copied."""
        there = await self._size_there()
        if there == self.size and await self._is_whole():
            return False
        try:
            await self._copy(there)
        except ChecksumMismatch:
            try:
                await self._copy(there)
            except ChecksumMismatch as error:
                error.message += "; it was read twice"
                raise
            warn_of_damaged_transfer(f"A block of {self._key}")
        return True

    async def _copy(self, there: int | None) -> None:
        """Copy the file; replace the target's file once the source is verified."""
        policy = self._settings.policy

        async def send(offset: int, block: memoryview) -> None:
            await retrying(policy, lambda: upload.write(offset, block))
            self._settings.on_bytes(len(block))

        with locate_errors(self._id.step, self._rank, self._key):
            upload = await self._target.open_upload(
                self._key, size=self.size, block_bytes=self._block_bytes
            )
        async with aborted_on_error(upload):
            fault = await self._fault(self._source, send)
            if fault is not None:
                raise ChecksumMismatch(
                    f"The source is damaged: {fault:.200} is not what was saved",
                    step=self._id.step,
                    rank=self._rank,
                    key=self._key,
                    hint="Nothing was copied of this file; copy another checkpoint",
                )
            if there is not None:
                await self._target.delete([self._key])
            await retrying(policy, lambda: self._complete(upload))

    async def _size_there(self) -> int | None:
        there = await stat_or_none(self._target, self._key)
        return None if there is None else there.size

    async def _is_whole(self) -> bool:
        """Read the target's file, which has the right size, and compare it with the checksums."""
        try:
            if await self._fault(self._target) is not None:
                return False
        except (MissingObject, TruncatedObject):
            return False
        self._settings.on_bytes(self.size)
        return True

    async def _fault(self, backend: Backend, use: UseBlock | None = None) -> str | None:
        """Read the file in lanes, use each block, in any order; return the first difference."""
        check = FileCheck(self._data, self._number)
        offsets = iter(range(0, self.size, self._block_bytes))

        async def lane() -> None:
            buffer = memoryview(mmap.mmap(-1, min(self._block_bytes, self.size)))
            for offset in offsets:
                block = buffer[: min(self._block_bytes, self.size - offset)]
                with locate_errors(self._id.step, self._rank, self._key):
                    await backend.read_into(self._key, offset, block)
                check.add(*await anyio.to_thread.run_sync(check.sums_of, offset, block))
                if use is not None:
                    await use(offset, block)

        blocks = -(-self.size // self._block_bytes)
        await run_lanes(min(self._settings.lanes, blocks), lane)
        return check.fault()

    async def _complete(self, upload: Upload) -> None:
        try:
            await upload.complete()
        except CkpipeError:
            # The answer may have been lost, or another process copies the same: check the store.
            if await self._size_there() != self.size or not await self._is_whole():
                raise


def block_bytes_for(size: int, wanted: int, limits: UploadLimits) -> int:
    """Return the size of an upload's blocks: the wanted size, unless the store requires more.

    Args:
        size: Bytes of the object.
        wanted: The wanted bytes of a block.
        limits: The limits of the store.
    """
    least = limits.min_block_bytes
    if limits.max_blocks is not None:
        least = max(least, -(-size // limits.max_blocks))
    return wanted if wanted >= least else -(-least // _PAGE) * _PAGE


@asynccontextmanager
async def aborted_on_error(upload: Upload) -> AsyncIterator[None]:
    """Abort an upload if the block raises or is cancelled."""
    try:
        yield
    except BaseException:
        with anyio.CancelScope(shield=True):
            await upload.abort()
        raise


class FileCheck:
    """A comparison of a data file's blocks with the checksums of its checkpoint.

    Args:
        data: The entries and checksums of the rank's files.
        file: The number of the file.
    """

    def __init__(self, data: EntryTable, file: int) -> None:
        self._row = data.files[file]
        numbers = [n for n, of in enumerate(data.entry_files) if of == file and data.sizes[n]]
        numbers.sort(key=lambda n: data.begins[n])
        self._begins = [0, *(data.begins[n] for n in numbers)]
        self._sizes = [self._row.header_bytes, *(data.sizes[n] for n in numbers)]
        self._names = ["its header", *(repr(data.entry(n).name) for n in numbers)]
        self._expected = [
            data.checksums[data.first_sums[n] : data.first_sums[n + 1]] for n in numbers
        ]
        self._table = SumTable(self._sizes)
        self._sums = ChunkSums(self._table)

    def sums_of(self, offset: int, block: memoryview) -> tuple[BlockCuts, list[int]]:
        """Compute the checksums of a block; changes nothing, so any thread may call it.

        Args:
            offset: The start of the block in the file.
            block: Its bytes.
        """
        cuts = self._table.cuts(self._spans(offset, offset + len(block)))
        (sums,) = crc32c_of_each([(block, cuts.begins, cuts.ends)])
        return cuts, sums

    def _spans(self, begin: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield the ranges of the header, as entry 0, and of the entries in a range of the file."""
        at = begin
        while at < end:
            member = bisect_right(self._begins, at) - 1
            start = self._begins[member]
            stop = min(end, start + self._sizes[member])
            if stop <= at:
                return  # behind the last entry: the check of the file's size finds such bytes
            yield member, at - start, stop - start, at - begin
            at = stop

    def add(self, cuts: BlockCuts, sums: Sequence[int]) -> None:
        """Add the checksums of a block; each byte of the file once."""
        self._sums.add_block(cuts, sums)

    def fault(self) -> str | None:
        """Return the first difference to the checksums, after every block was added; else None."""
        found = self._sums.finished()
        headers = chunk_count(self._row.header_bytes)
        header = 0
        for number, value in enumerate(found[:headers]):
            rest = self._row.header_bytes - number * CHUNK_BYTES
            header = combine(header, value, min(CHUNK_BYTES, rest))
        if header != self._row.header_crc32c:
            return self._names[0]
        at = headers
        for name, expected in zip(self._names[1:], self._expected, strict=True):
            if tuple(found[at : at + len(expected)]) != tuple(expected):
                return name
            at += len(expected)
        return None
