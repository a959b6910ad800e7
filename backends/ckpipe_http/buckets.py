"""A prefix of a bucket as a store: its names, its requests, its probe and its uploads.

A bucket is a flat space of names, of at most 1024 bytes of UTF-8 each, in which a root is a prefix.
A backend subclasses :class:`BucketBackend` and :class:`BlockUpload` with the requests of its own
store.
"""

from __future__ import annotations

import abc
import hashlib
import logging
import re
import secrets
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from datetime import datetime
from types import TracebackType
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import aiohttp
import anyio
from awscrt.checksums import crc32c

from ckpipe.backend import (
    Backend,
    Children,
    ObjectInfo,
    PutMode,
    Upload,
    check_key,
    check_prefix,
    for_each,
    truncated,
)
from ckpipe.errors import (
    CkpipeError,
    InvalidKey,
    LinkUnavailable,
    ObjectExists,
    ObjectNotFound,
    PermissionDenied,
    StoreError,
    StoreUnavailable,
    UsageError,
)
from ckpipe_http.failures import Refused, Table, broken, refused
from ckpipe_http.requests import checksum_of, fill, flag, positive

logger = logging.getLogger("ckpipe")

OWNER = "ckpipe-upload"
"""The custom metadata of an object that names the upload or the link that made it."""

MAX_NAME_BYTES = 1024
"""The longest name of an object, prefix included, in bytes of UTF-8: a limit of the stores."""

PROBE_KEY = ".ckpipe-probe"
"""The object directly below the root for the probe of the store; no method shows it."""

PROBE_TEXT = b"ckpipe tries to create this object twice, to see whether the store refuses it.\n"

SLOWEST_BYTES_PER_SECOND = 1 << 20
"""A body may take the time of this speed in addition to the time of a request without a body."""

ENDED_AT_ONCE = 16
"""The number of objects deleted, or of uploads ended, at a time."""

_NO_LINK = (400, 403, 405, 501)
"""The statuses that refuse a copy: it is too large, not allowed, or unknown to the store."""

_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]+")

_honours: dict[tuple[str, str | None, str], bool] = {}
"""Whether stores honour the condition of a create-only put, by scheme, endpoint and bucket."""

Part = TypeVar("Part")


class Stored(NamedTuple):
    """An object as the store lists it, by its whole name."""

    name: str
    size: int
    modified: datetime
    generation: str = ""


Page = tuple[list[Stored], list[str]]
"""A page of a list: objects, and in a delimited list the prefixes below."""


class BucketBackend(Backend, abc.ABC):
    """Serve the objects of a bucket whose names begin with a prefix.

    Each request has a deadline, and its errors are translated.

    Before its first write to a bucket a process probes, with one object below the root, whether the
    store honours the condition of a create-only put. A process that only reads writes nothing.

    The subclass implements ``__aenter__`` and enters its resources into :attr:`_stack`.

    Args:
        url: ``scheme://bucket/prefix``, without percent-decoding.
        endpoint: The address of the store's API; None for the default of the scheme.
        timeout: Seconds for a request without a body.
        require_create_only: Whether to refuse a store that ignores that condition.

    Raises:
        UsageError: If the URL is of another form, or an option is out of range.
    """

    prefers_worker = True
    can_link = True
    scheme: ClassVar[str]
    """The scheme of the URL."""
    errors: ClassVar[Table]
    """The table of the store's and its client's errors, by code, status and type."""
    condition: ClassVar[str]
    """The store's name for the condition of a create-only put."""
    buffered_bytes: ClassVar[int]
    """Large objects of at most this size are kept in memory and sent whole."""

    def __init__(
        self, url: str, endpoint: str | None, timeout: float, *, require_create_only: bool
    ) -> None:
        self.bucket, self.prefix = _parse(url, self.scheme)
        self.root = f"{self.scheme}://{self.bucket}/{self.prefix}"
        self.endpoint, self.timeout = endpoint, positive("request_timeout", timeout)
        self.unfinished: set[BlockUpload[Any]] = set()
        """Uploads that may have remains on the store beside their objects."""
        self._require_create_only = flag("require_create_only", require_create_only)
        # If the store ignores the condition, a create-only put checks first, which is not atomic.
        self._create_only = True
        self._stack = AsyncExitStack()
        self._probed = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.root}>"

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End unfinished uploads, each request with its deadline; close the connections."""

        async def end(upload: BlockUpload[Any]) -> None:
            try:
                await upload.end()
            except StoreError as error:
                logger.warning("Unfinished uploads may be left behind: %s", error)

        with anyio.CancelScope(shield=True):
            await for_each(self.unfinished, end, at_once=ENDED_AT_ONCE)
            await self._stack.aclose()

    # Names

    def is_reserved(self, key: str) -> bool:
        """Tell whether a key belongs to an internal object, which no method shows."""
        return key == PROBE_KEY

    def name(self, key: str) -> str:
        """Make the whole name of a key's object.

        Raises:
            InvalidKey: If the store cannot hold the key, or the key is reserved.
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
        """Make the whole prefix for a prefix of keys; see :func:`ckpipe.backend.check_prefix`."""
        return self.prefix + check_prefix(prefix)

    def key(self, name: str) -> str | None:
        """Find the key of an object's name; None for names that are no keys of this root.

        Objects of other programs below the root may have such names, for example the empty
        ``folder/`` of a file browser.
        """
        key = name.removeprefix(self.prefix)
        try:
            check_key(key)
        except InvalidKey:
            return None
        return None if self.is_reserved(key) else key

    # Requests

    @contextmanager
    def attempt(
        self, action: str, key: str | None = None, nbytes: int = 0
    ) -> Iterator[anyio.CancelScope]:
        """Bound the time of the block, and translate its errors.

        Args:
            action: The verb for the message of an error, such as ``"read"``.
            key: The key; without one, a 404 is about the bucket.
            nbytes: The size of the body of the request or answer.

        Yields:
            The scope with the deadline, to extend once the answer gives its size.

        Raises:
            StoreError: If it failed.
        """
        what = f"Could not {action} {self.root}{key or ''}"
        try:
            with anyio.fail_after(self.timeout + nbytes / SLOWEST_BYTES_PER_SECOND) as scope:
                yield scope
        except CkpipeError:
            raise
        except Exception as error:
            answer = self.refusal(error)
            if answer is not None:
                raise refused(answer, what, key, self.errors) from error
            made = broken(error, what, key, self.errors)
            if made is None:
                raise
            raise made from error

    def refusal(self, error: BaseException | None) -> Refused | None:
        """Read the answer behind an error of the client; None if there was none."""
        return error if isinstance(error, Refused) else None

    def answer_to(self, error: StoreError) -> Refused:
        """Find the answer that an error was translated from; without one, return status 0."""
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
            create: Whether to send the store's condition that there is no such object.
            owner: The upload that makes it, for its metadata :data:`OWNER`.
            key: The key, for errors.

        Raises:
            ObjectExists: If the store refuses because of the condition.
            StoreError: If the store failed.
        """

    @abc.abstractmethod
    async def owner(self, key: str) -> str | None:
        """Read which upload has made an object; None if it has no owner, or does not exist.

        Raises:
            StoreError: If the store failed.
        """

    @abc.abstractmethod
    def opened(
        self, key: str, span: str | None = None
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """Request an object within an :meth:`attempt`, and lend the answer with its body.

        Args:
            key: Its key.
            span: The range for the ``Range`` header; None for all of it.
        """

    def told_checksum(self, response: aiohttp.ClientResponse) -> int | None:
        """Read the CRC-32C of a whole object in the headers of an answer; None if it has none."""
        return None

    @abc.abstractmethod
    def pages(self, prefix: str, delimiter: str = "") -> AsyncIterator[Page]:
        """Request the pages of a list, each within its own attempt.

        Args:
            prefix: The beginning of the whole names.
            delimiter: The text at which names are cut; empty for whole names.
        """

    @abc.abstractmethod
    async def begin(self, key: str, size: int, block_bytes: int) -> Upload:
        """Begin an upload in blocks of a valid size."""

    # Writes

    async def _probe(self) -> None:
        """Refuse an unfit store before the first write.

        A checkpoint is complete when its index is *created*, and several processes may try that. If
        a store ignores the condition of a create-only put, all of them succeed, one overwrites the
        other, and none gets an error. So the probe creates one object twice, once per store and
        process. The object stays, since a process that may write may not be allowed to delete. With
        it, the next probe needs one request less.

        Raises:
            StoreError: If the store is unfit, or failed.
        """
        if self._probed:
            return
        store = (self.scheme, self.endpoint, self.bucket)
        try:
            if store not in _honours:
                _honours[store] = await self._honours_create_only()
            self._create_only = _honours[store]
        except PermissionDenied:
            self._create_only = True  # the write itself then raises its own error
        if not self._create_only and self._require_create_only:
            raise StoreError(
                f"The store of {self.root} ignores {self.condition}, so two writers can overwrite "
                "each other's checkpoints unnoticed",
                hint="Use another store, or accept the risk with the option "
                "require_create_only=False and give every run its own root",
            )
        self._probed = True

    async def _honours_create_only(self) -> bool:
        name = self.prefix + PROBE_KEY
        honoured = False
        for _ in range(2):
            try:
                await self.write(name, PROBE_TEXT, create=True)
            except ObjectExists:
                honoured = True
                break
        if name not in {each.name async for page, _ in self.pages(name) for each in page}:
            message = f"{self.root} does not list a new object"
            raise StoreError(message, hint="Use a store whose lists are consistent")
        return honoured

    async def put(self, key: str, data: bytes, mode: PutMode) -> None:
        name = self.name(key)
        await self._probe()
        if mode is PutMode.CREATE:
            await self.create(key, data)
        else:
            await self.write(name, data, create=False, key=key)

    async def put_volatile(self, key: str, data: bytes) -> None:
        # No probe: a lease has a random name, and is deleted at the end.
        await self.create(key, data)

    async def create(self, key: str, data: bytes, owner: str | None = None) -> None:
        """Create a small object.

        Args:
            key: Its key.
            data: The object.
            owner: The upload that makes it.

        Raises:
            ObjectExists: If the key is taken.
            StoreError: If the store failed.
        """
        name = self.name(key)
        if not self._create_only:
            await self.check_free(key)
        await self.write(name, data, create=self._create_only, owner=owner, key=key)

    async def check_free(self, key: str) -> None:
        """Check that a key is free.

        Raises:
            ObjectExists: If it is not.
            StoreError: If the store failed.
        """
        try:
            await self.stat(key)
        except ObjectNotFound:
            return
        raise ObjectExists(f"There is an object at {self.root}{key} already", key=key)

    async def link(self, source: str, target: str) -> None:
        names = self.name(source), self.name(target)
        await self._probe()
        mark = hashlib.sha256("\0".join(names).encode()).hexdigest()[:32]
        try:
            await self.check_free(target)  # some stores ignore the condition of a copy
            await self.copy(source, target, mark)
        except ObjectExists:
            if await self.owner(target) != mark:
                raise
        except ObjectNotFound as error:
            raise ObjectNotFound(error.message, key=source) from error
        except StoreError as error:
            refused = self.answer_to(error).status in _NO_LINK
            if not refused or type(error) not in (StoreError, PermissionDenied):
                raise
            raise LinkUnavailable(error.message, key=target) from error

    @abc.abstractmethod
    async def copy(self, source: str, target: str, mark: str) -> None:
        """Copy an object on the store, as if it were written anew, if the store has no target.

        Args:
            source: Its key.
            target: The key of the copy.
            mark: The text for its metadata :data:`OWNER`.

        Raises:
            ObjectExists: If the store refuses because of the condition.
            ObjectNotFound: If there is no source.
            StoreError: If the store failed.
        """

    async def open_upload(self, key: str, *, size: int, block_bytes: int) -> Upload:
        self.name(key)
        least, most = self.limits.min_block_bytes, self.limits.max_blocks or size
        if size > block_bytes and (block_bytes < least or size > most * block_bytes):
            message = f"The store cannot take {size} bytes in {most} blocks of {block_bytes} bytes"
            mebibytes = -(-max(size // most, least) // (1 << 20)) + 1
            hint = f'Set staging.block_bytes to "{mebibytes} MiB" or more'
            raise UsageError(message, key=key, hint=hint)
        await self._probe()
        if size <= min(block_bytes, self.buffered_bytes):
            return BufferedUpload(self, key, size)
        return await self.begin(key, size, block_bytes)

    # Reads

    async def get(self, key: str, *, max_bytes: int) -> bytes:
        data = bytearray()
        with self.attempt("read", key) as scope:
            async with self.opened(key) as response:
                told, size = self.told_checksum(response), response.content_length or 0
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
            message = f"Could not read {self.root}{key}: "
            message += "the received bytes have another checksum than the object"
            raise StoreUnavailable(message, key=key)
        return bytes(data)

    async def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        wanted = len(buffer)
        try:
            with self.attempt("read", key, wanted):
                span = f"bytes={offset}-{offset + wanted - 1}"
                async with self.opened(key, span) as response:
                    self._check_range(response.headers.get("Content-Range"), key, offset, wanted)
                    came = await fill(response, buffer)
            if came != wanted:
                raise self._cut_short(key, came, wanted)
        except StoreError as error:
            if self.answer_to(error).status != 416:
                raise
            size = (await self.stat(key)).size
            raise truncated(key, offset, wanted, size) from error

    def _check_range(self, header: str | None, key: str, offset: int, wanted: int) -> None:
        """Compare an answer's ``Content-Range`` (RFC 9110, section 14.4) with the request.

        Raises:
            TruncatedObject: If the object is too short.
            StoreError: If the store does not answer with the range.
        """
        found = _CONTENT_RANGE.fullmatch(header or "")
        if found is None or int(found[1]) != offset:
            message = f"Could not read {self.root}{key}: the store does not support ranges"
            raise StoreError(message, key=key)
        size, came = int(found[3]), int(found[2]) + 1 - offset
        if offset + wanted > size:
            raise truncated(key, offset, wanted, size)
        if came != wanted:
            raise self._cut_short(key, came, wanted)

    def _cut_short(self, key: str, came: int, wanted: int) -> StoreError:
        message = f"Could not read {self.root}{key}: {came} bytes arrived instead of {wanted}"
        return StoreUnavailable(message, key=key)

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        async for page, _ in self.pages(self.below(prefix)):
            for info in self._objects(page):
                yield info

    async def children(self, prefix: str = "") -> Children:
        objects: list[ObjectInfo] = []
        prefixes: set[str] = set()
        async for page, names in self.pages(self.below(prefix), "/"):
            objects += self._objects(page)
            keys = [self.key(name.removesuffix("/")) for name in names]
            prefixes |= {f"{key}/" for key in keys if key is not None}
        return Children(tuple(objects), tuple(sorted(prefixes)))

    def _objects(self, page: Iterable[Stored]) -> Iterator[ObjectInfo]:
        """Read the objects on a page, without names that are no keys of this root."""
        for stored in page:
            key = self.key(stored.name)
            if key is not None:
                yield ObjectInfo(key, stored.size, stored.modified)


def _parse(url: str, scheme: str) -> tuple[str, str]:
    """Read the bucket and the prefix, which is empty or ends with a ``/``.

    Raises:
        UsageError: If the URL is of another form.
    """
    form = f"Write {scheme}://bucket/prefix"
    found, separator, rest = url.partition("://")
    bucket, _, prefix = rest.partition("/")
    if found.lower() != scheme or not separator or not _BUCKET.fullmatch(bucket):
        # The URL is not repeated, since it may hold credentials.
        short = len(bucket) == 1 and bucket.isalnum()
        message = "The URL does not name a bucket"
        message += ": a bucket has a name of at least two characters" if short else ""
        if scheme == "s3" and rest.startswith("arn:"):
            alias = "the alias of the access point, which ends in -s3alias, as the bucket"
            raise UsageError("The URL has the ARN of an access point", hint=f"{form}, with {alias}")
        raise UsageError(message, hint=f"{form}, without credentials or port")
    prefix = prefix.strip("/")
    if "\\" in prefix or _CONTROL.search(prefix):
        # Some stores treat a backslash as a slash, and would list objects under another name.
        message = f"The prefix {prefix!r} has a backslash or a control character"
        raise UsageError(message, hint=form)
    if not prefix:
        return bucket, ""
    try:
        return bucket, f"{check_key(prefix)}/"
    except InvalidKey as error:
        message = f"The prefix {prefix!r} has an empty component, '.' or '..'"
        raise UsageError(message, hint=form) from error


class BlockUpload(Upload, abc.ABC, Generic[Part]):
    """Send an object in blocks, each with its checksum, and make the object of them at the end.

    It stays among the unfinished uploads of its store until it can have no remains beside the
    object, so that closing removes them.

    Args:
        store: Sends the requests.
        key: The object's key.
        size: Its size in bytes.
        block_bytes: The size of all blocks except the last.
    """

    takes_checksums = True

    def __init__(self, store: BucketBackend, key: str, size: int, block_bytes: int) -> None:
        self._store, self.key, self._name = store, key, store.name(key)
        self._size, self._block_bytes = size, block_bytes
        self._count = -(-size // block_bytes)
        self._token = secrets.token_hex(8)  # names this upload in the metadata of its object
        self._parts: dict[int, Part] = {}
        store.unfinished.add(self)

    def __repr__(self) -> str:
        done = f"{len(self._parts)} of {self._count} parts"
        return f"<{type(self).__name__} {self.key} {self._size} bytes [{done}]>"

    async def write(self, offset: int, data: memoryview) -> None:
        await self.write_summed(offset, data, await checksum_of(data))

    async def abort(self) -> None:
        with anyio.CancelScope(shield=True):
            await self.end()

    @abc.abstractmethod
    async def end(self) -> None:
        """Remove the remains of this upload beside the object.

        Raises:
            StoreError: If the store failed; the remains stay noted then.
        """

    def _number(self, offset: int, data: memoryview) -> int:
        """Find the number of a block.

        Raises:
            UsageError: If it is no block of this upload.
        """
        number, beside = divmod(offset, self._block_bytes)
        if beside or len(data) != min(self._block_bytes, self._size - offset):
            message = f"{len(data)} bytes at {offset} are no block of {self._size} bytes"
            raise UsageError(message, key=self.key)
        return number

    def _all_parts(self) -> list[Part]:
        """Return the parts in their order.

        Raises:
            UsageError: If some were not written.
        """
        if len(self._parts) != self._count:
            message = f"The upload has {len(self._parts)} of its {self._count} parts"
            raise UsageError(message, key=self.key)
        return [self._parts[number] for number in range(self._count)]


class BufferedUpload(Upload):
    """Keep an object in memory, and send it by one request when it is complete.

    Args:
        store: Sends the request.
        key: The object's key.
        size: Its size in bytes.
    """

    def __init__(self, store: BucketBackend, key: str, size: int) -> None:
        self._store, self._key, self._data = store, key, bytearray(size)
        self._token = secrets.token_hex(8)

    def __repr__(self) -> str:
        return f"<BufferedUpload {self._key} {len(self._data)} bytes>"

    async def write(self, offset: int, data: memoryview) -> None:
        if offset < 0 or offset + len(data) > len(self._data):
            message = f"A block of {len(data)} bytes at {offset} leaves the {len(self._data)} bytes"
            raise UsageError(message, key=self._key)
        memoryview(self._data)[offset : offset + len(data)] = data

    async def complete(self) -> None:
        await self._store.create(self._key, bytes(self._data), self._token)

    async def landed(self) -> bool:
        return await self._store.owner(self._key) == self._token

    async def abort(self) -> None:
        self._data.clear()
