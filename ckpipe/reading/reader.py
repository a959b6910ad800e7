"""Carry out planned reads: each thread takes a read, reads it, verifies it and copies it.

A thread has a buffer and an open file of its own, so the number of threads bounds memory and
descriptors. While some of them wait for the store, others verify and copy. A range that the store
has in memory already is read four mebibytes at a time, which stay in the processor's cache. No byte
of a chunk is copied before its checksum is verified, and exactly the verified bytes are copied. A
chunk that arrives in several reads is assembled before it is verified. Only files of other programs
have no checksums: their chunks are copied as they are, and counted as unverified.

If threads cannot read a store themselves, the event loop reads it and the thread waits. It also
repeats a read that a thread has tried in vain.
"""

from __future__ import annotations

import mmap
import threading
import time
from array import array
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, groupby
from operator import attrgetter
from typing import Any, NamedTuple

import anyio.from_thread
import anyio.to_thread
import numpy as np
import torch

from ckpipe.backend import Backend, ObjectReader, truncated
from ckpipe.catalog.complete import check_members
from ckpipe.catalog.find import locate_errors
from ckpipe.catalog.inspect import data_bytes
from ckpipe.catalog.opened import Opened
from ckpipe.errors import (
    ChecksumMismatch,
    CorruptCheckpoint,
    StoreError,
    TruncatedObject,
    naming_refusals,
)
from ckpipe.format.checksum import CHUNK_BYTES, crc32c
from ckpipe.format.entry_table import EntryTable
from ckpipe.interpreter import available_cpus, gc_paused
from ckpipe.memory.arena import Arena
from ckpipe.memory.native import address_of, copy_bytes, copy_each, verify_copy_each
from ckpipe.reading.fill import Destination, RawBytes
from ckpipe.reading.read_plan import Need, Read, ReadChunks, least_read_bytes, plan_reads
from ckpipe.store.retry import locate_damage, naming_unreadable, warn_of_damaged_transfer
from ckpipe.threads import in_threads, on_loop
from ckpipe.types import VerifyResult, first_of

Destinations = Mapping[int, Sequence[Destination]]
"""For each needed entry, by number, the destinations of its bytes."""


@dataclass(slots=True)
class ReadTally:
    """The count of bytes read so far, and whether any were delivered.

    Args:
        bytes: Bytes read.
        planned: Bytes that will have been read at the end, as far as is known.
        reads: Requests made.
        began: Start time of the reads, by :func:`time.perf_counter`; 0 until then.
        delivered: Whether verified bytes have left the buffers.
    """

    bytes: int = 0
    planned: int = 0
    reads: int = 0
    began: float = 0.0
    delivered: bool = False


_CACHED_PIECE_BYTES = 4 * CHUNK_BYTES
"""Bytes that are read from the store's memory at once.

They stay in the processor's last-level cache until they are copied. With fewer bytes, two threads
wait for the GIL longer than they read.
"""


@dataclass(eq=False, slots=True)
class _PartialChunk:
    """A chunk that arrives in several reads, and the number of missing bytes."""

    memory: memoryview
    missing: int


class _PlannedChunks(NamedTuple):
    """The chunks to read, and the takers of their bytes.

    Args:
        chunks: The chunks.
        destinations: The destinations of each entry's bytes.
        targets: The address to which each chunk is copied as it is; 0 for none.
        others: Whether any other destination takes bytes of it.
    """

    chunks: ReadChunks
    destinations: Destinations
    targets: array[int]
    others: np.ndarray[Any, np.dtype[np.bool_]]


def _planned_chunks(chunks: ReadChunks, destinations: Destinations) -> _PlannedChunks:
    entries, rows = np.unique(chunks.entry, return_inverse=True)
    direct: list[tuple[int, int, int]] = []
    several = np.zeros(len(entries), np.bool_)
    for row, entry in enumerate(entries.tolist()):
        takers = destinations.get(entry, ())
        raw = [each for each in takers if type(each) is RawBytes][:1]
        direct += raw or [(0, 0, 0)]
        several[row] = len(takers) > len(raw)
    table = np.fromiter(chain.from_iterable(direct), np.int64).reshape(-1, 3)
    start, stop, address = table[rows].T
    whole = (start <= chunks.lo) & (chunks.lo + chunks.end - chunks.at <= stop) & (address > 0)
    targets = np.where(whole, address + chunks.lo - start, 0)
    others = several[rows] | ((address > 0) & ~whole)
    return _PlannedChunks(chunks, destinations, _longs(targets), others)


def _copy_unverified(targets: array[int], sources: array[int], sizes: array[int]) -> int:
    """Copy ranges that have no checksums, as :func:`verify_copy_each` does; return their number."""
    given = np.flatnonzero(targets).tolist()
    if len(given) == len(targets):
        copy_each(targets, sources, sizes, release_gil=True)
    else:
        columns = (array("q", [column[n] for n in given]) for column in (targets, sources, sizes))
        copy_each(*columns, release_gil=True)
    return len(targets)


def _longs(column: np.ndarray[Any, np.dtype[np.int64]]) -> array[int]:
    return array("q", column.tobytes())


class Reader:
    """Read data files of one checkpoint.

    Args:
        opened: The checkpoint.
        data: The table of its entries.
        buffers: The read buffers; one thread reads into each.
        tally: Counts the reads; None for a new one.

    Attributes:
        tally: The count of reads.
    """

    def __init__(
        self,
        opened: Opened,
        data: EntryTable,
        buffers: Sequence[memoryview],
        tally: ReadTally | None = None,
    ) -> None:
        self._backend, self._step = opened.store, opened.document.step
        self._data, self._buffers = data, buffers
        smallest = min(len(buffer) for buffer in buffers)
        self._read_bytes, self._alignment = smallest, self._backend.limits.alignment
        assert smallest >= least_read_bytes(self._alignment), "a lane's buffer is too small"
        self.tally = ReadTally() if tally is None else tally
        self._lock = threading.Lock()
        self._partial: dict[int, _PartialChunk] = {}

    async def read(self, needs: Sequence[Need], destinations: Destinations) -> None:
        """Read the needed bytes, verify every chunk that has a checksum, and copy it.

        Args:
            needs: The needed bytes.
            destinations: The destinations of each entry's bytes.

        Raises:
            ChecksumMismatch: If bytes differ from the saved ones.
            TruncatedObject: If a data file is too short.
            MissingObject: If one is gone.
            CorruptCheckpoint: If the device cannot read one, and reads others.
            StoreError: If the store failed.
        """
        async with naming_unreadable(self._backend, self._step):
            await self._read(needs, destinations)

    async def _read(self, needs: Sequence[Need], destinations: Destinations) -> None:
        self.tally.began = self.tally.began or time.perf_counter()
        lanes = len(self._buffers)
        planned, reads = await anyio.to_thread.run_sync(self._plan, needs, destinations)
        self.tally.planned = self.tally.bytes + sum(read.size for read in reads)
        if all(read.cached for read in reads):
            # No thread waits, so more threads than CPUs would evict each other's bytes from cache.
            lanes = min(lanes, available_cpus())
        left, buffers = deque(reads), list(self._buffers)

        def work() -> None:
            buffer, number = buffers.pop(), -1
            file: ObjectReader | None = None
            while left:
                anyio.from_thread.check_cancelled()
                try:
                    read = left.popleft()
                except IndexError:
                    return
                if read.file != number:
                    number, file = read.file, self._open(read.file)
                self._deliver(planned, read, file, buffer)

        await in_threads(work, min(lanes, len(reads)))

    def _plan(
        self, needs: Sequence[Need], destinations: Destinations
    ) -> tuple[_PlannedChunks, list[Read]]:
        """Plan the reads, those that the store has in memory behind the others."""
        with gc_paused():
            chunks, reads = plan_reads(
                self._data, needs, self._read_bytes, self._alignment, len(self._buffers)
            )
            planned = _planned_chunks(chunks, destinations)
        found: list[Read] = []
        for number, group in groupby(reads, attrgetter("file")):
            anyio.from_thread.check_cancelled()
            file = self._open(number)
            for read in group:
                if file is not None and read.offset + read.size > file.size:
                    rank, key = self._file(number)
                    with locate_errors(self._step, rank, key):  # before any byte is delivered
                        raise truncated(key, read.offset, read.size, file.size)
                cached = file is not None and file.is_cached(read.offset, read.size)
                found.append(read._replace(cached=cached))
        return planned, sorted(found, key=attrgetter("cached"))

    def _open(self, number: int) -> ObjectReader | None:
        rank, key = self._file(number)
        with locate_errors(self._step, rank, key):
            return self._backend.open_object(key)

    def _deliver(
        self, planned: _PlannedChunks, read: Read, file: ObjectReader | None, buffer: memoryview
    ) -> None:
        """Read a range, verify its chunks and deliver each; call it in a thread.

        Raises:
            ChecksumMismatch: If a chunk is damaged; no chunk behind it is delivered.
        """
        at, ends = planned.chunks.at, planned.chunks.end
        most = max(1, read.stop - read.first)
        if read.cached:
            most = max(1, _CACHED_PIECE_BYTES * most // read.size)
        else:
            whole = self._filled(read, file, buffer)

        def fetch(begin: int, end: int) -> memoryview:
            """Return a range of the file's bytes, valid until the next call."""
            if read.cached:
                return self._filled(read._replace(offset=begin, size=end - begin), file, buffer)
            return whole[begin - read.offset : end - read.offset]

        # No gradients; tensors that were made in inference mode can be written only in it.
        with torch.inference_mode():
            for first in range(read.first, read.stop, most):
                stop = min(first + most, read.stop)
                self._take(planned, first, stop, fetch(int(at[first]), int(ends[stop - 1])))
            for number in read.cut:
                begin = max(int(at[number]), read.offset)
                found = fetch(begin, min(int(ends[number]), read.offset + read.size))
                assembled = self._assemble(planned, number, begin - int(at[number]), found)
                if assembled is not None:
                    self._take(planned, number, number + 1, assembled)

    def _assemble(
        self, planned: _PlannedChunks, number: int, begin: int, found: memoryview
    ) -> memoryview | None:
        """Copy a range of a chunk to its place in it; return the chunk once it is complete."""
        size = int(planned.chunks.end[number] - planned.chunks.at[number])
        with self._lock:
            partial = self._partial.get(number)
            if partial is None:
                partial = _PartialChunk(memoryview(bytearray(size)), size)
                self._partial[number] = partial
        copy_bytes(address_of(partial.memory) + begin, address_of(found), len(found))
        with self._lock:
            partial.missing -= len(found)
            if partial.missing:
                return None
            del self._partial[number]
        return partial.memory

    def _take(self, planned: _PlannedChunks, first: int, stop: int, found: memoryview) -> None:
        """Verify chunks and deliver them; a damaged one is read again.

        Args:
            planned: All chunks.
            first: The number of the first chunk to take.
            stop: The number behind the last one.
            found: Their bytes, from the start of the first chunk on.
        """
        entry, lo, at, end, sums = planned.chunks
        begin, address = int(at[first]), address_of(found) - at[first]
        if end[stop - 1] - begin > len(found):
            raise AssertionError("chunks exceed the bytes that were read")
        while first < stop:
            rows = slice(first, stop)
            targets, sources = planned.targets[rows], _longs(at[rows] + address)
            sizes = _longs(end[rows] - at[rows])
            if self._data.verified:
                good = verify_copy_each(targets, sources, sizes, sums[rows])
            else:
                good = _copy_unverified(targets, sources, sizes)
            self.tally.delivered |= any(targets[:good])
            for number in np.flatnonzero(planned.others[first : first + good]).tolist():
                low, raw = int(lo[first + number]), targets[number] != 0
                for destination in planned.destinations[int(entry[first + number])]:
                    if raw and type(destination) is RawBytes:
                        raw = False  # The native call has copied these bytes.
                        continue
                    self.tally.delivered = True
                    destination.put(sources[number], low, low + sizes[number])
            first += good
            if first < stop:
                damaged = found[int(at[first]) - begin : int(end[first]) - begin]
                self._take(planned, first, first + 1, self._read_again(planned, first, damaged))
                first += 1

    def _read_again(self, planned: _PlannedChunks, number: int, damaged: memoryview) -> memoryview:
        """Read a damaged chunk once more, by a request of its own.

        Raises:
            ChecksumMismatch: If it is damaged again.
        """
        data = self._data
        entry, lo, at, end, checksum = (int(each[number]) for each in planned.chunks)
        file = data.entry_files[entry]
        rank, key = self._file(file)
        again = self._filled(Read(file, at, end - at), None, memoryview(bytearray(end - at)))
        what = (
            f"Chunk {lo // CHUNK_BYTES} of {data.entry(entry).name!r:.200} (bytes "
            f"{lo} to {lo + end - at} of it) in {data.files[file].name}"
        )
        if crc32c(again) != checksum:
            message = f"{what} is not what was saved"
            error = ChecksumMismatch(message, step=self._step, rank=rank, key=key)
            raise locate_damage(error, same=again == damaged)
        warn_of_damaged_transfer(f"{what} of step {self._step}, rank {rank},")
        return again

    def _filled(self, read: Read, file: ObjectReader | None, buffer: memoryview) -> memoryview:
        """Read a range into the buffer and return it; call it in a thread.

        Args:
            read: The range.
            file: The open file; None to have the event loop read it.
            buffer: The buffer.
        """
        rank, key = self._file(read.file)
        # The processor copies cached bytes several times slower to an address that lies, by its
        # place in a page, up to 64 bytes behind theirs (4 KiB aliasing).
        skip = read.offset % 64 if read.cached and read.size + 64 <= len(buffer) else 0
        buffer = buffer[skip : skip + read.size]
        with locate_errors(self._step, rank, key):
            try:
                if file is None:
                    on_loop(self._backend.read_into, key, read.offset, buffer)
                else:
                    file.read_into(read.offset, buffer, cached=read.cached)
            except CancelledError as error:
                raise StoreError("The store cancelled a read by itself", key=key) from error
            except StoreError as error:
                if file is None or not error.transient:
                    raise
                return self._filled(read, None, buffer)  # such a request is retried
        with self._lock:
            self.tally.reads += 1
            self.tally.bytes += len(buffer)
        return buffer

    def _file(self, file: int) -> tuple[int, str]:
        """Return the rank that wrote a data file, and its key."""
        return self._data.ranks[file], self._data.keys[file]

    async def check_file(self, file: int) -> None:
        """Verify the size and the header of a data file.

        Raises:
            As :meth:`read` does.
        """
        async with naming_unreadable(self._backend, self._step):
            await self._check_file(file)

    async def _check_file(self, file: int) -> None:
        row = self._data.files[file]
        rank, key = self._file(file)
        with locate_errors(self._step, rank, key):
            found = (await self._backend.stat(key)).size
        if found != row.size:
            kind = TruncatedObject if found < row.size else ChecksumMismatch
            raise kind(
                f"The data file has {found} bytes, {row.size} were saved",
                step=self._step,
                rank=rank,
                key=key,
            )

        def check_header() -> None:
            first = self._header_sum(file, self._open(file))
            if first == row.header_crc32c:
                return
            second = self._header_sum(file, None)
            if second != row.header_crc32c:
                message = "The header of a data file is not what was saved"
                error = ChecksumMismatch(message, step=self._step, rank=rank, key=key)
                raise locate_damage(error, same=first == second)
            warn_of_damaged_transfer(f"The header of {key}")

        await in_threads(check_header, 1)

    def _header_sum(self, number: int, file: ObjectReader | None) -> int:
        header_bytes, found, at = self._data.files[number].header_bytes, 0, 0
        while at < header_bytes:
            size = min(self._read_bytes, header_bytes - at)
            found = crc32c(self._filled(Read(number, at, size), file, self._buffers[0]), found)
            at += size
        return found


@contextmanager
def lane_buffers(arena: Arena, backend: Backend, lanes: int) -> Iterator[list[memoryview]]:
    """Lend a buffer for each lane: blocks of the arena, unless these are too small for a chunk.

    Enter and leave it on the thread that uses the arena.
    """
    least = least_read_bytes(max(backend.limits.alignment, mmap.PAGESIZE))
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


async def verify(opened: Opened, arena: Arena, *, lanes: int) -> VerifyResult:
    """Read every byte of a checkpoint and check all of them, also of manifests and group objects.

    The tensors of a foreign checkpoint are only read.

    Args:
        opened: The checkpoint.
        arena: Lends the read buffers; used on the caller's thread only.
        lanes: The number of concurrent reads.

    Raises:
        ChecksumMismatch: If bytes differ from the saved ones, or a file is too long.
        TruncatedObject: If a data file is too short.
        MissingObject: If one is gone.
        CorruptCheckpoint: If the device cannot read one, and reads others. The error of the first
            damaged file names all others. If a foreign file has changed meanwhile.
        StoreError: If the store failed.
    """
    backend, document = opened.store, opened.document
    files, damaged = 0, list[CorruptCheckpoint]()
    with naming_refusals(step=document.step), lane_buffers(arena, backend, lanes) as buffers:
        for number in range(len(document.parts)):
            data = EntryTable(document)
            await anyio.to_thread.run_sync(data.join, number)
            needs: list[list[Need]] = [[] for _ in data.files]
            for n, size in enumerate(data.sizes):
                needs[data.entry_files[n]].append(Need(n, 0, size))
            for file, wanted in enumerate(needs):
                reader = Reader(opened, data, buffers)
                try:
                    if data.verified:
                        await reader.check_file(file)
                    await reader.read(wanted, {})
                except CorruptCheckpoint as error:
                    damaged.append(error)
            files += len(data.files)
    if damaged:
        first, *others = damaged
        if others:
            first.message += f"; damaged are also {first_of([each.key for each in others])}"
        raise first
    if not opened.unverified:
        await check_members(backend, document)
    await opened.check_unchanged()
    return VerifyResult(opened.id, files, data_bytes(document), document.source)
