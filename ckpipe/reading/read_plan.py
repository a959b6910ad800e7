"""Plan the ranges of data files that a load reads: pure, the same for a load and a ``verify``.

Theory. Bytes can be verified only by whole chunks, so every need is widened to its chunks, and no
read cuts through a chunk. Needs that touch, or nearly do, are read together. Widening, gaps and
alignment read bytes that are not needed. All three draw on one allowance: a tenth of a contiguous
need of 20 MiB or more, 2 MiB for a smaller one. Chunks cost at most 2 MiB less two bytes of it for
each contiguous need, so the allowance is never overdrawn; gaps and alignment take the rest. Widened
needs are merged first, so that no entry's bytes are read twice, except the pages at which two
aligned reads meet.

Stores that are read by range requests. A large object was sent in parts (multipart upload), and
stores keep the parts apart: for a range across a boundary the store opens two of them. So ranges of
the size of parts begin and end at the boundaries of parts, as Amazon advises ("Performance design
patterns for Amazon S3", byte-range fetches); on SeaweedFS ranges that were 4 KiB off the boundaries
took a fourth longer. Chunks do not end at these boundaries, so a chunk across a boundary arrives in
several reads, and is assembled before it is verified.

Lanes take the next read when they are free. So when none is left, each lane still has between
nothing and a whole read to do, and the last one goes on alone at the rate of one connection. A read
of at most twice a lane's share of the remaining bytes keeps the difference small ("guided
self-scheduling", Polychronopoulos and Kuck, IEEE Transactions on Computers, 1987). Requests cost
time too, 5 ms of CPU at both ends together in a measurement, so reads have a least size.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np

from ckpipe.format.checksum import CHUNK_BYTES
from ckpipe.format.entry_table import EntryTable

ALLOWANCE_BYTES = 2 * CHUNK_BYTES
"""Bytes that may be read beyond a contiguous need, unless a tenth of the need is more."""

GAP_BYTES = 256 << 10
"""Bytes of the largest gap that is read rather than skipped with another request."""

LEAST_BYTES = 8 << 20
"""Bytes of which about half is the least size of reads that keep lanes busy at the end."""


class Need(NamedTuple):
    """Bytes that a load wants.

    Args:
        entry: The number of the entry.
        lo: Their start in the entry, in bytes.
        hi: Their end in the entry, in bytes; exclusive.
    """

    entry: int
    lo: int
    hi: int


Column = np.ndarray[Any, np.dtype[np.int64]]


class ReadChunks(NamedTuple):
    """The chunks of entries to read, by file and position, as columns.

    Args:
        entry: The number of the entry.
        lo: Its start in the entry, in bytes.
        at: Its start in the file, in bytes.
        end: Its end in the file, in bytes.
        checksum: Its expected CRC-32C; 0 in a file without checksums.
    """

    entry: Column
    lo: Column
    at: Column
    end: Column
    checksum: array[int]


class Read(NamedTuple):
    """One request for a range of a data file.

    Args:
        file: The number of the file.
        offset: The start of the range in the file, in bytes.
        size: Its length in bytes.
        first: The number of the first whole chunk in it.
        stop: The number behind the last one.
        cut: The chunks across its ends; other reads have the rest of them.
        cached: Whether the store has it in memory; the plan does not know.
    """

    file: int
    offset: int
    size: int
    first: int = 0
    stop: int = 0
    cut: tuple[int, ...] = ()
    cached: bool = False


def least_read_bytes(alignment: int) -> int:
    """Return the least size of reads: any chunk fits into it, with both ends aligned."""
    return CHUNK_BYTES + 2 * alignment


@dataclass(slots=True)
class _Span:
    """Consecutive chunks of a file, and the needed bytes in them."""

    file: int
    begin: int
    end: int
    needed: int = 0
    needs: int = 0
    need_end: int = -1
    ranges: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def chunk_count(self) -> int:
        """The number of its chunks."""
        return sum(-(-(last - first) // CHUNK_BYTES) for _, first, last in self.ranges)

    @property
    def spare(self) -> int:
        """The bytes that may still be read beyond the needs."""
        allowance = max(ALLOWANCE_BYTES * self.needs, self.needed // 10)
        return allowance - (self.end - self.begin - self.needed)

    def add(self, begin: int, end: int) -> None:
        """Count a need at ``[begin, end)`` of the file."""
        known = self.need_end
        if begin > known:
            self.needs += 1
            self.needed += end - begin
            self.need_end = end
        elif end > known:
            self.needed += end - known
            self.need_end = end


def plan_reads(
    data: EntryTable, needs: Iterable[Need], read_bytes: int, alignment: int, lanes: int = 1
) -> tuple[ReadChunks, list[Read]]:
    """Plan the reads for some needs, by file and offset.

    Args:
        data: The table of the entries.
        needs: The needed bytes, in any order; needs may overlap, and empty ones are skipped.
        read_bytes: The largest size of a read, unless one chunk alone is larger. If the store has
            no alignment, reads end at the boundaries of parts of this size.
        alignment: Offsets and sizes become multiples of this, where the allowance permits.
        lanes: The number of threads that take the reads.
    """
    spans = list(_joined(_spans(data, needs)))
    chunks = _chunks(data, spans)
    left = sum(span.end - span.begin for span in spans)
    # A store with alignment is a disk, whose bandwidth all lanes share to the end.
    in_parts = alignment == 1 and read_bytes >= 2 * CHUNK_BYTES
    reads: list[Read] = []
    stop = 0
    for span in spans:
        first, stop = stop, stop + span.chunk_count
        at, end = chunks.at[first:stop], chunks.end[first:stop]
        if in_parts:
            cuts = _cuts_at_parts(span, read_bytes, left, lanes)
        else:
            cuts = _cuts_at_chunks(at, end, read_bytes - 2 * (alignment - 1))
        step = alignment if 2 * alignment * (len(cuts) - 1) <= span.spare else 1
        reads += _reads(span.file, first, at, end, cuts, step, data.files[span.file].size)
        left -= span.end - span.begin
    return chunks, reads


def _spans(data: EntryTable, needs: Iterable[Need]) -> Iterator[_Span]:
    """Widen needs to whole chunks, and merge those that touch."""
    table = np.fromiter(chain.from_iterable(needs), np.int64).reshape(-1, 3)
    entry, lo, hi = table[table[:, 1] < table[:, 2]].T
    numbers = entry.tolist()
    file = np.array([data.entry_files[n] for n in numbers], np.int64)
    begin = np.array([data.begins[n] for n in numbers], np.int64) + lo
    size = np.array([data.sizes[n] for n in numbers], np.int64)
    first = lo - lo % CHUNK_BYTES
    last = np.minimum(size, -(-hi // CHUNK_BYTES) * CHUNK_BYTES)
    order = np.lexsort((begin, file))
    columns = (file, entry, begin, begin + hi - lo, begin - lo, first, last)
    span: _Span | None = None
    for of_file, number, low, high, base, chunk_lo, chunk_hi in zip(
        *(column[order].tolist() for column in columns), strict=True
    ):
        if span is None or span.file != of_file or base + chunk_lo > span.end:
            if span is not None:
                yield span
            span = _Span(of_file, base + chunk_lo, base + chunk_hi)
        span.add(low, high)
        span.end = max(span.end, base + chunk_hi)
        if span.ranges and span.ranges[-1][0] == number and chunk_lo <= span.ranges[-1][2]:
            _, since, until = span.ranges.pop()
            span.ranges.append((number, since, max(until, chunk_hi)))
        else:
            span.ranges.append((number, chunk_lo, chunk_hi))
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
                last.ranges += span.ranges
                continue
        if last is not None:
            yield last
        last = span
    if last is not None:
        yield last


def _chunks(data: EntryTable, spans: Iterable[_Span]) -> ReadChunks:
    """Cut the ranges of spans into their chunks."""
    flat = chain.from_iterable(chain.from_iterable(span.ranges for span in spans))
    ranges = np.fromiter(flat, np.int64).reshape(-1, 3)
    counts = -(-(ranges[:, 2] - ranges[:, 1]) // CHUNK_BYTES)
    entry, first, last = np.repeat(ranges, counts, axis=0).T
    lo = first + CHUNK_BYTES * (np.arange(len(entry)) - np.repeat(counts.cumsum() - counts, counts))
    numbers = entry.tolist()
    begins = np.array([data.begins[n] for n in numbers], np.int64)
    sums = np.array([data.first_sums[n] for n in numbers], np.int64) + lo // CHUNK_BYTES
    checksum = array("I", bytes(4 * len(entry)))
    if data.verified:
        checksum = array("I", [data.checksums[n] for n in sums.tolist()])
    return ReadChunks(entry, lo, begins + lo, begins + np.minimum(lo + CHUNK_BYTES, last), checksum)


def _cuts_at_chunks(at: Column, end: Column, room: int) -> list[int]:
    """Return the bounds of greedily packed reads, each within the room that alignment leaves."""
    cuts, number = [int(at[0])], 0
    while end[-1] > cuts[-1] + room:
        # A chunk that is larger than the room is read by itself.
        number = max(int(np.searchsorted(end, cuts[-1] + room, "right")), number + 1)
        if number == len(at):
            break
        cuts.append(int(at[number]))
    return [*cuts, int(end[-1])]


def _cuts_at_parts(span: _Span, part_bytes: int, left: int, lanes: int) -> list[int]:
    """Return the bounds of reads that end at parts' boundaries and fit a lane's share.

    Args:
        span: The span to cut.
        part_bytes: The size of parts; they end at its multiples.
        left: The bytes of this span and of those behind it.
        lanes: The number of threads that take the reads.
    """
    if span.end - span.begin <= min(part_bytes, max(LEAST_BYTES, 2 * left // lanes)):
        return [span.begin, span.end]  # One request across a boundary is cheaper than two.
    # A boundary with a chunk's size or less behind it is ignored.
    first_edge = (span.begin // part_bytes + 1) * part_bytes
    edges = range(first_edge, span.end - CHUNK_BYTES, part_bytes)
    cuts = [span.begin]
    for begin, end in pairwise([span.begin, *edges, span.end]):
        count = -(-(end - begin) // min(part_bytes, max(LEAST_BYTES, 2 * left // lanes)))
        for number in range(1, count):
            at = begin + (end - begin) * number // count
            cuts.append((at + CHUNK_BYTES // 2) // CHUNK_BYTES * CHUNK_BYTES)
        cuts.append(end)
        left -= end - begin
    return cuts


def _reads(
    file: int,
    base: int,
    at: Column,
    end: Column,
    cuts: Sequence[int],
    alignment: int,
    size: int,
) -> Iterator[Read]:
    """Yield the reads between cuts, without empty ones.

    Args:
        file: The number of the file.
        base: The number of the first chunk of the span.
        at: The start of each of its chunks in the file, in bytes.
        end: The end of each of its chunks in the file, in bytes.
        cuts: The bounds of the reads.
        alignment: Offsets and sizes become multiples of this.
        size: The size of the file.
    """
    first = 0
    for begin, close in pairwise(cuts):
        stop = int(np.searchsorted(at, close))
        if first == stop:
            continue
        low, high = max(begin, int(at[first])), min(close, int(end[stop - 1]))
        head, tail = int(at[first] < low), int(end[stop - 1] > high)
        if stop - first == 1 and head and tail:
            tail = 0
        whole = range(base + first + head, base + stop - tail)
        cut = (*range(base + first, whole.start), *range(whole.stop, base + stop))
        offset = low - low % alignment
        until = min(size, -(-high // alignment) * alignment)
        yield Read(file, offset, until - offset, whole.start, whole.stop, cut)
        first = stop - 1 if end[stop - 1] > close else stop
