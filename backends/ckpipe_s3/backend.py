"""A prefix of an S3 bucket as a store."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Literal, Self

from ckpipe.backend import Upload, UploadLimits
from ckpipe_http.buckets import BucketBackend
from ckpipe_http.requests import check_endpoint, check_proxy, flag, positive
from ckpipe_s3.bucket import Access, Address, AddressingStyle, S3Bucket
from ckpipe_s3.client import open_client
from ckpipe_s3.upload import MultipartUpload, OpenUploads

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
