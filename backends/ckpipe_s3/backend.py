"""A prefix of an S3 bucket as a store.

Large objects are multipart uploads: each block is a part, sent straight from the caller's memory.
The store shows nothing of an object until its upload is completed. The client is made once, and its
own retries are off.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import re
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any, Literal, Self

import aiohttp
import botocore.exceptions as client_errors
from aiobotocore.config import AioConfig

from ckpipe.backend import ObjectInfo, Upload, UploadLimits, run_in_thread
from ckpipe.errors import (
    ObjectNotFound,
    PermissionDenied,
    StoreError,
    StoreUnavailable,
    UsageError,
)
from ckpipe_http.buckets import OWNER, BlockUpload, BucketBackend, Page, Stored
from ckpipe_http.failures import Meaning, Refused, broken
from ckpipe_http.requests import (
    CONNECT_SECONDS,
    MemoryBody,
    check_endpoint,
    check_proxy,
    checksum_of,
    checksum_text,
    positive,
    trust,
)
from ckpipe_s3.access import KEYS, Keys, signed
from ckpipe_s3.failures import ERRORS, UNKNOWN_CHECKSUM, refusal

DELETE_BATCH = 1000
"""The most objects that one request deletes; a limit of S3 itself."""

MIN_PART_BYTES = 5 << 20
"""The smallest part that is not the last; a limit of S3 itself."""

MAX_PARTS = 10_000
"""The most parts of an upload; a limit of S3 itself."""

MAX_COPY_BYTES = 5 << 30
"""The largest object that one request copies; a limit of S3 itself."""

# Uploads of other programs may be open below the root, and the store lists only their keys. So an
# upload counts as ckpipe's if its key lies in a checkpoint, an export, or ckpipe's own folder.
_OWN = re.compile(r"(?:step-[0-9]{12,}\.[^/]+\.[0-9]+(?:\.hf|\.torch)?|\.ckpipe)/.+", re.DOTALL)


class S3Backend(BucketBackend):
    """Objects of a bucket whose names begin with a prefix, on AWS or a compatible server.

    Small objects are written by one ``PutObject``, create-only ones with ``If-None-Match: *``.
    Large ones are multipart uploads, sent straight from the caller's memory, each part with its
    checksum for the store to verify. The backend retries nothing: errors tell whether a retry may
    help. Every request has a deadline. Credentials are found as by every AWS tool, and refreshed
    while the backend is open; those in a file are read again if the store refuses them.

    Before its first write to a bucket, a process probes with one object below the root,
    ``.ckpipe-probe``, whether the store honours ``If-None-Match``. A process that only reads writes
    nothing.

    Args:
        url: ``s3://bucket/prefix``, without percent-decoding.
        endpoint_url: The URL of a compatible store; by default AWS's own for the region.
        region: The bucket's region; by default that of the environment or the profile.
        profile: The profile in the AWS configuration files; by default the environment's.
        addressing_style: Whether the bucket is in the ``path`` of the URL or in its host
            (``virtual``); by default ``path`` with an ``endpoint_url``, and else ``auto``.
        sse: Encryption of objects on the store, such as ``"AES256"`` or ``"aws:kms"``.
        sse_kms_key_id: The key for ``aws:kms``; by default the bucket's.
        checksum: The checksum that each object and part carries for the store to verify:
            ``"crc32c"``; ``"md5"`` (the header ``Content-MD5``) for stores that refuse the first,
            which costs processor time; or ``"none"``. With ``"none"``, damage on the way to the
            store is found only when the checkpoint is read.
        storage_class: The storage class of data files, such as ``"STANDARD_IA"``. Small objects,
            which are read often, stay in the bucket's default.
        request_payer: ``"requester"`` to pay for requests to a requester-pays bucket.
        proxy: The URL of an HTTP proxy; by default the environment's, by ``HTTPS_PROXY``,
            ``HTTP_PROXY`` and ``NO_PROXY``.
        ca_bundle: A file of certificates to trust instead of the system's.
        max_connections: The most connections at a time.
        request_timeout: Seconds for a request without a body. A body adds the time that it takes
            at 1 MiB/s. A ``credential_process`` has half of these seconds.
        require_create_only: Whether to refuse a store that ignores ``If-None-Match``. Without
            it, two runs that use one root at the same time can overwrite each other's
            checkpoints unnoticed.

    Raises:
        UsageError: If the URL has another form, or an option is out of range.
    """

    scheme = "s3"
    errors = ERRORS
    limits = UploadLimits(
        min_block_bytes=MIN_PART_BYTES, max_blocks=MAX_PARTS, max_link_bytes=MAX_COPY_BYTES
    )
    condition = "If-None-Match"
    buffered_bytes = MIN_PART_BYTES

    def __init__(
        self,
        url: str,
        *,
        endpoint_url: str | None = None,
        region: str | None = None,
        profile: str | None = None,
        addressing_style: Literal["auto", "path", "virtual"] | None = None,
        sse: str | None = None,
        sse_kms_key_id: str | None = None,
        checksum: Literal["crc32c", "md5", "none"] = "crc32c",
        storage_class: str | None = None,
        request_payer: Literal["requester"] | None = None,
        proxy: str | None = None,
        ca_bundle: str | None = None,
        max_connections: int = 32,
        request_timeout: float = 60.0,
        require_create_only: bool = True,
    ) -> None:
        super().__init__(
            url,
            None if endpoint_url is None else check_endpoint(endpoint_url),
            request_timeout,
            require_create_only=require_create_only,
        )
        if checksum not in ("crc32c", "md5", "none"):
            message = f"checksum must be 'crc32c', 'md5' or 'none', not {checksum!r:.40}"
            raise UsageError(message)
        self._region, self._profile, self._ca_bundle = region, profile, ca_bundle
        self._checksum = checksum
        self._summing = {"ChecksumAlgorithm": "CRC32C"} if checksum == "crc32c" else {}
        self._style = addressing_style or ("path" if endpoint_url else "auto")
        self._proxy = check_proxy(proxy)
        self._max_connections = positive("max_connections", max_connections)
        self._common = _given(Bucket=self.bucket, RequestPayer=request_payer)
        self._writing = _given(ServerSideEncryption=sse, SSEKMSKeyId=sse_kms_key_id)
        self._storage_class = _given(StorageClass=storage_class)

    async def __aenter__(self) -> Self:
        """Make the client; send no request yet.

        Raises:
            PermissionDenied: If there are no usable credentials.
            StoreUnavailable: If a ``credential_process`` did not end in time.
            StoreError: If the options do not make a client.
        """
        try:
            self.client = await run_in_thread(self.make_client)
        except client_errors.CredentialRetrievalError as error:
            message = f"Could not open the store: no credentials ({type(error).__name__})"
            raise PermissionDenied(message, hint=KEYS) from error
        except (client_errors.BotoCoreError, OSError, ValueError) as error:
            found = broken(error, "Could not open the store", None, ERRORS)
            if isinstance(found, PermissionDenied):
                raise found from error
            name = type(error).__name__
            hint = "Check the options of the backend and the AWS configuration files"
            raise StoreError(f"No S3 client can be made: {name}", hint=hint) from error
        self._stack.push_async_exit(self.client)
        return self

    def make_client(self) -> Any:
        """Make a client; block while it reads the service's model and looks for credentials.

        The client's library can read these files only on an event loop. So it gets a short-lived
        loop in a worker thread. Only its first request, which comes later, binds the client to a
        loop.
        """
        # A compatible server rarely checks it, but requests cannot be signed without a region.
        other_region = "us-east-1" if self.endpoint else None
        self._keys = Keys(self._profile, self._region, other_region, self.timeout / 2)
        session = self._keys.session
        session.register_component("credential_provider", self._keys)
        for bundle, source in (
            (self._ca_bundle, "the option 'ca_bundle'"),
            (session.get_config_variable("ca_bundle"), "AWS_CA_BUNDLE, and ca_bundle in a profile"),
            (os.environ.get("REQUESTS_CA_BUNDLE"), "REQUESTS_CA_BUNDLE"),
        ):
            if bundle is not None:
                trust(bundle, source)  # raises if it cannot be used
                break
        context = session.create_client(
            "s3",
            endpoint_url=self.endpoint,
            region_name=self._keys.region,
            verify=self._ca_bundle,
            config=AioConfig(
                signature_version="s3v4",
                # The signature does not hash bodies, since each has a CRC-32C in its header.
                s3={"addressing_style": self._style, "payload_signing_enabled": False},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                retries={"total_max_attempts": 1, "mode": "standard"},
                connect_timeout=min(CONNECT_SECONDS, self.timeout),
                read_timeout=self.timeout,
                max_pool_connections=self._max_connections,
                proxies={"http": self._proxy, "https": self._proxy} if self._proxy else None,
                tcp_keepalive=True,
            ),
        )
        client = asyncio.run(context.__aenter__())
        client.meta.events.register("before-call.s3.CopyObject", _if_none_match)
        if self._checksum != "crc32c":
            client.meta.events.register("before-call.s3.DeleteObjects", _with_md5)
        return client

    # Requests. The client's own timeouts are not enough: it waits for ever if a server goes silent
    # before it has asked for a body, or in the middle of one.

    def refusal(self, error: BaseException | None) -> Refused | None:
        return refusal(error)

    async def _send(self, operation: str, /, **parameters: Any) -> Any:
        """Send a request within the deadline and the error handling of an :meth:`attempt`.

        If the store refuses the credentials, and there are others by now, it is sent again, at most
        three times: a role or a program may give others each time, and all may be refused.
        """
        for left in reversed(range(4)):
            signed.set(None)
            try:
                return await getattr(self.client, operation)(**self._common, **parameters)
            except client_errors.ClientError as error:
                answer = self.refusal(error) or Refused(0, "")
                used = signed.get()
                if not left or not await self._keys.renewed(used, answer.code, answer.status):
                    raise
        raise AssertionError

    async def ask(
        self,
        action: str,
        operation: str,
        /,
        *,
        key: str | None = None,
        nbytes: int = 0,
        **parameters: Any,
    ) -> Any:
        """Send a request within its own attempt.

        Args:
            action: The verb for the message of an error, such as ``"read"``.
            operation: The client's method.
            key: The key.
            nbytes: The size of the request's body.
            parameters: The method's parameters.

        Raises:
            StoreError: If it failed.
        """
        try:
            with self.attempt(action, key, nbytes):
                return await self._send(operation, **parameters)
        except StoreError as error:
            summed = any("Checksum" in name for name in parameters)
            if summed and error.hint is None and self.answer_to(error).status in (400, 501):
                error.hint = UNKNOWN_CHECKSUM
            raise

    async def _answers(self, operation: str, *marks: str, **parameters: Any) -> AsyncIterator[Any]:
        """Request the pages of a list, each within its own attempt.

        Args:
            operation: The client's method.
            marks: The parameters that name the place where a page begins.
            parameters: Its other parameters.

        Raises:
            StoreError: If the store failed.
        """
        begin: dict[str, Any] = {}
        while True:
            page = await self.ask("list", operation, **parameters, **begin)
            yield page
            following = {mark: page[f"Next{mark}"] for mark in marks if page.get(f"Next{mark}")}
            if not page.get("IsTruncated") or not following:
                return
            if following == begin:
                message = f"Could not list {self.root}: the same page comes again and again"
                raise StoreError(message)
            begin = following

    async def pages(self, prefix: str, delimiter: str = "") -> AsyncIterator[Page]:
        cut = {"Delimiter": delimiter} if delimiter else {}
        answers = self._answers("list_objects_v2", "ContinuationToken", Prefix=prefix, **cut)
        async for answer in answers:
            objects = [
                Stored(entry["Key"], entry["Size"], _whole_seconds(entry["LastModified"]))
                for entry in answer.get("Contents", ())
            ]
            yield objects, [entry["Prefix"] for entry in answer.get("CommonPrefixes", ())]

    async def write(
        self,
        name: str,
        data: bytes,
        *,
        create: bool,
        owner: str | None = None,
        key: str | None = None,
    ) -> None:
        condition = {"IfNoneMatch": "*"} if create else {}
        carried = await self.summed(data)
        await self.ask(
            "write", "put_object", key=key, nbytes=len(data), Key=name, Body=data,
            **carried, **condition, **_owned_by(owner), **self._writing,
        )  # fmt: skip

    async def copy(self, source: str, target: str, mark: str) -> None:
        # The size is unknown here, so each copy may take as long as the largest.
        await self.ask(
            "link", "copy_object", key=target, nbytes=MAX_COPY_BYTES // 100,
            Key=self.name(target), CopySource={"Bucket": self.bucket, "Key": self.name(source)},
            MetadataDirective="REPLACE", TaggingDirective="REPLACE",
            **_owned_by(mark), **self._summing, **self._writing, **self._storage_class,
        )  # fmt: skip

    async def summed(self, data: bytes | memoryview, value: int | None = None) -> dict[str, str]:
        """Make the parameter with the checksum of a body.

        Args:
            data: The body.
            value: Its CRC-32C, if it is known.
        """
        if self._checksum == "md5":
            return {"ContentMD5": await run_in_thread(_md5_text, data)}
        if self._checksum == "none":
            return {}
        value = await checksum_of(data) if value is None else value
        return {"ChecksumCRC32C": checksum_text(value)}

    @asynccontextmanager
    async def opened(
        self, key: str, span: str | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        ranged = {"Range": span} if span else {}
        answer = await self._send("get_object", Key=self.name(key), **ranged)
        stream: aiohttp.ClientResponse = answer["Body"].raw_stream
        try:
            yield stream
        finally:
            stream.close()

    async def owner(self, key: str) -> str | None:
        try:
            head = await self._head(key)
        except ObjectNotFound:
            return None
        found: str | None = head["Metadata"].get(OWNER)
        return found

    async def stat(self, key: str) -> ObjectInfo:
        head = await self._head(key)
        modified = _whole_seconds(head["LastModified"])
        return ObjectInfo(key, int(head["ContentLength"]), modified, head.get("ETag"))

    async def _head(self, key: str) -> Any:
        return await self.ask("look at", "head_object", key=key, Key=self.name(key))

    async def delete(self, keys: Iterable[str]) -> None:
        names = [self.name(key) for key in keys]
        names += self._folders(names)
        for start in range(0, len(names), DELETE_BATCH):
            await self._delete(names[start : start + DELETE_BATCH])

    def _folders(self, names: Iterable[str]) -> list[str]:
        """Return the folders in which objects of checkpoints lie, the deepest first.

        Some servers keep and list a folder whose last object was deleted, until its own name is
        deleted, which does nothing while it has objects. AWS has no folders, and would keep a mark
        for each of these names in a bucket with versions.
        """
        if ".amazonaws.com" in self.client.meta.endpoint_url:
            return []
        keys = (name.removeprefix(self.prefix) for name in names)
        parts = [key.split("/") for key in keys if key.startswith("step-") and _OWN.fullmatch(key)]
        folders = {"/".join(each[:end]) for each in parts for end in range(1, len(each))}
        deepest = sorted(folders, key=lambda each: each.count("/"), reverse=True)
        return [f"{self.prefix}{each}/" for each in deepest]

    async def _delete(self, names: list[str]) -> None:
        try:
            answer = await self.ask(
                "delete objects of", "delete_objects",
                Delete={"Objects": [{"Key": name} for name in names], "Quiet": True},
            )  # fmt: skip
        except StoreError as error:
            if type(error) is not StoreError:
                raise
            # Some stores support no batches, or only another form of them.
            for name in names:
                if not name.endswith("/"):
                    await self.ask("delete", "delete_object", key=self.key(name), Key=name)
            return
        for entry in answer.get("Errors", ()):
            key, code = self.key(entry.get("Key", "")), entry.get("Code", "")
            if entry.get("Key", "").endswith("/"):
                continue
            found = ERRORS.get(code, Meaning(StoreError))
            text = Refused(0, code, entry.get("Message") or "").text
            message = f"Could not delete {self.root}{key}: {code}" + (f": {text}" if text else "")
            raise found.kind(message, key=key, hint=found.hint)

    # Uploads

    async def begin(self, key: str, size: int, block_bytes: int) -> Upload:
        upload = MultipartUpload(self, key, size, block_bytes)
        await upload.begin({**self._summing, **self._writing, **self._storage_class})
        return upload

    async def abort_upload(self, key: str, upload_id: str) -> None:
        """Abort an upload, if it is still open.

        Raises:
            StoreError: If the store failed.
        """
        try:
            await self.ask(
                "abort an upload of", "abort_multipart_upload", key=key,
                Key=self.name(key), UploadId=upload_id,
            )  # fmt: skip
        except ObjectNotFound:
            pass
        except StoreUnavailable:
            raise
        except StoreError as error:
            gone = self.answer_to(error).code == "NoSuchUpload"
            if not gone and upload_id in await self._open_uploads(key):
                raise

    async def settle(self, key: str) -> None:
        """Abort open uploads of a key whose begin was not answered.

        If the answer to a request that begins an upload is lost, the upload may be open under an
        unknown id. So every open upload of the key with an unknown id is aborted. The key of a data
        file belongs to one save of one rank, so no other process has an upload for it.

        Raises:
            StoreError: If the store failed.
        """
        uploads = [each for each in self.unfinished if isinstance(each, MultipartUpload)]
        lost = {each for each in uploads if each.key == key and each.id is None}
        if not lost:
            return
        for upload_id in await self._open_uploads(key):
            if upload_id not in {each.id for each in uploads}:
                await self.abort_upload(key, upload_id)
        self.unfinished -= lost

    async def _open_uploads(self, key: str) -> list[str]:
        found = self._begun(self.name(key))
        return [upload_id async for of, upload_id, _ in found if of == key]

    async def _begun(self, prefix: str) -> AsyncIterator[tuple[str, str, datetime]]:
        """List the key, the id and the begin of each upload that is open below a prefix."""
        marks = ("KeyMarker", "UploadIdMarker")
        async for page in self._answers("list_multipart_uploads", *marks, Prefix=prefix):
            for entry in page.get("Uploads", ()):
                key = self.key(entry["Key"])
                # Some stores ignore the prefix.
                if key is not None and entry["Key"].startswith(prefix):
                    yield key, entry["UploadId"], entry["Initiated"].astimezone(UTC)

    async def remove_stale_uploads(self, prefix: str, *, before: datetime) -> int:
        found = {
            (key, upload_id)
            async for key, upload_id, begun in self._begun(self.below(prefix))
            if begun < before and _OWN.fullmatch(key)
        }
        for key, upload_id in found:
            await self.abort_upload(key, upload_id)
        return len(found)


def _given(**parameters: str | None) -> dict[str, str]:
    return {name: value for name, value in parameters.items() if value is not None}


def _md5_text(data: bytes | memoryview) -> str:
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()


def _with_md5(params: Any, **_: Any) -> None:
    """Send a deletion with ``Content-MD5``, since the API wants it or another checksum."""
    params["context"].pop("checksum", None)
    params["headers"]["Content-MD5"] = _md5_text(params["body"])


def _if_none_match(params: Any, **_: Any) -> None:
    """Send a copy with its condition, which is no parameter in older versions of the client."""
    params["headers"]["If-None-Match"] = "*"


def _owned_by(owner: str | None) -> dict[str, Any]:
    """Make the parameters that name the upload in the metadata of its object."""
    return {} if owner is None else {"Metadata": {OWNER: owner}}


def _whole_seconds(modified: datetime) -> datetime:
    """Cut a time to whole seconds, as the head of an object has it; some lists are more exact."""
    return modified.astimezone(UTC).replace(microsecond=0)


class MultipartUpload(BlockUpload[Mapping[str, Any]]):
    """Send an object in parts; call :meth:`begin` first."""

    _store: S3Backend
    id: str | None = None
    """The store's id of the upload; None while its begin is not answered."""

    async def begin(self, parameters: Mapping[str, Any]) -> None:
        """Begin the upload on the store, with further parameters.

        Raises:
            StoreError: If the store failed.
        """
        try:
            answer = await self._store.ask(
                "begin an upload of", "create_multipart_upload", key=self.key,
                Key=self._name, **_owned_by(self._token), **parameters,
            )  # fmt: skip
        except StoreError as error:
            if not isinstance(error, StoreUnavailable):
                self._store.unfinished.discard(self)
            raise
        self.id = str(answer["UploadId"])
        self._store.unfinished.add(self)

    async def write_summed(self, offset: int, data: memoryview, checksum: int) -> None:
        number = self._number(offset, data)
        carried = await self._store.summed(data, checksum)
        with MemoryBody(data) as body:
            answer = await self._store.ask(
                "write a part of", "upload_part", key=self.key, nbytes=len(data),
                Key=self._name, UploadId=self.id, PartNumber=number + 1, Body=body,
                ContentLength=len(data), **carried,
            )  # fmt: skip
        part = {"PartNumber": number + 1, "ETag": answer["ETag"]}
        if "ChecksumCRC32C" in answer.keys() & carried.keys():
            part |= carried  # the store has checked it, and will check it again
        self._parts[number] = part

    async def complete(self) -> None:
        parts = self._all_parts()
        await self._store.check_free(self.key)
        # Some stores ignore If-None-Match here, so only the check above remains. It is enough,
        # because names of data files are unique.
        await self._store.ask(
            "complete", "complete_multipart_upload", key=self.key, nbytes=self._size // 100,
            Key=self._name, UploadId=self.id, MultipartUpload={"Parts": parts},
        )  # fmt: skip
        self._store.unfinished.discard(self)
        await self._store.settle(self.key)

    async def landed(self) -> bool:
        if await self._store.owner(self.key) != self._token:
            return False
        self._store.unfinished.discard(self)  # closing aborts other open uploads of the key
        return True

    async def end(self) -> None:
        if self.id is not None:
            await self._store.abort_upload(self.key, self.id)
            self._store.unfinished.discard(self)
        await self._store.settle(self.key)
