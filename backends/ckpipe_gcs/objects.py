"""Whole objects: written by one request, read whole or in ranges, listed and deleted."""

from __future__ import annotations

import json
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, TypeVar

import aiohttp
import anyio
from awscrt.checksums import crc32c

from ckpipe.backend import ObjectInfo, PutMode
from ckpipe.errors import ObjectNotFound, StoreError, StoreUnavailable
from ckpipe_gcs.failures import bucket_missing, requesting, status_of
from ckpipe_gcs.requests import FIELDS, Address, MemoryBody, Requests, Resource
from ckpipe_http.bodies import fill
from ckpipe_http.buckets import OWNER, BucketObjects
from ckpipe_http.requests import (
    SLOWEST_BYTES_PER_SECOND,
    check_range,
    checksum_of,
    checksum_text,
    cut_short,
    read_checksum,
    truncated,
)

DELETED_AT_ONCE = 16
"""The number of objects that are deleted at a time."""

PINNED = 4096
"""The most objects whose generation is remembered once it was read."""


class Objects(BucketObjects[Address]):
    """The objects below a root.

    Every write of an object makes a new *generation* of it. The first range that is read of an
    object notes its generation; further ones must be of the same, so that a reader never mixes
    two versions. A look at the object, or a write to it, begins anew.

    Args:
        requests: Sends the requests.
        writing: Parameters of every request that makes an object.
    """

    def __init__(self, requests: Requests, writing: Mapping[str, str]) -> None:
        super().__init__(requests.address)
        self._requests, self.writing = requests, writing
        self._pins: OrderedDict[str, str] = OrderedDict()

    async def put(self, key: str, data: bytes, mode: PutMode, owner: str | None = None) -> None:
        self._pins.pop(key, None)
        await super().put(key, data, mode, owner)

    async def owner(self, key: str) -> str | None:
        try:
            return owner_of(await self.resource(self._address.name(key), key))
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
        """Do :meth:`BucketObjects.write`.

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
        url = self._requests.upload_url("multipart", name, **condition, **self.writing)
        try:
            made = await self._requests.ask(
                "write", "POST", url, key=key, nbytes=len(data), body=body
            )
        except ObjectNotFound as error:
            raise bucket_missing(error, str(self._address)) from error
        finally:
            body.end()
        check_stored(made, value, len(data), f"{self._address}{key or ''}", key)
        return made

    async def resource(self, name: str, key: str) -> Resource:
        """Ask for the resource of an object by its whole name.

        Raises:
            ObjectNotFound: If there is none.
            StoreError: If the store failed.
        """
        url = self._requests.object_url(name, fields=FIELDS)
        return await self._requests.ask("look at", "GET", url, key=key)

    async def stat(self, key: str) -> ObjectInfo:
        found = await self.resource(self._address.name(key), key)
        self._pins.pop(key, None)
        with self._requests.attempt("look at", key):
            return info(key, found)

    async def get(self, key: str, max_bytes: int) -> bytes:
        url = self._requests.object_url(self._address.name(key), alt="media")
        with self._requests.attempt("read", key) as scope:
            async with self._requests.answer("GET", url) as response:
                expected = min(response.content_length or max_bytes, max_bytes)
                scope.deadline += expected / SLOWEST_BYTES_PER_SECOND
                told, data = told_checksum(response), bytearray()
                if (response.content_length or 0) <= max_bytes:
                    async for piece in response.content.iter_any():
                        data += piece
                        if len(data) > max_bytes:
                            break
                size = max(len(data), response.content_length or 0)
        if size > max_bytes:
            message = f"The object has {size} bytes, more than the {max_bytes} expected"
            raise StoreError(message, key=key)
        where = f"{self._address}{key}"
        if len(data) != size:
            raise cut_short(where, key, len(data), size)
        if told is not None and crc32c(memoryview(data)) != told:
            message = f"Could not read {where}: what came has another checksum than the object"
            raise StoreUnavailable(message, key=key)
        return bytes(data)

    async def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        wanted, pin = len(buffer), self._pins.get(key)
        condition = {"ifGenerationMatch": pin} if pin else {}
        url = self._requests.object_url(self._address.name(key), alt="media", **condition)
        headers = {"Range": f"bytes={offset}-{offset + wanted - 1}"}
        try:
            with self._requests.attempt("read", key, wanted):
                async with self._requests.answer("GET", url, headers=headers) as response:
                    where = f"{self._address}{key}"
                    shown = response.headers.get("Content-Range")
                    check_range(shown, where, key, offset, wanted)
                    self._pin(key, response.headers.get("x-goog-generation"))
                    came = await fill(response, buffer)
            if came != wanted:
                raise cut_short(where, key, came, wanted)
        except StoreError as error:
            if pin and status_of(error) in (404, 412):
                raise self._overwritten(key) from error
            if status_of(error) != 416:
                raise
            raise truncated(key, offset, wanted, (await self.stat(key)).size) from error

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
        message = f"{self._address}{key} was overwritten or deleted while it was read"
        return StoreError(message, key=key, hint="Let nobody else write below this root")

    async def delete(self, keys: Iterable[str]) -> None:
        names: dict[str, str | None] = {}
        for key in keys:
            names[self._address.name(key)] = None
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
        url = self._requests.object_url(name, **query)
        key = name.removeprefix(self._address.prefix)
        with self._requests.attempt("delete", key):
            async with self._requests.answer("DELETE", url, expected=(404,)) as response:
                await response.read()


BYTES = "application/octet-stream"
NEW: Mapping[str, str] = {"ifGenerationMatch": "0"}
"""The condition that there is no such object."""


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


def told_checksum(response: aiohttp.ClientResponse) -> int | None:
    """Read the CRC-32C of a whole object in the headers of an answer.

    Raises:
        ValueError: If it is none.
    """
    for header in response.headers.getall("x-goog-hash", ()):
        for entry in header.split(","):
            name, _, value = entry.strip().partition("=")
            if name == "crc32c":
                return read_checksum(value)
    return None


def modified(resource: Resource) -> datetime:
    """Read when this generation of an object was written."""
    return datetime.fromisoformat(resource["timeCreated"]).astimezone(UTC)


def info(key: str, resource: Resource) -> ObjectInfo:
    """Read size and time of an object."""
    return ObjectInfo(key, int(resource["size"]), modified(resource))


async def pages(requests: Requests, prefix: str, delimiter: str = "") -> AsyncIterator[Resource]:
    """Ask for the pages of a list, each under its own deadline.

    Args:
        requests: Sends the requests.
        prefix: The beginning of the names.
        delimiter: Where names are cut; empty for whole names.

    Raises:
        StoreError: If the store failed.
    """
    query = {"prefix": prefix, "fields": f"items({FIELDS}),prefixes,nextPageToken"}
    if delimiter:
        query["delimiter"] = delimiter
    while True:
        try:
            page = await requests.ask("list", "GET", requests.url(_PATH, **query))
        except ObjectNotFound as error:
            raise bucket_missing(error, str(requests.address)) from error
        yield page
        if not page.get("nextPageToken"):
            return
        query["pageToken"] = str(page["nextPageToken"])


_PATH = "/storage/v1/b/{bucket}/o"


def objects(address: Address, page: Resource) -> Iterator[ObjectInfo]:
    """Read the objects on a page, without names that are no keys of this root."""
    with requesting("list", str(address)):
        for resource in page.get("items", ()):
            key = address.key(resource["name"])
            if key is not None:
                yield info(key, resource)


def prefixes(address: Address, page: Resource) -> Iterator[str]:
    """Read the prefixes on a page of a delimited list."""
    for prefix in page.get("prefixes", ()):
        key = address.key(prefix.removesuffix("/"))
        if key is not None:
            yield f"{key}/"
