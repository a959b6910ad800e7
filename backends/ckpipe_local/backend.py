"""A directory of the local machine, or of a mounted network file system, as a store.

A file has no name until it is whole: it is written under a temporary one, then published in one
step.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from datetime import datetime
from operator import itemgetter
from types import TracebackType
from typing import Literal, Self
from urllib.parse import unquote_to_bytes

import aiofiles.os
import anyio

from ckpipe.backend import (
    Backend,
    Children,
    ObjectInfo,
    ObjectReader,
    PutMode,
    Upload,
    UploadLimits,
    check_key,
    check_prefix,
    run_in_thread,
    without_secrets,
)
from ckpipe.errors import InvalidKey, LinkRefused, StoreError, UsageError
from ckpipe_local.directories import Root, is_hidden, object_info
from ckpipe_local.failures import (
    LINKING,
    NOT_SUPPORTED,
    READING,
    needing,
    opening,
    translating,
    unrepeatable,
)
from ckpipe_local.naming import give_name, sync_file
from ckpipe_local.reads import (
    ALIGNMENT,
    LocalObject,
    aligned_part,
    check_regular,
    read_small,
)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)


class LocalUpload(Upload):
    """Upload into a preallocated temporary file, by parallel positional writes.

    Completing syncs the file, links it to its name and syncs the directory, in this order. Every
    call, cancelled or not, ends only when its worker thread no longer uses the caller's memory.

    The file is open twice: one descriptor goes through the page cache. The other one bypasses it,
    if the file system can. Neither is closed while a thread writes through it, because its number
    may be given to another file at once.

    Args:
        root: The root.
        key: The object's key.
        size: Its size in bytes.
        direct: Whether to write past the page cache if the file system can.
        unfinished: The uploads to abort at the end.
    """

    # Each call of a thread takes the GIL from a trainer several times, and a write of this many
    # blocks is still a small fraction of a save.
    most_blocks = 16

    def __init__(
        self, root: Root, key: str, size: int, direct: bool, unfinished: set[LocalUpload]
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
        # Noted in this thread, since a caller that is cancelled now never gets the upload.
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
            _write_all(self._buffered, [data[:start]], offset)
            _write_all(self._buffered, [data[stop:]], offset + stop)
            if start < stop:
                middles.append((offset + start, data[start:stop]))
        for offset, pieces in side_by_side(middles):
            assert direct is not None
            done, rest = _write_all(direct, pieces, offset, stop_at=errno.EINVAL)
            if rest:
                self._refused = True
                _write_all(self._buffered, rest, offset + done)

    def _publish(self) -> None:
        """Make the data durable, then the name, and close the file."""
        # Once only: the kernel reports a loss once. After a failed sync it counts the lost pages
        # as written, and another sync would succeed.
        if self._synced is None:
            self._synced = False
            with unrepeatable(f"make {self._path} durable", self._key):
                sync_file(self._buffered)
            self._synced = True
        elif not self._synced:
            raise StoreError(f"The disk has lost parts of {self._path}", key=self._key)
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
        try:
            os.close(self._buffered)
        finally:
            if self._direct is not None:
                os.close(self._direct)

    def discard(self) -> None:
        """Close and remove the file, and directories that are empty then; block.

        A published object stays.
        """
        self._close()
        _remove_temporary(self._root, self._directory, self._temporary)


def put_object(root: Root, key: str, data: bytes, mode: PutMode, lasting: bool) -> None:
    """Write a small object at once.

    It makes as few system calls as possible, since each of them may lose the GIL for a while.

    Args:
        root: The root.
        key: The object's key.
        data: The object.
        mode: Whether an object of this key may exist already.
        lasting: Whether it has to survive a power loss.
    """
    below, name = os.path.split(key)
    with (
        needing(len(data), root.path),
        root.new_file(below, lasting=lasting) as (directory, descriptor, temporary),
    ):
        try:
            try:
                _write_all(descriptor, [memoryview(data)], 0)
                if lasting:
                    sync_file(descriptor)  # if it fails, another try writes another file
            finally:
                os.close(descriptor)
            give_name(directory, temporary, name, mode, lasting=lasting)
        except BaseException:
            _remove_temporary(root, below, temporary)
            raise


def _remove_temporary(root: Root, directory: str, name: str) -> None:
    """Remove a temporary file, unless a link has replaced its directory."""
    with contextlib.suppress(LinkRefused):
        root.delete([os.path.join(directory, name)])


# System calls


def side_by_side(
    ranges: Iterable[tuple[int, memoryview]],
) -> Iterator[tuple[int, list[memoryview]]]:
    """Sort ranges of a file, and join adjacent ones."""
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


def _write_all(
    descriptor: int, pieces: Sequence[memoryview], offset: int, stop_at: int | None = None
) -> tuple[int, Sequence[memoryview]]:
    """Write buffers one after the other, however many calls the kernel needs.

    Returns:
        The number of written bytes, and the remaining buffers, which are empty unless the error
        ``stop_at`` occurred.
    """
    done, left = 0, deque(piece for piece in pieces if piece)
    while left:
        try:
            count = os.pwritev(descriptor, left, offset + done)
        except OSError as error:
            if error.errno != stop_at:
                raise
            break
        if not count:
            raise OSError(errno.EIO, "The file system wrote nothing")
        done += count
        while left and count >= len(left[0]):
            count -= len(left.popleft())
        if count:
            left[0] = left[0][count:]
    return done, left


def _open_direct(name: str, directory: int) -> int | None:
    """Open a file of an open directory for writing past the page cache.

    Returns:
        None if its file system refuses.
    """
    flags = os.O_WRONLY | os.O_CLOEXEC | os.O_DIRECT | os.O_NOFOLLOW
    try:
        return os.open(name, flags, dir_fd=directory)
    except OSError as error:
        if error.errno in NOT_SUPPORTED | {errno.EINVAL}:
            return None
        raise


def _preallocate(descriptor: int, size: int) -> None:
    """Give a file its size, and reserve its space if the file system can.

    ``posix_fallocate`` is not used: if the file system does not support it, the C library emulates
    it by writing into every block of the file.
    """
    while _libc.fallocate(descriptor, 0, 0, size):
        code = ctypes.get_errno()
        if code in NOT_SUPPORTED | {errno.EINVAL}:
            os.ftruncate(descriptor, size)
            return
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


# Each is one call of one thread, so that a cancelled caller continues at once and leaves no file
# open. Writes and deletions use run_in_thread: they are never left half done.
_read_small = aiofiles.os.wrap(read_small)
_list_objects = aiofiles.os.wrap(Root.objects)
_list_children = aiofiles.os.wrap(Root.children)


class LocalBackend(Backend):
    """Objects as files below a root directory, which the first write makes if it is missing.

    A key is the path of its file relative to the root. Objects appear under their names by one
    atomic ``link`` or ``rename`` of a temporary file that was synced before. A crash leaves at
    most temporary files behind, which no method shows. Directories that become empty are
    removed. Cached pages are read from the page cache, and other bulk data goes past it.

    A file system without hard links needs ``renameat2`` with ``RENAME_NOREPLACE``; with neither,
    opening for writing raises :class:`~ckpipe.errors.StoreError`. Names that NFS, FUSE and SMB
    give to files that are deleted while open, such as ``.nfs…``, are no objects.

    The root may be reached through links. If a directory below it is a link, reads go through it,
    while writing, deleting or listing all of it raises :class:`~ckpipe.errors.LinkRefused`.

    Args:
        url: ``file:///path`` (percent-encoded), or a plain path, relative to the working
            directory of this moment or, with a leading ``~``, to the home.
        direct: Whether to read and write bulk data past the page cache if the file system can.
        access: With ``"write"`` opening tests whether the root can be written, or made. With
            ``"read"`` the root stays as it is, so a read-only file system is enough.

    Raises:
        UsageError: If the URL names another host or no path.
    """

    limits = UploadLimits(alignment=ALIGNMENT)
    can_link = True

    def __init__(
        self, url: str, *, direct: bool = True, access: Literal["write", "read"] = "write"
    ) -> None:
        self._root = Root(os.path.normpath(_absolute(path_of(url))))
        self._direct, self._access = direct, access
        self._uploads: set[LocalUpload] = set()

    def __repr__(self) -> str:
        mode = "direct" if self._direct else "buffered"
        return f"<LocalBackend {self._root.path} [{mode}, {len(self._uploads)} uploads]>"

    async def __aenter__(self) -> Self:
        create = self._access != "read"
        with opening(self._root.path, create=create):
            await run_in_thread(self._root.prove, create)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Abort the uploads that were neither completed nor aborted."""
        with anyio.CancelScope(shield=True), translating(f"clean up {self._root.path}"):
            await run_in_thread(self._discard_all)

    def _discard_all(self) -> None:
        while self._uploads:
            self._uploads.pop().discard()

    async def put(self, key: str, data: bytes, mode: PutMode) -> None:
        await self._put(key, data, mode, lasting=True)

    async def put_volatile(self, key: str, data: bytes) -> None:
        await self._put(key, data, PutMode.CREATE, lasting=False)

    async def _put(self, key: str, data: bytes, mode: PutMode, *, lasting: bool) -> None:
        with translating(f"write {self._path(key)}", key):
            await run_in_thread(put_object, self._root, key, data, mode, lasting)

    async def link(self, source: str, target: str) -> None:
        with translating(f"link {self._path(target)}", target, LINKING):
            await run_in_thread(self._root.link, self._checked(source), target)

    async def open_upload(self, key: str, *, size: int, block_bytes: int) -> Upload:
        with translating(f"write {self._path(key)}", key):
            return await run_in_thread(
                LocalUpload, self._root, key, size, self._direct, self._uploads
            )

    async def get(self, key: str, *, max_bytes: int) -> bytes:
        path = self._path(key)
        with translating(f"read {path}", key, READING):
            return await _read_small(path, key, max_bytes)

    async def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        def read() -> None:
            file = self._open(key)
            file.read_into(offset, buffer, cached=file.is_cached(offset, len(buffer)))

        await run_in_thread(read)

    def open_object(self, key: str) -> ObjectReader | None:
        return self._open(key)

    def _open(self, key: str) -> LocalObject:
        return LocalObject(self._path(key), key, direct=self._direct)

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        check_prefix(prefix)
        with translating(f"list {self._root.path}/{prefix}", table=READING):
            found = await _list_objects(self._root, prefix)
        for info in found:
            yield info

    async def children(self, prefix: str = "") -> Children:
        check_prefix(prefix)
        with translating(f"list {self._root.path}/{prefix}", table=READING):
            return await _list_children(self._root, prefix)

    async def stat(self, key: str) -> ObjectInfo:
        path = self._path(key)
        with translating(f"look at {path}", key, READING):
            found = await aiofiles.os.stat(path)
        check_regular(found, path, key)
        return object_info(key, found)

    async def delete(self, keys: Iterable[str]) -> None:
        checked = [self._checked(key) for key in keys]
        with translating(f"delete objects of {self._root.path}"):
            await run_in_thread(self._root.delete, checked)

    async def remove_stale_uploads(self, prefix: str, *, before: datetime) -> int:
        check_prefix(prefix)
        with translating(f"clean up {self._root.path}/{prefix}"):
            return await run_in_thread(self._root.remove_stale, prefix, before)

    def _path(self, key: str) -> str:
        return os.path.join(self._root.path, self._checked(key))

    def _checked(self, key: str) -> str:
        if any(is_hidden(part) for part in check_key(key).split("/")):
            message = "The key has a part that names a temporary file, or one that was deleted"
            raise InvalidKey(message, key=key)
        return key


def _absolute(path: str) -> str:
    if os.path.isabs(path):
        return path
    try:
        return f"{os.getcwd()}/{path}"
    except FileNotFoundError:
        raise UsageError(
            f"The working directory was deleted, so the relative path {path!r:.200} names no place",
            hint="Change to a directory that exists, or give an absolute path",
        ) from None


def path_of(url: str) -> str:
    """Read the path of a ``file`` URL or a plain path; a leading ``~`` of a path is the home.

    Raises:
        UsageError: If it names another host, another scheme or no path.
    """
    scheme, separator, rest = url.partition("://")
    path = url
    if separator and "/" not in scheme:
        host, slash, path = rest.partition("/")
        if scheme.lower() != "file" or host.lower() not in ("", "localhost") or not slash:
            message = f"{without_secrets(url)!r} does not name a local directory"
            raise UsageError(message, hint="Write file:///absolute/path, or a plain path")
        path = "/" + os.fsdecode(unquote_to_bytes(path))
    if not path or "\0" in path or (url.lower().startswith("file:/") and not separator):
        message = f"{url!r} does not name a directory"
        raise UsageError(message, hint="Write file:///absolute/path, or a plain path")
    return path if separator else os.path.expanduser(path)
