"""Whole objects: written by one request, read whole or in ranges, looked at and deleted."""

from __future__ import annotations

import json
import secrets
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import aiohttp

from ckpipe.backend import ObjectInfo, PutMode
from ckpipe.errors import ObjectExists, ObjectNotFound, StoreError, StoreUnavailable
from ckpipe.format.checksum import crc32c
from ckpipe.stores.body_checksums import checksum_of, checksum_text, read_checksum
from ckpipe.stores.bucket_backend import OWNER
from ckpipe.stores.http_bodies import fill
from ckpipe.stores.http_stores import SLOWEST_BYTES_PER_SECOND, check_range, cut_short, truncated
from ckpipe.tasks.lanes import run_lanes
from ckpipe_gcs.body import MemoryBody
from ckpipe_gcs.failures import bucket_missing, status_of
from ckpipe_gcs.listing import info
from ckpipe_gcs.requests import FIELDS, Requests, Resource

DELETE_LANES = 16
"""How many objects are deleted at a time."""

PINNED = 4096
"""How many objects are remembered by the generation that was read of them."""


class Objects:
    """The objects below a root.

    Every write of an object makes a new *generation* of it. The first range that is read of an
    object notes its generation; further ones must be of the same, so that a reader never mixes
    two versions. A look at the object, or a write to it, begins anew.

    Args:
        requests: Sends the requests.
        writing: What stands in the query of every request that makes an object.
    """

    create_only = True
    """Whether the store honours ``ifGenerationMatch``. Where it does not, a create-only put looks
    first, which is not atomic."""

    def __init__(self, requests: Requests, writing: Mapping[str, str]) -> None:
        self._requests, self.writing = requests, writing
        self._address = requests.address
        self._pins: OrderedDict[str, str] = OrderedDict()

    async def put(self, key: str, data: bytes, mode: PutMode, owner: str | None = None) -> None:
        """See :class:`ckpipe.stores.bucket_backend.BucketObjects`."""
        name = self._address.name(key)
        self._pins.pop(key, None)
        conditional = mode is PutMode.CREATE and self.create_only
        if mode is PutMode.CREATE and not conditional:
            await self._check_free(key)
        await self.write(name, data, NEW if conditional else {}, owned_by(owner), key)

    async def owner(self, key: str) -> str | None:
        """See :class:`ckpipe.stores.bucket_backend.BucketObjects`."""
        try:
            return owner_of(await self.resource(self._address.name(key), key))
        except ObjectNotFound:
            return None

    async def create(self, name: str, data: bytes) -> None:
        """See :class:`ckpipe.stores.bucket_backend.BucketObjects`."""
        await self.write(name, data, NEW, {})

    async def write(
        self,
        name: str,
        data: bytes | memoryview,
        condition: Mapping[str, str],
        resource: Mapping[str, Any],
        key: str | None = None,
    ) -> Resource:
        """Makes an object by its whole name, in one request that carries its checksum.

        Args:
            name: The name.
            data: Flat bytes.
            condition: Under which condition, as part of the query.
            resource: What else is told of the object.
            key: The key concerned, for errors.

        Returns:
            The object's resource.

        Raises:
            ObjectExists: If the store refuses for the condition.
            StoreError: If the store failed.
        """
        value = await checksum_of(data)
        told = {"name": name, "contentType": BYTES, **resource, "crc32c": checksum_text(value)}
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

    async def _check_free(self, key: str) -> None:
        try:
            await self.stat(key)
        except ObjectNotFound:
            return
        raise ObjectExists(f"There is an object at {self._address}{key} already", key=key)

    async def resource(self, name: str, key: str) -> Resource:
        """What the store tells of an object by its whole name.

        Raises:
            ObjectNotFound: If there is none.
            StoreError: If the store failed.
        """
        url = self._requests.object_url(name, fields=FIELDS)
        return await self._requests.ask("look at", "GET", url, key=key)

    async def stat(self, key: str) -> ObjectInfo:
        """See :meth:`ckpipe.Backend.stat`."""
        found = await self.resource(self._address.name(key), key)
        self._pins.pop(key, None)
        with self._requests.attempt("look at", key):
            return info(key, found)

    async def get(self, key: str, max_bytes: int) -> bytes:
        """See :meth:`ckpipe.Backend.get`."""
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
        """See :meth:`ckpipe.Backend.read_into`."""
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
        """See :meth:`ckpipe.Backend.delete`."""
        names: dict[str, str | None] = {}
        for key in keys:
            names[self._address.name(key)] = None
            self._pins.pop(key, None)
        await self.remove(names)

    async def remove(self, names: Mapping[str, str | None]) -> None:
        """Deletes objects by their whole names, several at a time.

        Args:
            names: Each with the generation that is deleted; None for whatever is there.

        Raises:
            StoreError: If the store failed; some of the objects may be gone.
        """
        waiting = iter(names.items())

        async def lane() -> None:
            for name, generation in waiting:
                await self._remove(name, generation)

        await run_lanes(min(DELETE_LANES, len(names)), lane)

    async def _remove(self, name: str, generation: str | None) -> None:
        query = {"generation": generation} if generation else {}
        url = self._requests.object_url(name, **query)
        key = name.removeprefix(self._address.prefix)
        with self._requests.attempt("delete", key):
            async with self._requests.answer("DELETE", url, expected=(404,)) as response:
                await response.read()


BYTES = "application/octet-stream"
NEW: Mapping[str, str] = {"ifGenerationMatch": "0"}
"""The condition that there is no such object."""


def owned_by(owner: str | None) -> Mapping[str, Any]:
    """What the store is told of an object, so that it names the upload that has made it."""
    return {} if owner is None else {"metadata": {OWNER: owner}}


def owner_of(resource: Resource) -> str | None:
    """The upload that has made an object, by what the store tells of it."""
    found: str | None = (resource.get("metadata") or {}).get(OWNER)
    return found


def related(metadata: bytes, data: bytes | memoryview) -> MemoryBody:
    """A body of an object's resource and its content (RFC 2387)."""
    boundary = secrets.token_hex(24)
    json_type, edge = "application/json; charset=UTF-8", f"--{boundary}"
    opening = f"{edge}\r\nContent-Type: {json_type}\r\n\r\n".encode()
    between = f"\r\n{edge}\r\nContent-Type: {BYTES}\r\n\r\n".encode()
    return MemoryBody(
        opening + metadata + between, data, f"\r\n{edge}--".encode(),
        content_type=f"multipart/related; boundary={boundary}",
    )  # fmt: skip


def check_stored(made: Resource, value: int, size: int, where: str, key: str | None) -> None:
    """Looks whether the store has what was sent.

    Args:
        made: What the store tells of the object.
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
    """The CRC-32C of a whole object as the headers of an answer tell it.

    Raises:
        ValueError: If it is none.
    """
    for header in response.headers.getall("x-goog-hash", ()):
        for entry in header.split(","):
            name, _, value = entry.strip().partition("=")
            if name == "crc32c":
                return read_checksum(value)
    return None
