"""A prefix of an S3 bucket as a store."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack
from datetime import datetime
from functools import partial
from types import TracebackType
from typing import Literal, Self, TypeVar

import anyio

from ckpipe.backend import Backend, Children, ObjectInfo, PutMode, Upload, UploadLimits
from ckpipe.buffered_upload import BufferedUpload
from ckpipe.errors import UsageError
from ckpipe.fitness import unfit
from ckpipe_s3.address import parse_address
from ckpipe_s3.client import Access, AddressingStyle, open_client
from ckpipe_s3.listing import children, objects
from ckpipe_s3.objects import Objects
from ckpipe_s3.open_uploads import OpenUploads
from ckpipe_s3.probe import honours_create_only
from ckpipe_s3.requests import Requests
from ckpipe_s3.upload import MultipartUpload

MIN_PART_BYTES = 5 << 20
"""The smallest part that is not the last; a limit of S3 itself."""

MAX_PARTS = 10_000
"""The most parts of an upload; a limit of S3 itself."""

Number = TypeVar("Number", int, float)


class S3Backend(Backend):
    """Objects of a bucket whose names begin with a prefix, on AWS or a compatible server.

    Small objects are written by one ``PutObject``, create-only ones with ``If-None-Match: *``.
    Large ones are multipart uploads, sent straight from the caller's memory, each part with its
    CRC-32C for the store to verify. Nothing is tried again here: errors say whether trying again
    may help. Every request has a deadline. Credentials are found as by every AWS tool, and
    refreshed while the backend is open.

    Before its first write to a bucket, which for a pipeline is part of opening, a process finds
    out by one object below the root, ``.ckpipe-probe``, whether the store honours
    ``If-None-Match``. Who only reads writes nothing.

    Args:
        url: ``s3://bucket/prefix``; its characters stand for themselves.
        endpoint_url: The URL of a compatible store; by default AWS's own for the region.
        region: The bucket's region; by default what the environment or the profile says.
        profile: The profile in the AWS configuration files; by default the environment's.
        addressing_style: Whether the bucket stands in the ``path`` of the URL or in its host
            (``virtual``); by default ``path`` with an ``endpoint_url`` and else ``auto``.
        sse: Encryption of objects on the store, such as ``"AES256"`` or ``"aws:kms"``.
        sse_kms_key_id: The key for ``aws:kms``; by default the bucket's.
        storage_class: The storage class of data files, such as ``"STANDARD_IA"``. The small
            objects, which every look at the store reads, stay in the bucket's default.
        request_payer: ``"requester"`` to pay for requests to a bucket that asks for it.
        proxy: The URL of an HTTP proxy.
        ca_bundle: A file of certificates to trust instead of the system's.
        max_connections: The most connections at a time.
        request_timeout: Seconds for a request without a body; a body may take as long again as
            it would at 1 MiB/s.
        require_create_only: Whether to refuse a store that ignores ``If-None-Match``. Without
            it, two runs that use one root at the same time can overwrite each other's
            checkpoints unnoticed.

    Raises:
        UsageError: If the URL is of another form, or an option is out of range.
    """

    limits = UploadLimits(min_block_bytes=MIN_PART_BYTES, max_blocks=MAX_PARTS)
    prefers_worker = True

    def __init__(
        self,
        url: str,
        *,
        endpoint_url: str | None = None,
        region: str | None = None,
        profile: str | None = None,
        addressing_style: AddressingStyle | None = None,
        sse: str | None = None,
        sse_kms_key_id: str | None = None,
        storage_class: str | None = None,
        request_payer: Literal["requester"] | None = None,
        proxy: str | None = None,
        ca_bundle: str | None = None,
        max_connections: int = 32,
        request_timeout: float = 60.0,
        require_create_only: bool = True,
    ) -> None:
        self._address = parse_address(url)
        self._access = Access(
            endpoint_url, region, profile, addressing_style, proxy, ca_bundle,
            _positive("max_connections", max_connections),
            _positive("request_timeout", request_timeout),
        )  # fmt: skip
        self._common = _given(RequestPayer=request_payer)
        self._writing = _given(ServerSideEncryption=sse, SSEKMSKeyId=sse_kms_key_id)
        self._storage_class = _given(StorageClass=storage_class)
        self._require_create_only = require_create_only
        self._stack = AsyncExitStack()
        self._checked = False

    def __repr__(self) -> str:
        return f"<S3Backend {self._address}>"

    async def __aenter__(self) -> Self:
        """Makes the client; the store is not asked anything yet.

        Raises:
            StoreError: If no client can be made of the options.
        """
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(open_client(self._access))
            timeout = self._access.request_timeout
            self._requests = Requests(client, self._address, timeout, self._common)
            self._objects = Objects(self._requests, self._writing)
            self._unfinished = OpenUploads(self._requests, {**self._writing, **self._storage_class})
            self._stack = stack.pop_all()
        return self

    async def _check_fitness(self) -> None:
        """Refuses a store that is not fit to be written to, before the first write."""
        if self._checked:
            return
        endpoint = self._access.endpoint_url
        fit = await honours_create_only(self._requests, self._objects, endpoint)
        self._objects.create_only = fit
        if not fit and self._require_create_only:
            raise unfit(str(self._address), "If-None-Match")
        self._checked = True

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Gives up the uploads that nobody completed or aborted, and closes the client."""
        with anyio.CancelScope(shield=True):
            await self._unfinished.close()
            await self._stack.aclose()

    async def put(self, key: str, data: bytes, mode: PutMode) -> None:
        self._address.name(key)
        await self._check_fitness()
        await self._objects.put(key, data, mode)

    async def open_upload(self, key: str, *, size: int, block_bytes: int) -> Upload:
        self._address.name(key)
        await self._check_fitness()
        if size <= min(block_bytes, MIN_PART_BYTES):
            return BufferedUpload(partial(self._create, key), key, size)
        if size > block_bytes and (block_bytes < MIN_PART_BYTES or size > MAX_PARTS * block_bytes):
            message = f"S3 cannot take {size} bytes in {MAX_PARTS} blocks of {block_bytes} bytes"
            mebibytes = -(-max(size // MAX_PARTS, MIN_PART_BYTES) // (1 << 20)) + 1
            hint = f'Set staging.block_bytes to "{mebibytes} MiB" or more'
            raise UsageError(message, key=key, hint=hint)
        upload_id = await self._unfinished.begin(key)
        return MultipartUpload(
            self._requests, self._objects, self._unfinished, key, size, block_bytes, upload_id
        )

    async def _create(self, key: str, data: bytes) -> None:
        await self._objects.put(key, data, PutMode.CREATE)

    async def get(self, key: str, *, max_bytes: int) -> bytes:
        return await self._objects.get(key, max_bytes)

    async def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        await self._objects.read_into(key, offset, buffer)

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        below = self._address.below(prefix)
        for info in objects(
            self._address, await self._requests.pages("list_objects_v2", Prefix=below)
        ):
            yield info

    async def children(self, prefix: str = "") -> Children:
        below = self._address.below(prefix)
        pages = await self._requests.pages("list_objects_v2", Prefix=below, Delimiter="/")
        return children(self._address, pages)

    async def stat(self, key: str) -> ObjectInfo:
        return await self._objects.stat(key)

    async def delete(self, keys: Iterable[str]) -> None:
        await self._objects.delete(keys)

    async def remove_stale_uploads(self, prefix: str, *, before: datetime) -> int:
        self._address.below(prefix)
        return await self._unfinished.remove_stale(prefix, before)


def _given(**parameters: str | None) -> dict[str, str]:
    return {name: value for name, value in parameters.items() if value is not None}


def _positive(name: str, value: Number) -> Number:
    if value <= 0:
        raise UsageError(f"{name} must be more than 0, not {value}")
    return value
