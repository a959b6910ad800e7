"""Translate errors of S3 and of its client to errors of ckpipe, in one place.

The codes are those of "Error responses" in the Amazon S3 API reference. Compatible stores use the
same codes, and where they do not, the status says enough.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import aiohttp
import botocore.exceptions as client_errors

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
from ckpipe_http.requests import UNREACHED, retry_after, tls_failure

_RIGHTS = "Give these credentials the rights that docs/tutorials/s3.md lists"
_KEYS = "Look at the credentials that this process finds: environment, profile, or instance role"
_REGION = "Set the option 'region' to the bucket's own, or 'endpoint_url' for another store"
_CLOCK = "Set this machine's clock"
_BUCKET = "Create the bucket, or name another one"
_ONCE_MORE = "Save again"

_Kind = tuple[type[StoreError], str | None]

# By the code of an answer, and where that is unknown, by the status.
_ANSWERS: Mapping[str | int, _Kind] = {
    "NoSuchKey": (ObjectNotFound, None),
    "NoSuchBucket": (StoreError, _BUCKET),
    "NoSuchUpload": (StoreError, "Look for a lifecycle rule or a clean-up that removes uploads"),
    "PreconditionFailed": (ObjectExists, None),
    "ConditionalRequestConflict": (StoreUnavailable, None),
    "OperationAborted": (StoreUnavailable, None),
    "AccessDenied": (PermissionDenied, _RIGHTS),
    "AllAccessDisabled": (PermissionDenied, _RIGHTS),
    "InvalidAccessKeyId": (PermissionDenied, _KEYS),
    "SignatureDoesNotMatch": (PermissionDenied, _KEYS),
    "ExpiredToken": (PermissionDenied, "Renew the credentials; static ones cannot be refreshed"),
    "InvalidToken": (PermissionDenied, _KEYS),
    "RequestTimeTooSkewed": (PermissionDenied, _CLOCK),
    "SlowDown": (Throttled, None),
    "Throttling": (Throttled, None),
    "ThrottlingException": (Throttled, None),
    "RequestLimitExceeded": (Throttled, None),
    "TooManyRequests": (Throttled, None),
    "RequestTimeout": (StoreUnavailable, None),
    "IncompleteBody": (StoreUnavailable, None),
    # Bits that were flipped on the way arrive whole when they are sent again.
    "BadDigest": (StoreUnavailable, "Look at the network if this goes on"),
    "XAmzContentChecksumMismatch": (StoreUnavailable, "Look at the network if this goes on"),
    "InvalidPart": (StoreError, _ONCE_MORE),
    "QuotaExceeded": (StoreFull, "Free space within the bucket's quota"),
    "XMinioStorageFull": (StoreFull, "Free space on the store"),
    "KeyTooLongError": (InvalidKey, "Use a shorter prefix"),
    "PermanentRedirect": (StoreError, _REGION),
    "AuthorizationHeaderMalformed": (StoreError, _REGION),
    "IllegalLocationConstraintException": (StoreError, _REGION),
    301: (StoreError, _REGION),
    307: (StoreError, _REGION),
    401: (PermissionDenied, _KEYS),
    403: (PermissionDenied, _RIGHTS),
    404: (ObjectNotFound, None),
    408: (StoreUnavailable, None),
    412: (ObjectExists, None),
    429: (Throttled, None),
    507: (StoreFull, "Free space on the store"),
}
_NO_CREDENTIALS = (
    client_errors.NoCredentialsError,
    client_errors.PartialCredentialsError,
    client_errors.CredentialRetrievalError,
    client_errors.NoAuthTokenError,
    client_errors.TokenRetrievalError,
    client_errors.UnauthorizedSSOTokenError,
    client_errors.SSOTokenLoadError,
)
_PASSING = (
    client_errors.HTTPClientError,
    client_errors.ConnectionError,
    client_errors.FlexibleChecksumError,
    aiohttp.ClientError,
    OSError,  # TimeoutError is one
)


@contextmanager
def requesting(action: str, where: str, key: str | None = None) -> Iterator[None]:
    """Translate the errors of a request.

    Args:
        action: The verb for the message, such as ``"read"``.
        where: The URL of the object or root.
        key: The key concerned.
    """
    try:
        yield
    except client_errors.ClientError as error:
        raise _refusal(error, f"Could not {action} {where}", key) from error
    except (client_errors.BotoCoreError, aiohttp.ClientError, OSError) as error:
        raise _breakdown(error, f"Could not {action} {where}", key) from error
    except ValueError as error:
        # The client's parser of answers, met by half an answer.
        message = f"Could not {action} {where}: the answer makes no sense"
        raise StoreUnavailable(message, key=key) from error


@contextmanager
def opening() -> Iterator[None]:
    """Translate the errors of making the client, before any request."""
    try:
        yield
    except (client_errors.BotoCoreError, OSError, ValueError) as error:
        if isinstance(error, _NO_CREDENTIALS):
            raise _breakdown(error, "Could not open the store", None) from error
        message = f"No S3 client can be made: {type(error).__name__}"
        hint = "Look at the options of the backend and at the AWS configuration files"
        raise StoreError(message, hint=hint) from error


def status_of(error: StoreError) -> int:
    """Find the HTTP status that an error is made of; 0 without one."""
    return int(_answer_of(error.__cause__).get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def upload_is_gone(error: StoreError) -> bool:
    """Tell whether an error says that an upload is not open."""
    return _code_of(error.__cause__) == "NoSuchUpload"


def _code_of(error: Any) -> str:
    """Find the store's own code for a refusal; a status where it has none, empty without one."""
    return str(_answer_of(error).get("Error", {}).get("Code", ""))


def _answer_of(error: Any) -> Mapping[str, Any]:
    return getattr(error, "response", None) or {}


def refused(code: str, what: str, key: str | None) -> StoreError:
    """Make the error for a refusal that came without a status, as one entry of an answer."""
    unknown = StoreUnavailable if code == "InternalError" else StoreError
    kind, hint = _ANSWERS.get(code, (unknown, None))
    return kind(f"{what}: {code}", key=key, hint=hint)


def _refusal(error: Any, what: str, key: str | None) -> StoreError:
    answer = error.response.get("ResponseMetadata", {})
    status = int(answer.get("HTTPStatusCode") or 0)
    code = _code_of(error)
    passing = status >= 500 and status != 501
    unknown = StoreUnavailable if passing else StoreError
    kind, hint = _ANSWERS.get(code) or _ANSWERS.get(status) or (unknown, None)
    headers = answer.get("HTTPHeaders", {})
    asked = retry_after(headers.get("retry-after"))
    if status == 503 and asked is not None:
        kind = Throttled
    request = answer.get("RequestId") or headers.get("x-amz-request-id")
    said = f"{code or 'no code'} (status {status}{f', request {request}' if request else ''})"
    made = kind(f"{what}: {said}", key=key, hint=hint)
    if isinstance(made, Throttled):
        made.retry_after = asked
    return made


def _breakdown(error: Exception, what: str, key: str | None) -> StoreError:
    """Make the error for a request that got no answer, or could not be made.

    The texts of the client's errors are not repeated: some hold URLs, and those may hold
    passwords of proxies.
    """
    name = type(error).__name__
    if isinstance(error, _NO_CREDENTIALS):
        return PermissionDenied(f"{what}: no credentials ({name})", key=key, hint=_KEYS)
    if isinstance(error, client_errors.SSLError | aiohttp.ClientSSLError):
        return tls_failure(error, what, key)
    if isinstance(error, client_errors.ProxyConnectionError):
        return StoreUnavailable(f"{what}: the proxy cannot be reached", key=key)
    if isinstance(error, client_errors.EndpointConnectionError):
        message = f"{what}: the connection failed or broke off"
        return StoreUnavailable(message, key=key, hint=UNREACHED)
    if isinstance(error, TimeoutError):
        hint = "Raise the option 'request_timeout' if the store is merely slow"
        return StoreUnavailable(f"{what}: no answer in time", key=key, hint=hint)
    if isinstance(error, _PASSING):
        return StoreUnavailable(f"{what}: the connection broke off ({name})", key=key)
    return StoreError(f"{what}: {name}", key=key)
