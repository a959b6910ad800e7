"""A prefix of an S3 bucket as a store.

Large objects are multipart uploads: each block is a part, sent straight from the caller's memory.
The store shows nothing of an object until its upload is completed. The client is made once and
has no retries of its own.
"""

from __future__ import annotations

import asyncio
import functools
import io
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from typing import Any, Literal, Self

import anyio
from aiobotocore.config import AioConfig
from aiobotocore.session import AioSession
from botocore.exceptions import BotoCoreError
from botocore.loaders import create_loader

from ckpipe.backend import Upload, UploadLimits, run_in_thread
from ckpipe.errors import ObjectNotFound, PermissionDenied, StoreError, StoreUnavailable
from ckpipe_http.buckets import BlockUpload, BucketBackend, Leftovers
from ckpipe_http.failures import broken
from ckpipe_http.requests import (
    CONNECT_SECONDS,
    check_endpoint,
    check_proxy,
    checksum_text,
    flag,
    positive,
)
from ckpipe_s3.bucket import (
    FOREIGN,
    Access,
    Address,
    AddressingStyle,
    Parameters,
    S3Bucket,
    owned_by,
)

PIECE_BYTES = 1 << 20
"""The bytes of a body that are handed to the socket at a time. Each piece costs a switch to a
worker thread, so it is larger than the HTTP client asks for."""


class MultipartUpload(BlockUpload[Mapping[str, Any]]):
    """An object that is sent in parts; :meth:`begin` comes first.

    Args:
        bucket: Sends the requests.
        open_uploads: The uploads that are open on the store.
        key: Its key.
        size: Its size in bytes.
        block_bytes: The size of all parts but the last.
    """

    def __init__(
        self, bucket: S3Bucket, open_uploads: OpenUploads, key: str, size: int, block_bytes: int
    ) -> None:
        super().__init__(key, size, block_bytes)
        self._bucket, self._open_uploads = bucket, open_uploads
        self._name = bucket.address.name(key)

    async def begin(self) -> None:
        """Begin the upload on the store.

        Raises:
            StoreError: If the store failed.
        """
        self._id = await self._open_uploads.begin(self._key, owned_by(self._token))

    async def write_summed(self, offset: int, data: memoryview, checksum: int) -> None:
        number = self._number(offset, data)
        told = checksum_text(checksum)
        body = MemoryBody(data)
        try:
            answer = await self._bucket.ask(
                "write a part of", "upload_part", key=self._key, nbytes=len(data),
                Key=self._name, UploadId=self._id, PartNumber=number + 1, Body=body,
                ContentLength=len(data), ChecksumCRC32C=told,
            )  # fmt: skip
        finally:
            body.end()
        part = {"PartNumber": number + 1, "ETag": answer["ETag"]}
        if "ChecksumCRC32C" in answer:  # so the store has checked it, and checks it once more
            part["ChecksumCRC32C"] = told
        self._parts[number] = part

    async def complete(self) -> None:
        parts = self._all_parts()
        await self._bucket.check_free(self._key)
        # Some stores ignore If-None-Match here, so the check above is what there is. It is
        # enough where names are unique, as those of data files are.
        await self._bucket.ask(
            "complete", "complete_multipart_upload", key=self._key, nbytes=self._size // 100,
            Key=self._name, UploadId=self._id, MultipartUpload={"Parts": parts},
        )  # fmt: skip
        self._open_uploads.forget(self._id)
        await self._open_uploads.settle(self._key)

    async def landed(self) -> bool:
        if await self._bucket.owner(self._key) != self._token:
            return False
        self._open_uploads.forget(self._id)  # closing settles what else may be open for the key
        return True

    async def abort(self) -> None:
        with anyio.CancelScope(shield=True):
            await self._open_uploads.abort(self._key, self._id)
            await self._open_uploads.settle(self._key)


class OpenUploads(Leftovers):
    """Begin and end multipart uploads, so that none of ours stays open on the store.

    If the answer to a request that begins an upload is lost, the upload may be open under an id
    that is unknown here. Its key is noted then, and *settled* later: every upload that is open
    for the key and is not known here is aborted. The key of a data file belongs to one save of
    one rank, so no other process has an upload for it.

    Args:
        bucket: Sends the requests.
        writing: Parameters of every request that begins an upload.
    """

    def __init__(self, bucket: S3Bucket, writing: Parameters) -> None:
        self._bucket, self._writing = bucket, writing
        self._open: dict[str, str] = {}
        self._doubtful: Counter[str] = Counter()

    async def begin(self, key: str, more: Parameters) -> str:
        """Begin an upload.

        Args:
            key: The key of its object.
            more: Further parameters of the request.

        Returns:
            The store's id of it.

        Raises:
            StoreError: If the store failed.
        """
        self._doubtful[key] += 1  # stays so if the answer is lost, or the caller is cancelled
        try:
            answer = await self._bucket.ask(
                "begin an upload of", "create_multipart_upload", key=key,
                Key=self._bucket.address.name(key), ChecksumAlgorithm="CRC32C", **more,
                **self._writing,
            )  # fmt: skip
        except StoreError as error:
            if not isinstance(error, StoreUnavailable):
                self._doubtful[key] -= 1
            raise
        self._doubtful[key] -= 1
        upload_id = str(answer["UploadId"])
        self._open[upload_id] = key
        return upload_id

    def forget(self, upload_id: str) -> None:
        """Note that an upload is complete."""
        self._open.pop(upload_id, None)

    async def abort(self, key: str, upload_id: str) -> None:
        """Abort an upload, if it is still open.

        Raises:
            StoreError: If the store failed.
        """
        name = self._bucket.address.name(key)
        try:
            await self._bucket.ask(
                "abort an upload of", "abort_multipart_upload", key=key,
                Key=name, UploadId=upload_id,
            )  # fmt: skip
        except ObjectNotFound:
            pass
        except StoreError as error:
            gone = self._bucket.answer_to(error).code == "NoSuchUpload"
            if not gone and upload_id in await self._listed(key):
                raise
        self._open.pop(upload_id, None)

    async def settle(self, key: str) -> None:
        """Abort uploads of a key whose beginning was not answered.

        Raises:
            StoreError: If the store failed.
        """
        if self._doubtful[key] <= 0:
            return
        for upload_id in await self._listed(key):
            if upload_id not in self._open:
                await self.abort(key, upload_id)
        del self._doubtful[key]

    async def _listed(self, key: str) -> list[str]:
        found = await self._found(self._bucket.address.name(key))
        return [upload_id for upload_id, (of, _) in found.items() if of == key]

    async def _found(self, prefix: str) -> dict[str, tuple[str, datetime]]:
        found = {}
        async for page in self._bucket.answers("list_multipart_uploads", Prefix=prefix):
            for entry in page.get("Uploads", ()):
                # Not every store looks at the prefix.
                if entry["Key"].startswith(prefix):
                    key = self._bucket.address.key(entry["Key"])
                    if key is not None:
                        found[entry["UploadId"]] = (key, entry["Initiated"].astimezone(UTC))
        return found

    async def remove_stale(self, prefix: str, before: datetime) -> int:
        found = await self._found(prefix)
        stale = [(key, id) for id, (key, begun) in found.items() if begun < before]
        for key, upload_id in stale:
            await self.abort(key, upload_id)
        return len(stale)

    async def close(self) -> None:
        for upload_id, key in list(self._open.items()):
            await self.abort(key, upload_id)
        for key in list(self._doubtful):
            await self.settle(key)


class MemoryBody(io.RawIOBase):
    """Read a memoryview as a file, without copying it.

    The client insists on a file for a body that is not ``bytes``. Reads return slices of the
    caller's memory. Once closed, the body reads as ended, so that a request that was
    cancelled while it still sends never touches memory that has another use by then.

    Args:
        data: Flat bytes.
    """

    def __init__(self, data: memoryview) -> None:
        super().__init__()
        self._data, self._at, self._ended = data, 0, False

    def __len__(self) -> int:
        return len(self._data)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._data)}[whence]
        self._at = min(max(base + offset, 0), len(self._data))
        return self._at

    def read(self, size: int | None = -1) -> memoryview:
        """Return a slice of the memory, which may be longer than ``size``; empty at the end."""
        if self._ended:
            return memoryview(b"")
        piece = self._data[self._at : self._at + PIECE_BYTES]
        self._at += len(piece)
        return piece

    def end(self) -> None:
        """Forget the memory."""
        self._ended, self._data = True, memoryview(b"")


PAGED = ("list_objects_v2", "list_multipart_uploads")
"""The operations whose answers come in pages."""


@asynccontextmanager
async def open_client(access: Access) -> AsyncIterator[Any]:
    """Make a client, and close it at the end.

    Raises:
        StoreError: If no client can be made of these options.
    """
    try:
        client = await run_in_thread(make_client, access)
    except (BotoCoreError, OSError, ValueError) as error:
        found = broken(error, "Could not open the store", None, FOREIGN)
        if isinstance(found, PermissionDenied):
            raise found from error
        hint = "Look at the options of the backend and at the AWS configuration files"
        raise StoreError(f"No S3 client can be made: {type(error).__name__}", hint=hint) from error
    try:
        yield client
    finally:
        with anyio.CancelScope(shield=True):
            await client.__aexit__(None, None, None)


def make_client(access: Access) -> Any:
    """Make a client; block while it reads the service's model and looks for credentials.

    All of that is files, for which the client's library has no other way than to read them on
    an event loop. So it gets a short-lived loop in a worker thread. The client is bound to a
    loop by its first request only, which comes later.
    """
    if access.ca_bundle is not None:
        ssl.create_default_context(cafile=access.ca_bundle)  # raises if it is none
    session = AioSession(profile=access.profile)
    session.register_component("data_loader", _models())
    region = access.region or session.get_config_variable("region")
    context = session.create_client(
        "s3",
        endpoint_url=access.endpoint_url,
        # A compatible server seldom cares, but requests cannot be signed without a region.
        region_name=region or ("us-east-1" if access.endpoint_url else None),
        verify=access.ca_bundle,
        config=_config(access),
    )
    return asyncio.run(_entered(context))


@functools.cache
def _models() -> Any:
    """Make the loader of service models, once, since they are the same for every client."""
    return create_loader()


async def _entered(context: Any) -> Any:
    client = await context.__aenter__()
    for operation in PAGED:
        client.get_paginator(operation)  # reads one more file, at the first call
    return client


def _config(access: Access) -> AioConfig:
    style = access.addressing_style or ("path" if access.endpoint_url else "auto")
    return AioConfig(
        signature_version="s3v4",
        # Bodies are not hashed for the signature, since each has a CRC-32C in its header.
        s3={"addressing_style": style, "payload_signing_enabled": False},
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        retries={"total_max_attempts": 1, "mode": "standard"},
        connect_timeout=min(CONNECT_SECONDS, access.request_timeout),
        read_timeout=access.request_timeout,
        max_pool_connections=access.max_connections,
        proxies={"http": access.proxy, "https": access.proxy} if access.proxy else None,
        tcp_keepalive=True,
    )


MIN_PART_BYTES = 5 << 20
"""The smallest part that is not the last; a limit of S3 itself."""

MAX_PARTS = 10_000
"""The most parts of an upload; a limit of S3 itself."""


class S3Backend(BucketBackend):
    """Objects of a bucket whose names begin with a prefix, on AWS or a compatible server.

    Small objects are written by one ``PutObject``, create-only ones with ``If-None-Match: *``.
    Large ones are multipart uploads, sent straight from the caller's memory, each part with its
    CRC-32C for the store to verify. Nothing is tried again here: errors say whether trying again
    may help. Every request has a deadline. Credentials are found as by every AWS tool, and
    refreshed while the backend is open.

    Before its first write to a bucket, which for a pipeline is part of opening, a process finds
    out by one object below the root, ``.ckpipe-probe``, whether the store honours
    ``If-None-Match``. A process that only reads writes nothing.

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
        proxy: The URL of an HTTP proxy; by default the environment's, by ``HTTPS_PROXY``,
            ``HTTP_PROXY`` and ``NO_PROXY``.
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
    condition = "If-None-Match"
    buffered_bytes = MIN_PART_BYTES
    _bucket: S3Bucket
    _leftovers: OpenUploads

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
        super().__init__(
            Address.parse(url),
            None if endpoint_url is None else check_endpoint(endpoint_url),
            require_create_only=flag("require_create_only", require_create_only),
        )
        self._access = Access(
            endpoint_url, region, profile, addressing_style, check_proxy(proxy), ca_bundle,
            positive("max_connections", max_connections),
            positive("request_timeout", request_timeout),
            _given(RequestPayer=request_payer),
            _given(ServerSideEncryption=sse, SSEKMSKeyId=sse_kms_key_id),
        )  # fmt: skip
        self._storage_class = _given(StorageClass=storage_class)

    async def __aenter__(self) -> Self:
        """Make the client; the store is not asked anything yet.

        Raises:
            StoreError: If no client can be made of the options.
        """
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(open_client(self._access))
            self._bucket = S3Bucket(client, self._address, self._access)
            self._leftovers = OpenUploads(
                self._bucket, {**self._access.writing, **self._storage_class}
            )
            self._stack = stack.pop_all()
        return self

    async def _begin(self, key: str, size: int, block_bytes: int) -> Upload:
        upload = MultipartUpload(self._bucket, self._leftovers, key, size, block_bytes)
        await upload.begin()
        return upload


def _given(**parameters: str | None) -> dict[str, str]:
    return {name: value for name, value in parameters.items() if value is not None}
