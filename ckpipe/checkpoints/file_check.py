"""Whether a data file is what was saved, found out from its blocks in any order: pure.

The header has one checksum and every entry one for each mebibyte, counted from its own start, so
blocks of a file cut through what the checksums cover. Each block is cut into pieces that lie in
one mebibyte of the header or of one entry, and the sums of pieces are joined.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ckpipe.format.checksum import (
    CHUNK_BYTES,
    ChunkSums,
    SumTable,
    chunk_count,
    chunk_spans,
    combine,
    crc32c,
)
from ckpipe.loads.entry_tables import PartData


@dataclass(frozen=True, slots=True)
class PieceSum:
    """The checksum of bytes ``[lo, hi)`` of a member of a data file.

    Args:
        member: 0 for the header, 1 and up for the file's entries in the order of their offsets.
        lo: The first byte, from the member's start.
        hi: Behind the last byte.
        value: The CRC-32C.
    """

    member: int
    lo: int
    hi: int
    value: int


class FileCheck:
    """Compares the blocks of a data file with the checksums of its checkpoint.

    Args:
        data: What the checkpoint says of its rank's files.
        file: The number of the file.
    """

    def __init__(self, data: PartData, file: int) -> None:
        self._row = data.files[file]
        numbers = [n for n, entry in enumerate(data.entries) if entry.file == file and entry.nbytes]
        numbers.sort(key=lambda n: data.begins[n])
        self._begins = [0, *(data.begins[n] for n in numbers)]
        self._sizes = [self._row.header_bytes, *(data.entries[n].nbytes for n in numbers)]
        self._names = ["its header", *(repr(data.entries[n].name) for n in numbers)]
        self._expected = [
            data.checksums[data.first_sums[n] : data.first_sums[n + 1]] for n in numbers
        ]
        self._sums = ChunkSums(SumTable(self._sizes))

    @property
    def size(self) -> int:
        """The size of the file in bytes."""
        return self._row.size

    def sums_of(self, offset: int, block: memoryview) -> list[PieceSum]:
        """The checksums of the pieces of a block; changes nothing, so any thread may call it.

        Args:
            offset: Where the block begins in the file.
            block: Its bytes.
        """
        return [
            PieceSum(member, lo, hi, crc32c(block[at : at + hi - lo]))
            for member, lo, hi, at in self._pieces(offset, offset + len(block))
        ]

    def _pieces(self, begin: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        at = begin
        while at < end:
            member = bisect_right(self._begins, at) - 1
            start = self._begins[member]
            stop = min(end, start + self._sizes[member])
            if stop <= at:
                return  # behind the last entry: the size of the file tells of such bytes
            for _, lo, hi in chunk_spans(at - start, stop - start):
                yield member, lo, hi, start + lo - begin
            at = stop

    def add(self, pieces: Sequence[PieceSum]) -> None:
        """Takes the sums of a block; each byte of the file once."""
        for piece in pieces:
            self._sums.add(piece.member, piece.lo, piece.hi, piece.value)

    def fault(self) -> str | None:
        """What is not as it was saved, once every block was taken; None if all is."""
        found = self._sums.finished()
        headers = chunk_count(self._row.header_bytes)
        if _joined(found[:headers], self._row.header_bytes) != self._row.header_crc32c:
            return self._names[0]
        at = headers
        for name, expected in zip(self._names[1:], self._expected, strict=True):
            if tuple(found[at : at + len(expected)]) != tuple(expected):
                return name
            at += len(expected)
        return None


def _joined(sums: Sequence[int], nbytes: int) -> int:
    total = 0
    for number, value in enumerate(sums):
        total = combine(total, value, min(CHUNK_BYTES, nbytes - number * CHUNK_BYTES))
    return total


__all__ = ["FileCheck", "PieceSum"]
