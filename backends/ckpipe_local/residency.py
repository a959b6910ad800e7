"""What the page cache holds of a file: how much from an offset on, and a view of it.

``cachestat`` counts the pages of a range at the cost of a few microseconds; ``mincore``, which
looks at each, is asked only for where a gap begins, and by older kernels. ``RWF_NOWAIT`` is not
free of side effects: each such read of what is not there starts a read-ahead of up to several MiB
into the page cache, which then competes with the direct read of the same bytes.
"""

from __future__ import annotations

import mmap
import os

from ckpipe.memory.addresses import address_of
from ckpipe_local.failures import truncated
from ckpipe_local.object_files import open_object
from ckpipe_local.system_calls import cached_pages, resident_pages

_LOOKED_THROUGH_BYTES = 128 << 20
"""How much is looked through page by page at a time; who wants more asks for parts of it."""


def cached_length(descriptor: int, path: str, offset: int, size: int) -> int:
    """How many bytes from ``offset`` on, at most ``size``, the page cache holds without a gap."""
    size = min(size, os.fstat(descriptor).st_size - offset)
    if size <= 0 or not _tells_residency(descriptor, path):
        return 0
    cached = cached_pages(descriptor, offset, size)
    if cached is not None and cached in (0, _pages(offset, size)):
        return size if cached else 0
    view, skipped = _map(descriptor, offset, size)
    resident = resident_pages(address_of(view), len(view)) * mmap.PAGESIZE
    return max(0, min(size, resident - skipped))


def _pages(offset: int, size: int) -> int:
    return (offset + size - 1) // mmap.PAGESIZE - offset // mmap.PAGESIZE + 1


def resident_view(path: str, key: str, offset: int, size: int) -> memoryview | None:
    """Maps a range of a file if the page cache holds all of it; None otherwise.

    Pages are mapped when they are read, 16 at a time, by as many threads as read them. Should
    memory get so short that the kernel drops some before, reading these waits for the disk.
    """
    descriptor = open_object(path, key)
    try:
        length = os.fstat(descriptor).st_size
        if offset + size > length:
            raise truncated(key, offset, size, length)
        if not size:
            return memoryview(b"")
        return _view(descriptor, offset, size) if _tells_residency(descriptor, path) else None
    finally:
        os.close(descriptor)


def _view(descriptor: int, offset: int, size: int) -> memoryview | None:
    cached = cached_pages(descriptor, offset, size)
    if cached is None and size > _LOOKED_THROUGH_BYTES:
        return None
    if cached is not None and cached < _pages(offset, size):
        return None
    view, skipped = _map(descriptor, offset, size)
    length = len(view)
    if cached is None and resident_pages(address_of(view), length) * mmap.PAGESIZE < length:
        return None
    return view[skipped:]


def _map(descriptor: int, offset: int, size: int) -> tuple[memoryview, int]:
    """Maps a range from the page on in which it begins; the mapping ends with its last view."""
    skipped = offset % mmap.ALLOCATIONGRANULARITY
    length, start = skipped + size, offset - skipped
    mapping = mmap.mmap(descriptor, length, mmap.MAP_SHARED, mmap.PROT_READ, offset=start)
    return memoryview(mapping), skipped


def _tells_residency(descriptor: int, path: str) -> bool:
    """Whether the kernel tells this user what is cached; to others it calls every page cached."""
    return os.fstat(descriptor).st_uid == os.geteuid() or os.access(path, os.W_OK)
