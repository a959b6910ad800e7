"""Carrying out planned reads: lanes that read, and deliverers that verify and hand on.

::

    free buffers ──▶ lanes (read) ──arrived──▶ deliverers (verify, put) ──▶ tensors
         ▲                                            │
         └────────────────────────────────────────────┘

A fixed number of buffers bounds the memory. Lanes read whenever one is free, so the store never
waits for a checksum; there is a deliverer for each core, since more would only take turns. What
the store has in memory already is read by all deliverers together: each takes the next few chunks
when it is through with some, and reads a mebibyte at a time into a buffer of its own, which stays
in the processor's cache. A chunk's bytes reach nothing before its checksum was found right, and
what is copied then is what was checked.

Lanes and deliverers are threads from beginning to end. A disk lies still from the end of a read to
the beginning of the next, and the way through the event loop and back took a tenth of the time
that it reads. A store that is asked on the loop is asked from the thread, which waits.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from functools import partial

import anyio.from_thread
import anyio.to_thread

from ckpipe.backend import Backend
from ckpipe.errors import (
    ChecksumMismatch,
    CkpipeError,
    MissingObject,
    ObjectNotFound,
    StoreError,
    TruncatedObject,
)
from ckpipe.format.checksum import CHUNK_BYTES, crc32c
from ckpipe.format.manifest import FileRow
from ckpipe.format.object_names import data_file_key
from ckpipe.loads.delivering import Arrived, Delivery, ReadTally, shared
from ckpipe.loads.destinations import Destination
from ckpipe.loads.entry_tables import EntryTable, Need
from ckpipe.loads.handover import Handover
from ckpipe.loads.lane_threads import LaneThreads
from ckpipe.loads.load_planning import Piece, Read, ReadLimits, batched, plan_reads
from ckpipe.loads.read_parts import in_parts
from ckpipe.memory.arena import Arena
from ckpipe.stores.second_reading import told, warn
from ckpipe.tasks.ahead import Ahead
from ckpipe.tasks.awaited_threads import in_thread, on_loop
from ckpipe.tasks.collector import collector_paused
from ckpipe.types import CheckpointId

_CACHED_BYTES = 128 << 20
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
        tally: Counts what is read; None for one of its own.

    Attributes:
        tally: What was read.
    """

    def __init__(
        self,
        backend: Backend,
        id: CheckpointId,
        buffers: Sequence[memoryview],
        sure: Callable[[], Awaitable[None]] | None = None,
        tally: ReadTally | None = None,
    ) -> None:
        self._backend, self._id, self._buffers, self._sure = backend, id, buffers, sure
        smallest = min(len(buffer) for buffer in buffers)
        self._limits = ReadLimits(smallest, backend.limits.alignment)
        assert self._limits.read_bytes == self._limits.buffer_bytes, "a lane's buffer is too small"
        self.tally = ReadTally() if tally is None else tally
        self._cached_ranges = 0
        self._own = threading.local()
        self._lanes = max(1, len(buffers) - DELIVERERS)
        self._lock = threading.Lock()
        self._under_way, self._idle_since = 0, 0.0

    async def plan(self, data: EntryTable, needs: Sequence[Need]) -> list[Read]:
        """The reads that bring what is needed.

        Args:
            data: Where the entries are.
            needs: What to read.
        """
        self.tally.began = self.tally.began or time.perf_counter()
        return await anyio.to_thread.run_sync(_plan, data, needs, self._limits, self._lanes)

    async def deliver(
        self,
        data: EntryTable,
        reads: Sequence[Read],
        destinations: Callable[[], Awaitable[Destinations]],
    ) -> None:
        """Reads, verifies every chunk and hands it to its destinations.

        Args:
            data: Where the entries are.
            reads: What :meth:`plan` has found.
            destinations: Tells who takes the bytes of each entry. Is asked once; until it has
                answered, lanes read as far as there are buffers.

        Raises:
            Exception: What the destinations raise.
            ChecksumMismatch: If bytes differ from those that were saved.
            TruncatedObject: If a data file is too short.
            MissingObject: If one is gone.
            StoreError: If the store failed.
        """
        if not reads:
            return
        self.tally.planned = self.tally.bytes + sum(read.size for read in reads)
        lanes, deliverers = min(self._lanes, len(reads)), min(DELIVERERS, len(reads))
        handover = Handover(self._buffers, lanes, deliverers)
        delivery = Ahead(partial(self._delivery, data, destinations))
        threads = LaneThreads(
            handover,
            partial(self._lane, data, handover),
            partial(self._deliverer, handover, delivery),
        )
        async with delivery.started():
            # Lanes may be reading for long when it turns out that this was in vain.
            await threads.run(self._not_in_memory(data, reads, handover), delivery.get)

    def forget_cached(self) -> None:
        """Count what the store has in memory as not read; only if nothing of it was delivered."""
        self.tally.reads -= self._cached_ranges
        self._cached_ranges = 0

    async def _delivery(
        self, data: EntryTable, destinations: Callable[[], Awaitable[Destinations]]
    ) -> Delivery:
        """What can be delivered with, once that is allowed."""
        self._idle_since = time.perf_counter()
        try:
            found = await destinations()
            delivery = Delivery(found, self.tally, partial(self._read_again, data))
        finally:
            if not self._under_way:
                self.tally.waited += time.perf_counter() - self._idle_since
        if self._sure is not None:
            await self._sure()
        return delivery

    async def _not_in_memory(
        self, data: EntryTable, reads: Sequence[Read], handover: Handover
    ) -> AsyncIterator[Sequence[Read]]:
        """Give deliverers what the store has in memory, and yield the rest."""
        groups = deque(batched(reads))
        while groups:
            group = groups.popleft()
            if (seen := await self._cached(data, group)) is not None:
                for _ in range(min(DELIVERERS, len(group))):
                    handover.arrive(seen)
            elif len(smaller := list(batched(group, _CACHED_BYTES))) > 1:
                groups.extendleft(reversed(smaller))
            else:
                yield group

    def _lane(self, data: EntryTable, handover: Handover) -> None:
        while (found := handover.next_read()) is not None:
            anyio.from_thread.check_cancelled()
            read, buffer = found
            rank, name = data.ranks[read.file], data.files[read.file].name
            source = self._filled(rank, name, read.offset, buffer[: read.size])
            run = (0, read.pieces, read.fragments)
            handover.arrive(Arrived(read.file, partial(_part, source), iter([run]), buffer))

    def _deliverer(self, handover: Handover, delivery: Ahead[Delivery]) -> None:
        while (arrived := handover.next_arrived()) is not None:
            on_loop(delivery.get).put(arrived)
            if arrived.buffer is not None:
                handover.give_back(arrived.buffer)

    async def header(self, data: EntryTable, file: int) -> None:
        """Verifies the header of a data file.

        Raises:
            As :meth:`deliver` does.
        """
        row, rank = data.files[file], data.ranks[file]
        header = Ahead(partial(in_thread, self._check_header, row, rank))
        async with header.started():  # so that being cancelled in any way reaches the thread
            await header.get()

    def _check_header(self, row: FileRow, rank: int) -> None:
        first = self._header_sum(row, rank)
        if first == row.header_crc32c:
            return
        key = data_file_key(self._id, row.name)
        second = self._header_sum(row, rank)
        if second != row.header_crc32c:
            message = "The header of a data file is not what was saved"
            error = ChecksumMismatch(message, step=self._id.step, rank=rank, key=key)
            raise told(error, same=first == second)
        warn(f"The header of {key}")

    def _header_sum(self, row: FileRow, rank: int) -> int:
        found = at = 0
        while at < row.header_bytes:
            size = min(self._limits.read_bytes, row.header_bytes - at)
            found = crc32c(self._filled(rank, row.name, at, self._buffers[0][:size]), found)
            at += size
        return found

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

    async def _cached(self, data: EntryTable, batch: list[Read]) -> Arrived | None:
        """What reads bring, to be read by deliverers, if the store has all of it in memory."""
        first, last = batch[0], batch[-1]
        size = last.offset + last.size - first.offset
        rank, name = data.ranks[first.file], data.files[first.file].name
        key = data_file_key(self._id, name)
        with self._working(), _translated(self._id.step, rank, key):
            found = await self._backend.cached(key, first.offset, size)
        if found is None:
            return None

        def fetch(begin: int, end: int) -> memoryview:
            buffer = self._own_buffer(end - begin)
            with _translated(self._id.step, rank, key):
                found.read_into(begin, buffer)
            with self._lock:
                self.tally.bytes += len(buffer)
            return buffer

        with self._lock:
            self.tally.reads += 1
        self._cached_ranges += 1
        return shared(batch, fetch)

    def _own_buffer(self, size: int) -> memoryview:
        """The calling thread's own buffer, whose content the next call may overwrite."""
        buffer: memoryview | None = getattr(self._own, "buffer", None)
        if buffer is None or len(buffer) < size:
            buffer = self._own.buffer = memoryview(bytearray(max(size, CHUNK_BYTES)))
        return buffer[:size]

    def _filled(self, rank: int, name: str, offset: int, buffer: memoryview) -> memoryview:
        """The buffer, filled with a range of a file; to be called in a thread."""
        key = data_file_key(self._id, name)
        with self._working(), _translated(self._id.step, rank, key):
            if not self._backend.read_here(key, offset, buffer):
                try:
                    on_loop(self._backend.read_into, key, offset, buffer)
                except CancelledError as error:
                    raise StoreError("The store gave up a read by itself", key=key) from error
        with self._lock:
            self.tally.reads += 1
            self.tally.bytes += len(buffer)
        return buffer

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Notes that something is being read."""
        with self._lock:
            self._under_way += 1
        try:
            yield
        finally:
            with self._lock:
                self._under_way -= 1
                self._idle_since = time.perf_counter()

    def _read_again(self, data: EntryTable, piece: Piece, damaged: memoryview) -> memoryview:
        """Read a chunk that came damaged once more; to be called in a thread.

        Raises:
            ChecksumMismatch: If it comes damaged again.
        """
        file, name = data.entry_files[piece.entry], data.entries[piece.entry].name
        rank, file_name = data.ranks[file], data.files[file].name
        at = data.begins[piece.entry] + piece.lo
        chunk = self._filled(rank, file_name, at, memoryview(bytearray(len(damaged))))
        what = (
            f"Chunk {piece.lo // CHUNK_BYTES} of {name!r:.200} (bytes {piece.lo} to {piece.hi} of "
            f"it) in {file_name}"
        )
        key = data_file_key(self._id, file_name)
        if crc32c(chunk) != piece.checksum:
            message = f"{what} is not what was saved"
            error = ChecksumMismatch(message, step=self._id.step, rank=rank, key=key)
            raise told(error, same=chunk == damaged)
        warn(f"{what} of step {self._id.step}, rank {rank},")
        return chunk


def _part(source: memoryview, begin: int, end: int) -> memoryview:
    return source[begin:end]


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
            f"A data file of the checkpoint is gone: {error.message}", step=step, rank=rank, key=key
        ) from error
    except CkpipeError as error:
        error.located(step=step, rank=rank)
        raise


def _plan(data: EntryTable, needs: Sequence[Need], limits: ReadLimits, lanes: int) -> list[Read]:
    with collector_paused():
        reads = plan_reads(data, needs, limits)
        # Where reads are to be aligned there is a disk, which all lanes share to the end.
        return reads if limits.alignment > 1 else list(in_parts(reads, limits.read_bytes, lanes))
