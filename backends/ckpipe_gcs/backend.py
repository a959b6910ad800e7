"""A prefix of a bucket on Google Cloud Storage as a store.

An upload sends each block as a temporary object of its own, straight from the caller's memory and
several at a time; when all are there, the store composes them into the object, which appears whole
under its name, and the temporary ones are deleted. A request composes up to 32 objects into one,
so more are composed in a tree. Large blocks go through sessions, so that a broken connection costs
only the bytes on their way.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Self

import anyio
from awscrt.checksums import combine_crc32c
from yarl import URL

from ckpipe.backend import Upload, UploadLimits
from ckpipe.errors import ObjectExists, ObjectNotFound, StoreError, StoreUnavailable
from ckpipe_gcs.access import Access, find_endpoint, open_session, open_tokens
from ckpipe_gcs.bucket import (
    BYTES,
    DELETED_AT_ONCE,
    FIELDS,
    NEW,
    Address,
    GcsBucket,
    MemoryBody,
    Resource,
    answered,
    check_stored,
    for_each,
    json_body,
    owned_by,
    owner_of,
    upload_of,
)
from ckpipe_http.buckets import BlockUpload, BucketBackend, Leftovers
from ckpipe_http.requests import check_proxy, checksum_text, flag, positive

logger = logging.getLogger("ckpipe")

MAX_SOURCES = 32
"""The most objects that one request composes; a limit of the store."""

MAX_LEVELS = 3
"""The greatest height of the tree of an upload."""

MAX_PARTS = MAX_SOURCES**MAX_LEVELS

COMPOSED_AT_ONCE = 8
"""The most requests that compose and are under way at a time."""

TEMPORARY_CLASS = "STANDARD"
"""Other classes charge for a month at least, also for what lives for a minute. A composed object
has the class of its parts."""


INCOMPLETE = 308
"""The status that says how much of a session's bytes the store has."""

GONE = (404, 410, 499)
"""The statuses that say that there is no such session, or no longer; 499 also answers a request
that ends one."""

_RANGE = re.compile(r"bytes=0-(\d+)")


@dataclass(frozen=True, slots=True)
class Part:
    """A range of an object's bytes as an object of its own.

    Args:
        name: The whole name of that object.
        generation: Its generation.
        size: Bytes.
        checksum: Their CRC-32C.
    """

    name: str
    generation: str
    size: int
    checksum: int


def joined(parts: Sequence[Part]) -> tuple[int, int]:
    """Compute the size and CRC-32C of parts one after the other."""
    size = checksum = 0
    for part in parts:
        checksum = combine_crc32c(checksum, part.checksum, part.size)
        size += part.size
    return size, checksum


class Session:
    """Send one object through a resumable session of its own, which outlives connections.

    A session is begun by one request and takes the bytes in others. The store keeps what it has
    received when a connection breaks, in whole pieces of 256 KiB. So after anything but a clear
    answer the store is asked how much it has, and the rest is sent from there; perhaps it has
    everything and only the answer was lost, and then the object is there. Source of the protocol:
    "Resumable uploads" and "Perform resumable uploads" in the Cloud Storage documentation. A
    session that is left alone shows nothing on the store, and ends by itself after a week.

    Args:
        bucket: Sends the requests.
        name: The whole name of the object, which is this session's alone.
        key: The key that it is for, for errors.
        resource: Further fields of the object's resource.
    """

    def __init__(self, bucket: GcsBucket, name: str, key: str, resource: Mapping[str, Any]) -> None:
        self._bucket, self._name, self._key, self._resource = bucket, name, key, resource
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
            StoreError: If the store failed. Calling again goes on from what it has.
        """
        at = 0
        if self._url is None:
            self._url = await self._begin(len(data), checksum)
        else:
            had = await self._ask(self._url, len(data))
            if not isinstance(had, int):
                return had
            at = had
        while True:
            sent = await self._send(self._url, data, at)
            if not isinstance(sent, int):
                return sent
            if sent <= at:
                where = f"{self._bucket.address}{self._key}"
                message = f"Could not write {where}: the store takes no more bytes of an upload"
                raise StoreUnavailable(message, key=self._key)
            at = sent

    async def _begin(self, size: int, checksum: int) -> URL:
        url = self._bucket.upload_url("resumable", self._name, **NEW, **self._bucket.writing)
        told = {"name": self._name, "contentType": BYTES, **self._resource}
        headers = {"X-Upload-Content-Type": BYTES, "X-Upload-Content-Length": str(size)}
        body = json_body({**told, "crc32c": checksum_text(checksum)})
        with self._bucket.creating(), self._bucket.attempt("begin an upload of", self._key):
            async with self._bucket.answer("POST", url, headers=headers, body=body) as begun:
                await begun.read()
                return URL(begun.headers["Location"], encoded=True)

    async def _ask(self, url: URL, size: int) -> int | Resource:
        """Ask how many bytes the store has; it answers with the resource if it has all."""
        return await self._put(url, None, f"bytes */{size}", 0)

    async def _send(self, url: URL, data: memoryview, at: int) -> int | Resource:
        body = MemoryBody(data[at:])
        span = f"bytes {at}-{len(data) - 1}/{len(data)}"
        try:
            return await self._put(url, body, span, len(data) - at)
        finally:
            body.end()

    async def _put(
        self, url: URL, body: MemoryBody | None, span: str, nbytes: int
    ) -> int | Resource:
        headers = {"Content-Range": span}
        try:
            with self._bucket.attempt("write", self._key, nbytes):
                async with self._bucket.answer("PUT", url, headers=headers, body=body) as had:
                    if had.status == INCOMPLETE:
                        await had.read()
                        return received(had.headers.get("Range"))
                    return await answered(had)
        except StoreError as error:
            if self._bucket.answer_to(error).status not in GONE:
                raise
            self._url = None  # the next call begins anew
            message = f"{error.message}: the upload was ended by somebody else"
            raise StoreUnavailable(message, key=self._key) from error

    async def cancel(self) -> None:
        """End the session, if one is open.

        Raises:
            StoreError: If the store failed.
        """
        if self._url is None:
            return
        with self._bucket.attempt("end an upload of", self._key):
            async with self._bucket.answer("DELETE", self._url, expected=GONE) as ended:
                await ended.read()
        self._url = None


def received(header: str | None) -> int:
    """Read in the ``Range`` header of an answer how many bytes the store has.

    Raises:
        ValueError: If it is of another form.
    """
    if header is None:
        return 0
    found = _RANGE.fullmatch(header)
    if found is None:
        raise ValueError("the range of what the store has does not begin at 0")
    return int(found[1]) + 1


class CompositeUpload(BlockUpload[Part]):
    """Send an object in parts, and compose it of them.

    Args:
        bucket: Sends the requests.
        leftovers: The temporary objects on the store.
        key: The object's key.
        size: Its size in bytes.
        block_bytes: The size of all parts but the last.
        resumable_bytes: The size from which a part is sent through a session.
    """

    def __init__(
        self,
        bucket: GcsBucket,
        leftovers: TemporaryObjects,
        key: str,
        size: int,
        block_bytes: int,
        resumable_bytes: int,
    ) -> None:
        super().__init__(key, size, block_bytes)
        self._bucket, self._leftovers = bucket, leftovers
        self._resumable_bytes = resumable_bytes
        self._name = bucket.address.name(key)
        self._where = f"{bucket.address}{key}"
        self._sessions: dict[int, Session] = {}
        self._names: set[str] = set()
        self._temporary(0, 0)  # raises if there is no room for such names

    def _temporary(self, level: int, number: int) -> str:
        return self._bucket.address.part(self._key, self._token, level, number)

    def _note(self, level: int, number: int) -> str:
        name = self._temporary(level, number)
        self._names.add(name)
        self._leftovers.names[name] = None
        return name

    async def write_summed(self, offset: int, data: memoryview, checksum: int) -> None:
        number = self._number(offset, data)
        if number in self._parts:
            return  # the same bytes as before, says the contract
        name = self._note(0, number)
        try:
            made = await self._send(number, name, data, checksum)
        except ObjectExists:
            # The name is this part's alone, so an answer was lost and this is the object.
            made = await self._bucket.resource(name, self._key)
        self._parts[number] = await self._checked(name, made, checksum, len(data))

    async def _send(self, number: int, name: str, data: memoryview, value: int) -> Resource:
        if len(data) < self._resumable_bytes:
            return await self._bucket.write(
                name, data, create=True, key=self._key, storage_class=TEMPORARY_CLASS
            )
        session = self._sessions.get(number)
        if session is None:
            resource = {"storageClass": TEMPORARY_CLASS}
            session = Session(self._bucket, name, self._key, resource)
            self._sessions[number] = session
            self._leftovers.sessions.add(session)
        made = await session.send(data, value)
        self._leftovers.sessions.discard(session)
        del self._sessions[number]
        return made

    async def _checked(self, name: str, made: Resource, value: int, size: int) -> Part:
        """Check a temporary object by the resource that the store told, and note it."""
        try:
            check_stored(made, value, size, self._where, self._key)
        except StoreUnavailable:
            with contextlib.suppress(StoreError):
                await self._bucket.remove({name: None})  # makes room for another try
            raise
        part = Part(name, str(made["generation"]), size, value)
        self._leftovers.names[name] = part.generation
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
        """Compose one temporary object of each run of parts that one request takes."""
        made: dict[int, Part] = {}

        async def compose(start: int) -> None:
            group, number = parts[start : start + MAX_SOURCES], start // MAX_SOURCES
            made[number] = await self._compose_group(level, number, group)

        await for_each(range(0, len(parts), MAX_SOURCES), compose, at_once=COMPOSED_AT_ONCE)
        return [made[number] for number in range(len(made))]

    async def _compose_group(self, level: int, number: int, group: Sequence[Part]) -> Part:
        name = self._note(level, number)
        size, value = joined(group)
        try:
            made = await self._compose(name, group, {"contentType": BYTES})
        except ObjectExists:
            made = await self._bucket.resource(name, self._key)
        return await self._checked(name, made, value, size)

    async def landed(self) -> bool:
        try:
            found = await self._bucket.resource(self._name, self._key)
        except ObjectNotFound:
            return False
        if owner_of(found) != self._token:
            return False
        await self._finish(found)
        return True

    async def _finish(self, made: Resource) -> None:
        """Check the object, and delete the temporary ones.

        Raises:
            StoreError: If it is not what was sent; it is removed then.
        """
        size, value = joined(self._all_parts())
        try:
            check_stored(made, value, size, self._where, self._key)
        except StoreUnavailable as error:
            await self._bucket.remove({self._name: str(made["generation"])})
            message = f"{self._where} was composed of other bytes than were sent"
            raise StoreError(message, key=self._key, hint="Save again") from error
        try:
            await self._end()
        except StoreError as error:
            # The object is whole. Closing the backend tries once more, and so does a sweep.
            logger.warning("Temporary objects of %s were left behind: %s", self._where, error)

    async def _compose(
        self, name: str, parts: Sequence[Part], resource: Mapping[str, object]
    ) -> Resource:
        query = {**NEW, **self._bucket.writing, "fields": FIELDS}
        url = self._bucket.object_url(name, "/compose", **query)
        nbytes = sum(part.size for part in parts) // 100
        sources = [{"name": part.name, "generation": part.generation} for part in parts]
        body = json_body({"sourceObjects": sources, "destination": resource})
        return await self._bucket.ask(
            "complete", "POST", url, key=self._key, nbytes=nbytes, body=body
        )

    async def _end(self) -> None:
        await self._leftovers.end(tuple(self._names), tuple(self._sessions.values()))
        self._names.clear()

    async def abort(self) -> None:
        with anyio.CancelScope(shield=True):
            await self._end()


class TemporaryObjects(Leftovers):
    """Keep account of temporary objects and sessions, so that none of ours stays on the store.

    A name is noted before the request that may make the object, and forgotten once it is known
    to be gone: so a lost answer leaves nothing behind.

    Args:
        bucket: Sends the requests.
    """

    def __init__(self, bucket: GcsBucket) -> None:
        self._bucket = bucket
        self.names: dict[str, str | None] = {}
        """Objects that may be there, with the generation once that is known."""
        self.sessions: set[Session] = set()
        """Sessions that may be open."""

    async def end(self, names: Iterable[str], sessions: Iterable[Session] = ()) -> None:
        """End sessions and delete temporary objects, as far as they were noted.

        Raises:
            StoreError: If the store failed; what is left stays noted.
        """

        async def cancel(session: Session) -> None:
            await session.cancel()
            self.sessions.discard(session)

        # Sessions first, since one that goes on might make an object again.
        open_ones = [session for session in sessions if session in self.sessions]
        await for_each(open_ones, cancel, at_once=DELETED_AT_ONCE)
        noted = {name: self.names[name] for name in names if name in self.names}
        await self._bucket.remove(noted)
        for name in noted:
            self.names.pop(name, None)

    async def close(self) -> None:
        await self.end(tuple(self.names), tuple(self.sessions))

    async def remove_stale(self, prefix: str, before: datetime) -> int:
        found: dict[str, dict[str, str | None]] = {}
        latest: dict[str, datetime] = {}
        async for page in self._bucket.pages(prefix):
            for stored in page.objects:
                token = upload_of(stored.name)
                if token is not None:
                    found.setdefault(token, {})[stored.name] = stored.generation
                    latest[token] = max(latest.get(token, stored.modified), stored.modified)
        stale = [token for token, written in latest.items() if written < before]
        for token in stale:
            await self._bucket.remove(found[token])
        return len(stale)


class GcsBackend(BucketBackend):
    """Objects of a bucket whose names begin with a prefix, on Google Cloud Storage.

    Small objects are written by one request, create-only ones with ``ifGenerationMatch=0``. Of
    large ones each block is sent straight from the caller's memory as a temporary object beside
    the object, and the store composes them; temporary objects are deleted in any case, and those
    of killed processes by ``sweep``. Everything carries its CRC-32C for the store to verify, and
    what the store reports is compared. Nothing is tried again here: errors say whether trying
    again may help. Every request has a deadline.

    Credentials are application-default credentials, found as by every client of Google Cloud, and
    tokens are renewed while the backend is open. With ``STORAGE_EMULATOR_HOST`` requests go to
    that emulator, without credentials.

    Before its first write to a bucket, which for a pipeline is part of opening, a process finds
    out by one object below the root, ``.ckpipe-probe``, whether the store honours
    ``ifGenerationMatch``. A process that only reads writes nothing.

    Args:
        url: ``gs://bucket/prefix``; its characters stand for themselves.
        endpoint_url: Scheme, host and port of the API, for private endpoints and emulators; by
            default ``STORAGE_EMULATOR_HOST``, and else the store's own.
        credentials_file: A file of credentials, instead of those that are found.
        anonymous: Whether to send no credentials, as for public buckets and emulators.
        user_project: The project that pays for requests to a bucket that asks for it.
        kms_key_name: The key that objects are encrypted with on the store, as
            ``projects/…/cryptoKeys/…``; by default the bucket's.
        proxy: The URL of an HTTP proxy; by default the environment's, by ``HTTPS_PROXY``,
            ``HTTP_PROXY`` and ``NO_PROXY``.
        ca_bundle: A file of certificates to trust instead of the system's.
        max_connections: The most connections at a time.
        request_timeout: Seconds for a request without a body; a body may take as long again as
            it would at 1 MiB/s.
        resumable_bytes: The size from which a block is sent through a resumable session. A
            session costs one request more, and spares sending again what has arrived when a
            connection breaks.
        require_create_only: Whether to refuse a store that ignores ``ifGenerationMatch``, as
            some emulators do. Without it, two runs that use one root at the same time can
            overwrite each other's checkpoints unnoticed.

    Raises:
        UsageError: If the URL is of another form, or an option is out of range.
    """

    limits = UploadLimits(max_blocks=MAX_PARTS)
    condition = "ifGenerationMatch"
    buffered_bytes = 2 << 20
    _address: Address
    _bucket: GcsBucket
    _leftovers: TemporaryObjects

    def __init__(
        self,
        url: str,
        *,
        endpoint_url: str | None = None,
        credentials_file: str | None = None,
        anonymous: bool = False,
        user_project: str | None = None,
        kms_key_name: str | None = None,
        proxy: str | None = None,
        ca_bundle: str | None = None,
        max_connections: int = 32,
        request_timeout: float = 60.0,
        resumable_bytes: int = 8 << 20,
        require_create_only: bool = True,
    ) -> None:
        address = Address.parse(url)
        endpoint, emulated = find_endpoint(endpoint_url, os.environ)
        super().__init__(
            address,
            endpoint,
            require_create_only=flag("require_create_only", require_create_only),
        )
        unknown = flag("anonymous", anonymous) or (emulated and credentials_file is None)
        self._access = Access(
            endpoint, unknown, credentials_file, check_proxy(proxy), ca_bundle,
            positive("max_connections", max_connections),
            positive("request_timeout", request_timeout),
            {"userProject": user_project} if user_project else {},
            {"kmsKeyName": kms_key_name} if kms_key_name else {},
        )  # fmt: skip
        self._resumable_bytes = positive("resumable_bytes", resumable_bytes)

    async def __aenter__(self) -> Self:
        """Find the credentials; the store is not asked anything yet.

        Raises:
            StoreError: If the options or the file of the credentials cannot be used.
        """
        access = self._access
        async with AsyncExitStack() as stack:
            session = await stack.enter_async_context(open_session(access))
            tokens = await stack.enter_async_context(open_tokens(access))
            self._bucket = GcsBucket(session, tokens, self._address, access)
            self._leftovers = TemporaryObjects(self._bucket)
            self._stack = stack.pop_all()
        return self

    async def _begin(self, key: str, size: int, block_bytes: int) -> Upload:
        return CompositeUpload(
            self._bucket, self._leftovers, key, size, block_bytes, self._resumable_bytes
        )
