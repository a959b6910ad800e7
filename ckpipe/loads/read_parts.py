"""Reads for stores that are asked in ranges: cut where parts meet, and smaller towards the end.

Theory. A large object was sent in parts, and stores keep parts apart: a range across an edge has
the store open two of them. So ranges of the size of parts begin and end where parts do, as Amazon
advises ("Performance design patterns for Amazon S3", byte-range fetches); on SeaweedFS ranges that
lay 4 KiB beside the edges took a fourth longer. Chunks do not end there, so a chunk across an edge
comes in fragments, and is put together before it is verified (:mod:`ckpipe.loads.seams`).

Lanes take reads in turn, so that when none is left each has between nothing and a whole read to
go, and the last one alone at what one connection brings. A read that is no more than twice a
lane's share of what is left keeps the difference small ("guided self-scheduling", Polychronopoulos
and Kuck, IEEE Transactions on Computers, 1987). Requests cost time too, 5 ms of processors on both
ends together where that was measured, so there is a least size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from ckpipe.format.checksum import CHUNK_BYTES
from ckpipe.loads.load_planning import Fragment, Piece, Read, batched

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
    """Where to cut a range further, so that its pieces are of about the same size."""
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
    fragments: list[Fragment] = []
    for chunk in chunks:
        at, piece = chunk
        if begin <= at and _end(chunk) <= end:
            pieces.append(piece._replace(at=at - begin))
            continue
        first, last = max(at, begin), min(_end(chunk), end)
        fragments.append(Fragment(piece, first - at, first - begin, last - first))
    return Read(file, begin, end - begin, tuple(pieces), tuple(fragments))


__all__ = ["LEAST_BYTES", "in_parts"]
