"""CRC-32C (Castagnoli, RFC 3720 appendix B.4) of bytes and of the chunks of an entry.

The AWS common runtime computes single checksums. It uses carry-less multiplication where the
processor has it, and releases the GIL for large buffers. It is imported at first use, since its
import costs as much as the rest of ckpipe. Many checksums are computed in one call
(:mod:`ckpipe.memory.native`).

Blocks of a save are checksummed elsewhere: ``save/program.py`` has ``memory/native.py`` do so while
it copies host memory, and ``save/serialize.py`` computes the checksums that the copy did not.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from ckpipe.memory.native import address_of, crc32c_each

CHUNK_BYTES = 1 << 20
"""Bytes of a chunk: an entry has one checksum for each mebibyte, counted from its own start."""


@functools.cache
def _runtime() -> tuple[Callable[..., int], Callable[..., int]]:
    from awscrt import checksums

    return checksums.crc32c, checksums.combine_crc32c


def prepare() -> None:
    """Import the AWS common runtime, unless it is imported already.

    If the program forks during a thread's import, the child inherits an import lock that is never
    released, and every checksum there would wait for it.
    """
    _runtime()


def crc32c(data: bytes | memoryview, previous: int = 0) -> int:
    """Compute the CRC-32C of ``data``, continued from ``previous``."""
    value: int = _runtime()[0](data, previous)
    return value


def crc32c_of_each(
    blocks: Sequence[tuple[memoryview, Sequence[int], Sequence[int]]],
) -> list[list[int]]:
    """Compute the CRC-32C of each range of each block, in one call.

    Args:
        blocks: Flat bytes, with the starts and the ends of the ranges in them.

    Raises:
        ValueError: If a range is not within its bytes.
    """
    import numpy as np

    sources, sizes = array("q"), array("q")
    for data, *bounds in blocks:
        begins, ends = (np.asarray(each, np.int64) for each in bounds)
        if len(begins) != len(ends) or (begins > ends).any():
            raise ValueError("ranges that end before they begin have no checksum")
        if begins.min(initial=0) < 0 or ends.max(initial=0) > len(data):
            raise ValueError(f"ranges exceed the {len(data)} bytes of their block")
        base = address_of(data) if len(data) else 0
        sources.frombytes((begins + base).tobytes())
        sizes.frombytes((ends - begins).tobytes())
    sums = crc32c_each(sources, sizes).tolist()
    at = list(accumulate((len(begins) for _, begins, _ in blocks), initial=0))
    return [sums[first:last] for first, last in pairwise(at)]


def combine(first: int, second: int, second_bytes: int) -> int:
    """Compute the CRC-32C of two byte strings joined, from both sums and the second's length."""
    value: int = _runtime()[1](first, second, second_bytes)
    return value


def chunk_count(nbytes: int) -> int:
    """Return the number of checksums of an entry of ``nbytes``."""
    return -(-nbytes // CHUNK_BYTES)


def chunk_spans(lo: int, hi: int) -> Iterator[tuple[int, int, int]]:
    """Cut the byte range ``[lo, hi)`` of an entry at its chunk boundaries.

    Yields:
        The number of the chunk, and the start and end of its range in the entry.
    """
    while lo < hi:
        chunk = lo // CHUNK_BYTES
        end = min(hi, (chunk + 1) * CHUNK_BYTES)
        yield chunk, lo, end
        lo = end


@dataclass(frozen=True, slots=True)
class BlockCuts:
    """The ranges of a block to checksum, and the places of their checksums in the table of all.

    Args:
        begins: The start of each range in the block, in bytes.
        ends: The end of each range in the block, in bytes.
        slots: For each range, the number of its chunk's checksum in the table of all entries.
        parts: Ranges that are no whole chunks, by their numbers: the size of the chunk, and the
            start and end of the range in the entry.
    """

    begins: Sequence[int]
    ends: Sequence[int]
    slots: Sequence[int]
    parts: Mapping[int, tuple[int, int, int]]


class SumTable:
    """The places of each entry's checksums in the list of all checksums.

    The table depends on the sizes of the entries alone, so that saves of one structure share it.

    Args:
        sizes: Bytes of each entry.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes
        self._first = list(accumulate(map(chunk_count, sizes), initial=0))

    def __len__(self) -> int:
        return self._first[-1]

    def cuts(self, spans: Iterable[tuple[int, int, int, int]]) -> BlockCuts:
        """Cut a block into ranges to checksum.

        Args:
            spans: The ranges of entries in it: number of the entry, start and end in the entry,
                and start in the block.
        """
        begins, ends, slots = array("q"), array("q"), array("q")
        parts: dict[int, tuple[int, int, int]] = {}
        for entry, first, last, at in spans:
            for chunk, lo, hi in chunk_spans(first, last):
                size = min(CHUNK_BYTES, self.sizes[entry] - chunk * CHUNK_BYTES)
                if hi - lo < size:
                    parts[len(slots)] = (size, lo, hi)
                begins.append(at + lo - first)
                ends.append(at + hi - first)
                slots.append(self._first[entry] + chunk)
        return BlockCuts(begins, ends, slots, parts)


class ChunkSums:
    """The checksums of one rank's entries, collected block by block in any order.

    A chunk that straddles two blocks arrives as two ranges, perhaps the second first. Their sums
    are combined once both are there.

    Args:
        table: The places of the checksums.
    """

    def __init__(self, table: SumTable) -> None:
        self._sums = [_ABSENT] * len(table)
        self._partial: dict[int, dict[int, tuple[int, int]]] = {}

    def add_block(self, cuts: BlockCuts, values: Sequence[int]) -> None:
        """Add the checksums of a block's ranges, in their order.

        Raises:
            AssertionError: If their number is not that of the ranges.
        """
        if len(values) != len(cuts.begins):  # no assert: this must hold under python -O too
            raise AssertionError("a block has other ranges than were checksummed")
        for number, (slot, value) in enumerate(zip(cuts.slots, values, strict=True)):
            if number not in cuts.parts:
                self._sums[slot] = value
                continue
            size, lo, hi = cuts.parts[number]
            pieces = self._partial.setdefault(slot, {})
            pieces[lo] = (hi, value)
            if sum(piece_end - begin for begin, (piece_end, _) in pieces.items()) == size:
                total = 0
                for begin, (end, part) in sorted(pieces.items()):
                    total = combine(total, part, end - begin)
                self._sums[slot] = total
                del self._partial[slot]

    def finished(self) -> list[int]:
        """Return all checksums, entry by entry.

        Raises:
            AssertionError: If the checksum of a range is missing.
        """
        if _ABSENT in self._sums:  # no assert: this must hold under python -O too
            raise AssertionError("a chunk of the data file was never checksummed")
        return self._sums


_ABSENT = -1
"""Marks a checksum that is not there yet."""
