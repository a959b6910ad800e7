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
    reserved = _reserved(nbytes + HUGE_PAGE_BYTES)
    base = _address(reserved)
    at = (offset - base) % HUGE_PAGE_BYTES
    _map_over(base + at, nbytes, mmap.PROT_READ, descriptor, offset)
    return memoryview(reserved)[at : at + nbytes].toreadonly()


def map_to_write(descriptor: int, nbytes: int) -> tuple[mmap.mmap, int]:
    """Maps a range of a file to be read and written, where its huge pages can be huge.

    Python would keep another descriptor of a file that it maps itself, which children that are
    forked would inherit, and all of its memory with it.

    Args:
        descriptor: The file, of at least so many bytes and a huge page more; may be closed.
        nbytes: How many bytes to map, at least one.

    Returns:
        The mapping, which ends with its last view, and where in the file it begins.

    Raises:
        OSError: If the system does not map it.
    """
    reserved = _reserved(nbytes)
    base = _address(reserved)
    offset = base % HUGE_PAGE_BYTES
    _map_over(base, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, descriptor, offset)
    return reserved, offset


def _reserved(nbytes: int) -> mmap.mmap:
    return mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _map_over(address: int, nbytes: int, access: int, descriptor: int, offset: int) -> None:
    flags = mmap.MAP_SHARED | _MAP_FIXED
    if _map(address, nbytes, access, flags, descriptor, offset) == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


__all__ = ["HUGE_PAGE_BYTES", "map_to_read", "map_to_write"]
