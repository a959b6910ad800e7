"""Requests for one bucket on S3, and the table of the errors that they meet.

The codes are those of "Error responses" in the Amazon S3 API reference. Compatible stores use the
same codes, and where they do not, the status says enough.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, ClassVar, Literal

import aiohttp
import botocore.exceptions as client_errors

from ckpipe.backend import ObjectInfo
from ckpipe.errors import (
    InvalidKey,
    ObjectExists,
    ObjectNotFound,
    PermissionDenied,
    StoreError,
    StoreFull,
    StoreUnavailable,
    Throttled,
)
from ckpipe_http.buckets import OWNER, Bucket, BucketAddress, Page, Stored
from ckpipe_http.failures import (
    BUCKET,
    CLIENT_ERRORS,
    NETWORK,
    TLS,
    UNREACHED,
    Foreign,
    Refused,
    Table,
    retry_after,
)
from ckpipe_http.requests import checksum_of, checksum_text

DELETE_BATCH = 1000
"""The most objects that one request deletes; a limit of S3 itself."""

AddressingStyle = Literal["auto", "path", "virtual"]
Parameters = Mapping[str, Any]

_RIGHTS = "Give these credentials the rights that docs/tutorials/s3.md lists"
_KEYS = "Look at the credentials that this process finds: environment, profile, or instance role"
_REGION = "Set the option 'region' to the bucket's own, or 'endpoint_url' for another store"
_CLOCK = "Set this machine's clock"
_ONCE_MORE = "Save again"

_NO_CREDENTIALS = (
    client_errors.NoCredentialsError,
    client_errors.PartialCredentialsError,
    client_errors.CredentialRetrievalError,
    client_errors.NoAuthTokenError,
    client_errors.TokenRetrievalError,
    client_errors.UnauthorizedSSOTokenError,
    client_errors.SSOTokenLoadError,
)

FOREIGN: Table = {
    **CLIENT_ERRORS,
    **dict.fromkeys(_NO_CREDENTIALS, Foreign(PermissionDenied, _KEYS, "no credentials ({name})")),
    client_errors.SSLError: TLS,
    client_errors.ProxyConnectionError: Foreign(
        StoreUnavailable, None, "the proxy cannot be reached"
    ),
    client_errors.EndpointConnectionError: Foreign(
        StoreUnavailable, UNREACHED, "the connection failed or broke off"
    ),
    client_errors.HTTPClientError: Foreign(StoreUnavailable),
    client_errors.ConnectionError: Foreign(StoreUnavailable),
    client_errors.FlexibleChecksumError: Foreign(StoreUnavailable),
    client_errors.BotoCoreError: Foreign(StoreError, None, "{name}"),
    "NoSuchKey": Foreign(ObjectNotFound),
    "NoSuchBucket": Foreign(StoreError, BUCKET),
    "NoSuchUpload": Foreign(
        StoreError, "Look for a lifecycle rule or a clean-up that removes uploads"
    ),
    "PreconditionFailed": Foreign(ObjectExists),
    "ConditionalRequestConflict": Foreign(StoreUnavailable),
    "OperationAborted": Foreign(StoreUnavailable),
    "AccessDenied": Foreign(PermissionDenied, _RIGHTS),
    "AllAccessDisabled": Foreign(PermissionDenied, _RIGHTS),
    "InvalidAccessKeyId": Foreign(PermissionDenied, _KEYS),
    "SignatureDoesNotMatch": Foreign(PermissionDenied, _KEYS),
    "ExpiredToken": Foreign(
        PermissionDenied, "Renew the credentials; static ones cannot be refreshed"
    ),
    "InvalidToken": Foreign(PermissionDenied, _KEYS),
    "RequestTimeTooSkewed": Foreign(PermissionDenied, _CLOCK),
    "SlowDown": Foreign(Throttled),
    "Throttling": Foreign(Throttled),
    "ThrottlingException": Foreign(Throttled),
    "RequestLimitExceeded": Foreign(Throttled),
    "TooManyRequests": Foreign(Throttled),
    "InternalError": Foreign(StoreUnavailable),
    "RequestTimeout": Foreign(StoreUnavailable),
    "IncompleteBody": Foreign(StoreUnavailable),
    # Bits that were flipped on the way arrive whole when they are sent again.
    "BadDigest": Foreign(StoreUnavailable, NETWORK),
    "XAmzContentChecksumMismatch": Foreign(StoreUnavailable, NETWORK),
    "InvalidPart": Foreign(StoreError, _ONCE_MORE),
    "QuotaExceeded": Foreign(StoreFull, "Free space within the bucket's quota"),
    "XMinioStorageFull": Foreign(StoreFull, "Free space on the store"),
    "KeyTooLongError": Foreign(InvalidKey, "Use a shorter prefix"),
    "PermanentRedirect": Foreign(StoreError, _REGION),
    "AuthorizationHeaderMalformed": Foreign(StoreError, _REGION),
    "IllegalLocationConstraintException": Foreign(StoreError, _REGION),
    301: Foreign(StoreError, _REGION),
    307: Foreign(StoreError, _REGION),
    401: Foreign(PermissionDenied, _KEYS),
    403: Foreign(PermissionDenied, _RIGHTS),
    404: Foreign(ObjectNotFound),
    408: Foreign(StoreUnavailable),
    412: Foreign(ObjectExists),
    429: Foreign(Throttled),
    507: Foreign(StoreFull, "Free space on the store"),
}


@dataclass(frozen=True, slots=True)
class Address(BucketAddress):
    """A root on S3."""

    scheme: ClassVar[str] = "s3"


@dataclass(frozen=True, slots=True)
class Access:
    """Options of the client, with the meaning that they have in :class:`S3Backend`.

    Args:
        common: Parameters of every request.
        writing: Parameters of every request that makes an object.
    """

    endpoint_url: str | None = None
    region: str | None = None
    profile: str | None = None
    addressing_style: AddressingStyle | None = None
    proxy: str | None = field(default=None, repr=False)
    ca_bundle: str | None = None
    max_connections: int = 32
    request_timeout: float = 60.0
    common: Parameters = field(default_factory=dict)
    writing: Parameters = field(default_factory=dict)


class S3Bucket(Bucket):
    """Send requests for one bucket.

    The client's own timeouts do not suffice: it waits for ever on a server that goes silent
    before it has asked for a body, or in the middle of one.

    Args:
        client: The client.
        address: Bucket and prefix.
        access: The options of requests.
    """

    foreign = FOREIGN

    def __init__(self, client: Any, address: BucketAddress, access: Access) -> None:
        super().__init__(address, access.request_timeout)
        self._client, self._writing = client, access.writing
        self._common = {"Bucket": address.bucket, **access.common}

    def refusal(self, error: BaseException | None) -> Refused | None:
        if not isinstance(error, client_errors.ClientError):
            return None
        said, answer = error.response.get("Error", {}), error.response.get("ResponseMetadata", {})
        headers = answer.get("HTTPHeaders", {})
        return Refused(
            int(answer.get("HTTPStatusCode") or 0),
            str(said.get("Code") or "no code"),
            str(said.get("Message", "")),
            answer.get("RequestId") or headers.get("x-amz-request-id"),
            retry_after(headers.get("retry-after")),
        )

    async def _send(self, operation: str, /, **parameters: Any) -> Any:
        """Send a request within an :meth:`attempt`, whose deadline and errors it has."""
        return await getattr(self._client, operation)(**self._common, **parameters)

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
        """Send a request within an attempt of its own.

        Args:
            action: The verb for the message of an error, such as ``"read"``.
            operation: The client's method.
            key: The key concerned.
            nbytes: The size of the request's body.
            parameters: The method's parameters.

        Raises:
            StoreError: If it failed.
        """
        with self.attempt(action, key, nbytes):
            return await self._send(operation, **parameters)

    async def answers(self, operation: str, /, **parameters: Any) -> AsyncIterator[Any]:
        """Ask for the pages of a list, each within an attempt of its own.

        Raises:
            StoreError: If the store failed.
        """
        paginator = self._client.get_paginator(operation).paginate(**self._common, **parameters)
        following = aiter(paginator)
        while True:
            with self.attempt("list"):
                page = await anext(following, None)
            if page is None:
                return
            yield page

    async def pages(self, prefix: str, delimiter: str = "") -> AsyncIterator[Page]:
        cut = {"Delimiter": delimiter} if delimiter else {}
        async for answer in self.answers("list_objects_v2", Prefix=prefix, **cut):
            yield Page(
                [
                    Stored(entry["Key"], entry["Size"], _whole_seconds(entry["LastModified"]))
                    for entry in answer.get("Contents", ())
                ],
                [entry["Prefix"] for entry in answer.get("CommonPrefixes", ())],
            )

    async def write(
        self,
        name: str,
        data: bytes,
        *,
        create: bool,
        owner: str | None = None,
        key: str | None = None,
    ) -> None:
        condition: Parameters = {"IfNoneMatch": "*"} if create else {}
        checksum = checksum_text(await checksum_of(data))
        await self.ask(
            "write", "put_object", key=key, nbytes=len(data), Key=name, Body=data,
            ChecksumCRC32C=checksum, **condition, **owned_by(owner), **self._writing,
        )  # fmt: skip

    @asynccontextmanager
    async def opened(
        self, key: str, span: str | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        ranged = {"Range": span} if span else {}
        answer = await self._send("get_object", Key=self.address.name(key), **ranged)
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
        return ObjectInfo(key, int(head["ContentLength"]), _whole_seconds(head["LastModified"]))

    async def _head(self, key: str) -> Any:
        name = self.address.name(key)
        return await self.ask("look at", "head_object", key=key, Key=name)

    async def delete(self, keys: Iterable[str]) -> None:
        names = [self.address.name(key) for key in keys]
        for start in range(0, len(names), DELETE_BATCH):
            await self._delete(names[start : start + DELETE_BATCH])

    async def _delete(self, names: list[str]) -> None:
        try:
            answer = await self.ask(
                "delete objects of", "delete_objects",
                Delete={"Objects": [{"Key": name} for name in names], "Quiet": True},
            )  # fmt: skip
        except StoreError as error:
            if type(error) is not StoreError:
                raise
            # Some stores know no batches, or want them otherwise.
            for name in names:
                key = self.address.key(name)
                await self.ask("delete", "delete_object", key=key, Key=name)
            return
        for entry in answer.get("Errors", ()):
            key, code = self.address.key(entry.get("Key", "")), entry.get("Code", "")
            found = FOREIGN.get(code, Foreign(StoreError))
            message = f"Could not delete {self.address}{key}: {code}"
            raise found.kind(message, key=key, hint=found.hint)


def owned_by(owner: str | None) -> Parameters:
    """Make the parameters by which an object names the upload that makes it."""
    return {} if owner is None else {"Metadata": {OWNER: owner}}


def _whole_seconds(modified: datetime) -> datetime:
    """Cut a time to what the head of an object tells; lists are more exact on some stores."""
    return modified.astimezone(UTC).replace(microsecond=0)
