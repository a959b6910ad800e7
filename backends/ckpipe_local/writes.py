"""Files that have no name yet: written under a temporary one, then published in one step."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter

import anyio

from ckpipe.backend import PutMode, Upload, run_in_thread
from ckpipe.errors import LinkRefused, StoreError, UsageError
from ckpipe_local.directories import Root, sync_entries
from ckpipe_local.failures import needing, translating, unrepeatable
from ckpipe_local.reads import aligned_part

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)


class LocalUpload(Upload):
    """Upload into a preallocated temporary file, by parallel positional writes.

    Completing syncs the file, links it to its name and syncs the directory, in this order. Every
    call ends only when its worker thread has let go of the caller's memory, cancelled or not.

    The file is open twice: one descriptor goes through the page cache, the other, where the file
    system has it, past it. Neither is closed while a thread writes through it, because its
    number may be given to another file at once.

    Args:
        root: The root.
        key: The object's key.
        size: Its size in bytes.
        direct: Whether to write past the page cache where the file system can.
        unfinished: The uploads that are to be given up at the end.
    """

    # Each call of a thread takes the GIL from a trainer several times, and a write of this many
    # blocks is still a small part of a save.
    most_blocks = 16

    def __init__(
        self, root: Root, key: str, size: int, *, direct: bool, unfinished: set[LocalUpload]
    ) -> None:
        self._root, self._key, self._size = root, key, size
        self._path = os.path.join(root.path, key)
        self._directory, self._name = os.path.split(key)
        self._unfinished = unfinished
        self._direct: int | None = None
        self._refused = False
        self._synced: bool | None = None
        self._state = threading.Condition()
        self._writers = 0
        self._closed = False
        with (
            needing(size, root.path),
            root.new_file(self._directory) as (directory, self._buffered, self._temporary),
        ):
            try:
                _preallocate(self._buffered, size)
                if direct:
                    self._direct = _open_direct(self._temporary, directory)
            except BaseException:
                self.discard()
                raise
        # Noted in this thread, since a caller that is cancelled now never gets to see the upload.
        unfinished.add(self)

    def __repr__(self) -> str:
        return f"<LocalUpload {self._key} {self._size} bytes>"

    async def write(self, offset: int, data: memoryview) -> None:
        await self.write_all([(offset, data)])

    async def write_all(self, blocks: Sequence[tuple[int, memoryview]]) -> None:
        for offset, data in blocks:
            if offset < 0 or offset + len(data) > self._size:
                message = f"A block of {len(data)} bytes at {offset} leaves the {self._size} bytes"
                raise UsageError(message, key=self._key)
        with translating(f"write {self._path}", self._key):
            await run_in_thread(self._write_while_open, blocks)

    async def complete(self) -> None:
        with translating(f"complete {self._path}", self._key):
            await run_in_thread(self._publish)
        self._unfinished.discard(self)

    async def abort(self) -> None:
        with anyio.CancelScope(shield=True), translating(f"abort {self._path}", self._key):
            await run_in_thread(self.discard)
        self._unfinished.discard(self)

    def _write_while_open(self, blocks: Sequence[tuple[int, memoryview]]) -> None:
        with self._state:
            if self._closed:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            self._writers += 1
        try:
            self._write(blocks)
        finally:
            with self._state:
                self._writers -= 1
                self._state.notify_all()

    def _write(self, blocks: Sequence[tuple[int, memoryview]]) -> None:
        direct = None if self._refused else self._direct
        middles: list[tuple[int, memoryview]] = []
        for offset, data in blocks:
            start, stop = (0, 0) if direct is None else aligned_part(data, offset)
            _write_all(self._buffered, data[:start], offset)
            _write_all(self._buffered, data[stop:], offset + stop)
            if start < stop:
                middles.append((offset + start, data[start:stop]))
        for offset, pieces in side_by_side(middles):
            assert direct is not None
            done = _write_direct(direct, pieces, offset)
            for piece in pieces:
                if done < len(piece):
                    self._refused = True
                    _write_all(self._buffered, piece[done:], offset + done)
                offset += len(piece)
                done = max(0, done - len(piece))

    def _publish(self) -> None:
        """Make the data durable, then the name, and close the file."""
        # Once, since the kernel reports a loss only once: after a failed sync it counts the lost
        # pages as written, and another sync would succeed.
        if self._synced is None:
            self._synced = False
            with unrepeatable(f"make {self._path} durable"):
                os.fsync(self._buffered)
            self._synced = True
        elif not self._synced:
            raise StoreError(f"Parts of {self._path} were lost on their way to the disk")
        self._close()
        with self._root.directories(self._directory) as opened:
            give_name(opened[-1], self._temporary, self._name, PutMode.CREATE)

    def _close(self) -> None:
        """Close both descriptors once no thread writes through them."""
        with self._state:
            if self._closed:
                return
            self._closed = True
            self._state.wait_for(lambda: not self._writers)
        os.close(self._buffered)
        if self._direct is not None:
            os.close(self._direct)

    def discard(self) -> None:
        """Close and remove the file, and directories that are empty then; blocks.

        The published object, if there is one, stays.
        """
        self._close()
        _remove_temporary(self._root, self._directory, self._temporary)


def put_object(root: Root, key: str, data: bytes, mode: PutMode, *, lasting: bool = True) -> None:
    """Write a small object at once.

    It takes as few system calls as it can, each of which may lose the GIL for a while.

    Args:
        root: The root.
        key: The object's key.
        data: The object.
        mode: Whether an object of this key may be there already.
        lasting: Whether it has to survive a loss of power.
    """
    below, name = os.path.split(key)
    with (
        needing(len(data), root.path),
        root.new_file(below, lasting=lasting) as (directory, descriptor, temporary),
    ):
        try:
            try:
                _write_all(descriptor, memoryview(data), 0)
                if lasting:
                    with unrepeatable(f"make {os.path.join(root.path, key)} durable"):
                        os.fsync(descriptor)
            finally:
                os.close(descriptor)
            give_name(directory, temporary, name, mode, lasting=lasting)
        except BaseException:
            _remove_temporary(root, below, temporary)
            raise


def _remove_temporary(root: Root, directory: str, name: str) -> None:
    """Remove a temporary file, unless a link has taken the place of its directory since."""
    with contextlib.suppress(LinkRefused):
        root.delete([os.path.join(directory, name)])


def give_name(
    directory: int, temporary: str, name: str, mode: PutMode, *, lasting: bool = True
) -> None:
    """Give a temporary file its name; of any number that create one, exactly one wins.

    The name is durable then, or taken back if it was new: a listed object has to stay.

    Args:
        directory: A descriptor of the directory that it is in.
        temporary: Its name until now.
        name: Its name from now on.
        mode: Whether another file may have the name already, which goes then.
        lasting: Whether the name has to survive a loss of power.
    """
    if mode is PutMode.CREATE:
        _link_new(directory, temporary, name)
        os.unlink(temporary, dir_fd=directory)
    else:
        os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
    if not lasting:
        return
    try:
        sync_entries(directory)
    except OSError:
        if mode is PutMode.CREATE:
            with contextlib.suppress(OSError):
                os.rename(name, temporary, src_dir_fd=directory, dst_dir_fd=directory)
        raise


def _link_new(directory: int, temporary: str, name: str) -> None:
    try:
        os.link(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
    except FileExistsError as error:
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISDIR(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR)) from error
        raise
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        message = "The file system has no hard links, which create-only writes need"
        raise StoreError(message, hint="Use another file system") from error


# System calls


def side_by_side(
    ranges: Iterable[tuple[int, memoryview]],
) -> Iterator[tuple[int, list[memoryview]]]:
    """Order ranges of a file, and join those that follow one another without a gap."""
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


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all of ``data``, however many calls the kernel needs for it."""
    while data:
        written = _advance(os.pwrite(descriptor, data, offset))
        data, offset = data[written:], offset + written


def _write_direct(descriptor: int, pieces: Sequence[memoryview], offset: int) -> int:
    """Write pieces one behind the other through an O_DIRECT descriptor, as far as it accepts them.

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


def _open_direct(name: str, directory: int) -> int | None:
    """Open a file of an open directory for writing past the page cache.

    Returns:
        None where its file system refuses.
    """
    flags = os.O_WRONLY | os.O_CLOEXEC | os.O_DIRECT | os.O_NOFOLLOW
    try:
        return os.open(name, flags, dir_fd=directory)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return None
        raise


def _preallocate(descriptor: int, size: int) -> None:
    """Give a file its size, with its space reserved where the file system can.

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
