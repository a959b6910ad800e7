"""Ranges of a file that the page cache holds, read piece by piece.

They are read and not mapped: what somebody cuts off a mapped file meanwhile ends the process that
touches it (SIGBUS), and bytes of a mapping can change between their check and their copy.
"""

from __future__ import annotations

import os

from ckpipe_local.direct_io import read_at
from ckpipe_local.failures import reading, truncated
from ckpipe_local.object_files import open_object
from ckpipe_local.residency import is_cached


def cached_range(path: str, key: str, offset: int, size: int) -> CachedFile | None:
    """Open a range of a file if the page cache holds all of it.

    Raises:
        TruncatedObject: If the file ends before the range does.
    """
    file = CachedFile(path, key, offset)
    length = os.fstat(file.descriptor).st_size
    if offset + size > length:
        raise truncated(key, offset, size, length)
    return file if is_cached(file.descriptor, path, offset, size) else None


class CachedFile:
    """A range of a file; open for as long as it is referenced.

    Args:
        path: The path of the file.
        key: Its key.
        offset: Where the range begins.
    """

    descriptor = -1

    def __init__(self, path: str, key: str, offset: int) -> None:
        self._path, self._key, self._offset = path, key, offset
        self.descriptor = open_object(path, key)

    def read_into(self, at: int, buffer: memoryview) -> None:
        """See :meth:`ckpipe.backend.CachedRange.read_into`; safe for several threads."""
        offset = self._offset + at
        with reading(f"read {self._path}", self._key):
            done = read_at(self.descriptor, buffer, offset)
            if done < len(buffer):
                size = os.fstat(self.descriptor).st_size
                raise truncated(self._key, offset, len(buffer), size)

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)


__all__ = ["CachedFile", "cached_range"]
