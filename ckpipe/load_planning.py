"""Which ranges of which data files a load reads: pure, and the same for a load and a ``verify``.

Theory. Bytes can be checked only by whole chunks, so every need is widened to the chunks it lies
in, and no read cuts through one. Needs that touch, or nearly do, are read together. Widening,
gaps and alignment read bytes that nobody needs; all three draw on one allowance: a tenth of a
contiguous need of 20 MiB or more, 2 MiB for a smaller one. Chunks cost at most 2 MiB less two
bytes of it for each contiguous need, so the allowance is never overdrawn; gaps and alignment
take what is left. Widened needs are merged first, so that no entry's bytes are read twice but
for the pages at which two aligned reads meet.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from ckpipe.checksum import CHUNK_BYTES, chunk_count
from ckpipe.manifest import EntryRow, FileRow, Layout, Part

ALLOWANCE_BYTES = 2 * CHUNK_BYTES
"""How much more than a contiguous need may be read, unless a tenth of it is more."""

GAP_BYTES = 256 << 10
"""Gaps up to this size are read over rather than skipped with another request."""


class Need(NamedTuple):
    """Bytes that a load wants.

    Args:
        entry: The number of the entry.
        lo: The first byte, from the entry's start.
        hi: Behind the last byte.
    """

    entry: int
    lo: int
    hi: int


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


@dataclass(frozen=True, slots=True)
class Read:
    """One request for a range of a data file.

    Args:
        file: The number of the file.
        offset: Where the range begins in the file, in bytes.
        size: Its length in bytes.
        pieces: The chunks in it, by position.
    """

    file: int
    offset: int
    size: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """What shapes the reads.

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


class PartData:
    """Where one part's entries and their checksums are.

    Args:
        part: The part.
        layout: Its layout.
    """

    def __init__(self, part: Part, layout: Layout) -> None:
        self.rank = part.rank
        self.files: tuple[FileRow, ...] = part.files
        self.entries: tuple[EntryRow, ...] = layout.entries
        self.checksums = part.checksums
        headers = [file.header_bytes for file in part.files]
        self.begins = [headers[entry.file] + entry.offset for entry in layout.entries]
        counts = (chunk_count(entry.nbytes) for entry in layout.entries)
        self.first_sums = list(accumulate(counts, initial=0))

    def all_needs(self) -> list[Need]:
        """Every byte of every entry."""
        return [Need(n, 0, entry.nbytes) for n, entry in enumerate(self.entries)]


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
        """How many more bytes may be read that nobody needs."""
        allowance = max(ALLOWANCE_BYTES * self.needs, self.needed // 10)
        return allowance - (self.end - self.begin - self.needed)

    def add(self, need: Need, begin: int, lo: int, hi: int) -> None:
        """Takes in a need of an entry at ``begin`` that is widened to ``[lo, hi)``."""
        if begin + need.lo > self.need_end:
            self.needs += 1
            self.needed += need.hi - need.lo
        else:
            self.needed += max(0, begin + need.hi - self.need_end)
        self.need_end = max(self.need_end, begin + need.hi)
        self.end = max(self.end, begin + hi)
        if self.parts and self.parts[-1][0] == need.entry and self.parts[-1][2] >= lo:
            _, first, last = self.parts[-1]
            self.parts[-1] = (need.entry, first, max(last, hi))
        else:
            self.parts.append((need.entry, lo, hi))


def plan_reads(data: PartData, needs: Iterable[Need], limits: ReadLimits) -> list[Read]:
    """Plans the reads that bring what is needed, by file and offset.

    Args:
        data: Where the entries are.
        needs: What is needed, in any order; needs may overlap, and empty ones are left out.
        limits: What shapes the reads.
    """
    return [
        read
        for span in _joined(_spans(data, needs))
        for read in _aligned(list(_cut(data, span, limits)), span, data, limits.alignment)
    ]


def batched(reads: Sequence[Read], nbytes: int) -> Iterator[list[Read]]:
    """Groups reads that follow one another without a gap, up to about so many bytes together.

    What a store has in memory is looked at a group at a time, since no buffer limits its size.
    """
    batch: list[Read] = []
    for read in reads:
        if batch:
            first, last = batch[0], batch[-1]
            follows = read.file == last.file and read.offset <= last.offset + last.size
            if not follows or read.offset + read.size - first.offset > nbytes:
                yield batch
                batch = []
        batch.append(read)
    if batch:
        yield batch


def _spans(data: PartData, needs: Iterable[Need]) -> Iterator[_Span]:
    entries, begins = data.entries, data.begins
    span: _Span | None = None
    wanted = [need for need in needs if need.lo < need.hi]
    wanted.sort(key=lambda need: (entries[need.entry].file, begins[need.entry] + need.lo))
    for need in wanted:
        row, begin = entries[need.entry], begins[need.entry]
        lo = need.lo - need.lo % CHUNK_BYTES
        hi = min(row.nbytes, -(-need.hi // CHUNK_BYTES) * CHUNK_BYTES)
        if span is None or span.file != row.file or begin + lo > span.end:
            if span is not None:
                yield span
            span = _Span(row.file, begin + lo, begin + hi)
        span.add(need, begin, lo, hi)
    if span is not None:
        yield span


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


def _cut(data: PartData, span: _Span, limits: ReadLimits) -> Iterator[Read]:
    """Packs a span's chunks greedily, with room for both ends to be aligned."""
    room = limits.read_bytes - 2 * limits.alignment
    pieces: list[Piece] = []
    start = end = span.begin
    for entry, first, last in span.parts:
        begin, sums = data.begins[entry], data.first_sums[entry]
        for lo in range(first, last, CHUNK_BYTES):
            hi = min(lo + CHUNK_BYTES, last)
            if pieces and begin + hi - start > room:
                yield Read(span.file, start, end - start, tuple(pieces))
                pieces = []
            if not pieces:
                start = begin + lo
            checksum = data.checksums[sums + lo // CHUNK_BYTES]
            end = begin + hi
            pieces.append(Piece(entry, lo, hi, begin + lo - start, checksum))
    yield Read(span.file, start, end - start, tuple(pieces))


def _aligned(reads: list[Read], span: _Span, data: PartData, alignment: int) -> Iterator[Read]:
    if alignment <= 1 or 2 * alignment * len(reads) > span.spare:
        yield from reads
        return
    size = data.files[span.file].size
    for read in reads:
        skipped = read.offset % alignment
        end = min(size, -(-(read.offset + read.size) // alignment) * alignment)
        pieces = read.pieces
        if skipped:
            pieces = tuple(Piece(e, lo, hi, at + skipped, crc) for e, lo, hi, at, crc in pieces)
        offset = read.offset - skipped
        yield Read(read.file, offset, end - offset, pieces)
