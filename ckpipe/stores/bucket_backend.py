"""What backends of buckets have in common: opening, fitness, and the way to their objects."""

from __future__ import annotations

import abc
import secrets
from collections.abc import Iterable
from contextlib import AsyncExitStack
from types import TracebackType
from typing import ClassVar, Protocol

import anyio

from ckpipe.backend import Backend, ObjectInfo, PutMode, Upload
from ckpipe.errors import UsageError
from ckpipe.stores import fitness
from ckpipe.stores.bucket_address import PROBE_KEY, BucketAddress

OWNER = "ckpipe-upload"
"""The custom metadata of an object that names the upload that made it."""


class BucketObjects(Protocol):
    """The objects below a root; each method is that of :class:`~ckpipe.Backend`."""

    create_only: bool
    """Whether the store honours the condition of a create-only put."""

    async def create(self, name: str, data: bytes) -> None:
        """Creates an object by its whole name, under the store's condition for that.

        Raises:
            ObjectExists: If the store refuses because there is one.
            StoreError: If the store failed.
        """

    async def put(self, key: str, data: bytes, mode: PutMode, owner: str | None = None) -> None: ...

    async def owner(self, key: str) -> str | None:
        """Reads which upload has made an object, by the metadata :data:`OWNER`.

        Returns:
            The ``owner`` that the object was put with; None if it has none, or is not there.

        Raises:
            StoreError: If the store failed.
        """
        ...

    async def get(self, key: str, max_bytes: int) -> bytes: ...

    async def read_into(self, key: str, offset: int, buffer: memoryview) -> None: ...

    async def stat(self, key: str) -> ObjectInfo: ...

    async def delete(self, keys: Iterable[str]) -> None: ...


class BucketBackend(Backend, abc.ABC):
    """Objects of a bucket whose names begin with a prefix.

    Before its first write to a bucket a process finds out by one object below the root whether
    the store honours the condition of a create-only put; see :mod:`ckpipe.stores.fitness`. Who only
    reads writes nothing.

    Entering is the subclass's own: it makes :attr:`_objects`, and puts what is to be closed on
    :attr:`_stack`.

    Args:
        address: Bucket and prefix.
        endpoint: Where the store answers; None for the one that the scheme means.
        require_create_only: Whether to refuse a store that ignores that condition.
    """

    prefers_worker = True
    condition: ClassVar[str]
    """How the store calls the condition of a create-only put."""

    _objects: BucketObjects

    def __init__(
        self, address: BucketAddress, endpoint: str | None, *, require_create_only: bool
    ) -> None:
        self._root, self._endpoint = address, endpoint
        self._require_create_only = require_create_only
        self._stack = AsyncExitStack()
        self._checked = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._root}>"

    @abc.abstractmethod
    async def _names(self, prefix: str) -> set[str]:
        """The whole names of all objects that begin so.

        Raises:
            StoreError: If the store failed.
        """

    @abc.abstractmethod
    async def _give_up(self) -> None:
        """Ends the uploads that nobody completed or aborted."""

    async def _check_fitness(self) -> None:
        """Refuses a store that is not fit to be written to, before the first write.

        Raises:
            StoreError: If it is not, or failed.
        """
        if self._checked:
            return
        name = self._root.prefix + PROBE_KEY

        async def create() -> None:
            await self._objects.create(name, fitness.PROBE_TEXT)

        async def listed() -> bool:
            return name in await self._names(name)

        store = (self._root.scheme, self._endpoint, self._root.bucket)
        fit = await fitness.honours_create_only(store, str(self._root), create, listed)
        self._objects.create_only = fit
        if not fit and self._require_create_only:
            raise fitness.unfit(str(self._root), self.condition)
        self._checked = True

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Gives up the uploads that nobody completed or aborted, and closes the connections."""
        with anyio.CancelScope(shield=True):
            await self._give_up()
            await self._stack.aclose()

    async def put(self, key: str, data: bytes, mode: PutMode) -> None:
        self._root.name(key)
        await self._check_fitness()
        await self._objects.put(key, data, mode)

    async def get(self, key: str, *, max_bytes: int) -> bytes:
        return await self._objects.get(key, max_bytes)

    async def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        await self._objects.read_into(key, offset, buffer)

    async def stat(self, key: str) -> ObjectInfo:
        return await self._objects.stat(key)

    async def delete(self, keys: Iterable[str]) -> None:
        await self._objects.delete(keys)


class BufferedUpload(Upload):
    """An object that is kept in memory, and sent whole by one request when it is complete.

    Args:
        objects: Writes and looks at objects.
        key: Its key.
        size: Its size in bytes.
    """

    def __init__(self, objects: BucketObjects, key: str, size: int) -> None:
        self._objects, self._key, self._data = objects, key, bytearray(size)
        self._token = secrets.token_hex(8)

    def __repr__(self) -> str:
        return f"<BufferedUpload {self._key} {len(self._data)} bytes>"

    async def write(self, offset: int, data: memoryview) -> None:
        if offset < 0 or offset + len(data) > len(self._data):
            message = f"A block of {len(data)} bytes at {offset} leaves the {len(self._data)} bytes"
            raise UsageError(message, key=self._key)
        memoryview(self._data)[offset : offset + len(data)] = data

    async def complete(self) -> None:
        await self._objects.put(self._key, bytes(self._data), PutMode.CREATE, self._token)

    async def landed(self) -> bool:
        return await self._objects.owner(self._key) == self._token

    async def abort(self) -> None:
        self._data.clear()


__all__ = ["OWNER", "BucketBackend", "BucketObjects", "BufferedUpload"]
