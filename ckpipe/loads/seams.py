"""Chunks that arrive in several reads, put together before they are verified."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from ckpipe.format.checksum import CHUNK_BYTES
from ckpipe.loads.load_planning import Fragment
from ckpipe.memory.native import address_of, copy_bytes


@dataclass(eq=False, slots=True)
class _Seam:
    """A chunk of which a part has arrived.

    Args:
        memory: Its bytes, as far as they have.
        missing: How many have not.
    """

    memory: memoryview
    missing: int


class Seams:
    """The chunks of one delivery that come in fragments; safe for several threads.

    While reads are taken in their order, few are open at a time: one for each read under way.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[tuple[int, int], _Seam] = {}
        self._spare: list[memoryview] = []

    def add(self, fragment: Fragment, source: int) -> memoryview | None:
        """Takes a fragment, once.

        Args:
            fragment: Which it is.
            source: The address of its bytes.

        Returns:
            The chunk, to be handed to :meth:`give_back`; None while parts of it are missing.
        """
        piece = fragment.piece
        key, size = (piece.entry, piece.lo), piece.hi - piece.lo
        with self._lock:
            seam = self._open.get(key)
            if seam is None:
                memory = self._spare.pop() if self._spare else memoryview(bytearray(CHUNK_BYTES))
                seam = self._open[key] = _Seam(memory, size)
        copy_bytes(address_of(seam.memory) + fragment.begin, source, fragment.size)
        with self._lock:
            seam.missing -= fragment.size
            if seam.missing:
                return None
            del self._open[key]
            return seam.memory[:size]

    def give_back(self, chunk: memoryview) -> None:
        """Takes back the memory of a chunk."""
        whole = chunk.obj
        assert isinstance(whole, bytearray)
        with self._lock:
            self._spare.append(memoryview(whole))


__all__ = ["Seams"]
