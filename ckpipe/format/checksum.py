"""CRC-32C (Castagnoli, RFC 3720 appendix B.4), of bytes and of the chunks of an entry.

The sums are computed by the AWS common runtime, which uses carry-less multiplication where the
processor has it and does not hold the interpreter's lock on large buffers. It is imported at
first use, since importing it costs as much as the rest of ckpipe.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

CHUNK_BYTES = 1 << 20
"""Every entry has one checksum for each mebibyte, counted from the entry's own start."""


@functools.cache
def _runtime() -> tuple[Callable[..., int], Callable[..., int]]:
    from awscrt import checksums

    return checksums.crc32c, checksums.combine_crc32c


def prepare() -> None:
    """Imports what computes the sums, if that has not happened yet.

    A thread that is in the middle of an import when the program forks leaves the child with a
    lock that nobody gives back, and every sum there would wait for it.
    """
    _runtime()


def crc32c(data: bytes | memoryview, previous: int = 0) -> int:
    """The CRC-32C of ``data``, going on from ``previous``."""
    value: int = _runtime()[0](data, previous)
    return value


def combine(first: int, second: int, second_bytes: int) -> int:
    """The CRC-32C of two pieces joined, from the sums of both and the length of the second."""
    value: int = _runtime()[1](first, second, second_bytes)
    return value


def chunk_count(nbytes: int) -> int:
    """How many checksums an entry of ``nbytes`` has."""
    return -(-nbytes // CHUNK_BYTES)


def chunk_spans(lo: int, hi: int) -> Iterator[tuple[int, int, int]]:
    """Cuts the byte range ``[lo, hi)`` of an entry at its chunk boundaries.

    Yields:
        The number of the chunk, and the start and end of the piece in the entry.
    """
    while lo < hi:
        chunk = lo // CHUNK_BYTES
        end = min(hi, (chunk + 1) * CHUNK_BYTES)
        yield chunk, lo, end
        lo = end


class ChunkSums:
    """The checksums of one data file's entries, put together from pieces in any order.

    A chunk that straddles two blocks arrives as two pieces, perhaps the second first; the sums
    of the pieces are combined once both are there.

    Args:
        sizes: Bytes of each entry.
    """

    def __init__(self, sizes: list[int]) -> None:
        self._first: list[int] = []
        total = 0
        for size in sizes:
            self._first.append(total)
            total += chunk_count(size)
        self._sums: list[int | None] = [None] * total
        self._partial: dict[int, dict[int, tuple[int, int]]] = {}
        self._sizes = sizes

    def add(self, entry: int, lo: int, hi: int, value: int) -> None:
        """Takes the sum of the piece ``[lo, hi)`` of an entry, which lies in one chunk."""
        chunk = lo // CHUNK_BYTES
        start, end = chunk * CHUNK_BYTES, min((chunk + 1) * CHUNK_BYTES, self._sizes[entry])
        slot = self._first[entry] + chunk
        if (lo, hi) == (start, end):
            self._sums[slot] = value
            return
        pieces = self._partial.setdefault(slot, {})
        pieces[lo] = (hi, value)
        if sum(piece_end - piece_lo for piece_lo, (piece_end, _) in pieces.items()) == end - start:
            self._sums[slot] = _join(pieces)
            del self._partial[slot]

    def finished(self) -> list[int]:
        """All sums, entry by entry.

        Raises:
            AssertionError: If a piece never came.
        """
        found = [value for value in self._sums if value is not None]
        if len(found) < len(self._sums):  # no assert: this must hold under python -O too
            raise AssertionError("a chunk of the data file was never checksummed")
        return found


def _join(pieces: dict[int, tuple[int, int]]) -> int:
    total = 0
    for lo in sorted(pieces):
        hi, value = pieces[lo]
        total = combine(total, value, hi - lo)
    return total
