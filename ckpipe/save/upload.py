"""Stage 5: write blocks to the store in parallel lanes, straight from host memory.

While the store throttles, fewer lanes write at a time, of all saves together (AIMD).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from ckpipe import threads
from ckpipe.backend import Upload
from ckpipe.errors import (
    CkpipeError,
    LinkUnavailable,
    ObjectExists,
    ObjectNotFound,
    SaveError,
    StoreError,
    StoreFull,
    TruncatedObject,
)
from ckpipe.events import BlockUploaded, FileLinked
from ckpipe.format.checksum import combine, crc32c
from ckpipe.format.data_file import BlockRange, DataFiles
from ckpipe.save.context import StoreContext
from ckpipe.save.links import digest_of
from ckpipe.save.record import FilledBlock, SaveRecord
from ckpipe.store.retry import Tries, retrying, telling

T = TypeVar("T")

logger = logging.getLogger("ckpipe")

ABORT_SECONDS = 15.0
"""Seconds for the retries of an abort of an upload, which cannot be cancelled."""


async def run(
    save: SaveRecord,
    context: StoreContext,
    inbox: MemoryObjectReceiveStream[FilledBlock],
    out: MemoryObjectSendStream[DataFiles],
) -> None:
    """Upload all data files, and give each block's memory back.

    A file all of whose blocks rest is linked to that of an earlier checkpoint. If only some rest,
    or the store refuses the link, they are read from there. After a failure, incomplete uploads are
    aborted.

    Raises:
        SaveError: If the file of the earlier checkpoint is gone or damaged.
        StoreError: If the store failed and retries did not help.
    """
    assert save.files is not None
    uploads = _Uploads(save, context, save.files)
    async with inbox, out:
        try:
            await context.prunes.catch_up()
            async with anyio.create_task_group() as lanes:
                # The first file is opened while its first block is being copied.
                lanes.start_soon(uploads.open_first, name="opening of the first file")
                for lane in range(context.settings.upload.lanes):
                    lanes.start_soon(uploads.lane, lane, inbox.clone(), name=f"upload lane {lane}")
            await uploads.complete()
            await out.send(save.files)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await uploads.abort()
            raise


class _Uploads:
    """The uploads of one save's data files."""

    def __init__(self, save: SaveRecord, context: StoreContext, files: DataFiles) -> None:
        self._save, self._context, self._files = save, context, files
        self._uploads: dict[int, Upload] = {}
        self._opening: defaultdict[int, anyio.Lock] = defaultdict(anyio.Lock)
        self._written: Counter[int] = Counter()
        self._resting: defaultdict[int, list[BlockRange]] = defaultdict(list)
        """The blocks of each file that rest, whose memory was given back."""
        self._bytes = 0
        self._policy = telling(context.retry, context.events, save.id, save.rank)
        self._writing = replace(self._policy, limiter=context.limiter)

    async def open_first(self) -> None:
        if self._files.blocks and not self._save.resting_digest(self._files.blocks[0]):
            await self._upload(self._files.blocks[0].file)

    async def lane(self, lane: int, inbox: MemoryObjectReceiveStream[FilledBlock]) -> None:
        async with inbox:
            async for first in inbox:
                if self._set_aside(first):
                    continue
                upload = await self._upload(first.plan.file)
                most = 1 if upload.takes_checksums else upload.most_blocks
                waiting = inbox.statistics().current_buffer_used
                share = 1 + waiting // self._context.settings.upload.lanes
                found = [first]
                with contextlib.suppress(anyio.WouldBlock, anyio.EndOfStream):
                    while len(found) < min(share, most):
                        if not self._set_aside(filled := inbox.receive_nowait()):
                            found.append(filled)
                for file, some in itertools.groupby(found, lambda filled: filled.plan.file):
                    await self._write(await self._upload(file), list(some), lane)

    def _set_aside(self, filled: FilledBlock) -> bool:
        """Give the memory of a block that rests back, unless its file is written in any case."""
        links, number, limits = self._context.links, filled.plan.file, self._context.backend.limits
        row, most = self._files.rows[number], limits.max_link_bytes
        if not filled.rests or number in self._uploads or (most is not None and row.size > most):
            return False
        if links is None or links.off:
            return False
        self._resting[number].append(filled.plan)
        filled.release()
        return True

    async def _write(self, upload: Upload, some: list[FilledBlock], lane: int) -> None:
        """Write blocks of one file."""
        save, plans = self._save, [filled.plan for filled in some]
        if upload.takes_checksums:
            checksum = await block_checksum(self._files, some[0])

        async def attempt() -> None:
            if upload.takes_checksums:
                await upload.write_summed(plans[0].offset, some[0].data, checksum)
            elif len(some) == 1:
                await upload.write(plans[0].offset, some[0].data)
            else:
                await upload.write_all([(filled.plan.offset, filled.data) for filled in some])

        began = time.perf_counter()
        with save.clock.timing("upload", sum(plan.nbytes for plan in plans)):
            await retrying(self._writing, attempt)
        save.clock.uploaded(plans, began, time.perf_counter(), lane)
        for filled in some:
            filled.release()
            self._count(filled.plan)

    def _count(self, plan: BlockRange) -> None:
        self._written[plan.file] += 1
        self._bytes += plan.nbytes
        self._context.events.emit(
            BlockUploaded(*self._save.where, plan.nbytes, self._bytes, self._files.size)
        )

    async def _upload(self, number: int) -> Upload:
        if (known := self._uploads.get(number)) is not None:
            return known
        async with self._opening[number]:
            if number not in self._uploads:
                row, context = self._files.rows[number], self._context
                open_upload = partial(
                    context.backend.open_upload,
                    row.key(self._save.id),
                    size=row.size,
                    block_bytes=context.block_bytes,
                )
                self._uploads[number] = await self._with_room(open_upload)
            return self._uploads[number]

    async def _with_room(self, request: Callable[[], Awaitable[T]]) -> T:
        """Make a request; if the store is full, make it again after the delayed prune."""
        with self._save.clock.timing("upload"):
            try:
                return await retrying(self._policy, request)
            except StoreFull:
                if not await self._context.prunes.ended():
                    raise
                return await retrying(self._policy, request)

    async def complete(self) -> None:
        """Make every file durable, several at a time."""
        blocks = Counter(block.file for block in self._files.blocks)
        resting = Counter({number: len(plans) for number, plans in self._resting.items()})
        if self._written + resting != blocks:  # no assert: this must hold under python -O too
            raise AssertionError("a block was never written")
        lanes = anyio.Semaphore(self._context.settings.upload.lanes)
        async with anyio.create_task_group() as tasks:
            for number in blocks:
                await lanes.acquire()
                tasks.start_soon(self._finish, number, lanes, name=f"end of data file {number}")

    async def _finish(self, number: int, lanes: anyio.Semaphore) -> None:
        """Link a file, or write those of its blocks that rest too, and make it durable."""
        resting = self._resting.get(number, [])
        if not (resting and number not in self._uploads and await self._link(number, resting)):
            for plan in resting:
                await self._write_from_earlier(plan)
            with self._save.clock.timing("upload"):
                await self._complete(number, self._uploads[number])
            del self._uploads[number]
        lanes.release()

    async def _link(self, number: int, plans: Sequence[BlockRange]) -> bool:
        """Link a file to that of an earlier checkpoint; False if the store refuses."""
        save, links, row = self._save, self._context.links, self._files.rows[number]
        key, size = row.key(save.id), row.size
        assert links is not None
        if links.off:
            return False
        # Recorded before it is there, since a cancelled save never gets the result.
        save.stored.append(key)
        try:
            source = await self._from_earlier(
                plans,
                lambda source: self._with_room(partial(self._context.backend.link, source, key)),
            )
        except LinkUnavailable as error:
            save.stored.remove(key)
            links.refused(save)
            then = "Saves write all from now on" if links.off else "This file is written anew"
            if self._context.is_first(then):
                logger.warning("The store refuses to link %s: %s. %s", key, error.message, then)
            return False
        except ObjectExists:
            # A dead worker may have written it.
            if not save.redelivered or (await self._context.retrying.stat(key)).size != size:
                save.taken = True
                raise
            source = key
        links.unavailable = False
        save.linked.add(number)
        save.clock.linked_bytes += size
        self._bytes += size
        self._context.events.emit(FileLinked(*save.where, key, source, size))
        return True

    async def _write_from_earlier(self, plan: BlockRange) -> None:
        """Write a block that rests with the bytes of an earlier checkpoint, which are checked."""
        data = memoryview(bytearray(plan.nbytes))

        async def read(source: str) -> None:
            try:
                await self._context.retrying.read_into(source, plan.offset, data)
            except (StoreError, TruncatedObject) as error:
                passes = error.transient and not getattr(error, "unreadable", False)
                if passes or isinstance(error, ObjectNotFound):
                    raise
                raise self._lost(f"{source} cannot be read: {error.message}") from error
            digest = await threads.run_sync(digest_of, data)
            if digest != self._save.digests[plan.file, plan.offset]:
                raise self._lost(f"{source} is damaged at byte {plan.offset}")

        await self._from_earlier([plan], read)
        upload = await self._upload(plan.file)
        with self._save.clock.timing("upload", plan.nbytes):
            await retrying(self._writing, partial(upload.write, plan.offset, data))
        self._count(plan)

    async def _from_earlier(
        self, plans: Sequence[BlockRange], use: Callable[[str], Awaitable[None]]
    ) -> str:
        """Use the newest committed file with the bytes of a save's blocks; return its key."""
        links, tried = self._context.links, set[str]()
        assert links is not None
        while True:
            # Newer ones may have been committed meanwhile.
            sources = (each for each in links.sources(self._save, plans) if each not in tried)
            if (source := next(sources, None)) is None:
                raise self._lost(f"{', '.join(sorted(tried))} is gone")
            try:
                await use(source)
            except ObjectNotFound:
                tried.add(source)
            else:
                return source

    def _lost(self, reason: str) -> SaveError:
        assert self._context.links is not None
        self._context.links.distrust(self._context.catalog)
        return SaveError(
            f"The bytes of a data file that did not change are lost: {reason}",
            hint="The next save writes all; ckpipe verify tells whether earlier ones are damaged",
        )

    async def _complete(self, number: int, upload: Upload) -> None:
        row = self._files.rows[number]
        key = row.key(self._save.id)
        tries, may_be_ours = Tries(self._policy), self._save.redelivered
        # Recorded before it is complete, since a cancelled save never gets the result.
        self._save.stored.append(key)
        while True:
            try:
                return await tries.once(upload.complete)
            except CkpipeError as error:
                taken = isinstance(error, ObjectExists)
                may_be_ours = may_be_ours or not taken
                if await self._landed(upload, key, row.size if may_be_ours else None):
                    return None
                self._save.taken |= taken
                await tries.wait_after(error)

    async def _landed(self, upload: Upload, key: str, size: int | None) -> bool:
        """Tell whether an upload is complete although its completion failed.

        Args:
            upload: The upload.
            key: The key of its object.
            size: An object of this size counts as its own if the store cannot tell; None if no
                object does.
        """
        try:
            landed = await retrying(self._policy, upload.landed)
            if landed is False and self._save.redelivered:  # a dead worker may have made it
                await retrying(self._policy, upload.abort)
                landed = None
            if landed is None and size is not None:
                landed = (await self._context.retrying.stat(key)).size == size
                if landed:  # a dead worker may have made the object, and this upload is still open
                    await self._give_up(upload)
        except StoreError:
            return False
        return bool(landed)

    async def abort(self) -> None:
        """Abort incomplete uploads."""
        for upload in self._uploads.values():
            await self._give_up(upload)
        self._uploads.clear()

    async def _give_up(self, upload: Upload) -> None:
        """Abort an upload; if the store fails in this too, remains stay there."""
        policy = replace(self._policy, deadline_seconds=ABORT_SECONDS)
        try:
            await retrying(policy, upload.abort)
        except StoreError as error:
            logger.warning("An upload of %s was left behind: %s", self._save.name, error)


_ON_LOOP_BYTES, _ON_LOOP_SPANS = 1 << 18, 256


async def block_checksum(files: DataFiles, filled: FilledBlock) -> int:
    """Combine the CRC-32C of a whole block from the checksums of its ranges."""
    spans = filled.plan.spans
    between = filled.plan.nbytes - sum(span.hi - span.lo for span in spans)
    if between > _ON_LOOP_BYTES or len(spans) > _ON_LOOP_SPANS:
        return await threads.run_sync(_joined, files, filled)
    return _joined(files, filled)


def _joined(files: DataFiles, filled: FilledBlock) -> int:
    view, cuts, at, total = filled.data, files.cuts(filled.plan), 0, 0
    for begin, end, value in zip(cuts.begins, cuts.ends, filled.sums.tolist(), strict=True):
        if begin < at:  # ranges overlap, as no plan of ours makes them: read all bytes
            return crc32c(view)
        if begin > at:
            total = crc32c(view[at:begin], total)
        total, at = combine(total, value, end - begin), end
    return crc32c(view[at:], total) if at < len(view) else total
