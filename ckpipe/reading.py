"""Carrying out planned reads: lanes that read, verify and deliver, each with a block of its own.

A lane owns one buffer, so memory is bounded by the number of lanes. What the store has in memory
already is looked at where it is; all else is read into the buffer. One call in a worker thread
then verifies and delivers: a chunk's bytes reach nothing before its checksum was found right,
and are copied while they are still in the processor's cache.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import anyio
import anyio.to_thread
import torch

from ckpipe.arena import Arena
from ckpipe.backend import Backend
from ckpipe.checksum import CHUNK_BYTES, crc32c
from ckpipe.collector import collector_paused
from ckpipe.errors import (
    ChecksumMismatch,
    CkpipeError,
    MissingObject,
    ObjectNotFound,
    TruncatedObject,
)
from ckpipe.filling import Destination
from ckpipe.load_planning import (
    Need,
    PartData,
    Piece,
    Read,
    ReadLimits,
    batched,
    plan_reads,
)
from ckpipe.object_names import data_file_key
from ckpipe.raw_memory import address_of
from ckpipe.types import CheckpointId

_MIN_ALIGNMENT = 4096
_VIEW_BYTES = 256 << 20


@dataclass(slots=True)
class ReadTally:
    """How much was read so far, and whether anything was delivered.

    Args:
        bytes: Bytes read.
        reads: Requests made.
        seconds: Time spent.
        delivered: Whether verified bytes have left the buffers.
    """

    bytes: int = 0
    reads: int = 0
    seconds: float = 0.0
    delivered: bool = False


class Reader:
    """Reads data files of one checkpoint.

    Args:
        backend: The store.
        id: The checkpoint.
        buffers: One for each lane.
    """

    def __init__(self, backend: Backend, id: CheckpointId, buffers: Sequence[memoryview]) -> None:
        self._backend, self._id, self._buffers = backend, id, buffers
        alignment = max(backend.limits.alignment, _MIN_ALIGNMENT)
        self._limits = ReadLimits(min(len(buffer) for buffer in buffers), alignment)
        assert self._limits.read_bytes == self._limits.buffer_bytes, "a lane's buffer is too small"
        self.tally = ReadTally()
        # Lanes that read together would also verify together and leave the store idle meanwhile;
        # where each waits for a core of its own, some of them always read.
        self._cores = anyio.CapacityLimiter(max(1, len(os.sched_getaffinity(0))))

    async def deliver(
        self,
        data: PartData,
        needs: Sequence[Need],
        destinations: Mapping[int, Sequence[Destination]],
    ) -> None:
        """Reads what is needed, verifies every chunk and hands it to its destinations.

        Args:
            data: Where the entries of the rank are.
            needs: What to read.
            destinations: Who takes the bytes of an entry.

        Raises:
            ChecksumMismatch: If bytes differ from those that were saved.
            TruncatedObject: If a data file is too short.
            MissingObject: If one is gone.
            StoreError: If the store failed.
        """
        started = time.perf_counter()
        reads = await anyio.to_thread.run_sync(_plan, data, needs, self._limits)
        lanes = len(self._buffers)
        total = sum(read.size for read in reads)
        pending = batched(reads, min(_VIEW_BYTES, total // (4 * lanes) + 1))
        failures: list[Exception] = []

        async def lane(buffer: memoryview) -> None:
            try:
                # All lanes pull from one iterator, on one thread.
                for batch in pending:
                    await self._deliver(batch, buffer, data, destinations)
            except Exception as error:
                failures.append(error)
                group.cancel_scope.cancel()

        async with anyio.create_task_group() as group:
            for number, buffer in enumerate(self._buffers[: len(reads)]):
                group.start_soon(lane, buffer, name=f"ckpipe load lane {number}")
        self.tally.seconds += time.perf_counter() - started
        if failures:
            # Only the first tells something: the others may be what stopping them has caused.
            raise failures[0]

    async def _deliver(
        self,
        batch: Sequence[Read],
        buffer: memoryview,
        data: PartData,
        destinations: Mapping[int, Sequence[Destination]],
    ) -> None:
        first, last = batch[0], batch[-1]
        name = data.files[first.file].name
        size = last.offset + last.size - first.offset
        view = await self._view(data.rank, name, first.offset, size)
        if view is not None:
            put = partial(_put, batch, view, destinations, self.tally)
            self._check(data, first.file, await anyio.to_thread.run_sync(put, limiter=self._cores))
            return
        for read in batch:
            source = await self._filled(data.rank, name, read.offset, buffer[: read.size])
            put = partial(_put, (read,), source, destinations, self.tally)
            bad = await anyio.to_thread.run_sync(put, limiter=self._cores)
            self._check(data, read.file, bad)

    async def header(self, data: PartData, file: int) -> None:
        """Verifies the header of a data file.

        Raises:
            As :meth:`deliver` does.
        """
        row = data.files[file]
        found = at = 0
        while at < row.header_bytes:
            size = min(self._limits.read_bytes, row.header_bytes - at)
            source = await self._filled(data.rank, row.name, at, self._buffers[0][:size])
            found = await anyio.to_thread.run_sync(crc32c, source, found)
            at += size
        if found != row.header_crc32c:
            raise ChecksumMismatch(
                "The header of a data file is not what was saved",
                step=self._id.step,
                rank=data.rank,
                key=data_file_key(self._id, row.name),
            )

    async def size(self, data: PartData, file: int) -> None:
        """Verifies the size of a data file.

        Raises:
            As :meth:`deliver` does.
        """
        row = data.files[file]
        key = data_file_key(self._id, row.name)
        with _translated(self._id.step, data.rank, key):
            found = (await self._backend.stat(key)).size
        if found != row.size:
            kind = TruncatedObject if found < row.size else ChecksumMismatch
            raise kind(
                f"The data file has {found} bytes, {row.size} were saved",
                step=self._id.step,
                rank=data.rank,
                key=key,
            )

    async def _view(self, rank: int, name: str, offset: int, size: int) -> memoryview | None:
        """A range of a file where it is in memory already, if it is and the store shows it."""
        key = data_file_key(self._id, name)
        with _translated(self._id.step, rank, key):
            view = await self._backend.view(key, offset, size)
        if view is None or len(view) != size:
            return None
        self.tally.reads += 1
        self.tally.bytes += size
        return view

    async def _filled(self, rank: int, name: str, offset: int, buffer: memoryview) -> memoryview:
        """The buffer, filled with a range of a file."""
        key = data_file_key(self._id, name)
        with _translated(self._id.step, rank, key):
            await self._backend.read_into(key, offset, buffer)
        self.tally.reads += 1
        self.tally.bytes += len(buffer)
        return buffer

    def _check(self, data: PartData, file: int, piece: Piece | None) -> None:
        if piece is None:
            return
        entry = data.entries[piece.entry]
        name = data.files[file].name
        raise ChecksumMismatch(
            f"Chunk {piece.lo // CHUNK_BYTES} of {entry.name!r:.200} (bytes {piece.lo} to "
            f"{piece.hi} of it) in {name} is not what was saved",
            step=self._id.step,
            rank=data.rank,
            key=data_file_key(self._id, name),
            hint="Load another checkpoint, or let fallback=True do so",
        )


@contextmanager
def lane_buffers(arena: Arena, backend: Backend, lanes: int) -> Iterator[list[memoryview]]:
    """Lends a buffer for each lane: blocks of the arena, unless these are too small for a chunk.

    Must be entered and left on the thread that uses the arena.
    """
    least = CHUNK_BYTES + 2 * max(backend.limits.alignment, _MIN_ALIGNMENT)
    if arena.block_bytes < least:
        yield [memoryview(mmap.mmap(-1, least)) for _ in range(lanes)]
        return
    arena.reserve(lanes)
    blocks = [arena.take() for _ in range(lanes)]
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


def _plan(data: PartData, needs: Sequence[Need], limits: ReadLimits) -> list[Read]:
    with collector_paused():
        return plan_reads(data, needs, limits)


def _put(
    reads: Sequence[Read],
    source: memoryview,
    destinations: Mapping[int, Sequence[Destination]],
    tally: ReadTally,
) -> Piece | None:
    """Verifies the chunks of reads and delivers each; stops at a bad one, and returns it.

    Args:
        reads: Reads of one file.
        source: The bytes of the file from the first of them on.
        destinations: Who takes the bytes of an entry.
        tally: Is told that something was delivered.
    """
    address = address_of(source)
    with torch.no_grad():
        for read in reads:
            shift = read.offset - reads[0].offset
            for entry, lo, hi, at, checksum in read.pieces:
                begin = shift + at
                if crc32c(source[begin : begin + hi - lo]) != checksum:
                    return Piece(entry, lo, hi, at, checksum)
                for destination in destinations.get(entry, ()):
                    tally.delivered = True
                    destination.put(address + begin, lo, hi)
    return None
