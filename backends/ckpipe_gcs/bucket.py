"""Requests for one bucket on Google Cloud Storage, and the table of the errors that they meet.

The API is the JSON API of Cloud Storage, version 1, as its reference describes it. The statuses and
reasons are those of its page "HTTP status and error codes for JSON".
"""

from __future__ import annotations

import json
import re
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, ClassVar, TypeVar
from urllib.parse import quote, urlencode

import aiohttp
import anyio
from aiohttp.abc import AbstractStreamWriter
from yarl import URL

from ckpipe.backend import ObjectInfo, PutMode
from ckpipe.errors import (
    InvalidKey,
    ObjectExists,
    ObjectNotFound,
    PermissionDenied,
    StoreError,
    StoreUnavailable,
    Throttled,
)
from ckpipe_gcs.access import CREDENTIALS, Access, Tokens
from ckpipe_http.buckets import OWNER, Bucket, BucketAddress, Page, Stored
from ckpipe_http.failures import (
    BUCKET,
    CLIENT_ERRORS,
    NETWORK,
    UNREACHED,
    Foreign,
    Refused,
    Table,
    retry_after,
)
from ckpipe_http.requests import checksum_of, checksum_text, read_checksum

Query = Mapping[str, str]
Resource = Mapping[str, Any]
"""The description of an object: its resource, as the reference calls it."""

FIELDS = "name,size,generation,crc32c,timeCreated,metadata"
"""The fields of a resource that are asked for."""

BYTES = "application/octet-stream"
NEW: Query = {"ifGenerationMatch": "0"}
"""The condition that there is no such object."""

PIECE_BYTES = 1 << 18
"""The bytes of a body that are handed to the socket at a time."""

PART_PREFIX = ".ckpipe-upload-"
PART_SUFFIX = ".ckpipe-part"
"""Temporary objects lie beside the object that they become, and have names of this form. The end
is what lifecycle rules and conditions on rights can match."""

DELETED_AT_ONCE = 16
"""The number of objects that are deleted at a time."""

PINNED = 4096
"""The most objects whose generation is remembered once it was read."""

_PART = re.compile(
    rf"(?:.*/)?{re.escape(PART_PREFIX)}([0-9a-f]{{16}})-\d+-\d+{re.escape(PART_SUFFIX)}", re.DOTALL
)

_RIGHTS = "Give these credentials the rights that docs/tutorials/gcs.md lists"
_PROJECT = "Name a project that pays for requests with the option 'user_project'"
_PROXY = Foreign(StoreUnavailable, None, "the proxy cannot be used ({name})")

FOREIGN: Table = {
    **CLIENT_ERRORS,
    aiohttp.ClientProxyConnectionError: _PROXY,
    aiohttp.ClientHttpProxyError: _PROXY,
    aiohttp.ClientConnectorError: Foreign(StoreUnavailable, UNREACHED),
    "userProjectMissing": Foreign(PermissionDenied, _PROJECT),
    "userProjectAccessDenied": Foreign(PermissionDenied, _PROJECT),
    "userProjectInvalid": Foreign(PermissionDenied, _PROJECT),
    "userProjectInconsistent": Foreign(PermissionDenied, _PROJECT),
    "rateLimitExceeded": Foreign(Throttled),
    "userRateLimitExceeded": Foreign(Throttled),
    "quotaExceeded": Foreign(Throttled),
    # Bits that were flipped on the way arrive whole when they are sent again.
    "badContent": Foreign(StoreUnavailable, NETWORK),
    "parseError": Foreign(StoreUnavailable, NETWORK),
    401: Foreign(PermissionDenied, CREDENTIALS),
    403: Foreign(PermissionDenied, _RIGHTS),
    404: Foreign(ObjectNotFound),
    408: Foreign(StoreUnavailable),
    409: Foreign(StoreUnavailable),
    412: Foreign(ObjectExists),
    429: Foreign(Throttled),
}


@dataclass(frozen=True, slots=True)
class Address(BucketAddress):
    """A root on Google Cloud Storage, whose names hold no line ends."""

    scheme: ClassVar[str] = "gs"

    def is_reserved(self, key: str) -> bool:
        return BucketAddress.is_reserved(self, key) or upload_of(key) is not None

    def name(self, key: str) -> str:
        name = BucketAddress.name(self, key)
        if "\n" in name or "\r" in name:
            raise InvalidKey("The name of an object on this store holds no line ends", key=key)
        return name

    def part(self, key: str, token: str, level: int, number: int) -> str:
        """Make the whole name of a temporary object.

        Args:
            key: The key of the object that it becomes a part of.
            token: 16 hexadecimal digits that tell one upload from all others.
            level: How often its content was composed.
            number: Its number on that level.

        Raises:
            InvalidKey: If the store cannot hold it.
        """
        folder = key.rpartition("/")[0]
        last = f"{PART_PREFIX}{token}-{level}-{number}{PART_SUFFIX}"
        # A long key is met here too, with a name of its own length instead of the part's.
        BucketAddress.name(self, f"{folder}/{'x' * len(last)}" if folder else "x" * len(last))
        return f"{self.prefix}{folder}/{last}" if folder else self.prefix + last


def upload_of(name: str) -> str | None:
    """Find the token of the upload that a temporary object belongs to; None for other names."""
    found = _PART.fullmatch(name)
    return found[1] if found else None


class MemoryBody(aiohttp.payload.Payload):
    """Send pieces of memory one after the other, without copying them.

    The socket gets slices of the caller's memory. The body may be sent with another
    request, from its beginning. Once ended it sends nothing more, so that a request that was
    cancelled while it still sends never touches memory that has another use by then.

    Args:
        pieces: Flat bytes.
        content_type: Their type.
    """

    _autoclose = True

    def __init__(
        self, *pieces: bytes | memoryview, content_type: str = "application/octet-stream"
    ) -> None:
        super().__init__(None, content_type=content_type)
        self._pieces = [memoryview(piece) for piece in pieces]
        self._size = sum(map(len, pieces))
        self._begun = False

    @property
    def consumed(self) -> bool:
        """Forbid the client to send it again by itself, as it would after a reset; the store is
        asked first how much has arrived."""
        return self._begun

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        raise TypeError("a body is bytes, not text")

    async def write(self, writer: AbstractStreamWriter) -> None:
        await self.write_with_length(writer, None)

    async def write_with_length(
        self, writer: AbstractStreamWriter, content_length: int | None
    ) -> None:
        self._begun = True
        for piece in tuple(self._pieces):
            for at in range(0, len(piece), PIECE_BYTES):
                if not self._pieces:
                    return
                await writer.write(piece[at : at + PIECE_BYTES])

    def end(self) -> None:
        """Forget the memory."""
        self._pieces = []


async def _refusal(response: aiohttp.ClientResponse) -> Refused:
    """Read why an answer refuses the request."""
    body = await response.content.read(1 << 16)
    reason = text = ""
    try:
        error = json.loads(body)["error"]
        reason, text = str(error["errors"][0]["reason"]), str(error["message"])
    except (ValueError, LookupError, TypeError):
        pass  # an answer of something before the store, which is told by its status
    headers = response.headers
    # The id of a request to an upload session would let any reader go on with the upload.
    private = "upload_id" in response.url.query
    request = None if private else headers.get("X-GUploader-UploadID")
    asked = retry_after(headers.get("Retry-After"))
    return Refused(response.status, reason[:64] or "no reason", text, request, asked)


class GcsBucket(Bucket):
    """Send requests for one bucket.

    Every write of an object makes a new *generation* of it. The first range that is read of an
    object notes its generation; further ones must be of the same, so that a reader never mixes
    two versions. A look at the object, or a write to it, begins anew.

    Args:
        session: Sends them.
        tokens: Gives the tokens that they carry.
        address: Bucket and prefix.
        access: The options of requests.
    """

    foreign = FOREIGN
    address: Address

    def __init__(
        self, session: aiohttp.ClientSession, tokens: Tokens, address: Address, access: Access
    ) -> None:
        super().__init__(address, access.request_timeout)
        self._session, self._tokens = session, tokens
        self._common, self.writing = access.common, access.writing
        self._endpoint, self._origin = access.endpoint, URL(access.endpoint).origin()
        self._pins: OrderedDict[str, str] = OrderedDict()

    def url(self, path: str, **query: str) -> URL:
        """Make the address of a path; ``{bucket}`` in it stands for the bucket."""
        whole = path.replace("{bucket}", quote(self.address.bucket, safe=""))
        parameters = urlencode({**query, **self._common}, quote_via=quote)
        return URL(f"{self._endpoint}{whole}?{parameters}", encoded=True)

    def object_url(self, name: str, verb: str = "", **query: str) -> URL:
        """Make the address of an object by its whole name."""
        return self.url(f"/storage/v1/b/{{bucket}}/o/{quote(name, safe='')}{verb}", **query)

    def upload_url(self, kind: str, name: str, **query: str) -> URL:
        """Make the address that creates an object by its whole name."""
        path = "/upload/storage/v1/b/{bucket}/o"
        return self.url(path, uploadType=kind, name=name, fields=FIELDS, **query)

    def refusal(self, error: BaseException | None) -> Refused | None:
        return error if isinstance(error, Refused) else None

    @asynccontextmanager
    async def answer(
        self,
        method: str,
        url: URL,
        *,
        headers: Query | None = None,
        body: MemoryBody | None = None,
        expected: tuple[int, ...] = (),
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request within an :meth:`attempt`, whose deadline it has, and lend the answer.

        A token that the store refuses is renewed, and the request sent once more.

        Args:
            method: The method.
            url: The address.
            headers: Headers.
            body: The body. Without one, the client tries a request once more by itself if
                a connection that was kept open turns out to be closed.
            expected: Statuses beyond 399 that are no errors here.

        Raises:
            Refused: If the answer says no.
        """
        # Addresses of upload sessions come from the store, and might lead anywhere.
        own = url.origin() == self._origin
        for is_last in (False, True):
            token = await self._tokens.get() if own else None
            carried = {"Authorization": f"Bearer {token}"} if token else {}
            async with self._session.request(
                method, url, headers={**(headers or {}), **carried},
                data=body, allow_redirects=False,
            ) as response:  # fmt: skip
                if response.status == 401 and token and not is_last:
                    self._tokens.forget(token)
                    continue
                if response.status >= 400 and response.status not in expected:
                    raise await _refusal(response)
                yield response
                return

    async def ask(
        self,
        action: str,
        method: str,
        url: URL,
        *,
        key: str | None = None,
        nbytes: int = 0,
        headers: Query | None = None,
        body: MemoryBody | None = None,
    ) -> Resource:
        """Send a request within an attempt of its own, and return the JSON of the answer.

        Args:
            action: The verb for the message of an error.
            method: The method.
            url: The address.
            key: The key concerned.
            nbytes: The size of the body, or of one that would keep the store as busy.
            headers: Headers.
            body: The body.

        Raises:
            StoreError: If it failed.
        """
        with self.attempt(action, key, nbytes):
            async with self.answer(method, url, headers=headers, body=body) as response:
                return await answered(response)

    async def put(self, key: str, data: bytes, mode: PutMode, owner: str | None = None) -> None:
        self._pins.pop(key, None)
        await super().put(key, data, mode, owner)

    async def owner(self, key: str) -> str | None:
        try:
            return owner_of(await self.resource(self.address.name(key), key))
        except ObjectNotFound:
            return None

    async def write(
        self,
        name: str,
        data: bytes | memoryview,
        *,
        create: bool,
        owner: str | None = None,
        key: str | None = None,
        storage_class: str | None = None,
    ) -> Resource:
        """Do :meth:`Bucket.write`.

        Args:
            name: As there.
            data: Flat bytes.
            create: As there.
            owner: As there.
            key: As there.
            storage_class: The class of the object; None for the bucket's own.

        Returns:
            The object's resource.
        """
        classed = {} if storage_class is None else {"storageClass": storage_class}
        condition = NEW if create else {}
        value = await checksum_of(data)
        told = {
            "name": name, "contentType": BYTES, **owned_by(owner), **classed,
            "crc32c": checksum_text(value),
        }  # fmt: skip
        body = related(json.dumps(told).encode(), data)
        url = self.upload_url("multipart", name, **condition, **self.writing)
        try:
            with self.creating():
                made = await self.ask("write", "POST", url, key=key, nbytes=len(data), body=body)
        finally:
            body.end()
        check_stored(made, value, len(data), f"{self.address}{key or ''}", key)
        return made

    @contextmanager
    def creating(self) -> Iterator[None]:
        """Translate a 404 that answers the creation of an object: it can only mean the bucket."""
        try:
            yield
        except ObjectNotFound as error:
            message = f"{error.message}: there is no bucket for {self.address}"
            raise StoreError(message, hint=BUCKET) from error

    async def resource(self, name: str, key: str) -> Resource:
        """Ask for the resource of an object by its whole name.

        Raises:
            ObjectNotFound: If there is none.
            StoreError: If the store failed.
        """
        url = self.object_url(name, fields=FIELDS)
        return await self.ask("look at", "GET", url, key=key)

    async def stat(self, key: str) -> ObjectInfo:
        found = await self.resource(self.address.name(key), key)
        self._pins.pop(key, None)
        with self.attempt("look at", key):
            return ObjectInfo(key, int(found["size"]), _modified(found))

    @asynccontextmanager
    async def opened(
        self, key: str, span: str | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        pin = self._pins.get(key) if span else None
        condition = {"ifGenerationMatch": pin} if pin else {}
        url = self.object_url(self.address.name(key), alt="media", **condition)
        try:
            async with self.answer("GET", url, headers={"Range": span} if span else {}) as response:
                if span:
                    self._pin(key, response.headers.get("x-goog-generation"))
                yield response
        except Refused as error:
            if pin and error.status in (404, 412):
                raise self._overwritten(key) from error
            raise

    def told_checksum(self, response: aiohttp.ClientResponse) -> int | None:
        for header in response.headers.getall("x-goog-hash", ()):
            for entry in header.split(","):
                name, _, value = entry.strip().partition("=")
                if name == "crc32c":
                    return read_checksum(value)
        return None

    def _pin(self, key: str, generation: str | None) -> None:
        if generation is None:
            return
        # Reads of one object run at the same time, so the first may have been answered meanwhile.
        if self._pins.setdefault(key, generation) != generation:
            raise self._overwritten(key)
        self._pins.move_to_end(key)
        if len(self._pins) > PINNED:
            self._pins.popitem(last=False)

    def _overwritten(self, key: str) -> StoreError:
        self._pins.pop(key, None)
        message = f"{self.address}{key} was overwritten or deleted while it was read"
        return StoreError(message, key=key, hint="Let nobody else write below this root")

    async def delete(self, keys: Iterable[str]) -> None:
        names: dict[str, str | None] = {}
        for key in keys:
            names[self.address.name(key)] = None
            self._pins.pop(key, None)
        await self.remove(names)

    async def remove(self, names: Mapping[str, str | None]) -> None:
        """Delete objects by their whole names, several at a time.

        Args:
            names: Each with the generation to delete; None for any.

        Raises:
            StoreError: If the store failed; some of the objects may be gone.
        """
        await for_each(names.items(), self._remove, at_once=DELETED_AT_ONCE)

    async def _remove(self, named: tuple[str, str | None]) -> None:
        name, generation = named
        query = {"generation": generation} if generation else {}
        url = self.object_url(name, **query)
        key = name.removeprefix(self.address.prefix)
        with self.attempt("delete", key):
            async with self.answer("DELETE", url, expected=(404,)) as response:
                await response.read()

    async def pages(self, prefix: str, delimiter: str = "") -> AsyncIterator[Page]:
        query = {"prefix": prefix, "fields": f"items({FIELDS}),prefixes,nextPageToken"}
        if delimiter:
            query["delimiter"] = delimiter
        while True:
            answer = await self.ask("list", "GET", self.url("/storage/v1/b/{bucket}/o", **query))
            with self.attempt("list"):
                objects = [
                    Stored(
                        each["name"],
                        int(each["size"]),
                        _modified(each),
                        str(each.get("generation", "")),
                    )
                    for each in answer.get("items", ())
                ]
            yield Page(objects, list(answer.get("prefixes", ())))
            if not answer.get("nextPageToken"):
                return
            query["pageToken"] = str(answer["nextPageToken"])


async def answered(response: aiohttp.ClientResponse) -> Resource:
    """Read the JSON of an answer; empty for an answer without content.

    Raises:
        ValueError: If it is no JSON object.
    """
    data = await response.read()
    found = json.loads(data) if data or response.status != 204 else {}
    if not isinstance(found, dict):
        raise ValueError("the answer is no JSON object")
    return found


def json_body(content: Mapping[str, Any]) -> MemoryBody:
    """Make a body of JSON."""
    return MemoryBody(json.dumps(content).encode(), content_type="application/json; charset=UTF-8")


Item = TypeVar("Item")


async def for_each(
    items: Iterable[Item], work: Callable[[Item], Awaitable[None]], *, at_once: int
) -> None:
    """Do some work for each item, for a number of them at a time.

    Raises:
        StoreError: What the first one to fail raised; the others are cancelled.
    """
    waiting = iter(items)

    async def lane() -> None:
        for item in waiting:
            await work(item)

    failure = None
    try:
        async with anyio.create_task_group() as tasks:
            for _ in range(at_once):
                tasks.start_soon(lane)
    except ExceptionGroup as group:
        failure = group.exceptions[0]
    if failure is not None:
        raise failure


def owned_by(owner: str | None) -> Mapping[str, Any]:
    """Make the part of a resource that names the upload that makes the object."""
    return {} if owner is None else {"metadata": {OWNER: owner}}


def owner_of(resource: Resource) -> str | None:
    """Find the upload that has made an object, by its resource."""
    found: str | None = (resource.get("metadata") or {}).get(OWNER)
    return found


def related(metadata: bytes, data: bytes | memoryview) -> MemoryBody:
    """Make a body of an object's resource and its content (RFC 2387)."""
    boundary = secrets.token_hex(24)
    json_type, edge = "application/json; charset=UTF-8", f"--{boundary}"
    opening = f"{edge}\r\nContent-Type: {json_type}\r\n\r\n".encode()
    between = f"\r\n{edge}\r\nContent-Type: {BYTES}\r\n\r\n".encode()
    return MemoryBody(
        opening + metadata + between, data, f"\r\n{edge}--".encode(),
        content_type=f"multipart/related; boundary={boundary}",
    )  # fmt: skip


def check_stored(made: Resource, value: int, size: int, where: str, key: str | None) -> None:
    """Compare an object's resource with what was sent.

    Args:
        made: The resource.
        value: The CRC-32C of what was sent.
        size: How many bytes that was.
        where: The URL of the object.
        key: Its key.

    Raises:
        StoreUnavailable: If it has something else.
    """
    try:
        same = int(made["size"]) == size and read_checksum(made["crc32c"]) == value
    except (LookupError, TypeError, ValueError):
        same = False
    if not same:
        message = f"Could not write {where}: the store has something else than what was sent"
        raise StoreUnavailable(message, key=key, hint="Look at the network if this goes on")


def _modified(resource: Resource) -> datetime:
    """Read when this generation of an object was written."""
    return datetime.fromisoformat(resource["timeCreated"]).astimezone(UTC)
