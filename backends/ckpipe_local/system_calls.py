"""System calls that Python does not offer, or not without holding the GIL."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)

_libc.syscall.argtypes = (
    ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long
)  # fmt: skip
_libc.syscall.restype = ctypes.c_long

_CACHESTAT = 451  # the same number on every architecture, since Linux 6.5
_PROBED_PAGES = 16
_LOWEST_BIT = bytes(value & 1 for value in range(256))  # the others of mincore mean nothing


def preallocate(descriptor: int, size: int) -> None:
    """Gives a file its size, with its space reserved where the file system can.

    ``posix_fallocate`` is not used because the C library imitates it, where it is not
    supported, by writing into every block of the file.
    """
    while _libc.fallocate(descriptor, 0, 0, size):
        code = ctypes.get_errno()
        if code in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            os.ftruncate(descriptor, size)
            return
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


def cached_pages(descriptor: int, offset: int, size: int) -> int | None:
    """How many pages of a file's range the page cache holds, as ``cachestat(2)`` counts them.

    Returns:
        None where the kernel does not tell: before Linux 6.5, and for other users' files.
    """
    bounds = (ctypes.c_uint64 * 2)(offset, size)
    counts = (ctypes.c_uint64 * 5)()
    if _libc.syscall(_CACHESTAT, descriptor, bounds, counts, 0):
        return None
    return counts[0]


def resident_pages(address: int, size: int) -> int:
    """How many pages of a mapping, counted from its begin, are in memory without a gap."""
    # A cold range is recognised by its first pages, for asking after all of them is not free.
    first = min(size, _PROBED_PAGES * mmap.PAGESIZE)
    found = _leading_pages(address, first)
    return found if found * mmap.PAGESIZE < first else _leading_pages(address, size)


def _leading_pages(address: int, size: int) -> int:
    pages = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
    if _libc.mincore(address, size, pages):
        return 0
    missing = pages.raw.translate(_LOWEST_BIT).find(0)
    return len(pages) if missing < 0 else missing
