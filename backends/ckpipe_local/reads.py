"""Reads of files: wholly cached ranges from the page cache, other bulk data past it.

O_DIRECT needs an aligned offset, length and memory address. So a range is cut in three: an
unaligned head and tail of less than a page each, which go through the page cache, and the middle,
which does not. The cuts are at page boundaries of the file. So no page is ever written both ways,
whatever the blocks are: writing one page both ways is not coherent. A file system may refuse
O_DIRECT when the file is opened, or only when it is used (EINVAL). Then all bytes go through the
page cache, which is slower and has the same result.

``cachestat`` counts the cached pages of a range in a few microseconds. On kernels before Linux 6.5,
``mincore`` is used, which examines each page. ``RWF_NOWAIT`` has a side effect: each such read of
an uncached page starts a read-ahead of up to several MiB into the page cache, which then competes
with the direct read of the same bytes.

Cached ranges are read and not mapped: if a mapped file is truncated, a process that touches a lost
page dies (SIGBUS), and bytes of a mapping can change between their check and their copy.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import stat
from contextlib import AbstractContextManager

from ckpipe.backend import truncated
from ckpipe.errors import ObjectNotFound, StoreError
from ckpipe_local.failures import READING, translating

ALIGNMENT = max(4096, mmap.PAGESIZE)
"""The alignment of offset, length and address for reads and writes past the page cache."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
_libc.syscall.argtypes = (
    ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long
)  # fmt: skip
_libc.syscall.restype = ctypes.c_long

_CACHESTAT = 451  # the same number on every architecture, since Linux 6.5
_LOWEST_BIT = bytes(value & 1 for value in range(256))  # mincore defines only this bit

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}

# Opening


def open_object(path: str, key: str) -> int:
    """Open the file of an object for reading.

    Raises:
        ObjectNotFound: If it is no regular file: to open a pipe would wait for its writer.
    """
    check_regular(os.stat(path), path, key)
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def check_regular(found: os.stat_result, path: str, key: str) -> None:
    """Refuse anything but a regular file.

    Raises:
        ObjectNotFound: If it is something else.
    """
    if not stat.S_ISREG(found.st_mode):
        raise ObjectNotFound(
            f"{path} is not a file but {_KINDS.get(stat.S_IFMT(found.st_mode), 'something else')}",
            key=key,
            hint="Find out which program created it, and remove it",
        )


# Whole objects and ranges


def read_small(path: str, key: str, max_bytes: int) -> bytes:
    """Read all of a small file.

    Raises:
        StoreError: If it is larger than expected.
    """
    with open(open_object(path, key), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            message = f"The object has {size} bytes, more than the {max_bytes} expected"
            raise StoreError(message, key=key)
        return file.read(size)


class LocalObject:
    """A file for the reads of one thread; open as long as it is referenced.

    Args:
        path: The path of the file.
        key: Its key.
        direct: Whether to read past the page cache what it does not hold.
    """

    _descriptor = -1

    def __init__(self, path: str, key: str, *, direct: bool) -> None:
        self._path, self._key, self._direct = path, key, direct
        with self._translating():
            self._descriptor = open_object(path, key)
            self.size = os.fstat(self._descriptor).st_size

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def _translating(self) -> AbstractContextManager[None]:
        return translating(f"read {self._path}", self._key, READING)

    def read_into(self, offset: int, buffer: memoryview, *, cached: bool) -> None:
        """See :meth:`ckpipe.backend.ObjectReader.read_into`."""
        descriptor, done = self._descriptor, 0
        with self._translating():
            if self._direct and not cached:
                done = _read_past_cache(descriptor, buffer, offset)
            done += read_at(descriptor, buffer[done:], offset + done)
            if done < len(buffer):
                raise truncated(self._key, offset, len(buffer), os.fstat(descriptor).st_size)

    def is_cached(self, offset: int, size: int) -> bool:
        """Tell whether the page cache holds all of a range, as far as the file reaches."""
        try:
            return _is_cached(self._descriptor, self._path, offset, size)
        except (OSError, ValueError):  # as of a file that is truncated meanwhile
            return False


def _read_past_cache(descriptor: int, buffer: memoryview, offset: int) -> int:
    start, stop = aligned_part(buffer, offset)
    if stop == start or (done := read_at(descriptor, buffer[:start], offset)) < start:
        return 0
    # One descriptor is switched to O_DIRECT instead of opening the path twice, because the path
    # may name another file by then.
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return done
    try:
        middle = buffer[start:stop]
        return done + read_at(descriptor, middle, offset + start, stop_at=(errno.EINVAL,))
    finally:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)


def read_at(
    descriptor: int,
    buffer: memoryview,
    offset: int,
    stop_at: tuple[int, ...] = (),
) -> int:
    """Read until the buffer is full, the file ends, or one of the errors ``stop_at`` comes."""
    done = 0
    while done < len(buffer):
        try:
            count = os.preadv(descriptor, [buffer[done:]], offset + done)
        except OSError as error:
            if error.errno not in stop_at:
                raise
            break
        if not count:
            break
        done += count
    return done


def aligned_part(data: memoryview, offset: int) -> tuple[int, int]:
    """Find the bounds of the middle of ``data`` that can go past the page cache."""
    start = -offset % ALIGNMENT
    stop = start + (len(data) - start) // ALIGNMENT * ALIGNMENT
    if stop <= start or (_address_of(data) + start) % ALIGNMENT:
        return 0, 0
    return start, stop


def _address_of(data: memoryview) -> int:
    # Imported here, since the import is slow and only bulk data needs it.
    import numpy as np

    address: int = np.frombuffer(data, dtype=np.uint8).__array_interface__["data"][0]
    return address


# The page cache


def _is_cached(descriptor: int, path: str, offset: int, size: int) -> bool:
    size = min(size, os.fstat(descriptor).st_size - offset)
    if size <= 0 or not _tells_residency(descriptor, path):
        return False
    bounds, counts = (ctypes.c_uint64 * 2)(offset, size), (ctypes.c_uint64 * 5)()
    skipped = offset % mmap.PAGESIZE
    pages = -(-(skipped + size) // mmap.PAGESIZE)
    if not _libc.syscall(_CACHESTAT, descriptor, bounds, counts, 0):
        return bool(counts[0] == pages)
    # The mapping is only queried and never read: reading a truncated page would kill the process.
    start, length = offset - skipped, skipped + size
    mapping = mmap.mmap(descriptor, length, mmap.MAP_SHARED, mmap.PROT_READ, offset=start)
    resident = ctypes.create_string_buffer(pages)
    if _libc.mincore(_address_of(memoryview(mapping)), length, resident):
        return False
    return 0 not in resident.raw.translate(_LOWEST_BIT)


def _tells_residency(descriptor: int, path: str) -> bool:
    """Tell whether the kernel shows this user the cached pages; others see all pages as cached."""
    return os.fstat(descriptor).st_uid == os.geteuid() or os.access(path, os.W_OK)
