"""Verify what was read, and hand it to its destinations."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from ckpipe.format.checksum import CHUNK_BYTES
from ckpipe.loads.destinations import Destination, RawBytes
from ckpipe.loads.load_planning import Fragment, Piece, Read
from ckpipe.loads.seams import Seams
from ckpipe.memory.native import address_of, verify_copy_each

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
    """Cut chunks into runs that have the bytes of a large chunk, which a cache holds."""
    if pieces:
        nbytes = pieces[-1].at + pieces[-1].hi - pieces[-1].lo - pieces[0].at
        count = max(1, CHUNK_BYTES * len(pieces) // max(1, nbytes))
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
                while batch:
                    taken = self._take(batch, source[batch[0].at - first.at :])
                    batch = batch[taken:]
            for fragment in read.fragments:
                self._join(fragment, address_of(fetch(fragment.at, fragment.at + fragment.size)))

    def _join(self, fragment: Fragment, source: int) -> None:
        """Takes the chunk of a fragment, if the rest of it is there."""
        chunk = self._seams.add(fragment, source)
        if chunk is not None:
            self._take([fragment.piece], chunk)
            self._seams.give_back(chunk)

    def _take(self, pieces: Sequence[Piece], source: memoryview) -> int:
        """Verify chunks and hand them on, up to the first that is damaged, which is read again.

        Args:
            pieces: The chunks, at least one.
            source: Their bytes, from the first of the first chunk on.

        Returns:
            How many are done.
        """
        address = address_of(source) - pieces[0].at
        if pieces[-1].at + pieces[-1].hi - pieces[-1].lo - pieces[0].at > len(source):
            raise AssertionError("chunks reach out of the bytes that were read")
        targets, sources, sizes, sums = array("q"), array("q"), array("q"), array("I")
        others: list[tuple[int, Destination]] = []
        for number, (entry, lo, hi, at, checksum) in enumerate(pieces):
            target = 0
            for destination in self._destinations.get(entry, ()):
                if type(destination) is RawBytes and not target:
                    start, stop, begin = destination
                    if start <= lo and hi <= stop:
                        target = begin + lo - start
                        continue
                others.append((number, destination))
            targets.append(target)
            sources.append(address + at)
            sizes.append(hi - lo)
            sums.append(checksum)
        good = verify_copy_each(targets, sources, sizes, sums)
        if any(targets[:good]):
            self._tally.delivered = True
        for number, destination in others:
            if number < good:
                self._tally.delivered = True
                destination.put(sources[number], pieces[number].lo, pieces[number].hi)
        if good == len(pieces):
            return good
        damaged, begin = pieces[good], pieces[good].at - pieces[0].at
        chunk = self._read_again(damaged, source[begin : begin + damaged.hi - damaged.lo])
        return good + self._take([damaged], chunk)


__all__ = ["Delivery", "Destinations", "ReadTally"]
