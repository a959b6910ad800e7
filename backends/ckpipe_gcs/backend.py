"""A prefix of a bucket on Google Cloud Storage as a store."""

from __future__ import annotations

import os
from contextlib import AsyncExitStack
from typing import Self

from ckpipe.backend import Upload, UploadLimits
from ckpipe_gcs.access import Access, find_endpoint, open_session, open_tokens
from ckpipe_gcs.bucket import Address, GcsBucket
from ckpipe_gcs.upload import MAX_PARTS, CompositeUpload, TemporaryObjects
from ckpipe_http.buckets import BucketBackend
from ckpipe_http.requests import check_proxy, flag, positive


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
