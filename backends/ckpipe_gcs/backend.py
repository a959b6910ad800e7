"""A prefix of a bucket on Google Cloud Storage as a store.

An upload sends each block as a separate temporary object, straight from the caller's memory and
several at a time. When all are there, the store composes them into the object, which appears whole
under its name, and the temporary objects are deleted. A request composes up to 32 objects into one,
so more are composed in a tree. Large blocks go through sessions, so a broken connection costs only
the bytes in transit.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from datetime import datetime
from functools import partial
from typing import Any, Self
from urllib.parse import quote, urlencode

import aiohttp
from yarl import URL

from ckpipe import __version__
from ckpipe.backend import ObjectInfo, Upload, UploadLimits, for_each, run_in_thread
from ckpipe.errors import InvalidKey, ObjectExists, ObjectNotFound, StoreError, StoreUnavailable
from ckpipe_gcs.access import Tokens, find_endpoint, find_proxy, find_source
from ckpipe_gcs.resources import (
    BYTES,
    FIELDS,
    FOREIGN,
    PART_PREFIX,
    PART_SUFFIX,
    Part,
    Resource,
    answered,
    check_stored,
    joined,
    json_body,
    modified,
    owned_by,
    owner_of,
    received,
    refusal,
    related,
    upload_of,
)
from ckpipe_http.buckets import ENDED_AT_ONCE, BlockUpload, BucketBackend, Page, Stored
from ckpipe_http.failures import BUCKET, Refused
from ckpipe_http.requests import (
    CONNECT_SECONDS,
    MemoryBody,
    check_proxy,
    checksum_of,
    checksum_text,
    flag,
    positive,
    read_checksum,
    trust,
)

logger = logging.getLogger("ckpipe")

NEW = {"ifGenerationMatch": "0"}
"""The condition that there is no such object."""

READ_BYTES = 1 << 20
"""The most bytes of an answer that are buffered before they are read."""

PINNED = 4096
"""The most objects whose generation is remembered after a read."""

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


class GcsBackend(BucketBackend):
    """Objects of a bucket whose names begin with a prefix, on Google Cloud Storage.

    Small objects are written by one request, create-only ones with ``ifGenerationMatch=0``. Each
    block of a large object is sent straight from the caller's memory as a temporary object beside
    the object, and the store composes them. Temporary objects are always deleted, and those of
    killed processes by ``sweep``. All data carries its CRC-32C for the store to verify, and the
    checksum that the store reports is compared. The backend retries nothing: errors tell whether a
    retry may help. Every request has a deadline.

    Credentials are application-default credentials, found as by every client of Google Cloud.
    If a file of credentials cannot be used, opening raises, and takes no other credentials. Tokens
    are renewed while the backend is open, with what the file holds by then. With
    ``STORAGE_EMULATOR_HOST`` requests go to that emulator, without credentials.

    Before its first write to a bucket, a process probes with one object below the root,
    ``.ckpipe-probe``, whether the store honours ``ifGenerationMatch``. A process that only reads
    writes nothing.

    Args:
        url: ``gs://bucket/prefix``, without percent-decoding.
        endpoint_url: Scheme, host and port of the API, for private endpoints and emulators; by
            default ``STORAGE_EMULATOR_HOST``, and else the store's own.
        credentials_file: A file of credentials, instead of the default search.
        anonymous: Whether to send no credentials, as for public buckets and emulators.
        user_project: The project that pays for requests to a requester-pays bucket.
        kms_key_name: The key that encrypts objects on the store, as
            ``projects/…/cryptoKeys/…``; by default the bucket's.
        proxy: The URL of an HTTP proxy; by default the environment's, by ``HTTPS_PROXY``,
            ``HTTP_PROXY`` and ``NO_PROXY``.
        ca_bundle: A file of certificates to trust instead of the system's.
        max_connections: The most connections at a time.
        request_timeout: Seconds for a request without a body. A body adds the time that it takes
            at 1 MiB/s.
        resumable_bytes: The size from which a block is sent through a resumable session. A
            session costs one more request. If a connection breaks, the bytes that have arrived
            are not sent again.
        require_create_only: Whether to refuse a store that ignores ``ifGenerationMatch``, as
            some emulators do. Without it, two runs that use one root at the same time can
            overwrite each other's checkpoints unnoticed.

    Raises:
        UsageError: If the URL has another form, or an option is out of range.
    """

    scheme = "gs"
    foreign = FOREIGN
    limits = UploadLimits(max_blocks=MAX_PARTS)
    condition = "ifGenerationMatch"
    buffered_bytes = 2 << 20

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
        endpoint, emulated = find_endpoint(endpoint_url, os.environ)
        super().__init__(url, endpoint, request_timeout, require_create_only=require_create_only)
        self._anonymous = flag("anonymous", anonymous) or (emulated and credentials_file is None)
        self.resumable_bytes = positive("resumable_bytes", resumable_bytes)
        self._api, self._origin = endpoint, URL(endpoint).origin()
        self._credentials_file, self._ca_bundle = credentials_file, ca_bundle
        self._proxy = check_proxy(proxy)
        self._max_connections = positive("max_connections", max_connections)
        self._common = {"userProject": user_project} if user_project else {}
        self.writing = {"kmsKeyName": kms_key_name} if kms_key_name else {}
        """Parameters of every request that makes an object."""
        # Every write of an object makes a new generation. The first read of a range notes the
        # generation, and later reads must have the same one, so that a reader never mixes two
        # versions. A stat of the object, or a write to it, forgets the generation.
        self._pins: OrderedDict[str, str] = OrderedDict()

    async def __aenter__(self) -> Self:
        """Find the credentials; send no request yet.

        Raises:
            PermissionDenied: If a file of credentials cannot be used.
            StoreError: If the file of certificates cannot be used.
        """
        async with AsyncExitStack() as stack:
            context = await run_in_thread(trust, self._ca_bundle)
            self._session = await stack.enter_async_context(
                aiohttp.ClientSession(
                    connector=aiohttp.TCPConnector(limit=self._max_connections, ssl=context),
                    # Each request has its own deadline, over all its steps.
                    timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
                    headers={"Accept-Encoding": "identity", "User-Agent": f"ckpipe/{__version__}"},
                    auto_decompress=False,
                    cookie_jar=aiohttp.DummyCookieJar(),
                    read_bufsize=READ_BYTES,
                    proxy=find_proxy(self._proxy, self._api),
                )
            )
            find = None
            if not self._anonymous:
                # Without the option, the environment names the proxy of each address.
                session: Any = await stack.enter_async_context(
                    aiohttp.ClientSession(proxy=self._proxy, trust_env=self._proxy is None)
                )
                find = partial(find_source, self._credentials_file, session)
            self._tokens = Tokens(find)
            await self._tokens.open()
            self._stack = stack.pop_all()
        return self

    # Names

    def is_reserved(self, key: str) -> bool:
        return super().is_reserved(key) or upload_of(key) is not None

    def name(self, key: str) -> str:
        name = super().name(key)
        if "\n" in name or "\r" in name:
            raise InvalidKey("A name on this store must not contain line breaks", key=key)
        return name

    def part_name(self, key: str, token: str, level: int, number: int) -> str:
        """Make the whole name of a temporary object.

        Args:
            key: The key of the object that it will belong to.
            token: 16 hexadecimal digits that identify the upload.
            level: The number of compositions of its content.
            number: Its number on that level.

        Raises:
            InvalidKey: If the store cannot hold it.
        """
        folder = key[: key.rfind("/") + 1]
        last = f"{PART_PREFIX}{token}-{level}-{number}{PART_SUFFIX}"
        # Checks the length with a placeholder, since the name of a part is reserved as a key.
        super().name(folder + "x" * len(last))
        return f"{self.prefix}{folder}{last}"

    # Requests

    def url(self, path: str, **query: str) -> URL:
        """Make the address of a path; ``{bucket}`` in it stands for the bucket."""
        whole = path.replace("{bucket}", quote(self.bucket, safe=""))
        parameters = urlencode({**query, **self._common}, quote_via=quote)
        return URL(f"{self._api}{whole}?{parameters}", encoded=True)

    def object_url(self, name: str, verb: str = "", **query: str) -> URL:
        """Make the address of an object by its whole name."""
        return self.url(f"/storage/v1/b/{{bucket}}/o/{quote(name, safe='')}{verb}", **query)

    def upload_url(self, kind: str, name: str, **query: str) -> URL:
        """Make the address that creates an object by its whole name."""
        path = "/upload/storage/v1/b/{bucket}/o"
        return self.url(path, uploadType=kind, name=name, fields=FIELDS, **query, **self.writing)

    @asynccontextmanager
    async def answer(
        self,
        method: str,
        url: URL,
        *,
        headers: Mapping[str, str] | None = None,
        body: MemoryBody | None = None,
        expected: tuple[int, ...] = (),
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request within the deadline of an :meth:`attempt`, and lend the answer.

        If the store refuses the token, the token is renewed and the request sent once more.

        Args:
            method: The method.
            url: The address.
            headers: Headers.
            body: The body. Without one, the client itself retries a request once if a kept
                connection proves to be closed.
            expected: Statuses beyond 399 that are no errors here.

        Raises:
            Refused: If the answer refuses the request.
        """
        # Addresses of upload sessions come from the store, and might name any host.
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
                    raise await refusal(response)
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
        body: MemoryBody | None = None,
    ) -> Resource:
        """Send a request within its own attempt, and return the JSON of the answer.

        Args:
            action: The verb for the message of an error.
            method: The method.
            url: The address.
            key: The key.
            nbytes: The size of the body, or of a body with the same processing time on the store.
            body: The body.

        Raises:
            StoreError: If it failed.
        """
        with self.attempt(action, key, nbytes):
            async with self.answer(method, url, body=body) as response:
                return await answered(response)

    async def owner(self, key: str) -> str | None:
        try:
            return owner_of(await self.resource(self.name(key), key))
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
        """Do :meth:`BucketBackend.write`.

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
        if key is not None:
            self._pins.pop(key, None)
        classed = {} if storage_class is None else {"storageClass": storage_class}
        value = await checksum_of(data)
        told = {
            "name": name, "contentType": BYTES, **owned_by(owner), **classed,
            "crc32c": checksum_text(value),
        }  # fmt: skip
        url = self.upload_url("multipart", name, **(NEW if create else {}))
        with related(told, data) as body, self.creating():
            made = await self.ask("write", "POST", url, key=key, nbytes=len(data), body=body)
        try:
            check_stored(made, value, len(data), f"{self.root}{key or ''}", key)
        except StoreUnavailable:
            if create and "generation" in made:
                # It would count as whole, and the next attempt would find its key taken.
                with contextlib.suppress(StoreError):
                    await self.remove({name: str(made["generation"])})
            raise
        return made

    @contextmanager
    def creating(self) -> Iterator[None]:
        """Translate a 404 for the creation of an object: it can only be about the bucket."""
        try:
            yield
        except ObjectNotFound as error:
            message = f"{error.message}: there is no bucket for {self.root}"
            raise StoreError(message, hint=BUCKET) from error

    async def resource(self, name: str, key: str) -> Resource:
        """Request the resource of an object by its whole name.

        Raises:
            ObjectNotFound: If there is none.
            StoreError: If the store failed.
        """
        return await self.ask("look at", "GET", self.object_url(name, fields=FIELDS), key=key)

    async def stat(self, key: str) -> ObjectInfo:
        found = await self.resource(self.name(key), key)
        self._pins.pop(key, None)
        with self.attempt("look at", key):
            return ObjectInfo(key, int(found["size"]), modified(found))

    @asynccontextmanager
    async def opened(
        self, key: str, span: str | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        pin = self._pins.get(key) if span else None
        condition = {"ifGenerationMatch": pin} if pin else {}
        url = self.object_url(self.name(key), alt="media", **condition)
        try:
            async with self.answer("GET", url, headers={"Range": span} if span else {}) as response:
                if span:
                    self._pin(key, response.headers.get("x-goog-generation"))
                yield response
        except Refused as error:
            if not pin or error.status not in (404, 412):
                raise
            # If the object is gone, a load falls back. Until that is known, the pin stays: the
            # next attempt might read another version.
            try:
                await self.stat(key)
            except ObjectNotFound:
                self._pins.pop(key, None)
                raise
            raise self._overwritten(key) from error

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
        # Reads of one object run concurrently, so another one may have been answered first.
        if self._pins.setdefault(key, generation) != generation:
            raise self._overwritten(key)
        self._pins.move_to_end(key)
        if len(self._pins) > PINNED:
            self._pins.popitem(last=False)

    def _overwritten(self, key: str) -> StoreError:
        self._pins.pop(key, None)
        message = f"{self.root}{key} was overwritten while it was read"
        return StoreError(message, key=key, hint="Let no other program write below this root")

    async def delete(self, keys: Iterable[str]) -> None:
        names: dict[str, str | None] = {}
        for key in keys:
            names[self.name(key)] = None
            self._pins.pop(key, None)
        await self.remove(names)

    async def remove(self, names: Mapping[str, str | None]) -> None:
        """Delete objects by their whole names, several at a time.

        Args:
            names: Each with the generation to delete; None for any.

        Raises:
            StoreError: If the store failed; some of the objects may be gone.
        """

        async def remove(named: tuple[str, str | None]) -> None:
            name, generation = named
            url = self.object_url(name, **({"generation": generation} if generation else {}))
            with self.attempt("delete", name.removeprefix(self.prefix)):
                async with self.answer("DELETE", url, expected=(404,)) as response:
                    await response.read()

        await for_each(names.items(), remove, at_once=ENDED_AT_ONCE)

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
                        modified(each),
                        str(each.get("generation", "")),
                    )
                    for each in answer.get("items", ())
                ]
            yield objects, list(answer.get("prefixes", ()))
            if not answer.get("nextPageToken"):
                return
            query["pageToken"] = str(answer["nextPageToken"])

    # Uploads

    async def begin(self, key: str, size: int, block_bytes: int) -> Upload:
        return CompositeUpload(self, key, size, block_bytes)

    async def remove_stale_uploads(self, prefix: str, *, before: datetime) -> int:
        found: dict[str, dict[str, str | None]] = {}
        latest: dict[str, datetime] = {}
        async for objects, _ in self.pages(self.below(prefix)):
            for stored in objects:
                token = upload_of(stored.name)
                if token is not None:
                    found.setdefault(token, {})[stored.name] = stored.generation
                    latest[token] = max(latest.get(token, stored.modified), stored.modified)
        stale = [token for token, written in latest.items() if written < before]
        for token in stale:
            await self.remove(found[token])
        return len(stale)


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
