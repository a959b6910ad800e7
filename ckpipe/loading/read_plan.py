"""Plan which ranges of which data files a load reads: pure, the same for a load and a ``verify``.

Theory. Bytes can be checked only by whole chunks, so every need is widened to the chunks it lies
in, and no read cuts through one. Needs that touch, or nearly do, are read together. Widening, gaps
and alignment read bytes that are not needed; all three draw on one allowance: a tenth of a
contiguous need of 20 MiB or more, 2 MiB for a smaller one. Chunks cost at most 2 MiB less two
bytes of it for each contiguous need, so the allowance is never overdrawn; gaps and alignment take
what is left. Widened needs are merged first, so that no entry's bytes are read twice but for the
pages at which two aligned reads meet.

Stores that are asked in ranges. A large object was sent in parts, and stores keep parts apart: a
range across an edge has the store open two of them. So ranges of the size of parts begin and end
where parts do, as Amazon advises ("Performance design patterns for Amazon S3", byte-range
fetches); on SeaweedFS ranges that lay 4 KiB beside the edges took a fourth longer. Chunks do not
end there, so a chunk across an edge comes in fragments, and is put together before it is verified.

Lanes take reads in turn, so that when none is left each has between nothing and a whole read to
go, and the last one alone at what one connection brings. A read that is no more than twice a
lane's share of what is left keeps the difference small ("guided self-scheduling", Polychronopoulos
and Kuck, IEEE Transactions on Computers, 1987). Requests cost time too, 5 ms of processors on both
ends together where that was measured, so there is a least size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ckpipe.format.checksum import CHUNK_BYTES
from ckpipe.loading.entries import EntryTable, Need

ALLOWANCE_BYTES = 2 * CHUNK_BYTES
"""How much more than a contiguous need may be read, unless a tenth of it is more."""

GAP_BYTES = 256 << 10
"""Gaps up to this size are read over rather than skipped with another request."""


class Piece(NamedTuple):
    """A chunk of an entry in a read.

    Args:
        entry: The number of the entry.
        lo: Its first byte, from the entry's start.
        hi: Behind its last byte.
        at: Where it is in the read's bytes.
        checksum: The CRC-32C that it must have.
    """

    entry: int
    lo: int
    hi: int
    at: int
    checksum: int


class PartialChunk(NamedTuple):
    """A part of a chunk in a read that does not bring all of it.

    Args:
        piece: The chunk; where it is in a read says nothing.
        begin: Where the part begins in the chunk.
        at: Where it is in the read's bytes.
        size: Its length in bytes.
    """

    piece: Piece
    begin: int
    at: int
    size: int


# Hundreds of thousands are made for a large load, for which the class's own constructor is slow.
_piece = partial(tuple.__new__, Piece)


@dataclass(frozen=True, slots=True)
class Read:
    """One request for a range of a data file.

    Args:
        file: The number of the file.
        offset: Where the range begins in the file, in bytes.
        size: Its length in bytes.
        pieces: The chunks in it, by position.
        fragments: The parts of chunks in it, whose rest other reads bring.
    """

    file: int
    offset: int
    size: int
    pieces: tuple[Piece, ...]
    fragments: tuple[PartialChunk, ...] = ()


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """The limits that shape the reads.

    Args:
        read_bytes: The size that a read stays within, unless one chunk alone is larger.
        alignment: Offsets and sizes become multiples of this, where the allowance permits.
    """

    read_bytes: int
    alignment: int

    @property
    def buffer_bytes(self) -> int:
        """The memory that any read fits into."""
        return max(self.read_bytes, CHUNK_BYTES + 2 * self.alignment)


@dataclass(slots=True)
class _Span:
    """Chunks that lie one behind the other in a file, with what is needed of them."""

    file: int
    begin: int
    end: int
    needed: int = 0
    needs: int = 0
    need_end: int = -1
    parts: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def spare(self) -> int:
        """The bytes that may still be read without need."""
        allowance = max(ALLOWANCE_BYTES * self.needs, self.needed // 10)
        return allowance - (self.end - self.begin - self.needed)

    def add(self, begin: int, end: int) -> None:
        """Counts a need at ``[begin, end)`` of the file."""
        known = self.need_end
        if begin > known:
            self.needs += 1
            self.needed += end - begin
            self.need_end = end
        elif end > known:
            self.needed += end - known
            self.need_end = end


def plan_reads(data: EntryTable, needs: Iterable[Need], limits: ReadLimits) -> list[Read]:
    """Plans the reads that bring what is needed, by file and offset.

    Args:
        data: Where the entries are.
        needs: What is needed, in any order; needs may overlap, and empty ones are left out.
        limits: What shapes the reads.
    """
    return [
        read
        for span in _joined(_spans(data, needs))
        for read in _reads(list(_cut(data, span, limits)), span, data, limits.alignment)
    ]


def batched(reads: Sequence[Read], nbytes: int | None = None) -> Iterator[list[Read]]:
    """Groups reads that follow one another without a gap.

    What a store has in memory is looked at a group at a time, since no buffer limits its size.

    Args:
        reads: The reads, by file and offset.
        nbytes: How many bytes a group has at the most, unless one read alone has more; None for
            any number.
    """
    batch: list[Read] = []
    for read in reads:
        if batch:
            first, last = batch[0], batch[-1]
            follows = read.file == last.file and read.offset <= last.offset + last.size
            size = read.offset + read.size - first.offset
            if not follows or (nbytes is not None and size > nbytes):
                yield batch
                batch = []
        batch.append(read)
    if batch:
        yield batch


def _spans(data: EntryTable, needs: Iterable[Need]) -> Iterator[_Span]:
    columns = _sorted_needs(data, needs)
    for lo, hi in pairwise(_bounds_of_files(columns[0])):
        of_file = [column[lo:hi] for column in columns]
        span = _only_span(of_file)
        if span is not None:
            yield span
        else:
            yield from _spans_of(zip(*(column.tolist() for column in of_file), strict=True))


def _bounds_of_files(file: NDArray[np.int64]) -> list[int]:
    """The bounds of each file's needs in the list of all."""
    changes = (np.flatnonzero(np.diff(file)) + 1).tolist()
    return [0, *changes, len(file)] if len(file) else []


def _only_span(columns: Sequence[NDArray[np.int64]]) -> _Span | None:
    """The span of needs that are whole chunks without a gap, as are those of a whole file."""
    file, entry, lo, hi, begin, first, last = columns
    end = begin + hi - lo
    whole = (lo == first).all() and (hi == last).all() and (end[:-1] == begin[1:]).all()
    if not whole or (entry[:-1] == entry[1:]).any():
        return None
    start, stop = int(begin[0]), int(end[-1])
    parts = list(zip(entry.tolist(), first.tolist(), last.tolist(), strict=True))
    return _Span(int(file[0]), start, stop, stop - start, 1, stop, parts)


def _spans_of(needs: Iterable[tuple[int, ...]]) -> Iterator[_Span]:
    span: _Span | None = None
    before, upto = -1, 0
    for file, entry, lo, hi, begin, first, last in needs:
        end = begin + hi - lo
        start, stop = begin - (lo - first), end + (last - hi)
        if span is None or span.file != file or start > span.end:
            if span is not None:
                yield span
            span, before, upto = _Span(file, start, stop), -1, 0
        span.add(begin, end)
        if stop > span.end:
            span.end = stop
        if entry == before and first <= upto:
            _, since, _ = span.parts.pop()
            first, last = since, max(upto, last)
        span.parts.append((entry, first, last))
        before, upto = entry, last
    if span is not None:
        yield span


def _sorted_needs(data: EntryTable, needs: Iterable[Need]) -> list[NDArray[np.int64]]:
    """The needs by place: file, entry, both ends, place in the file, ends of their chunks."""
    table = np.fromiter(chain.from_iterable(needs), np.int64).reshape(-1, 3)
    table = table[table[:, 1] < table[:, 2]]
    entry, lo, hi = table.T
    numbers = entry.tolist()
    file = np.array([data.entry_files[n] for n in numbers], np.int64)
    begin = np.array([data.begins[n] for n in numbers], np.int64) + lo
    size = np.array([data.sizes[n] for n in numbers], np.int64)
    first = lo - lo % CHUNK_BYTES
    last = np.minimum(size, -(-hi // CHUNK_BYTES) * CHUNK_BYTES)
    columns = (file, entry, lo, hi, begin, first, last)
    order = np.lexsort((begin, file))
    return [column[order] for column in columns]


def _joined(spans: Iterable[_Span]) -> Iterator[_Span]:
    last: _Span | None = None
    for span in spans:
        if last is not None and last.file == span.file:
            gap = span.begin - last.end
            if gap <= min(GAP_BYTES, last.spare + span.spare):
                last.end, last.need_end = span.end, span.need_end
                last.needed += span.needed
                last.needs += span.needs
                last.parts += span.parts
                continue
        if last is not None:
            yield last
        last = span
    if last is not None:
        yield last


_Chunk = tuple[int, int, int, int, int]
"""An entry, both ends of a chunk in it, where the chunk begins in the file, and its checksum."""


def _cut(data: EntryTable, span: _Span, limits: ReadLimits) -> Iterator[list[_Chunk]]:
    """Packs a span's chunks greedily, with room for both ends to be aligned."""
    room = limits.read_bytes - 2 * (limits.alignment - 1)
    checksums, begins, first_sums = data.checksums, data.begins, data.first_sums
    chunks: list[_Chunk] = []
    limit = span.begin + room
    for entry, first, last in span.parts:
        begin, sums = begins[entry], first_sums[entry]
        for lo in range(first, last, CHUNK_BYTES):
            hi = min(lo + CHUNK_BYTES, last)
            if begin + hi > limit:
                if chunks:
                    yield chunks
                    chunks = []
                limit = begin + lo + room
            chunks.append((entry, lo, hi, begin + lo, checksums[sums + lo // CHUNK_BYTES]))
    yield chunks


def _reads(
    cut: list[list[_Chunk]], span: _Span, data: EntryTable, alignment: int
) -> Iterator[Read]:
    """Makes reads of packed chunks, aligned where the span's allowance permits."""
    if 2 * alignment * len(cut) > span.spare:
        alignment = 1
    size = data.files[span.file].size
    for chunks in cut:
        offset, (_, lo, hi, last, _) = chunks[0][3], chunks[-1]
        end = last + hi - lo
        if alignment > 1:
            offset -= offset % alignment
            end = min(size, -(-end // alignment) * alignment)
        pieces = [_piece((entry, lo, hi, at - offset, crc)) for entry, lo, hi, at, crc in chunks]
        yield Read(span.file, offset, end - offset, tuple(pieces))


LEAST_BYTES = 8 << 20
"""Reads are not made smaller than about half of this."""

_Placed = tuple[int, Piece]
"""A chunk, and where it begins in its file."""


def in_parts(reads: Sequence[Read], part_bytes: int, lanes: int) -> Iterator[Read]:
    """The same chunks in other reads, none of which is larger than a part.

    What lies between chunks at an edge is not read.

    Args:
        reads: Reads of whole chunks in the order in which they are taken, none larger than a part.
        part_bytes: Where edges are in a file: at the multiples of this.
        lanes: How many take the reads.
    """
    if part_bytes < 2 * CHUNK_BYTES:
        yield from reads
        return
    left = sum(read.size for read in reads)
    for run in batched(reads):
        first, last = run[0].offset, run[-1]
        end = last.offset + last.size
        # One request across an edge is cheaper than two.
        whole = len(run) == 1 and end - first <= max(LEAST_BYTES, 2 * left // lanes)
        edges = [] if whole else _edges(first, end, part_bytes)
        cuts = [first]
        for begin, stop in pairwise([first, *edges, end]):
            cuts += _finer(begin, stop, min(part_bytes, max(LEAST_BYTES, 2 * left // lanes)))
            cuts.append(stop)
            left -= stop - begin
        yield from _recut(run, cuts) if len(cuts) > len(run) + 1 or edges else run


def _edges(begin: int, end: int, part_bytes: int) -> list[int]:
    """The edges of parts in a range, but for one that hardly anything is behind."""
    first = (begin // part_bytes + 1) * part_bytes
    return list(range(first, end - CHUNK_BYTES, part_bytes))


def _finer(begin: int, end: int, most: int) -> Iterator[int]:
    """The places to cut a range further, so that its pieces are of about the same size."""
    count = -(-(end - begin) // most)
    for number in range(1, count):
        at = begin + (end - begin) * number // count
        yield (at + CHUNK_BYTES // 2) // CHUNK_BYTES * CHUNK_BYTES


def _recut(run: Sequence[Read], cuts: Sequence[int]) -> Iterator[Read]:
    """Reads of what lies between cuts, without those that would bring nothing."""
    file = run[0].file
    chunks = [(read.offset + piece.at, piece) for read in run for piece in read.pieces]
    first = 0
    for begin, end in pairwise(cuts):
        while first < len(chunks) and _end(chunks[first]) <= begin:
            first += 1
        stop = first
        while stop < len(chunks) and chunks[stop][0] < end:
            stop += 1
        if first < stop:
            yield _read(file, chunks[first:stop], begin, end)


def _end(chunk: _Placed) -> int:
    at, piece = chunk
    return at + piece.hi - piece.lo


def _read(file: int, chunks: Sequence[_Placed], begin: int, end: int) -> Read:
    """The read of what lies between two cuts, all of which some chunk has a part in."""
    begin, end = max(begin, chunks[0][0]), min(end, _end(chunks[-1]))
    pieces: list[Piece] = []
    fragments: list[PartialChunk] = []
    for chunk in chunks:
        at, piece = chunk
        if begin <= at and _end(chunk) <= end:
            pieces.append(piece._replace(at=at - begin))
            continue
        first, last = max(at, begin), min(_end(chunk), end)
        fragments.append(PartialChunk(piece, first - at, first - begin, last - first))
    return Read(file, begin, end - begin, tuple(pieces), tuple(fragments))
