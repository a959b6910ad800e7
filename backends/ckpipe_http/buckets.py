"""A prefix of a bucket as a store: its address, its requests, its probe and its uploads.

A bucket is a flat space of names, of at most 1024 bytes of UTF-8 each, in which a root is a prefix.
A backend subclasses :class:`Bucket` and :class:`BlockUpload` with the requests of its own store,
and :class:`BucketBackend` with its options.
"""

from __future__ import annotations

import abc
import logging
import re
import secrets
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from types import TracebackType
from typing import ClassVar, Generic, NamedTuple, Self, TypeVar

import aiohttp
import anyio
from awscrt.checksums import crc32c

from ckpipe.backend import Backend, Children, ObjectInfo, PutMode, Upload, check_key
from ckpipe.errors import (
    CkpipeError,
    InvalidKey,
    ObjectExists,
    ObjectNotFound,
    PermissionDenied,
    StoreError,
    StoreUnavailable,
    TruncatedObject,
    UsageError,
)
from ckpipe_http.failures import Refused, Table, broken, refused
from ckpipe_http.requests import checksum_of, fill

logger = logging.getLogger("ckpipe")

OWNER = "ckpipe-upload"
"""The custom metadata of an object that names the upload that made it."""

MAX_NAME_BYTES = 1024
"""The longest name of an object, prefix included, in bytes of UTF-8: a limit of the stores."""

PROBE_KEY = ".ckpipe-probe"
"""The object directly below the root by which the store was probed; no method shows it."""

PROBE_TEXT = b"ckpipe tries to create this object twice, to see whether the store refuses it.\n"

SLOWEST_BYTES_PER_SECOND = 1 << 20
"""A body may take as long as it would at this speed, beyond the time of a bare request."""

_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
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


class Stored(NamedTuple):
    """An object as the store lists it, by its whole name."""

    name: str
    size: int
    modified: datetime
    generation: str = ""


class Page(NamedTuple):
    """A page of a list: objects, and of a delimited list the prefixes below."""

    objects: list[Stored]
    prefixes: list[str]


class Bucket(abc.ABC):
    """Send the requests for one bucket, each under a deadline and with its errors translated.

    Args:
        address: Bucket and prefix.
        timeout: Seconds for a request without a body.
    """

    foreign: ClassVar[Table]
    """The table of the store's and its client's errors, by code, status and type."""

    create_only = True
    """False if the store ignores the condition of a create-only put. Such a put looks first then,
    which is not atomic."""

    def __init__(self, address: BucketAddress, timeout: float) -> None:
        self.address, self.timeout = address, timeout

    @contextmanager
    def attempt(
        self, action: str, key: str | None = None, nbytes: int = 0
    ) -> Iterator[anyio.CancelScope]:
        """Bound the time of the block, and translate its errors.

        Args:
            action: The verb for the message of an error, such as ``"read"``.
            key: The key concerned; without one, a 404 speaks of the bucket.
            nbytes: The size of the body that is sent or comes.

        Yields:
            The scope that bounds it, to extend once the answer tells how much comes.

        Raises:
            StoreError: If it failed.
        """
        what = f"Could not {action} {self.address}{key or ''}"
        try:
            with anyio.fail_after(self.timeout + nbytes / SLOWEST_BYTES_PER_SECOND) as scope:
                yield scope
        except CkpipeError:
            raise
        except Exception as error:
            answer = self.refusal(error)
            made = (
                broken(error, what, key, self.foreign)
                if answer is None
                else refused(answer, what, key, self.foreign)
            )
            if made is None:
                raise
            raise made from error

    @abc.abstractmethod
    def refusal(self, error: BaseException | None) -> Refused | None:
        """Read the answer that an error of the client was made of; None if there was none."""

    def answer_to(self, error: StoreError) -> Refused:
        """Find the answer that an error was translated from; one of status 0 without any."""
        return self.refusal(error.__cause__) or Refused(0, "")

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

    async def put(self, key: str, data: bytes, mode: PutMode, owner: str | None = None) -> None:
        """Do :meth:`ckpipe.Backend.put`, and note in the metadata :data:`OWNER` who has made it."""
        name = self.address.name(key)
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
        raise ObjectExists(f"There is an object at {self.address}{key} already", key=key)

    @abc.abstractmethod
    async def owner(self, key: str) -> str | None:
        """Read which upload has made an object; None if it does not say, or is not there.

        Raises:
            StoreError: If the store failed.
        """

    @abc.abstractmethod
    def opened(
        self, key: str, span: str | None = None
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """Ask for an object within an :meth:`attempt`, and lend the answer with its body.

        Args:
            key: Its key.
            span: The range for the ``Range`` header; None for all of it.
        """

    def told_checksum(self, response: aiohttp.ClientResponse) -> int | None:
        """Read the CRC-32C of a whole object in the headers of an answer; None if it has none."""
        return None

    @abc.abstractmethod
    async def stat(self, key: str) -> ObjectInfo:
        """Do :meth:`ckpipe.Backend.stat`."""

    @abc.abstractmethod
    def pages(self, prefix: str, delimiter: str = "") -> AsyncIterator[Page]:
        """Ask for the pages of a list, each within an attempt of its own.

        Args:
            prefix: The beginning of the whole names.
            delimiter: Where names are cut; empty for whole names.
        """

    @abc.abstractmethod
    async def delete(self, keys: Iterable[str]) -> None:
        """Do :meth:`ckpipe.Backend.delete`."""


class Leftovers(abc.ABC):
    """Keep account of unfinished uploads, so that none of ours stays on the store."""

    @abc.abstractmethod
    async def close(self) -> None:
        """End the uploads that were neither completed nor aborted.

        Raises:
            StoreError: If the store failed.
        """

    @abc.abstractmethod
    async def remove_stale(self, prefix: str, before: datetime) -> int:
        """End the uploads below a prefix that have written nothing since a time.

        Args:
            prefix: The beginning of the whole names.
            before: By the store's own clock.

        Returns:
            How many uploads they were.

        Raises:
            StoreError: If the store failed.
        """


_honours: dict[tuple[str, str | None, str], bool] = {}
"""Whether stores honour the condition of a create-only put, by scheme, endpoint and bucket."""


class BucketBackend(Backend, abc.ABC):
    """Serve the objects of a bucket whose names begin with a prefix.

    Before its first write to a bucket a process probes by one object below the root whether the
    store honours the condition of a create-only put. A process that only reads writes nothing.

    ``__aenter__`` is the subclass's: it makes :attr:`_bucket` and :attr:`_leftovers`, and enters
    what has to be closed into :attr:`_stack`.

    Args:
        address: Bucket and prefix.
        endpoint: The address of the store's API; None for the one that the scheme means.
        require_create_only: Whether to refuse a store that ignores that condition.
    """

    prefers_worker = True
    condition: ClassVar[str]
    """The store's name for the condition of a create-only put."""
    buffered_bytes: ClassVar[int]
    """Large objects of at most this size are kept in memory and sent whole."""

    _bucket: Bucket
    _leftovers: Leftovers

    def __init__(
        self, address: BucketAddress, endpoint: str | None, *, require_create_only: bool
    ) -> None:
        self._address, self._endpoint = address, endpoint
        self._require_create_only = require_create_only
        self._stack = AsyncExitStack()
        self._probed = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._address}>"

    @abc.abstractmethod
    async def _begin(self, key: str, size: int, block_bytes: int) -> Upload:
        """Begin an upload in blocks that the store takes."""

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End unfinished uploads in the time of one request, and close the connections."""
        with anyio.CancelScope(shield=True):
            with anyio.move_on_after(self._bucket.timeout) as scope:
                try:
                    await self._leftovers.close()
                except StoreError as error:
                    logger.warning("Unfinished uploads may be left behind: %s", error)
            if scope.cancelled_caught:
                logger.warning("Unfinished uploads may be left behind below %s", self._address)
            await self._stack.aclose()

    async def _probe(self) -> None:
        """Refuse a store that is not fit to be written to, before the first write.

        A checkpoint is complete when an object was *created*, and several processes may try. On a
        store that ignores the condition of a create-only put all of them succeed, each over the
        other, and none is told. So one object is created twice, once per store and process. It
        stays, since a process that may write may not be allowed to delete; a second probe needs
        one request less for it.

        Raises:
            StoreError: If it is not fit, or failed.
        """
        if self._probed:
            return
        store = (self._address.scheme, self._endpoint, self._address.bucket)
        try:
            if store not in _honours:
                _honours[store] = await self._honours_create_only()
            fit = _honours[store]
        except PermissionDenied:
            fit = True  # the write itself is refused in its own name
        self._bucket.create_only = fit
        if not fit and self._require_create_only:
            raise StoreError(
                f"The store of {self._address} ignores {self.condition}, so that two writers can "
                "overwrite each other's checkpoints unnoticed",
                hint="Use another store, or accept the risk with the option "
                "require_create_only=False and give every run a root of its own",
            )
        self._probed = True

    async def _honours_create_only(self) -> bool:
        name = self._address.prefix + PROBE_KEY
        honoured = False
        for _ in range(2):
            try:
                await self._bucket.write(name, PROBE_TEXT, create=True)
            except ObjectExists:
                honoured = True
                break
        pages = self._bucket.pages(name)
        if name not in {stored.name async for page in pages for stored in page.objects}:
            message = f"{self._address} does not list an object that was just written"
            raise StoreError(message, hint="Use a store whose lists are consistent")
        return honoured

    async def put(self, key: str, data: bytes, mode: PutMode) -> None:
        self._address.name(key)
        await self._probe()
        await self._bucket.put(key, data, mode)

    async def put_volatile(self, key: str, data: bytes) -> None:
        # No probe: a lease of a load has a random name, and leaves nothing.
        await self._bucket.put(key, data, PutMode.CREATE)

    async def open_upload(self, key: str, *, size: int, block_bytes: int) -> Upload:
        self._address.name(key)
        least, most = self.limits.min_block_bytes, self.limits.max_blocks or size
        if size > block_bytes and (block_bytes < least or size > most * block_bytes):
            message = f"The store cannot take {size} bytes in {most} blocks of {block_bytes} bytes"
            mebibytes = -(-max(size // most, least) // (1 << 20)) + 1
            hint = f'Set staging.block_bytes to "{mebibytes} MiB" or more'
            raise UsageError(message, key=key, hint=hint)
        await self._probe()
        if size <= min(block_bytes, self.buffered_bytes):
            return BufferedUpload(self._bucket, key, size)
        return await self._begin(key, size, block_bytes)

    async def remove_stale_uploads(self, prefix: str, *, before: datetime) -> int:
        return await self._leftovers.remove_stale(self._address.below(prefix), before)

    async def get(self, key: str, *, max_bytes: int) -> bytes:
        data = bytearray()
        with self._bucket.attempt("read", key) as scope:
            async with self._bucket.opened(key) as response:
                told, size = self._bucket.told_checksum(response), response.content_length or 0
                scope.deadline += min(size or max_bytes, max_bytes) / SLOWEST_BYTES_PER_SECOND
                if size <= max_bytes:
                    async for piece in response.content.iter_any():
                        data += piece
                        if len(data) > max_bytes:
                            break
                size = max(len(data), size)
        if size > max_bytes:
            message = f"The object has {size} bytes, more than the {max_bytes} expected"
            raise StoreError(message, key=key)
        if len(data) != size:
            raise self._cut_short(key, len(data), size)
        if told is not None and crc32c(memoryview(data)) != told:
            message = f"Could not read {self._address}{key}: "
            message += "what came has another checksum than the object"
            raise StoreUnavailable(message, key=key)
        return bytes(data)

    async def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        wanted = len(buffer)
        try:
            with self._bucket.attempt("read", key, wanted):
                span = f"bytes={offset}-{offset + wanted - 1}"
                async with self._bucket.opened(key, span) as response:
                    self._check_range(response.headers.get("Content-Range"), key, offset, wanted)
                    came = await fill(response, buffer)
            if came != wanted:
                raise self._cut_short(key, came, wanted)
        except StoreError as error:
            if self._bucket.answer_to(error).status != 416:
                raise
            size = (await self.stat(key)).size
            raise _truncated(key, offset, wanted, size) from error

    def _check_range(self, header: str | None, key: str, offset: int, wanted: int) -> None:
        """Compare an answer's ``Content-Range`` (RFC 9110, section 14.4) with what was wanted.

        Raises:
            TruncatedObject: If the object ends before.
            StoreError: If the store does not answer with the range.
        """
        found = _CONTENT_RANGE.fullmatch(header or "")
        if found is None or int(found[1]) != offset:
            message = f"Could not read {self._address}{key}: the store does not answer with ranges"
            raise StoreError(message, key=key)
        size, came = int(found[3]), int(found[2]) + 1 - offset
        if offset + wanted > size:
            raise _truncated(key, offset, wanted, size)
        if came != wanted:
            raise self._cut_short(key, came, wanted)

    def _cut_short(self, key: str, came: int, wanted: int) -> StoreError:
        message = f"Could not read {self._address}{key}: {came} bytes came, and not {wanted}"
        return StoreUnavailable(message, key=key)

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        async for page in self._bucket.pages(self._address.below(prefix)):
            for info in self._objects(page):
                yield info

    async def children(self, prefix: str = "") -> Children:
        objects: list[ObjectInfo] = []
        prefixes: set[str] = set()
        async for page in self._bucket.pages(self._address.below(prefix), "/"):
            objects += self._objects(page)
            keys = [self._address.key(name.removesuffix("/")) for name in page.prefixes]
            prefixes |= {f"{key}/" for key in keys if key is not None}
        return Children(tuple(objects), tuple(sorted(prefixes)))

    def _objects(self, page: Page) -> Iterator[ObjectInfo]:
        """Read the objects on a page, without names that are no keys of this root."""
        for stored in page.objects:
            key = self._address.key(stored.name)
            if key is not None:
                yield ObjectInfo(key, stored.size, stored.modified)

    async def stat(self, key: str) -> ObjectInfo:
        return await self._bucket.stat(key)

    async def delete(self, keys: Iterable[str]) -> None:
        await self._bucket.delete(keys)


def _truncated(key: str, offset: int, wanted: int, size: int) -> TruncatedObject:
    message = f"The object has {size} bytes, and {wanted} from byte {offset} on were wanted"
    return TruncatedObject(message, key=key)


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
        bucket: Writes and looks at objects.
        key: Its key.
        size: Its size in bytes.
    """

    def __init__(self, bucket: Bucket, key: str, size: int) -> None:
        self._bucket, self._key, self._data = bucket, key, bytearray(size)
        self._token = secrets.token_hex(8)

    def __repr__(self) -> str:
        return f"<BufferedUpload {self._key} {len(self._data)} bytes>"

    async def write(self, offset: int, data: memoryview) -> None:
        if offset < 0 or offset + len(data) > len(self._data):
            message = f"A block of {len(data)} bytes at {offset} leaves the {len(self._data)} bytes"
            raise UsageError(message, key=self._key)
        memoryview(self._data)[offset : offset + len(data)] = data

    async def complete(self) -> None:
        await self._bucket.put(self._key, bytes(self._data), PutMode.CREATE, self._token)

    async def landed(self) -> bool:
        return await self._bucket.owner(self._key) == self._token

    async def abort(self) -> None:
        self._data.clear()
