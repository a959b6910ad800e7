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
from functools import partial
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np

from ckpipe.format.checksum import CHUNK_BYTES, chunk_count
from ckpipe.format.manifest import Bundle, EntryRow, FileRow, Layout, Part

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


class Fragment(NamedTuple):
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
new_need = partial(tuple.__new__, Need)


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
    fragments: tuple[Fragment, ...] = ()


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


class EntryTable:
    """Entries of data files and their checksums, by numbers of the table's own.

    Attributes:
        files: The data files.
        ranks: For each file, the rank that wrote it.
        entries: The entries.
        sizes: For each entry, how many bytes it has.
        entry_files: For each entry, the number of its file.
        begins: For each entry, where it begins in its file, in bytes.
        checksums: CRC-32C of every mebibyte of every entry.
        first_sums: For each entry, the number of its first checksum.
    """

    files: Sequence[FileRow]
    ranks: Sequence[int]
    entries: Sequence[EntryRow]
    sizes: Sequence[int]
    entry_files: Sequence[int]
    begins: Sequence[int]
    checksums: Sequence[int]
    first_sums: Sequence[int]

    def number(self, part: int, entry: int) -> int:
        """The number in the table of an entry of a part, which exists."""
        raise NotImplementedError


class PartData(EntryTable):
    """One part's entries, by their own numbers.

    Args:
        part: The part.
        layout: Its layout.
    """

    def __init__(self, part: Part, layout: Layout) -> None:
        self.files = part.files
        self.ranks = [part.rank] * len(part.files)
        self.entries = layout.entries
        self.sizes = [entry.nbytes for entry in layout.entries]
        self.entry_files = [entry.file for entry in layout.entries]
        self.checksums = part.checksums
        headers = [file.header_bytes for file in part.files]
        self.begins = [headers[entry.file] + entry.offset for entry in layout.entries]
        self.first_sums = list(accumulate(map(chunk_count, self.sizes), initial=0))

    def number(self, part: int, entry: int) -> int:
        """See :meth:`EntryTable.number`."""
        return entry

    def all_needs(self) -> list[Need]:
        """Every byte of every entry."""
        return [Need(n, 0, entry.nbytes) for n, entry in enumerate(self.entries)]


class JoinedData(EntryTable):
    """Entries of several parts; those of a part are numbered when the first is asked for.

    A load of one rank touches few of the parts, so nothing is done for the rest.

    Args:
        bundle: The bundle that has the parts.
    """

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle
        self.files: list[FileRow] = []
        self.ranks: list[int] = []
        self.entries: list[EntryRow] = []
        self.sizes: list[int] = []
        self.entry_files: list[int] = []
        self.begins: list[int] = []
        self.checksums: list[int] = []
        self.first_sums: list[int] = []
        self._bases: dict[int, int] = {}

    def number(self, part: int, entry: int) -> int:
        """See :meth:`EntryTable.number`."""
        base = self._bases.get(part)
        return (self._join(part) if base is None else base) + entry

    def _join(self, number: int) -> int:
        part = self._bundle.parts[number]
        base = self._bases[number] = len(self.entries)
        data = PartData(part, self._bundle.layouts[part.layout])
        file, checksum = len(self.files), len(self.checksums)
        self.files += data.files
        self.ranks += data.ranks
        self.entries += data.entries
        self.sizes += data.sizes
        self.entry_files += [file + each for each in data.entry_files]
        self.begins += data.begins
        self.checksums += data.checksums
        self.first_sums += [checksum + each for each in data.first_sums[:-1]]
        return base


def entry_table(bundle: Bundle) -> EntryTable:
    """The entries of all parts of a bundle."""
    if len(bundle.parts) > 1:
        return JoinedData(bundle)
    (part,) = bundle.parts
    return PartData(part, bundle.layouts[part.layout])


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
    span: _Span | None = None
    before, upto = -1, 0
    for file, entry, lo, hi, begin, first, last in _sorted_needs(data, needs):
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


def _sorted_needs(data: EntryTable, needs: Iterable[Need]) -> Iterator[tuple[int, ...]]:
    """What is needed, by place: file, entry, both ends, place in the file, ends of its chunks."""
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
    return zip(*(column[order].tolist() for column in columns), strict=True)


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
