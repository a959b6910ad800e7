"""Carry out planned reads: each thread takes a read, reads it, verifies it and copies it.

A thread has a buffer of its own, so their number bounds the memory. While some of them wait for
the store, others verify and copy. A range that the store has in memory already is read a mebibyte
at a time, which stays in the processor's cache. The bytes of a chunk reach nothing before its
checksum was found right, and the bytes that are copied then are those that were checked. A chunk
that arrives in several reads is put together before it is verified.

A store that threads cannot read themselves is asked on the event loop; the thread waits.
"""

from __future__ import annotations

import mmap
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import anyio.from_thread
import anyio.to_thread
import torch

from ckpipe.backend import Backend, CachedRange
from ckpipe.errors import (
    ChecksumMismatch,
    CkpipeError,
    MissingObject,
    ObjectNotFound,
    StoreError,
    TruncatedObject,
)
from ckpipe.format.checksum import CHUNK_BYTES, crc32c
from ckpipe.format.manifest import FileRow, ManifestDocument
from ckpipe.format.names import data_file_key
from ckpipe.interpreter import available_cpus, gc_paused
from ckpipe.loading.entries import EntryTable, Need, PartData
from ckpipe.loading.fill import Destination, RawBytes
from ckpipe.loading.read_plan import (
    PartialChunk,
    Piece,
    Read,
    ReadLimits,
    batched,
    in_parts,
    plan_reads,
)
from ckpipe.memory.arena import Arena
from ckpipe.memory.native import address_of, copy_bytes, verify_copy_each
from ckpipe.store.retry import locate_damage, warn_of_damaged_transfer
from ckpipe.threads import in_threads, on_loop
from ckpipe.types import CheckpointId, VerifyResult


@dataclass(eq=False, slots=True)
class _Seam:
    """A chunk of which a part has arrived.

    Args:
        memory: Its bytes, as far as they have.
        missing: How many have not.
    """

    memory: memoryview
    missing: int


class ChunkAssembler:
    """The chunks of one delivery that come in fragments; safe for several threads.

    While reads are taken in their order, few are open at a time: one for each read under way.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[tuple[int, int], _Seam] = {}
        self._spare: list[memoryview] = []

    def add(self, fragment: PartialChunk, source: int) -> memoryview | None:
        """Takes a fragment, once.

        Args:
            fragment: Which it is.
            source: The address of its bytes.

        Returns:
            The chunk, to be handed to :meth:`give_back`; None while parts of it are missing.
        """
        piece = fragment.piece
        key, size = (piece.entry, piece.lo), piece.hi - piece.lo
        with self._lock:
            seam = self._open.get(key)
            if seam is None:
                memory = self._spare.pop() if self._spare else memoryview(bytearray(CHUNK_BYTES))
                seam = self._open[key] = _Seam(memory, size)
        copy_bytes(address_of(seam.memory) + fragment.begin, source, fragment.size)
        with self._lock:
            seam.missing -= fragment.size
            if seam.missing:
                return None
            del self._open[key]
            return seam.memory[:size]

    def give_back(self, chunk: memoryview) -> None:
        """Takes back the memory of a chunk."""
        whole = chunk.obj
        assert isinstance(whole, bytearray)
        with self._lock:
            self._spare.append(memoryview(whole))


Destinations = Mapping[int, Sequence[Destination]]
"""For each entry that is asked for, by number, who takes its bytes."""


@dataclass(slots=True)
class ReadTally:
    """The count of bytes read so far, and whether anything was delivered.

    Args:
        bytes: Bytes read.
        planned: Bytes that will have been read at the end, as far as is known.
        reads: Requests made.
        began: When reading began, by :func:`time.perf_counter`; 0 until then.
        delivered: Whether verified bytes have left the buffers.
    """

    bytes: int = 0
    planned: int = 0
    reads: int = 0
    began: float = 0.0
    delivered: bool = False


def _batches(pieces: Sequence[Piece]) -> Iterator[Sequence[Piece]]:
    """Cut chunks into runs that have the bytes of a large chunk, which a cache holds."""
    if pieces:
        nbytes = pieces[-1].at + pieces[-1].hi - pieces[-1].lo - pieces[0].at
        count = max(1, CHUNK_BYTES * len(pieces) // max(1, nbytes))
        for first in range(0, len(pieces), count):
            yield pieces[first : first + count]


class Delivery:
    """Verifies and hands on what several threads read at a time.

    Args:
        destinations: Who takes the bytes of an entry.
        tally: Is told that something was delivered.
        read_again: Reads a chunk that came damaged once more, given its damaged bytes; raises
            :class:`~ckpipe.errors.ChecksumMismatch` if it comes damaged again.
    """

    def __init__(
        self,
        destinations: Destinations,
        tally: ReadTally,
        read_again: Callable[[Piece, memoryview], memoryview],
    ) -> None:
        self._destinations, self._tally, self._seams = destinations, tally, ChunkAssembler()
        self._read_again = read_again

    def put(self, read: Read, fetch: Callable[[int, int], memoryview]) -> None:
        """Verify the chunks of a read and deliver each; blocks.

        Args:
            read: The read.
            fetch: Brings its bytes between two places, until it is called again.

        Raises:
            ChecksumMismatch: If a chunk is damaged; nothing behind it is delivered.
        """
        with torch.no_grad():
            for batch in _batches(read.pieces):
                first, last = batch[0], batch[-1]
                source = fetch(first.at, last.at + last.hi - last.lo)
                while batch:
                    taken = self._take(batch, source[batch[0].at - first.at :])
                    batch = batch[taken:]
            for fragment in read.fragments:
                self._join(fragment, address_of(fetch(fragment.at, fragment.at + fragment.size)))

    def _join(self, fragment: PartialChunk, source: int) -> None:
        """Takes the chunk of a fragment, if the rest of it is there."""
        chunk = self._seams.add(fragment, source)
        if chunk is not None:
            self._take([fragment.piece], chunk)
            self._seams.give_back(chunk)

    def _take(self, pieces: Sequence[Piece], source: memoryview) -> int:
        """Verify chunks and hand them on, up to the first that is damaged, which is read again.

        Args:
            pieces: The chunks, at least one.
            source: Their bytes, from the first of the first chunk on.

        Returns:
            How many are done.
        """
        address = address_of(source) - pieces[0].at
        if pieces[-1].at + pieces[-1].hi - pieces[-1].lo - pieces[0].at > len(source):
            raise AssertionError("chunks reach out of the bytes that were read")
        targets, sources, sizes, sums = array("q"), array("q"), array("q"), array("I")
        others: list[tuple[int, Destination]] = []
        for number, (entry, lo, hi, at, checksum) in enumerate(pieces):
            target = 0
            for destination in self._destinations.get(entry, ()):
                if type(destination) is RawBytes and not target:
                    start, stop, begin = destination
                    if start <= lo and hi <= stop:
                        target = begin + lo - start
                        continue
                others.append((number, destination))
            targets.append(target)
            sources.append(address + at)
            sizes.append(hi - lo)
            sums.append(checksum)
        good = verify_copy_each(targets, sources, sizes, sums)
        if any(targets[:good]):
            self._tally.delivered = True
        for number, destination in others:
            if number < good:
                self._tally.delivered = True
                destination.put(sources[number], pieces[number].lo, pieces[number].hi)
        if good == len(pieces):
            return good
        damaged, begin = pieces[good], pieces[good].at - pieces[0].at
        chunk = self._read_again(damaged, source[begin : begin + damaged.hi - damaged.lo])
        return good + self._take([damaged], chunk)


_CACHED_BYTES = 128 << 20
"""Of how many bytes together the store is asked whether it has them in memory, if not of all."""


class _Source(NamedTuple):
    """A read, and where the store has it in memory: in a range that begins at an offset."""

    read: Read
    cached: CachedRange | None = None
    offset: int = 0


class Reader:
    """Reads data files of one checkpoint.

    Args:
        backend: The store.
        id: The checkpoint.
        buffers: Where bytes are read into; as many threads read.
        tally: Counts what is read; None for one of its own.

    Attributes:
        tally: What was read.
    """

    def __init__(
        self,
        backend: Backend,
        id: CheckpointId,
        buffers: Sequence[memoryview],
        tally: ReadTally | None = None,
    ) -> None:
        self._backend, self._id, self._buffers = backend, id, buffers
        smallest = min(len(buffer) for buffer in buffers)
        self._limits = ReadLimits(smallest, backend.limits.alignment)
        assert self._limits.read_bytes == self._limits.buffer_bytes, "a lane's buffer is too small"
        self.tally = ReadTally() if tally is None else tally
        self._lock = threading.Lock()

    async def read(
        self, data: EntryTable, needs: Sequence[Need], destinations: Destinations
    ) -> None:
        """Read what is needed, verify every chunk and hand it to its destinations.

        Args:
            data: Where the entries are.
            needs: What to read.
            destinations: Who takes the bytes of each entry.

        Raises:
            ChecksumMismatch: If bytes differ from those that were saved.
            TruncatedObject: If a data file is too short.
            MissingObject: If one is gone.
            StoreError: If the store failed.
        """
        self.tally.began = self.tally.began or time.perf_counter()
        lanes = len(self._buffers)
        reads = await anyio.to_thread.run_sync(_plan, data, needs, self._limits, lanes)
        self.tally.planned = self.tally.bytes + sum(read.size for read in reads)
        sources = await self._sources(data, reads)
        delivery = Delivery(destinations, self.tally, partial(self._read_again, data))
        buffers = list(self._buffers)

        def work() -> None:
            buffer = buffers.pop()
            while sources:
                anyio.from_thread.check_cancelled()
                try:
                    source = sources.popleft()
                except IndexError:
                    return
                delivery.put(source.read, self._fetch(data, source, buffer))

        if all(source.cached is not None for source in sources):
            # None of them waits, so more than processors push each other's bytes out of the cache.
            lanes = min(lanes, available_cpus())
        await in_threads(work, min(lanes, len(reads)))

    async def _sources(self, data: EntryTable, reads: Sequence[Read]) -> deque[_Source]:
        """Find out which reads the store has in memory; the others come first."""
        found: deque[_Source] = deque()
        in_memory: list[_Source] = []
        groups = deque(batched(reads))
        while groups:
            group = groups.popleft()
            cached = await self._cached(data, group)
            if cached is not None:
                in_memory += [_Source(read, cached, group[0].offset) for read in group]
            elif len(smaller := list(batched(group, _CACHED_BYTES))) > 1:
                groups.extendleft(reversed(smaller))
            else:
                found.extend(map(_Source, group))
        found.extend(in_memory)
        return found

    async def _cached(self, data: EntryTable, group: Sequence[Read]) -> CachedRange | None:
        first, last = group[0], group[-1]
        size = last.offset + last.size - first.offset
        rank, key = self._file(data, first.file)
        with _translated(self._id.step, rank, key):
            found = await self._backend.cached(key, first.offset, size)
        if found is not None:
            self.tally.reads += 1
        return found

    def _fetch(
        self, data: EntryTable, source: _Source, buffer: memoryview
    ) -> Callable[[int, int], memoryview]:
        """Return what brings the bytes between two places of a read, until it is called again."""
        read, cached, offset = source
        rank, key = self._file(data, read.file)
        if cached is None:
            whole = self._filled(rank, key, read.offset, buffer[: read.size])
            return lambda begin, end: whole[begin:end]

        def fetch(begin: int, end: int) -> memoryview:
            part = buffer[: end - begin]
            with _translated(self._id.step, rank, key):
                cached.read_into(read.offset - offset + begin, part)
            with self._lock:
                self.tally.bytes += len(part)
            return part

        return fetch

    def _file(self, data: EntryTable, file: int) -> tuple[int, str]:
        """Return the rank that wrote a data file, and its key."""
        return data.ranks[file], data_file_key(self._id, data.files[file].name)

    async def header(self, data: EntryTable, file: int) -> None:
        """Verify the header of a data file.

        Raises:
            As :meth:`read` does.
        """
        await in_threads(partial(self._check_header, data.files[file], *self._file(data, file)), 1)

    def _check_header(self, row: FileRow, rank: int, key: str) -> None:
        first = self._header_sum(row, rank, key)
        if first == row.header_crc32c:
            return
        second = self._header_sum(row, rank, key)
        if second != row.header_crc32c:
            message = "The header of a data file is not what was saved"
            error = ChecksumMismatch(message, step=self._id.step, rank=rank, key=key)
            raise locate_damage(error, same=first == second)
        warn_of_damaged_transfer(f"The header of {key}")

    def _header_sum(self, row: FileRow, rank: int, key: str) -> int:
        found = at = 0
        while at < row.header_bytes:
            size = min(self._limits.read_bytes, row.header_bytes - at)
            found = crc32c(self._filled(rank, key, at, self._buffers[0][:size]), found)
            at += size
        return found

    async def size(self, data: EntryTable, file: int) -> None:
        """Verify the size of a data file.

        Raises:
            As :meth:`read` does.
        """
        row = data.files[file]
        rank, key = self._file(data, file)
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

    def _filled(self, rank: int, key: str, offset: int, buffer: memoryview) -> memoryview:
        """Return the buffer, filled with a range of a file; to be called in a thread."""
        with _translated(self._id.step, rank, key):
            if not self._backend.read_here(key, offset, buffer):
                try:
                    on_loop(self._backend.read_into, key, offset, buffer)
                except CancelledError as error:
                    raise StoreError("The store gave up a read by itself", key=key) from error
        with self._lock:
            self.tally.reads += 1
            self.tally.bytes += len(buffer)
        return buffer

    def _read_again(self, data: EntryTable, piece: Piece, damaged: memoryview) -> memoryview:
        """Read a chunk that came damaged once more; to be called in a thread.

        Raises:
            ChecksumMismatch: If it comes damaged again.
        """
        file, name = data.entry_files[piece.entry], data.entries[piece.entry].name
        rank, key = self._file(data, file)
        at = data.begins[piece.entry] + piece.lo
        chunk = self._filled(rank, key, at, memoryview(bytearray(len(damaged))))
        what = (
            f"Chunk {piece.lo // CHUNK_BYTES} of {name!r:.200} (bytes {piece.lo} to {piece.hi} of "
            f"it) in {data.files[file].name}"
        )
        if crc32c(chunk) != piece.checksum:
            message = f"{what} is not what was saved"
            error = ChecksumMismatch(message, step=self._id.step, rank=rank, key=key)
            raise locate_damage(error, same=chunk == damaged)
        warn_of_damaged_transfer(f"{what} of step {self._id.step}, rank {rank},")
        return chunk


@contextmanager
def lane_buffers(arena: Arena, backend: Backend, lanes: int) -> Iterator[list[memoryview]]:
    """Lend a buffer for each lane: blocks of the arena, unless these are too small for a chunk.

    Must be entered and left on the thread that uses the arena.
    """
    least = ReadLimits(0, max(backend.limits.alignment, mmap.PAGESIZE)).buffer_bytes
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
            f"A data file of the checkpoint is gone: {error.message}", step=step, rank=rank, key=key
        ) from error
    except CkpipeError as error:
        error.located(step=step, rank=rank)
        raise


def _plan(data: EntryTable, needs: Sequence[Need], limits: ReadLimits, lanes: int) -> list[Read]:
    with gc_paused():
        reads = plan_reads(data, needs, limits)
        # Where reads are to be aligned there is a disk, which all lanes share to the end.
        return reads if limits.alignment > 1 else list(in_parts(reads, limits.read_bytes, lanes))


async def verify(
    backend: Backend, bundle: ManifestDocument, arena: Arena, *, lanes: int
) -> VerifyResult:
    """Reads every byte of every data file of a checkpoint and checks all of them.

    Args:
        backend: The store.
        bundle: The checkpoint's index or manifest, validated.
        arena: Lends the blocks that are read into; used on the caller's thread only.
        lanes: How many reads run at once.

    Raises:
        ChecksumMismatch: If bytes differ from those that were saved, or a file is too long.
        TruncatedObject: If a data file is too short.
        MissingObject: If one is gone.
        StoreError: If the store failed.
    """
    files = 0
    with lane_buffers(arena, backend, lanes) as buffers:
        reader = Reader(backend, bundle.id, buffers)
        for part in bundle.parts:
            make_data = partial(PartData, part, bundle.layouts[part.layout])
            data = await anyio.to_thread.run_sync(make_data)
            for number in range(len(data.files)):
                await reader.size(data, number)
                await reader.header(data, number)
            await reader.read(data, data.all_needs(), {})
            files += len(data.files)
    return VerifyResult(str(bundle.id), files, sum(f.size for p in bundle.parts for f in p.files))
