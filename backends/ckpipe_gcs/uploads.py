"""Upload an object to Google Cloud Storage in blocks, which the store composes.

An upload sends each block as a separate temporary object, straight from the caller's memory and
several at a time. When all are there, the store composes them into the object, which appears whole
under its name, and the temporary objects are deleted. A request composes up to 32 objects into one,
so more are composed in a tree. Large blocks go through sessions, so a broken connection costs only
the bytes in transit.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from yarl import URL

from ckpipe.backend import for_each
from ckpipe.errors import ObjectExists, ObjectNotFound, StoreError, StoreUnavailable
from ckpipe_gcs.resources import (
    BYTES,
    FIELDS,
    Part,
    Resource,
    answered,
    check_stored,
    joined,
    json_body,
    owned_by,
    owner_of,
    received,
)
from ckpipe_http.buckets import ENDED_AT_ONCE, BlockUpload
from ckpipe_http.requests import MemoryBody, checksum_text

if TYPE_CHECKING:
    from ckpipe_gcs.backend import GcsBackend

logger = logging.getLogger("ckpipe")

NEW = {"ifGenerationMatch": "0"}
"""The condition that there is no such object."""

MAX_SOURCES = 32
"""The most objects that one request composes; a limit of the store."""

MAX_LEVELS = 3
"""The greatest height of the tree of an upload."""

MAX_PARTS = MAX_SOURCES**MAX_LEVELS

COMPOSED_AT_ONCE = 8
"""The most concurrent requests that compose."""

TEMPORARY_CLASS = "STANDARD"
"""The storage class of temporary objects. Other classes charge for at least a month, even for an
object that lives for a minute. A composed object has the class of its parts."""

INCOMPLETE = 308
"""The status of an answer with the number of a session's bytes that the store has."""

GONE = (404, 410, 499)
"""The statuses of a session that does not exist (any more); 499 also answers a request that ends
one."""


class Session:
    """Send one temporary object through its own resumable session, which outlives connections.

    One request begins a session, and others send the bytes. If a connection breaks, the store keeps
    the bytes that it has received, in multiples of 256 KiB. So after anything but a clear answer
    the session asks the store how much it has, and sends the rest. If only the answer was lost, the
    store has everything, and the object exists. Source of the protocol: "Resumable uploads" and
    "Perform resumable uploads" in the Cloud Storage documentation. An abandoned session is
    invisible on the store, and ends by itself after a week.

    Args:
        store: Sends the requests.
        name: The whole name of the object, which only this session uses.
        key: The key, for errors.
    """

    def __init__(self, store: GcsBackend, name: str, key: str) -> None:
        self._store, self._name, self._key = store, name, key
        self._url: URL | None = None

    async def send(self, data: memoryview, checksum: int) -> Resource:
        """Send the object, or the rest that the store does not have yet.

        Args:
            data: All of the object's bytes, the same in each call.
            checksum: Their CRC-32C, which the store verifies.

        Returns:
            The object's resource.

        Raises:
            ObjectExists: If there is an object of the name.
            StoreError: If the store failed. Another call continues with the missing bytes.
        """
        size, at = len(data), 0
        if self._url is None:
            self._url = await self._begin(size, checksum)
        else:
            had = await self._put(self._url, None, f"bytes */{size}", 0)
            if not isinstance(had, int):
                return had
            at = had
        while True:
            with MemoryBody(data[at:]) as body:
                span = f"bytes {at}-{size - 1}/{size}"
                had = await self._put(self._url, body, span, size - at)
            if not isinstance(had, int):
                return had
            if had <= at:
                where = f"{self._store.root}{self._key}"
                message = f"Could not write {where}: the store accepts no more bytes of an upload"
                raise StoreUnavailable(message, key=self._key)
            at = had

    async def _begin(self, size: int, checksum: int) -> URL:
        url = self._store.upload_url("resumable", self._name, **NEW)
        headers = {"X-Upload-Content-Type": BYTES, "X-Upload-Content-Length": str(size)}
        told = {
            "name": self._name, "contentType": BYTES, "storageClass": TEMPORARY_CLASS,
            "crc32c": checksum_text(checksum),
        }  # fmt: skip
        with self._store.creating(), self._store.attempt("begin an upload of", self._key):
            async with self._store.answer(
                "POST", url, headers=headers, body=json_body(told)
            ) as begun:
                await begun.read()
                return URL(begun.headers["Location"], encoded=True)

    async def _put(
        self, url: URL, body: MemoryBody | None, span: str, nbytes: int
    ) -> int | Resource:
        """Send bytes, or query how many the store has; if it has all, return the resource."""
        headers = {"Content-Range": span}
        try:
            with self._store.attempt("write", self._key, nbytes):
                async with self._store.answer("PUT", url, headers=headers, body=body) as had:
                    if had.status == INCOMPLETE:
                        await had.read()
                        return received(had.headers.get("Range"))
                    return await answered(had)
        except StoreError as error:
            if self._store.answer_to(error).status not in GONE:
                raise
            self._url = None  # the next call begins anew
            message = f"{error.message}: another program has ended the upload"
            raise StoreUnavailable(message, key=self._key) from error

    async def cancel(self) -> None:
        """End the session, if one is open.

        Raises:
            StoreError: If the store failed.
        """
        if self._url is None:
            return
        with self._store.attempt("end an upload of", self._key):
            async with self._store.answer("DELETE", self._url, expected=GONE) as ended:
                await ended.read()
        self._url = None


class CompositeUpload(BlockUpload[Part]):
    """Send an object in parts, and compose it from them."""

    _store: GcsBackend

    def __init__(self, store: GcsBackend, key: str, size: int, block_bytes: int) -> None:
        super().__init__(store, key, size, block_bytes)
        self._where = f"{store.root}{key}"
        self._sessions: dict[int, Session] = {}
        # A name is noted before the request that may make the object, and forgotten once the object
        # is known to be gone. So a lost answer leaves nothing behind. The generation comes later.
        self._temporary: dict[str, str | None] = {}
        self._part_name(0, 0)  # raises if there is no room for such names

    def _part_name(self, level: int, number: int) -> str:
        return self._store.part_name(self.key, self._token, level, number)

    async def write_summed(self, offset: int, data: memoryview, checksum: int) -> None:
        number = self._number(offset, data)
        if number in self._parts:
            return  # by the contract these are the same bytes as before
        name = self._part_name(0, number)
        self._temporary[name] = None
        try:
            made = await self._send(number, name, data, checksum)
        except ObjectExists:
            # Only this part has the name, so an answer was lost and this is the object.
            made = await self._store.resource(name, self.key)
        self._parts[number] = await self._checked(name, made, checksum, len(data))

    async def _send(self, number: int, name: str, data: memoryview, value: int) -> Resource:
        if len(data) < self._store.resumable_bytes:
            return await self._store.write(
                name, data, create=True, key=self.key, storage_class=TEMPORARY_CLASS
            )
        session = self._sessions.setdefault(number, Session(self._store, name, self.key))
        made = await session.send(data, value)
        self._sessions.pop(number, None)  # an abort may have come first
        return made

    async def _checked(self, name: str, made: Resource, value: int, size: int) -> Part:
        """Check a temporary object by the resource from the store, and note it."""
        try:
            check_stored(made, value, size, self._where, self.key)
        except StoreUnavailable:
            with contextlib.suppress(StoreError):
                await self._store.remove({name: None})  # frees the name for another attempt
            raise
        part = Part(name, str(made["generation"]), size, value)
        self._temporary[name] = part.generation
        self._store.unfinished.add(self)  # an abort may have come first
        return part

    async def complete(self) -> None:
        parts = self._all_parts()
        level = 0
        while len(parts) > MAX_SOURCES:
            level += 1
            parts = await self._composed(level, parts)
        resource = {"contentType": BYTES, **owned_by(self._token)}
        await self._finish(await self._compose(self._name, parts, resource))

    async def _composed(self, level: int, parts: Sequence[Part]) -> list[Part]:
        """Compose the parts in groups of one request each, into one temporary object per group."""

        async def compose(start: int) -> Part:
            group, number = parts[start : start + MAX_SOURCES], start // MAX_SOURCES
            name = self._part_name(level, number)
            self._temporary[name] = None
            size, value = joined(group)
            try:
                found = await self._compose(name, group, {"contentType": BYTES})
            except ObjectExists:
                found = await self._store.resource(name, self.key)
            return await self._checked(name, found, value, size)

        starts = range(0, len(parts), MAX_SOURCES)
        return await for_each(starts, compose, at_once=COMPOSED_AT_ONCE)

    async def _compose(self, name: str, parts: Sequence[Part], resource: Resource) -> Resource:
        query = {**NEW, **self._store.writing, "fields": FIELDS}
        url = self._store.object_url(name, "/compose", **query)
        nbytes = sum(part.size for part in parts) // 100
        sources = [{"name": part.name, "generation": part.generation} for part in parts]
        body = json_body({"sourceObjects": sources, "destination": resource})
        return await self._store.ask(
            "complete", "POST", url, key=self.key, nbytes=nbytes, body=body
        )

    async def landed(self) -> bool:
        try:
            found = await self._store.resource(self._name, self.key)
        except ObjectNotFound:
            return False
        if owner_of(found) != self._token:
            return False
        await self._finish(found)
        return True

    async def _finish(self, made: Resource) -> None:
        """Check the object, and delete the temporary ones.

        Raises:
            StoreError: If it has other bytes than were sent; it is removed then.
        """
        size, value = joined(self._all_parts())
        try:
            check_stored(made, value, size, self._where, self.key)
        except StoreUnavailable as error:
            await self._store.remove({self._name: str(made["generation"])})
            message = f"{self._where} was composed of other bytes than were sent"
            raise StoreError(message, key=self.key, hint="Save again") from error
        try:
            await self.end()
        except StoreError as error:
            # The object is whole. Closing the backend tries once more; later a sweep does.
            logger.warning("Temporary objects of %s were left behind: %s", self._where, error)

    async def end(self) -> None:
        # Sessions first, since a running one might make an object again. Sessions that begin
        # meanwhile stay noted.
        sessions, temporary = dict(self._sessions), dict(self._temporary)
        await for_each(sessions.values(), Session.cancel, at_once=ENDED_AT_ONCE)
        for number in sessions:
            self._sessions.pop(number, None)
        await self._store.remove(temporary)
        for name in temporary:
            self._temporary.pop(name, None)
        self._store.unfinished.discard(self)
