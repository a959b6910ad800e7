"""Translate errors of the store and of the HTTP client to errors of ckpipe, in one place.

The statuses and reasons are those of "HTTP status and error codes for JSON" in the Cloud Storage
reference. The store's texts are not repeated in messages, apart from the reason, which is one word.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import aiohttp

from ckpipe.errors import (
    ObjectExists,
    ObjectNotFound,
    PermissionDenied,
    StoreError,
    StoreUnavailable,
    Throttled,
)
from ckpipe_http.requests import UNREACHED, retry_after, tls_failure

_RIGHTS = "Give these credentials the rights that docs/tutorials/gcs.md lists"
CREDENTIALS = (
    "Look at the credentials that this process finds: the option 'credentials_file', "
    "GOOGLE_APPLICATION_CREDENTIALS, gcloud auth application-default login, or the machine's own"
)
_BUCKET = "Create the bucket, or name another one"
_PROJECT = "Name a project that pays for requests with the option 'user_project'"
_NETWORK = "Look at the network if this goes on"

_Kind = tuple[type[StoreError], str | None]

# By the reason of an answer, and where that is unknown, by the status.
_ANSWERS: Mapping[str | int, _Kind] = {
    "userProjectMissing": (PermissionDenied, _PROJECT),
    "userProjectAccessDenied": (PermissionDenied, _PROJECT),
    "userProjectInvalid": (PermissionDenied, _PROJECT),
    "userProjectInconsistent": (PermissionDenied, _PROJECT),
    "rateLimitExceeded": (Throttled, None),
    "userRateLimitExceeded": (Throttled, None),
    "quotaExceeded": (Throttled, None),
    401: (PermissionDenied, CREDENTIALS),
    403: (PermissionDenied, _RIGHTS),
    404: (ObjectNotFound, None),
    408: (StoreUnavailable, None),
    409: (StoreUnavailable, None),
    412: (ObjectExists, None),
    429: (Throttled, None),
}


class Refused(Exception):
    """The error of an answer that refuses the request.

    Args:
        status: Its HTTP status.
        reason: The store's word for the reason; empty without.
        text: The store's own message, which may hold anything.
        request: The store's id of the request.
        asked: Seconds that the store asks to wait.
    """

    def __init__(
        self, status: int, reason: str, text: str, request: str | None, asked: float | None
    ) -> None:
        self.status, self.reason, self.text = status, reason, text
        self.request, self.asked = request, asked
        super().__init__(f"status {status} {reason}".strip())


async def refusal(response: aiohttp.ClientResponse) -> Refused:
    """Read why an answer refuses the request."""
    body = await response.content.read(1 << 16)
    reason = text = ""
    try:
        error = json.loads(body)["error"]
        reason, text = str(error["errors"][0]["reason"]), str(error["message"])
    except (ValueError, LookupError, TypeError):
        pass  # an answer of something before the store, which is told by its status
    headers = response.headers
    asked = retry_after(headers.get("Retry-After"))
    # The id of a request to an upload session would let any reader go on with the upload.
    private = "upload_id" in response.url.query
    request = None if private else headers.get("X-GUploader-UploadID")
    return Refused(response.status, reason[:64], text, request, asked)


@contextmanager
def requesting(action: str, where: str, key: str | None = None) -> Iterator[None]:
    """Translate the errors of a request.

    Args:
        action: The verb for the message, such as ``"read"``.
        where: The URL of the object or root.
        key: The key concerned; without one, a 404 speaks of the bucket.
    """
    try:
        yield
    except Refused as error:
        raise _refused(error, f"Could not {action} {where}", key) from error
    except (aiohttp.ClientError, OSError) as error:
        raise _breakdown(error, f"Could not {action} {where}", key) from error
    except (ValueError, LookupError, TypeError) as error:
        message = f"Could not {action} {where}: the answer makes no sense"
        raise StoreUnavailable(message, key=key) from error


@contextmanager
def opening() -> Iterator[None]:
    """Translate the errors of opening, before any request."""
    try:
        yield
    except (OSError, ValueError, LookupError) as error:
        message = f"The options of the store cannot be used: {type(error).__name__}"
        hint = "Look at the options 'ca_bundle' and 'credentials_file'"
        raise StoreError(message, hint=hint) from error


def status_of(error: StoreError) -> int:
    """Find the HTTP status that an error is made of; 0 without one."""
    return error.__cause__.status if isinstance(error.__cause__, Refused) else 0


def bucket_missing(error: StoreError, where: str) -> StoreError:
    """Make the error for a 404 that can only mean the bucket."""
    return StoreError(f"{error.message}: there is no bucket for {where}", hint=_BUCKET)


def _refused(error: Refused, what: str, key: str | None) -> StoreError:
    kind, hint = _kind(error)
    if kind is ObjectNotFound and key is None:
        kind, hint = StoreError, _BUCKET
    request = f", request {error.request}" if error.request else ""
    message = f"{what}: {error.reason or 'no reason'} (status {error.status}{request})"
    made = kind(message, key=key, hint=hint)
    if isinstance(made, Throttled):
        made.retry_after = error.asked
    return made


def _kind(error: Refused) -> _Kind:
    damaged = "crc32c" in error.text.lower() or error.reason in ("badContent", "parseError")
    if error.status == 400 and damaged:
        # Bits that were flipped on the way arrive whole when they are sent again.
        return StoreUnavailable, _NETWORK
    if error.status == 503 and error.asked is not None:
        return Throttled, None
    known = _ANSWERS.get(error.reason) or _ANSWERS.get(error.status)
    passing = error.status >= 500 and error.status != 501
    return known or ((StoreUnavailable if passing else StoreError), None)


def _breakdown(error: Exception, what: str, key: str | None) -> StoreError:
    """Make the error for a request that got no answer.

    The texts of the client's errors are not repeated: some hold URLs.
    """
    name = type(error).__name__
    if isinstance(error, aiohttp.ClientSSLError | ssl.SSLCertVerificationError):
        return tls_failure(error, what, key)
    if isinstance(error, aiohttp.ClientProxyConnectionError | aiohttp.ClientHttpProxyError):
        return StoreUnavailable(f"{what}: the proxy cannot be used ({name})", key=key)
    if isinstance(error, TimeoutError):
        hint = "Raise the option 'request_timeout' if the store is merely slow"
        return StoreUnavailable(f"{what}: no answer in time", key=key, hint=hint)
    reached = None if not isinstance(error, aiohttp.ClientConnectorError) else UNREACHED
    return StoreUnavailable(f"{what}: the connection broke off ({name})", key=key, hint=reached)
