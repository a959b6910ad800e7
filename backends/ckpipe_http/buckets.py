"""A prefix of a bucket as a store: its address, its probe, its objects and its uploads.

A bucket is a flat space of names, of at most 1024 bytes of UTF-8 each, in which a root is a prefix.
A backend subclasses :class:`BucketAddress`, :class:`BucketObjects`, :class:`BucketBackend` and
:class:`BlockUpload` with the requests of its own store.
"""

from __future__ import annotations

import abc
import re
import secrets
from collections.abc import Awaitable, Callable, Hashable, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import ClassVar, Generic, Self, TypeVar

import anyio

from ckpipe.backend import Backend, ObjectInfo, PutMode, Upload, check_key
from ckpipe.errors import (
    InvalidKey,
    ObjectExists,
    ObjectNotFound,
    PermissionDenied,
    StoreError,
    UsageError,
)
from ckpipe_http.requests import checksum_of

OWNER = "ckpipe-upload"
"""The custom metadata of an object that names the upload that made it."""

MAX_NAME_BYTES = 1024
"""The longest name of an object, prefix included, in bytes of UTF-8: a limit of the stores."""

PROBE_KEY = ".ckpipe-probe"
"""The object directly below the root by which the store was probed; no method shows it."""

PROBE_TEXT = b"ckpipe tries to create this object twice, to see whether the store refuses it.\n"

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True)
class BucketAddress:
    """A root in a bucket.

    Args:
        bucket: The bucket's name.
        prefix: The text before every key: empty, or whole parts with a ``/`` at the end.
    """

    bucket: str
    prefix: str
    scheme: ClassVar[str] = "bucket"
    """The scheme of the URL."""

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.prefix}"

    @classmethod
    def parse(cls, url: str) -> Self:
        """Read the bucket and prefix of ``scheme://bucket/prefix``, without percent-decoding.

        Raises:
            UsageError: If the URL is of another form.
        """
        form = f"Write {cls.scheme}://bucket/prefix"
        scheme, separator, rest = url.partition("://")
        bucket, _, prefix = rest.partition("/")
        if scheme.lower() != cls.scheme or not separator or not _BUCKET.fullmatch(bucket):
            # The URL is not repeated, since it may hold credentials.
            short = len(bucket) == 1 and bucket.isalnum()
            message = "The URL does not name a bucket"
            message += ": names of one character are none" if short else ""
            raise UsageError(message, hint=f"{form}, without credentials or port")
        prefix = prefix.strip("/")
        if "\\" in prefix or _CONTROL.search(prefix):
            # Some stores take a backslash for a slash, and would list what was written elsewhere.
            message = f"The prefix {prefix!r} has a backslash or a control character"
            raise UsageError(message, hint=form)
        if prefix:
            try:
                check_key(prefix)
            except InvalidKey as error:
                message = f"The prefix {prefix!r} has an empty part, '.' or '..'"
                raise UsageError(message, hint=form) from error
        return cls(bucket, f"{prefix}/" if prefix else "")

    def is_reserved(self, key: str) -> bool:
        """Tell whether a key is that of an object of the backend's own, which no method shows."""
        return key == PROBE_KEY

    def name(self, key: str) -> str:
        """Make the whole name of a key's object.

        Raises:
            InvalidKey: If the store cannot hold the key, or it is the backend's own.
        """
        name = self.prefix + check_key(key)
        try:
            nbytes = len(name.encode())
        except UnicodeEncodeError as error:
            raise InvalidKey("The name of an object is Unicode text", key=key) from error
        if nbytes > MAX_NAME_BYTES:
            message = f"The object's name is longer than the {MAX_NAME_BYTES} bytes of the store"
            raise InvalidKey(message, key=key, hint="Use a shorter prefix")
        if self.is_reserved(key):
            raise InvalidKey("The key is reserved for the backend itself", key=key)
        return name

    def below(self, prefix: str) -> str:
        """Make the whole prefix for a prefix of keys, which is empty or ends in ``/``.

        Raises:
            InvalidKey: If it is something else.
        """
        if prefix:
            check_key(prefix.removesuffix("/"))
            if not prefix.endswith("/"):
                raise InvalidKey("A prefix ends in '/'", key=prefix)
        return self.prefix + prefix

    def key(self, name: str) -> str | None:
        """Find the key of an object's name; None for names that are no keys of this root.

        Other programs may put objects below the root whose names are no keys, such as the
        empty ``folder/`` of a file browser.
        """
        key = name.removeprefix(self.prefix)
        try:
            check_key(key)
        except InvalidKey:
            return None
        return None if self.is_reserved(key) else key


Address = TypeVar("Address", bound=BucketAddress)


class BucketObjects(abc.ABC, Generic[Address]):
    """Read and write the objects below a root, each by as few requests as the store allows.

    Args:
        address: Bucket and prefix.
    """

    create_only = True
    """False if the store ignores the condition of a create-only put. Such a put looks first then,
    which is not atomic."""

    def __init__(self, address: Address) -> None:
        self._address = address

    async def put(self, key: str, data: bytes, mode: PutMode, owner: str | None = None) -> None:
        """Do :meth:`ckpipe.Backend.put`, and note in the metadata :data:`OWNER` who has made it."""
        name = self._address.name(key)
        if mode is PutMode.CREATE and not self.create_only:
            await self.check_free(key)
        create = mode is PutMode.CREATE and self.create_only
        await self.write(name, data, create=create, owner=owner, key=key)

    async def check_free(self, key: str) -> None:
        """Look whether a key is free.

        Raises:
            ObjectExists: If it is not.
            StoreError: If the store failed.
        """
        try:
            await self.stat(key)
        except ObjectNotFound:
            return
        raise ObjectExists(f"There is an object at {self._address}{key} already", key=key)

    @abc.abstractmethod
    async def write(
        self,
        name: str,
        data: bytes,
        *,
        create: bool,
        owner: str | None = None,
        key: str | None = None,
    ) -> object:
        """Write an object by its whole name, in one request that carries its checksum.

        Args:
            name: The name.
            data: The object.
            create: Whether to send the store's condition that there is none yet.
            owner: The upload that makes it, for its metadata.
            key: The key concerned, for errors.

        Raises:
            ObjectExists: If the store refuses for the condition.
            StoreError: If the store failed.
        """

    @abc.abstractmethod
    async def owner(self, key: str) -> str | None:
        """Read which upload has made an object; None if it does not say, or is not there.

        Raises:
            StoreError: If the store failed.
        """

    @abc.abstractmethod
    async def get(self, key: str, max_bytes: int) -> bytes:
        """Do :meth:`ckpipe.Backend.get`."""

    @abc.abstractmethod
    async def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """Do :meth:`ckpipe.Backend.read_into`."""

    @abc.abstractmethod
    async def stat(self, key: str) -> ObjectInfo:
        """Do :meth:`ckpipe.Backend.stat`."""

    @abc.abstractmethod
    async def delete(self, keys: Iterable[str]) -> None:
        """Do :meth:`ckpipe.Backend.delete`."""


class BucketBackend(Backend, abc.ABC, Generic[Address]):
    """Serve the objects of a bucket whose names begin with a prefix.

    Before its first write to a bucket a process probes by one object below the root whether the
    store honours the condition of a create-only put. A process that only reads writes nothing.

    ``__aenter__`` is the subclass's: it makes :attr:`_objects`, and enters what has to be closed
    into :attr:`_stack`.

    Args:
        address: Bucket and prefix.
        endpoint: The address of the store's API; None for the one that the scheme means.
        require_create_only: Whether to refuse a store that ignores that condition.
    """

    prefers_worker = True
    condition: ClassVar[str]
    """The store's name for the condition of a create-only put."""

    _objects: BucketObjects[Address]

    def __init__(
        self, address: Address, endpoint: str | None, *, require_create_only: bool
    ) -> None:
        self._address, self._endpoint = address, endpoint
        self._require_create_only = require_create_only
        self._stack = AsyncExitStack()
        self._probed = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._address}>"

    @abc.abstractmethod
    async def _names(self, prefix: str) -> set[str]:
        """List the whole names of all objects that begin so.

        Raises:
            StoreError: If the store failed.
        """

    @abc.abstractmethod
    async def _give_up(self) -> None:
        """End the uploads that were neither completed nor aborted."""

    async def _probe(self) -> None:
        """Refuse a store that is not fit to be written to, before the first write.

        Raises:
            StoreError: If it is not, or failed.
        """
        if self._probed:
            return
        name = self._address.prefix + PROBE_KEY

        async def create() -> None:
            await self._objects.write(name, PROBE_TEXT, create=True)

        async def listed() -> bool:
            return name in await self._names(name)

        store = (self._address.scheme, self._endpoint, self._address.bucket)
        fit = await honours_create_only(store, str(self._address), create, listed)
        self._objects.create_only = fit
        if not fit and self._require_create_only:
            raise StoreError(
                f"The store of {self._address} ignores {self.condition}, so that two writers can "
                "overwrite each other's checkpoints unnoticed",
                hint="Use another store, or accept the risk with the option "
                "require_create_only=False and give every run a root of its own",
            )
        self._probed = True

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Give up unfinished uploads, and close the connections."""
        with anyio.CancelScope(shield=True):
            await self._give_up()
            await self._stack.aclose()

    async def put(self, key: str, data: bytes, mode: PutMode) -> None:
        self._address.name(key)
        await self._probe()
        await self._objects.put(key, data, mode)

    async def put_volatile(self, key: str, data: bytes) -> None:
        # No probe: a lease of a load has a random name, and leaves nothing.
        await self._objects.put(key, data, PutMode.CREATE)

    async def get(self, key: str, *, max_bytes: int) -> bytes:
        return await self._objects.get(key, max_bytes)

    async def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        await self._objects.read_into(key, offset, buffer)

    async def stat(self, key: str) -> ObjectInfo:
        return await self._objects.stat(key)

    async def delete(self, keys: Iterable[str]) -> None:
        await self._objects.delete(keys)


_honours: dict[Hashable, bool] = {}


async def honours_create_only(
    store: Hashable,
    where: str,
    create: Callable[[], Awaitable[None]],
    listed: Callable[[], Awaitable[bool]],
) -> bool:
    """Find out whether creating an object fails where there is one, once per store and process.

    A checkpoint is complete when an object was *created*, and several processes may try. On a store
    that ignores the condition of a create-only put all of them succeed, each over the other, and
    none is told.

    The object stays, since a process that may write may not be allowed to delete; a second probe
    needs one request less for it. Credentials that may not write here learn nothing; the write
    itself is refused in its own name.

    Args:
        store: A key that tells one store from another.
        where: The URL of the root.
        create: Creates the probe's object.
        listed: Looks whether a list shows it.

    Raises:
        StoreError: If the store failed, or does not list what it holds.
    """
    if store in _honours:
        return _honours[store]
    honoured = False
    try:
        for _ in range(2):
            try:
                await create()
            except ObjectExists:
                honoured = True
                break
        if not await listed():
            message = f"{where} does not list an object that was just written"
            raise StoreError(message, hint="Use a store whose lists are consistent")
    except PermissionDenied:
        return True
    _honours[store] = honoured
    return honoured


Part = TypeVar("Part")


class BlockUpload(Upload, abc.ABC, Generic[Part]):
    """Send an object in blocks, each with its checksum, and make the object of them at the end.

    Args:
        key: Its key.
        size: Its size in bytes.
        block_bytes: The size of all blocks but the last.
    """

    takes_checksums = True

    def __init__(self, key: str, size: int, block_bytes: int) -> None:
        self._key, self._size, self._block_bytes = key, size, block_bytes
        self._count = -(-size // block_bytes)
        self._token = secrets.token_hex(8)  # names this upload in the metadata of its object
        self._parts: dict[int, Part] = {}

    def __repr__(self) -> str:
        done = f"{len(self._parts)} of {self._count} parts"
        return f"<{type(self).__name__} {self._key} {self._size} bytes [{done}]>"

    async def write(self, offset: int, data: memoryview) -> None:
        await self.write_summed(offset, data, await checksum_of(data))

    def _number(self, offset: int, data: memoryview) -> int:
        """Find the number of a block.

        Raises:
            UsageError: If it is none of this upload.
        """
        number, beside = divmod(offset, self._block_bytes)
        if beside or len(data) != min(self._block_bytes, self._size - offset):
            message = f"{len(data)} bytes at {offset} are no block of {self._size} bytes"
            raise UsageError(message, key=self._key)
        return number

    def _all_parts(self) -> list[Part]:
        """Return the parts in their order.

        Raises:
            UsageError: If some were not written.
        """
        if len(self._parts) != self._count:
            message = f"The upload has {len(self._parts)} of its {self._count} parts"
            raise UsageError(message, key=self._key)
        return [self._parts[number] for number in range(self._count)]


class BufferedUpload(Upload):
    """Keep an object in memory, and send it by one request when it is complete.

    Args:
        objects: Writes and looks at objects.
        key: Its key.
        size: Its size in bytes.
    """

    def __init__(self, objects: BucketObjects[Address], key: str, size: int) -> None:
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
