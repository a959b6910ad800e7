"""A directory of the local machine, or of a mounted network file system, as a store."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterable
from datetime import datetime
from types import TracebackType
from typing import Literal, Self
from urllib.parse import unquote_to_bytes

import aiofiles.os
import anyio

from ckpipe.backend import (
    Backend,
    CachedRange,
    Children,
    ObjectInfo,
    PutMode,
    Upload,
    UploadLimits,
    check_key,
    run_in_thread,
    without_secrets,
)
from ckpipe.errors import InvalidKey, UsageError
from ckpipe_local.directories import Root, is_temporary, object_info
from ckpipe_local.failures import READING, opening, translating
from ckpipe_local.reads import ALIGNMENT, cached_range, check_regular, read_range, read_small
from ckpipe_local.writes import LocalUpload, put_object

# Each is one call of one thread, so that a caller that is cancelled goes on at once and leaves no
# file open. Writes and deletions use run_in_thread: they are never left behind half done.
_read_small = aiofiles.os.wrap(read_small)
_list_objects = aiofiles.os.wrap(Root.objects)
_list_children = aiofiles.os.wrap(Root.children)


class LocalBackend(Backend):
    """Objects as files below a root directory, which the first write makes if it is missing.

    A key is the path of its file relative to the root. Objects appear under their names by one
    atomic ``link`` or ``rename`` of a temporary file that was synced before; a crash leaves at
    most temporary files behind, which no method shows. Directories that become empty are
    removed. Cached pages are read from the page cache, and other bulk data goes past it.

    The root may be reached through links. A directory below it that is a link can be read through,
    while writing, deleting or listing all of it raises :class:`~ckpipe.errors.LinkRefused`.

    Args:
        url: ``file:///path`` (percent-encoded), or a plain path, relative to the working
            directory of this moment or, with a leading ``~``, to the home.
        direct: Whether to read and write bulk data past the page cache where the file system
            can do so.
        access: ``"write"`` has opening try whether the root can be written, or made. ``"read"``
            takes the root as it is, so that a read-only file system will do.

    Raises:
        UsageError: If the URL names another host or no path.
    """

    limits = UploadLimits(alignment=ALIGNMENT)

    def __init__(
        self, url: str, *, direct: bool = True, access: Literal["write", "read"] = "write"
    ) -> None:
        path = path_of(url)
        whole = path if os.path.isabs(path) else f"{os.getcwd()}/{path}"
        self._root = Root(os.path.normpath(whole))
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
        """Give up the uploads that were neither completed nor aborted."""
        with anyio.CancelScope(shield=True), translating(f"clean up {self._root.path}"):
            await run_in_thread(self._discard_all)

    def _discard_all(self) -> None:
        while self._uploads:
            self._uploads.pop().discard()

    async def put(self, key: str, data: bytes, mode: PutMode) -> None:
        path = self._path(key)
        with translating(f"write {path}", key):
            await run_in_thread(self._put, key, data, mode)

    async def put_volatile(self, key: str, data: bytes) -> None:
        path = self._path(key)
        with translating(f"write {path}", key):
            await run_in_thread(self._put, key, data, PutMode.CREATE, False)

    def _put(self, key: str, data: bytes, mode: PutMode, lasting: bool = True) -> None:
        self._root.make()
        put_object(self._root, key, data, mode, lasting=lasting)

    async def open_upload(self, key: str, *, size: int, block_bytes: int) -> Upload:
        path = self._path(key)
        with translating(f"write {path}", key):
            return await run_in_thread(self._begin, key, size)

    def _begin(self, key: str, size: int) -> Upload:
        self._root.make()
        return LocalUpload(self._root, key, size, direct=self._direct, unfinished=self._uploads)

    async def get(self, key: str, *, max_bytes: int) -> bytes:
        path = self._path(key)
        with translating(f"read {path}", key, READING):
            return await _read_small(path, key, max_bytes)

    async def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        # A class that overrides this method has another read_here, which may do nothing.
        await run_in_thread(LocalBackend.read_here, self, key, offset, buffer)

    def read_here(self, key: str, offset: int, buffer: memoryview) -> bool:
        path = self._path(key)
        with translating(f"read {path}", key, READING):
            read_range(path, key, offset, buffer, direct=self._direct)
        return True

    async def cached(self, key: str, offset: int, size: int) -> CachedRange | None:
        path = self._path(key)
        with translating(f"read {path}", key, READING):
            return await run_in_thread(cached_range, path, key, offset, size)

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
        if any(is_temporary(part) for part in check_key(key).split("/")):
            raise InvalidKey("The key has a part that begins like a temporary file", key=key)
        return key


def check_prefix(prefix: str) -> None:
    """Accept a prefix that is empty, or whole parts with a slash at the end.

    Raises:
        InvalidKey: If it is something else.
    """
    if prefix:
        check_key(prefix.removesuffix("/"))
        if not prefix.endswith("/"):
            raise InvalidKey("A prefix ends in '/'", key=prefix)


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
