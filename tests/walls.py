"""Memory that ends where nobody may read on."""

from __future__ import annotations

import ctypes
import mmap

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
