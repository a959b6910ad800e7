"""Carrying out planned reads: lanes that read, and deliverers that verify and hand on.

::

    free buffers ──▶ lanes (read) ──arrived──▶ deliverers (verify, put) ──▶ tensors
         ▲                                            │
         └────────────────────────────────────────────┘

A fixed number of buffers bounds the memory. Lanes read whenever one is free, so the store never
waits for a checksum; there is a deliverer for each core, since more would only take turns. What
the store has in memory already is delivered from where it is, by all deliverers together, each
taking the next few chunks when it is through with some. A chunk's bytes reach nothing before its
checksum was found right, and are copied while they are still in the processor's cache.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import anyio
import anyio.to_thread
from anyio import create_memory_object_stream, create_task_group
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from ckpipe.backend import Backend
from ckpipe.errors import (
    ChecksumMismatch,
    CkpipeError,
    MissingObject,
    ObjectNotFound,
    TruncatedObject,
)
from ckpipe.format.checksum import CHUNK_BYTES, crc32c
from ckpipe.format.object_names import data_file_key
from ckpipe.loads.delivering import Arrived, Delivery, ReadTally, shown
from ckpipe.loads.destinations import Destination
from ckpipe.loads.load_planning import (
    EntryTable,
    Need,
    Piece,
    Read,
    ReadLimits,
    batched,
    plan_reads,
)
from ckpipe.loads.read_parts import in_parts
from ckpipe.loads.read_queue import ReadQueue
from ckpipe.memory.arena import Arena
from ckpipe.tasks.ahead import Ahead
from ckpipe.tasks.collector import collector_paused
from ckpipe.types import CheckpointId

_VIEW_BYTES = 128 << 20
"""Of how many bytes together the store is asked whether it has them in memory, if not of all."""

DELIVERERS = min(8, len(os.sched_getaffinity(0)))
"""Worker threads that verify and deliver."""

Destinations = Mapping[int, Sequence[Destination]]
"""For each entry that is asked for, by number, who takes its bytes."""


class Reader:
    """Reads data files of one checkpoint.

    Args:
        backend: The store.
        id: The checkpoint.
        buffers: Where bytes are read into, one for each read under way or being delivered.
        sure: Is awaited before anything is delivered; None if nothing need be.

    Attributes:
        tally: What was read.
        views: What the store has shown of its memory. To let it go takes milliseconds that neither
            the event loop nor a deliverer has, so that is left to whoever comes to it.
    """

    def __init__(
        self,
        backend: Backend,
        id: CheckpointId,
        buffers: Sequence[memoryview],
        sure: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._backend, self._id, self._buffers, self._sure = backend, id, buffers, sure
        smallest = min(len(buffer) for buffer in buffers)
        self._limits = ReadLimits(smallest, backend.limits.alignment)
        assert self._limits.read_bytes == self._limits.buffer_bytes, "a lane's buffer is too small"
        self.tally = ReadTally()
        self.views: list[memoryview] = []
        self._under_way, self._idle_since = 0, 0.0

    async def deliver(
        self,
        data: EntryTable,
        needs: Sequence[Need],
        destinations: Callable[[], Awaitable[Destinations]],
    ) -> None:
        """Reads what is needed, verifies every chunk and hands it to its destinations.

        Args:
            data: Where the entries are.
            needs: What to read.
            destinations: Tells who takes the bytes of each entry. Is asked once; until it has
                answered, lanes read as far as there are buffers.

        Raises:
            Exception: What the destinations raise.
            ChecksumMismatch: If bytes differ from those that were saved.
            TruncatedObject: If a data file is too short.
            MissingObject: If one is gone.
            StoreError: If the store failed.
        """
        self.tally.began = self.tally.began or time.perf_counter()
        lanes = max(1, len(self._buffers) - DELIVERERS)
        reads = await anyio.to_thread.run_sync(_plan, data, needs, self._limits, lanes)
        if not reads:
            return
        pending = ReadQueue(batched(reads))
        free_out, free = create_memory_object_stream[memoryview](len(self._buffers))
        arrived_out, arrived = create_memory_object_stream[Arrived](0)
        for buffer in self._buffers:
            free_out.send_nowait(buffer)
        failures: list[Exception] = []
        delivery = Ahead(partial(self._delivery, destinations))

        async def attempt(work: Awaitable[object]) -> None:
            try:
                await work
            except Exception as error:
                failures.append(error)
                group.cancel_scope.cancel()

        async with (
            free_out,
            free,
            delivery.started(),
            create_task_group() as group,
            arrived_out,
            arrived,
        ):
            # Lanes may be reading for long when it turns out that this was in vain.
            group.start_soon(attempt, delivery.get(), name="ckpipe load destinations")
            for number in range(min(lanes, len(reads))):
                lane = self._lane(data, pending, free, arrived_out.clone())
                group.start_soon(attempt, lane, name=f"ckpipe load lane {number}")
            for number in range(min(DELIVERERS, len(reads))):
                deliverer = self._deliverer(data, arrived.clone(), free_out, delivery)
                group.start_soon(attempt, deliverer, name=f"ckpipe load deliverer {number}")
        if failures:
            # Only the first tells something: the others may be what stopping them has caused.
            raise failures[0]

    async def forget_views(self) -> None:
        """Lets go of what the store has shown of its memory, and does not count it as read.

        Only for views of which nothing was delivered.
        """
        if self.views:
            self.tally.reads -= len(self.views)
            self.tally.bytes -= sum(map(len, self.views))
            await anyio.to_thread.run_sync(self.views.clear)

    async def _delivery(self, destinations: Callable[[], Awaitable[Destinations]]) -> Delivery:
        """What can be delivered with, once that is allowed."""
        self._idle_since = time.perf_counter()
        try:
            delivery = Delivery(await destinations(), self.tally)
        finally:
            if not self._under_way:
                self.tally.waited += time.perf_counter() - self._idle_since
        if self._sure is not None:
            await self._sure()
        return delivery

    async def _lane(
        self,
        data: EntryTable,
        pending: ReadQueue,
        free: MemoryObjectReceiveStream[memoryview],
        out: MemoryObjectSendStream[Arrived],
    ) -> None:
        async with out:
            while (found := await pending.next()) is not None:
                if isinstance(found, Read):
                    read = found
                elif (seen := await self._view(data, found)) is not None:
                    pending.settle()
                    for _ in range(min(DELIVERERS, len(found))):
                        await out.send(seen)
                    continue
                elif len(smaller := list(batched(found, _VIEW_BYTES))) > 1:
                    pending.divide(smaller)
                    continue
                else:
                    read, *rest = found
                    pending.settle(rest)
                buffer = await free.receive()
                rank, name = data.ranks[read.file], data.files[read.file].name
                source = await self._filled(rank, name, read.offset, buffer[: read.size])
                run = (0, read.pieces, read.fragments)
                await out.send(Arrived(read.file, source, iter([run]), buffer))

    async def _deliverer(
        self,
        data: EntryTable,
        inbox: MemoryObjectReceiveStream[Arrived],
        free: MemoryObjectSendStream[memoryview],
        delivery: Ahead[Delivery],
    ) -> None:
        async with inbox:
            async for arrived in inbox:
                put = (await delivery.get()).put
                self._check(data, arrived.file, await anyio.to_thread.run_sync(put, arrived))
                if arrived.buffer is not None:
                    free.send_nowait(arrived.buffer)

    async def header(self, data: EntryTable, file: int) -> None:
        """Verifies the header of a data file.

        Raises:
            As :meth:`deliver` does.
        """
        row, rank = data.files[file], data.ranks[file]
        found = at = 0
        while at < row.header_bytes:
            size = min(self._limits.read_bytes, row.header_bytes - at)
            source = await self._filled(rank, row.name, at, self._buffers[0][:size])
            found = await anyio.to_thread.run_sync(crc32c, source, found)
            at += size
        if found != row.header_crc32c:
            raise ChecksumMismatch(
                "The header of a data file is not what was saved",
                step=self._id.step,
                rank=rank,
                key=data_file_key(self._id, row.name),
            )

    async def size(self, data: EntryTable, file: int) -> None:
        """Verifies the size of a data file.

        Raises:
            As :meth:`deliver` does.
        """
        row, rank = data.files[file], data.ranks[file]
        key = data_file_key(self._id, row.name)
        with _translated(self._id.step, rank, key):
            found = (await self._backend.stat(key)).size
        if found != row.size:
            kind = TruncatedObject if found < row.size else ChecksumMismatch
            raise kind(
                f"The data file has {found} bytes, {row.size} were saved",
                step=self._id.step,
                rank=rank,
                key=key,
            )

    async def _view(self, data: EntryTable, batch: list[Read]) -> Arrived | None:
        """What reads bring where it is in memory already, if it is and the store shows it."""
        first, last = batch[0], batch[-1]
        size = last.offset + last.size - first.offset
        key = data_file_key(self._id, data.files[first.file].name)
        with self._working(), _translated(self._id.step, data.ranks[first.file], key):
            view = await self._backend.view(key, first.offset, size)
        if view is None or len(view) != size:
            return None
        self.tally.reads += 1
        self.tally.bytes += size
        self.views.append(view)
        return shown(batch, view)

    async def _filled(self, rank: int, name: str, offset: int, buffer: memoryview) -> memoryview:
        """The buffer, filled with a range of a file."""
        key = data_file_key(self._id, name)
        with self._working(), _translated(self._id.step, rank, key):
            await self._backend.read_into(key, offset, buffer)
        self.tally.reads += 1
        self.tally.bytes += len(buffer)
        return buffer

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Notes that something is being read."""
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1
            self._idle_since = time.perf_counter()

    def _check(self, data: EntryTable, file: int, piece: Piece | None) -> None:
        if piece is None:
            return
        entry = data.entries[piece.entry]
        name = data.files[file].name
        raise ChecksumMismatch(
            f"Chunk {piece.lo // CHUNK_BYTES} of {entry.name!r:.200} (bytes {piece.lo} to "
            f"{piece.hi} of it) in {name} is not what was saved",
            step=self._id.step,
            rank=data.ranks[file],
            key=data_file_key(self._id, name),
        )


def known(destinations: Destinations) -> Callable[[], Awaitable[Destinations]]:
    """Tells destinations that are known already, for :meth:`Reader.deliver`."""

    async def tell() -> Destinations:
        return destinations

    return tell


@contextmanager
def lane_buffers(arena: Arena, backend: Backend, lanes: int) -> Iterator[list[memoryview]]:
    """Lends buffers for lanes and deliverers: blocks of the arena, unless too small for a chunk.

    Must be entered and left on the thread that uses the arena.
    """
    least = ReadLimits(0, max(backend.limits.alignment, mmap.PAGESIZE)).buffer_bytes
    count = lanes + DELIVERERS
    if arena.block_bytes < least:
        yield [memoryview(mmap.mmap(-1, least)) for _ in range(count)]
        return
    arena.reserve(count)
    blocks = [arena.take() for _ in range(count)]
    try:
        yield [block.view for block in blocks]
    finally:
        for block in blocks:
            arena.give(block)


@contextmanager
def _translated(step: int, rank: int, key: str) -> Iterator[None]:
    """Says of a store's errors which checkpoint they concern, and of a lost file that it is one."""
    try:
        yield
    except ObjectNotFound as error:
        raise MissingObject(
            "A data file of the checkpoint is gone", step=step, rank=rank, key=key
        ) from error
    except CkpipeError as error:
        error.located(step=step, rank=rank)
        raise


def _plan(data: EntryTable, needs: Sequence[Need], limits: ReadLimits, lanes: int) -> list[Read]:
    with collector_paused():
        reads = plan_reads(data, needs, limits)
        # Where reads are to be aligned there is a disk, which all lanes share to the end.
        return reads if limits.alignment > 1 else list(in_parts(reads, limits.read_bytes, lanes))
