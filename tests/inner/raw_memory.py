"""Pieces of raw memory to copy: where they lie, and memory that ends where nobody may read on."""

from __future__ import annotations

import ctypes
import mmap
from array import array
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

GUARD = 0xA5
Bytes = npt.NDArray[np.uint8]


@dataclass
class Pieces:
    """Pieces and the memory that they are to be copied to.

    Args:
        sources: The bytes of each.
        places: Where each belongs in the target.
        target: Where they go, in between guard bytes.
        expected: The target once they are copied.
        order: In which they are copied.
    """

    sources: list[Bytes]
    places: list[int]
    target: Bytes
    expected: Bytes
    order: list[int]

    def arrays(self) -> tuple[array[int], array[int], array[int]]:
        """Targets, sources and sizes, in their order."""
        return (
            array("q", [self.target.ctypes.data + self.places[n] for n in self.order]),
            array("q", [self.sources[n].ctypes.data for n in self.order]),
            array("q", [len(self.sources[n]) for n in self.order]),
        )


@st.composite
def pieces(draw: st.DrawFn, sizes: st.SearchStrategy[int]) -> Pieces:
    """Pieces of some sizes, at any places."""
    shapes = draw(st.lists(st.tuples(sizes, st.integers(0, 70), st.integers(0, 70)), max_size=20))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sources = [random.integers(0, 256, shift + n, np.uint8)[shift:] for n, shift, _ in shapes]
    expected = np.full(sum(n + gap for n, _, gap in shapes) + 160, GUARD, np.uint8)
    places, at = [], 0
    for source, (nbytes, _, gap) in zip(sources, shapes, strict=True):
        places.append(at + gap)
        expected[at + gap : at + gap + nbytes] = source
        at += gap + nbytes
    order = draw(st.permutations(range(len(shapes))))
    return Pieces(sources, places, np.full(len(expected), GUARD, np.uint8), expected, order)


_walls: list[mmap.mmap] = []


def before_a_wall(value: bytes) -> int:
    """The address behind two pages of memory, where a page begins that nobody may touch."""
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 3 * page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(value * 2 * page)
    _walls.append(memory)
    wall = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + 2 * page
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    assert protect(wall, page, 0) == 0
    return wall


def behind_each_other(sizes: list[int], end: int) -> array[int]:
    """Where pieces begin of which the last ends somewhere."""
    return array("q", [end - sum(sizes[n:]) for n in range(len(sizes))])
