"""Verify what was read, and hand it to its destinations."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from ckpipe.format.checksum import CHUNK_BYTES, Parts, crc32c, crc32c_of_each
from ckpipe.loads.destinations import Destination, RawBytes
from ckpipe.loads.load_planning import Fragment, Piece, Read
from ckpipe.loads.seams import Seams
from ckpipe.memory.addresses import address_of
from ckpipe.memory.raw_memory import copy_each

_LEAST_TOGETHER = 16
"""How many chunks a megabyte must have for them to be verified and copied together: a call that
does that for several costs as much as a few calls for one."""

Destinations = Mapping[int, Sequence[Destination]]
"""For each entry that is asked for, by number, who takes its bytes."""


@dataclass(slots=True)
class ReadTally:
    """How much was read so far, and whether anything was delivered.

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
    """Small chunks as many together as a large one has bytes, which a cache holds; others alone."""
    count = 1
    if len(pieces) >= _LEAST_TOGETHER:
        nbytes = pieces[-1].at + pieces[-1].hi - pieces[-1].lo - pieces[0].at
        count = CHUNK_BYTES * len(pieces) // max(1, nbytes)
        count = count if count >= _LEAST_TOGETHER else 1
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
        self._destinations, self._tally, self._seams = destinations, tally, Seams()
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
                if len(batch) > 1 and self._take_small(batch, source):
                    continue
                for piece in batch:
                    begin = piece.at - first.at
                    self._take(piece, source[begin : begin + piece.hi - piece.lo])
            for fragment in read.fragments:
                self._join(fragment, address_of(fetch(fragment.at, fragment.at + fragment.size)))

    def _take_small(self, pieces: Sequence[Piece], source: memoryview) -> bool:
        """Verify chunks together and hand them on; False, with nothing done, if one is damaged."""
        shift, address = pieces[0].at, address_of(source)
        begins = [at - shift for _, _, _, at, _ in pieces]
        ends = [at - shift + hi - lo for _, lo, hi, at, _ in pieces]
        (sums,) = crc32c_of_each([Parts(source, begins, ends)])
        if any(sums[n] != piece.checksum for n, piece in enumerate(pieces)):
            return False
        targets, sources, sizes = array("q"), array("q"), array("q")
        for entry, lo, hi, at, _ in pieces:
            for destination in self._destinations.get(entry, ()):
                self._tally.delivered = True
                if type(destination) is RawBytes:
                    start, stop, target = destination
                    if start <= lo and hi <= stop:
                        targets.append(target + lo - start)
                        sources.append(address + at - shift)
                        sizes.append(hi - lo)
                        continue
                destination.put(address + at - shift, lo, hi)
        copy_each(targets, sources, sizes, lets_go=False)
        return True

    def _join(self, fragment: Fragment, source: int) -> None:
        """Takes the chunk of a fragment, if the rest of it is there."""
        chunk = self._seams.add(fragment, source)
        if chunk is not None:
            self._take(fragment.piece, chunk)
            self._seams.give_back(chunk)

    def _take(self, piece: Piece, chunk: memoryview) -> None:
        """Verifies a chunk and hands it on."""
        if crc32c(chunk) != piece.checksum:
            chunk = self._read_again(piece, chunk)
        address = address_of(chunk)
        for destination in self._destinations.get(piece.entry, ()):
            self._tally.delivered = True
            destination.put(address, piece.lo, piece.hi)


__all__ = ["Delivery", "Destinations", "ReadTally"]
