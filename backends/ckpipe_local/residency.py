"""What the page cache holds of a file: how much from an offset on, and whether all of a range.

``cachestat`` counts the pages of a range at the cost of a few microseconds; ``mincore``, which
looks at each, is asked only for where a gap begins, and by older kernels. ``RWF_NOWAIT`` is not
free of side effects: each such read of what is not there starts a read-ahead of up to several MiB
into the page cache, which then competes with the direct read of the same bytes.
"""

from __future__ import annotations

import mmap
import os

from ckpipe.memory.addresses import address_of
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


def is_cached(descriptor: int, path: str, offset: int, size: int) -> bool:
    """Tell whether the page cache holds all of a range that lies in the file."""
    if not size:
        return True
    if not _tells_residency(descriptor, path):
        return False
    cached = cached_pages(descriptor, offset, size)
    if cached is not None:
        return cached >= _pages(offset, size)
    if size > _LOOKED_THROUGH_BYTES:
        return False
    view, _ = _map(descriptor, offset, size)
    return resident_pages(address_of(view), len(view)) * mmap.PAGESIZE >= len(view)


def _map(descriptor: int, offset: int, size: int) -> tuple[memoryview, int]:
    """Map a range from the page on in which it begins; the mapping ends with its last view.

    It is asked about and never read: reading a page that was cut off ends the process.
    """
    skipped = offset % mmap.ALLOCATIONGRANULARITY
    length, start = skipped + size, offset - skipped
    mapping = mmap.mmap(descriptor, length, mmap.MAP_SHARED, mmap.PROT_READ, offset=start)
    return memoryview(mapping), skipped


def _tells_residency(descriptor: int, path: str) -> bool:
    """Whether the kernel tells this user what is cached; to others it calls every page cached."""
    return os.fstat(descriptor).st_uid == os.geteuid() or os.access(path, os.W_OK)
