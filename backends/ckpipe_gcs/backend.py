"""A prefix of a bucket on Google Cloud Storage as a store."""

from __future__ import annotations

import contextlib
import os
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from datetime import datetime
from functools import partial
from typing import Any, Self
from urllib.parse import quote, urlencode

import aiohttp
from yarl import URL

from ckpipe import __version__
from ckpipe.backend import ObjectInfo, Upload, UploadLimits, for_each, run_in_thread
from ckpipe.errors import InvalidKey, ObjectNotFound, StoreError, StoreUnavailable
from ckpipe_gcs.access import Tokens, find_endpoint, find_proxy, find_source
from ckpipe_gcs.resources import (
    BYTES,
    ERRORS,
    FIELDS,
    PART_PREFIX,
    PART_SUFFIX,
    Resource,
    answered,
    check_stored,
    json_body,
    modified,
    owned_by,
    owner_of,
    refusal,
    related,
    upload_of,
)
from ckpipe_gcs.uploads import MAX_PARTS, NEW, TEMPORARY_CLASS, CompositeUpload
from ckpipe_http.buckets import ENDED_AT_ONCE, BucketBackend, Page, Stored
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

READ_BYTES = 1 << 20
"""The most bytes of an answer that are buffered before they are read."""

PINNED = 4096
"""The most objects whose generation is remembered after a read."""


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
    errors = ERRORS
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

    async def copy(self, source: str, target: str, mark: str) -> None:
        self._pins.pop(target, None)
        verb = f"/rewriteTo/b/{{bucket}}/o/{quote(self.name(target), safe='')}"
        query = dict(NEW)
        if kms_key_name := self.writing.get("kmsKeyName"):
            query["destinationKmsKeyName"] = kms_key_name
        # The class is that of large objects, so the store need not move any bytes.
        told = {"contentType": BYTES, "storageClass": TEMPORARY_CLASS, **owned_by(mark)}
        while True:
            url = self.object_url(self.name(source), verb, **query)
            with self.attempt("link", target):
                async with self.answer("POST", url, body=json_body(told)) as response:
                    answer = await answered(response)
                if answer["done"]:
                    return
                query["rewriteToken"] = str(answer["rewriteToken"])

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
            return ObjectInfo(key, int(found["size"]), modified(found), found.get("etag"))

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
