"""Stage 5: writes blocks to the store in parallel lanes, each straight from host memory.

While the store throttles, fewer of them write at a time, of all saves together.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Generic

import anyio
from anyio.lowlevel import checkpoint_if_cancelled
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from ckpipe.backend import Upload
from ckpipe.errors import CkpipeError, ObjectExists, StoreError, StoreFull
from ckpipe.events import BlockUploaded
from ckpipe.format.data_file import DataFiles
from ckpipe.format.names import data_file_key
from ckpipe.save.delivery import B, Delivery, StoreContext, StoredFiles, block_checksum
from ckpipe.store.retry import Tries, retrying, telling

logger = logging.getLogger("ckpipe")

ABORT_SECONDS = 15.0
"""How long giving up an upload is tried again, in seconds; nothing can cancel it meanwhile."""


async def run(
    save: Delivery[B],
    depot: StoreContext,
    inbox: MemoryObjectReceiveStream[B],
    out: MemoryObjectSendStream[StoredFiles],
) -> None:
    """Uploads all data files. If it fails, what was uploaded is given up again.

    Raises:
        StoreError: If the store failed and retries did not help.
    """
    files = _Files(save, depot)
    async with inbox, out:
        try:
            await depot.let_retention_catch_up()
            async with anyio.create_task_group() as lanes:
                lanes.start_soon(files.open_first, name="opening of the first file")
                for lane in range(depot.lanes):
                    lanes.start_soon(_lane, files, lane, inbox.clone(), name=f"upload lane {lane}")
            await checkpoint_if_cancelled()  # the stream ends early if the copy failed
            if save.cargo is None:
                return  # the save was given up before there was a plan
            await files.complete()
            await out.send(StoredFiles(save.cargo.header_sums))
        except BaseException:
            with anyio.CancelScope(shield=True):
                await files.abort()
            raise


async def _lane(files: _Files[B], lane: int, inbox: MemoryObjectReceiveStream[B]) -> None:
    async with inbox:
        async for filled in inbox:
            for some in files.together(filled, inbox):
                await files.write(some, lane)


class _Files(Generic[B]):
    """The data files of one save on their way."""

    def __init__(self, save: Delivery[B], depot: StoreContext) -> None:
        self._save, self._depot = save, depot
        self._uploads: dict[int, Upload] = {}
        self._opening = anyio.Lock()
        self._written: Counter[int] = Counter()
        self._bytes = 0
        self._policy = telling(depot.retry, depot.events, save.id, save.rank)
        self._writing = replace(self._policy, limiter=depot.limiter)

    @property
    def _cargo(self) -> DataFiles:
        assert self._save.cargo is not None
        return self._save.cargo

    async def open_first(self) -> None:
        """Opens the first file before there is a block of it, if it is known what to store."""
        if self._save.cargo is not None and self._save.cargo.blocks:
            await self._upload(self._save.cargo.blocks[0].file)

    def together(self, first: B, inbox: MemoryObjectReceiveStream[B]) -> list[list[B]]:
        """The blocks that a lane writes in one call each: one, and its share of those that
        wait.
        """
        found = [first]
        share = 1 + inbox.statistics().current_buffer_used // self._depot.lanes
        with contextlib.suppress(anyio.WouldBlock, anyio.EndOfStream):
            while len(found) < min(share, self._most_blocks(first.plan.file)):
                found.append(inbox.receive_nowait())
        by_file = itertools.groupby(found, lambda filled: filled.plan.file)
        return [list(some) for _, some in by_file]

    def _most_blocks(self, file: int) -> int:
        upload = self._uploads.get(file)
        return 1 if upload is None or upload.takes_checksums else upload.most_blocks

    async def write(self, some: list[B], lane: int) -> None:
        """Writes blocks of one file."""
        save, plans = self._save, [filled.plan for filled in some]
        upload = await self._upload(plans[0].file)
        if upload.takes_checksums:
            checksum = await block_checksum(self._cargo, some[0])

        async def attempt() -> None:
            if upload.takes_checksums:
                await upload.write_summed(plans[0].offset, some[0].data, checksum)
            elif len(some) == 1:
                await upload.write(plans[0].offset, some[0].data)
            else:
                await upload.write_all([(filled.plan.offset, filled.data) for filled in some])

        with save.clock.uploading(plans, lane):
            await retrying(self._writing, attempt)
        for filled in some:
            self._done(filled)

    def _done(self, filled: B) -> None:
        save, nbytes = self._save, filled.plan.nbytes
        save.release(filled)
        self._written[filled.plan.file] += 1
        self._bytes += nbytes
        total = self._cargo.size
        self._depot.events.emit(
            BlockUploaded(save.name, save.id.step, save.rank, nbytes, self._bytes, total)
        )

    async def _upload(self, number: int) -> Upload:
        if (known := self._uploads.get(number)) is not None:
            return known
        async with self._opening:
            if number not in self._uploads:
                file = self._cargo.files[number]
                key = data_file_key(self._save.id, file.name)
                block_bytes = self._depot.block_bytes
                open_upload = partial(
                    self._depot.backend.open_upload, key, size=file.size, block_bytes=block_bytes
                )
                with self._save.clock.timing("upload"):
                    try:
                        upload = await retrying(self._policy, open_upload)
                    except StoreFull:
                        # There may be room once the prune is through that was put off.
                        if not await self._depot.pruned():
                            raise
                        upload = await retrying(self._policy, open_upload)
                self._uploads[number] = upload
            return self._uploads[number]

    async def complete(self) -> None:
        """Makes every file durable, one after the other."""
        blocks = Counter(block.file for block in self._cargo.blocks)
        if self._written != blocks:  # no assert: this must hold under python -O too
            raise AssertionError("a block was never written")
        for number, upload in list(self._uploads.items()):
            with self._save.clock.timing("upload"):
                await self._complete(number, upload)
            del self._uploads[number]

    async def _complete(self, number: int, upload: Upload) -> None:
        file = self._cargo.files[number]
        key = data_file_key(self._save.id, file.name)
        tries, may_be_ours = Tries(self._policy), self._save.again
        # Noted before it is complete: a save that is cancelled meanwhile does not hear of it.
        self._save.stored.append(key)
        while True:
            try:
                return await tries.once(upload.complete)
            except CkpipeError as error:
                taken = isinstance(error, ObjectExists)
                may_be_ours = may_be_ours or not taken
                if await self._landed(upload, key, file.size if may_be_ours else None):
                    return None
                if taken:  # another writer uses this name: nothing here is ours for sure
                    self._save.stored.clear()
                await tries.wait_after(error)

    async def _landed(self, upload: Upload, key: str, size: int | None) -> bool:
        """Tell whether an upload is complete although completing it failed.

        Args:
            upload: The upload.
            key: The key of its object.
            size: The size of an object that counts as its own if the store knows no better; None
                if none does.
        """
        try:
            landed = await retrying(self._policy, upload.landed)
            if landed is False and self._save.again:  # a worker that is dead may have made it
                await retrying(self._policy, upload.abort)
                landed = None
            if landed is None and size is not None:
                landed = (await self._depot.patient.stat(key)).size == size
        except StoreError:
            return False
        return bool(landed)

    async def abort(self) -> None:
        """Gives up what is not complete; a store that fails in this too keeps its leftovers."""
        policy = replace(self._policy, deadline_seconds=ABORT_SECONDS)
        for upload in self._uploads.values():
            try:
                await retrying(policy, upload.abort)
            except StoreError as error:
                logger.warning("An upload of %s was left behind: %s", self._save.name, error)
        self._uploads.clear()
