"""Smaller reads at the end of a load, so that all of its lanes end at about the same time.

Theory. Lanes take reads in turn, so that when none is left each has between nothing and a whole
read to go, and the last one alone at what one connection brings. A read that is no more than
twice a lane's share of what is left keeps the difference small ("guided self-scheduling",
Polychronopoulos and Kuck, IEEE Transactions on Computers, 1987). Requests cost time too, 5 ms
of processors on both ends together where that was measured, so there is a least size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ckpipe.loads.load_planning import Read

LEAST_BYTES = 8 << 20
"""Reads are not made smaller than about this."""


def with_finer_tail(reads: Sequence[Read], lanes: int) -> Iterator[Read]:
    """The same reads, the last of them cut between their chunks.

    What lies between chunks at a cut is not read.

    Args:
        reads: Reads in the order in which they are taken.
        lanes: How many take them.
    """
    left = sum(read.size for read in reads)
    for read in reads:
        most = max(LEAST_BYTES, 2 * left // lanes)
        yield from _cut(read, -(-read.size // most))
        left -= read.size


def _cut(read: Read, count: int) -> Iterable[Read]:
    """Cuts a read into so many of about the same size, or fewer if there are not as many chunks."""
    if count <= 1:
        return [read]
    share = -(-read.size // count)
    parts: list[Read] = []
    first = 0
    for number in range(1, len(read.pieces)):
        if read.pieces[number].at - read.pieces[first].at >= share:
            parts.append(_part(read, first, number))
            first = number
    return [*parts, _part(read, first, len(read.pieces))] if parts else [read]


def _part(read: Read, first: int, last: int) -> Read:
    pieces = read.pieces[first:last]
    begin = pieces[0].at
    end = pieces[-1].at + pieces[-1].hi - pieces[-1].lo
    moved = tuple(piece._replace(at=piece.at - begin) for piece in pieces)
    return Read(read.file, read.offset + begin, end - begin, moved)


__all__ = ["LEAST_BYTES", "with_finer_tail"]
