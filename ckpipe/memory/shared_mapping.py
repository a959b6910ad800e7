"""Maps files in memory at addresses where their huge pages can be huge in the mapping too."""

from __future__ import annotations

import ctypes
import mmap
import os

HUGE_PAGE_BYTES = 2 << 20

_MAP_FIXED = 0x10  # <asm-generic/mman-common.h>

_map = ctypes.CDLL(None, use_errno=True).mmap
_map.restype = ctypes.c_void_p
_map.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
]  # fmt: skip
_FAILED = ctypes.c_void_p(-1).value


def map_to_read(descriptor: int, nbytes: int, offset: int) -> memoryview:
    """Maps a range of a file to be read; it is unmapped when the last view of it is gone.

    The kernel uses huge pages of a file as such only where address and offset are alike modulo
    their size, and chooses an address with no regard to that. So room is reserved in which such
    an address is sure to be, and the file is mapped over it: whoever ends the reservation ends
    the mapping. The file must not be shortened while it is mapped.

    Args:
        descriptor: The file, open for reading; may be closed afterwards.
        nbytes: How many bytes to map, at least one.
        offset: Where in the file they begin, a multiple of the page size.

    Raises:
        OSError: If the system does not map it.
    """
    reserved = mmap.mmap(-1, nbytes + HUGE_PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    base = ctypes.addressof(ctypes.c_char.from_buffer(reserved))
    at = (offset - base) % HUGE_PAGE_BYTES
    flags = mmap.MAP_SHARED | _MAP_FIXED
    if _map(base + at, nbytes, mmap.PROT_READ, flags, descriptor, offset) == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return memoryview(reserved)[at : at + nbytes].toreadonly()


__all__ = ["HUGE_PAGE_BYTES", "map_to_read"]
