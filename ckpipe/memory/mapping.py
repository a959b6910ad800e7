"""Map files in memory where their huge pages can be huge, and keep descriptors from children.

A child that is started as another program has none of these descriptors anyway, but one that only
forks, as the workers of a DataLoader do, has all: it would keep a socket's other end from seeing
that this process is gone, and memory in use that it has given back.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os

_FIRST = 3  # behind the standard streams

_ours: set[int] = set()


def keep_private(descriptor: int) -> int:
    """Has children that are forked from now on close a descriptor.

    Returns:
        The descriptor, or the one that has taken its place if it was 0, 1 or 2: where a program has
        closed its standard streams, what prints would write to it, and no child could inherit it.
    """
    if descriptor < _FIRST:
        low, descriptor = descriptor, fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _FIRST)
        os.close(low)
    _ours.add(descriptor)
    return descriptor


def forget(descriptor: int) -> None:
    """End what :func:`keep_private` began; to be called before the descriptor is closed."""
    _ours.discard(descriptor)


def close_private(descriptor: int) -> None:
    """Close a descriptor that was kept private."""
    forget(descriptor)
    os.close(descriptor)


def _close_in_child() -> None:
    for descriptor in list(_ours):
        os.close(descriptor)
    _ours.clear()


os.register_at_fork(after_in_child=_close_in_child)


HUGE_PAGE_BYTES = 2 << 20

_MAP_FIXED = 0x10  # <asm-generic/mman-common.h>

_map = ctypes.CDLL(None, use_errno=True).mmap
_map.restype = ctypes.c_void_p
_map.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
]  # fmt: skip
_FAILED = ctypes.c_void_p(-1).value


def map_to_read(descriptor: int, nbytes: int, offset: int) -> memoryview:
    """Map a range of a file to be read; it is unmapped when the last view of it is gone.

    The kernel uses huge pages of a file as such only where address and offset are alike modulo
    their size, and chooses an address with no regard to that. So room is reserved in which such
    an address is sure to be, and the file is mapped over it: the end of the reservation ends the
    mapping. The file must not be shortened while it is mapped.

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
    """Map a range of a file to be read and written, where its huge pages can be huge.

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
