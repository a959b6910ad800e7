"""Map files at addresses where their huge pages stay huge, and close descriptors on fork.

A child process that executes another program inherits none of these descriptors. A child that only
forks, such as a worker of a DataLoader, inherits all of them. It would hide the end of this process
from a socket's other end, and keep returned memory in use.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os

_FIRST = 3  # behind the standard streams

_ours: set[int] = set()


def keep_private(descriptor: int) -> int:
    """Close a descriptor in children that are forked from now on.

    Returns:
        The descriptor, or its duplicate if it was 0, 1 or 2. Such a number comes up where a program
        has closed its standard streams: prints would write to it, and no child could inherit it.
    """
    if descriptor < _FIRST:
        low, descriptor = descriptor, fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _FIRST)
        os.close(low)
    _ours.add(descriptor)
    return descriptor


def forget(descriptor: int) -> None:
    """Undo :func:`keep_private`; call it before the descriptor is closed."""
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
    """Map a range of a file for reading; it is unmapped when the last view of it is gone.

    The kernel maps huge pages of a file as huge pages only where address and offset are equal
    modulo their size, and it chooses an address without regard to that. So an address range is
    reserved that is sure to contain such an address, and the file is mapped over it. The end of the
    reservation ends the mapping. The file must not be shortened while it is mapped.

    Args:
        descriptor: The file, open for reading; may be closed afterwards.
        nbytes: Bytes to map, at least one.
        offset: The offset of the first byte in the file, a multiple of the page size.

    Raises:
        OSError: If the system does not map it.
    """
    reserved = _reserved(nbytes + HUGE_PAGE_BYTES)
    base = _address(reserved)
    at = (offset - base) % HUGE_PAGE_BYTES
    _map_over(base + at, nbytes, mmap.PROT_READ, descriptor, offset)
    return memoryview(reserved)[at : at + nbytes].toreadonly()


def map_to_write(descriptor: int, nbytes: int) -> tuple[mmap.mmap, int]:
    """Map a range of a file for reading and writing, where its huge pages stay huge.

    Python's own mmap would keep another descriptor of the file. Forked children would inherit it,
    and all of the file's memory with it.

    Args:
        descriptor: The file, of at least so many bytes and a huge page more; may be closed.
        nbytes: Bytes to map, at least one.

    Returns:
        The mapping, which ends with its last view, and its offset in the file.

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
