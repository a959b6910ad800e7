"""Positional reads and writes that go past the page cache where they can.

O_DIRECT wants offset, length and memory address aligned. A range is therefore cut in three: an
unaligned head and tail of less than a page each, which go through the page cache, and the middle,
which does not. The cuts are at page boundaries of the file, so no page is ever written both ways,
whatever the blocks are: writing one page both ways is not coherent. A file system may refuse
O_DIRECT when the file is opened, or only when it is written (EINVAL); then all of it goes through
the page cache, which is slower and means the same.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter

from ckpipe.errors import StoreError
from ckpipe.memory.addresses import address_of
from ckpipe_local.failures import truncated
from ckpipe_local.object_files import open_object
from ckpipe_local.residency import cached_length

ALIGNMENT = max(4096, mmap.PAGESIZE)
"""What offset, length and address must be multiples of to go past the page cache."""


def aligned_part(data: memoryview, offset: int) -> tuple[int, int]:
    """Where the middle that can go past the page cache begins and ends in ``data``."""
    start = -offset % ALIGNMENT
    stop = start + (len(data) - start) // ALIGNMENT * ALIGNMENT
    if stop <= start or (address_of(data) + start) % ALIGNMENT:
        return 0, 0
    return start, stop


def side_by_side(
    ranges: Iterable[tuple[int, memoryview]],
) -> Iterator[tuple[int, list[memoryview]]]:
    """Ranges of a file in order, with those together that follow one another without a gap."""
    begin, end, run = 0, 0, list[memoryview]()
    for offset, data in sorted(ranges, key=itemgetter(0)):
        if run and offset != end:
            yield begin, run
            run = []
        begin = begin if run else offset
        end = offset + len(data)
        run.append(data)
    if run:
        yield begin, run


def write_all(descriptor: int, data: memoryview, offset: int) -> None:
    """Writes all of ``data``, however many calls the kernel needs for it."""
    while data:
        written = _advance(os.pwrite(descriptor, data, offset))
        data, offset = data[written:], offset + written


def write_direct(descriptor: int, pieces: Sequence[memoryview], offset: int) -> int:
    """Writes pieces one behind the other through an O_DIRECT descriptor, as far as it accepts them.

    Returns:
        How many bytes were written; fewer than all means that the rest was refused.
    """
    written, left = 0, deque(pieces)
    while left:
        try:
            count = _advance(os.pwritev(descriptor, left, offset + written))
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            break
        written += count
        while left and count >= len(left[0]):
            count -= len(left.popleft())
        if count:
            left[0] = left[0][count:]
    return written


def _advance(written: int) -> int:
    if not written:
        raise OSError(errno.EIO, "The file system wrote nothing")
    return written


def open_direct(path: str, directory: int | None = None) -> int | None:
    """Opens a file for writing past the page cache.

    Args:
        path: Its path.
        directory: A descriptor of the directory that the path is relative to.

    Returns:
        None where its file system refuses.
    """
    flags = os.O_WRONLY | os.O_CLOEXEC | os.O_DIRECT | os.O_NOFOLLOW
    try:
        return os.open(path, flags, dir_fd=directory)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return None
        raise


def read_small(path: str, key: str, max_bytes: int) -> bytes:
    """Reads all of a small file.

    Raises:
        StoreError: If it is larger than expected.
    """
    with open(open_object(path, key), "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            message = f"The object has {size} bytes, more than the {max_bytes} expected"
            raise StoreError(message, key=key)
        data = bytearray()
        while len(data) < size and (piece := file.read(size - len(data))):
            data += piece
    return bytes(data)


def read_buffered(path: str, key: str, offset: int, buffer: memoryview) -> None:
    """Fills ``buffer`` from a file, through the page cache."""
    descriptor = open_object(path, key)
    try:
        done = read_at(descriptor, buffer, offset)
        _check_full(descriptor, key, offset, buffer, done)
    finally:
        os.close(descriptor)


def read_direct(path: str, key: str, offset: int, buffer: memoryview) -> None:
    """Fills ``buffer`` from a file: from the page cache what is there, the rest past it."""
    descriptor = open_object(path, key)
    try:
        cached = cached_length(descriptor, path, offset, len(buffer))
        done = read_at(descriptor, buffer[:cached], offset)
        done += _read_past_cache(descriptor, buffer[done:], offset + done)
        done += read_at(descriptor, buffer[done:], offset + done)
        _check_full(descriptor, key, offset, buffer, done)
    finally:
        os.close(descriptor)


def _check_full(descriptor: int, key: str, offset: int, buffer: memoryview, done: int) -> None:
    if done < len(buffer):
        raise truncated(key, offset, len(buffer), os.fstat(descriptor).st_size)


def _read_past_cache(descriptor: int, buffer: memoryview, offset: int) -> int:
    start, stop = aligned_part(buffer, offset)
    if stop == start or (done := read_at(descriptor, buffer[:start], offset)) < start:
        return 0
    # One descriptor is switched over rather than the path opened twice, because the path may
    # have got another file in between.
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
    """Reads until the buffer is full, the file ends, or one of the errors ``stop_at`` comes."""
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
