"""Resources of objects on Google Cloud Storage, and the table of the errors of its API.

The API is the JSON API of Cloud Storage, version 1, as its reference describes it. The statuses and
reasons are those of its page "HTTP status and error codes for JSON".
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import aiohttp
from awscrt.checksums import combine_crc32c

from ckpipe.errors import PermissionDenied, StoreUnavailable, Throttled
from ckpipe_gcs.access import CREDENTIALS
from ckpipe_http.buckets import OWNER
from ckpipe_http.failures import NETWORK, SHARED, UNREACHED, Meaning, Refused, Table, retry_after
from ckpipe_http.requests import MemoryBody, read_checksum

Resource = Mapping[str, Any]
"""The description of an object; the reference calls it a resource."""

FIELDS = "name,size,generation,crc32c,timeCreated,metadata"
"""The fields of a resource that requests name."""

BYTES = "application/octet-stream"
_JSON = "application/json; charset=UTF-8"

PART_PREFIX = ".ckpipe-upload-"
PART_SUFFIX = ".ckpipe-part"
"""Temporary objects lie beside the object that they become, and have names of this form. Lifecycle
rules and conditions on rights can match the end."""

_PART = re.compile(
    rf"(?:.*/)?{re.escape(PART_PREFIX)}([0-9a-f]{{16}})-\d+-\d+{re.escape(PART_SUFFIX)}", re.DOTALL
)
_RANGE = re.compile(r"bytes=0-(\d+)")

_RIGHTS = "Give these credentials the rights that docs/tutorials/gcs.md lists"
_PROJECT = "Name a project that pays for requests with the option 'user_project'"
_PROXIES = (aiohttp.ClientProxyConnectionError, aiohttp.ClientHttpProxyError)
_NO_PROJECT = (
    "userProjectMissing",
    "userProjectAccessDenied",
    "userProjectInvalid",
    "userProjectInconsistent",
)
_THROTTLING = ("rateLimitExceeded", "userRateLimitExceeded", "quotaExceeded")

ERRORS: Table = {
    **SHARED,
    **dict.fromkeys(_PROXIES, Meaning(StoreUnavailable, None, "the proxy cannot be used ({name})")),
    aiohttp.ClientConnectorError: Meaning(StoreUnavailable, UNREACHED),
    **dict.fromkeys(_NO_PROJECT, Meaning(PermissionDenied, _PROJECT)),
    **dict.fromkeys(_THROTTLING, Meaning(Throttled)),
    # The network damaged the bytes; sending them again helps.
    "badContent": Meaning(StoreUnavailable, NETWORK),
    "parseError": Meaning(StoreUnavailable, NETWORK),
    401: Meaning(PermissionDenied, CREDENTIALS),
    403: Meaning(PermissionDenied, _RIGHTS),
    409: Meaning(StoreUnavailable),
}


def upload_of(name: str) -> str | None:
    """Find the token of the upload that a temporary object belongs to; None for other names."""
    found = _PART.fullmatch(name)
    return found[1] if found else None


async def refusal(response: aiohttp.ClientResponse) -> Refused:
    """Read the reason of an answer that refuses the request."""
    body = await response.content.read(1 << 16)
    reason, text = "", body.decode(errors="replace")
    try:
        error = json.loads(body)["error"]
        text = str(error["message"])
        reason = str(error["errors"][0]["reason"])
    except (ValueError, LookupError, TypeError):
        # Requests to upload sessions are refused with plain text, and proxies answer with a page.
        text = "" if text.startswith(("<", "{", "[")) else text
    headers = response.headers
    # The id of a request to an upload session would let any reader continue the upload.
    private = response.url.query.get("upload_id")
    request = None if private else headers.get("X-GUploader-UploadID")
    text = text.replace(private, "***") if private else text
    asked = retry_after(headers.get("Retry-After"))
    return Refused(response.status, reason[:64] or "no reason", text, request, asked)


async def answered(response: aiohttp.ClientResponse) -> Resource:
    """Read the JSON of an answer; empty for an answer without content.

    Raises:
        ValueError: If it is not a JSON object.
    """
    data = await response.read()
    found = json.loads(data) if data or response.status != 204 else {}
    if not isinstance(found, dict):
        raise ValueError("the answer is no JSON object")
    return found


def json_body(content: Mapping[str, Any]) -> MemoryBody:
    """Make a body of JSON."""
    return MemoryBody(json.dumps(content).encode(), content_type=_JSON)


def related(resource: Resource, data: bytes | memoryview) -> MemoryBody:
    """Make a body of an object's resource and its content (RFC 2387)."""
    boundary = secrets.token_hex(24)
    edge = f"--{boundary}"
    opening = f"{edge}\r\nContent-Type: {_JSON}\r\n\r\n{json.dumps(resource)}"
    between = f"\r\n{edge}\r\nContent-Type: {BYTES}\r\n\r\n"
    return MemoryBody(
        (opening + between).encode(), data, f"\r\n{edge}--".encode(),
        content_type=f"multipart/related; boundary={boundary}",
    )  # fmt: skip


def owned_by(owner: str | None) -> Mapping[str, Any]:
    """Make the fields of a resource that name the upload that makes the object."""
    return {} if owner is None else {"metadata": {OWNER: owner}}


def owner_of(resource: Resource) -> str | None:
    """Find the upload that made an object, by its resource."""
    found: str | None = (resource.get("metadata") or {}).get(OWNER)
    return found


def check_stored(made: Resource, value: int, size: int, where: str, key: str | None) -> None:
    """Compare an object's resource with the sent bytes.

    Args:
        made: The resource.
        value: The CRC-32C of the sent bytes.
        size: The number of sent bytes.
        where: The URL of the object.
        key: Its key.

    Raises:
        StoreUnavailable: If they differ.
    """
    try:
        same = int(made["size"]) == size and read_checksum(made["crc32c"]) == value
    except (LookupError, TypeError, ValueError):
        same = False
    if not same:
        message = f"Could not write {where}: the store has other bytes than were sent"
        raise StoreUnavailable(message, key=key, hint=NETWORK)


def modified(resource: Resource) -> datetime:
    """Read the time at which this generation of an object was written."""
    return datetime.fromisoformat(resource["timeCreated"]).astimezone(UTC)


@dataclass(frozen=True, slots=True)
class Part:
    """A range of an object's bytes, stored as a separate object.

    Args:
        name: The whole name of the separate object.
        generation: Its generation.
        size: Bytes.
        checksum: Their CRC-32C.
    """

    name: str
    generation: str
    size: int
    checksum: int


def joined(parts: Sequence[Part]) -> tuple[int, int]:
    """Compute the size and CRC-32C of concatenated parts."""
    size = checksum = 0
    for part in parts:
        checksum = combine_crc32c(checksum, part.checksum, part.size)
        size += part.size
    return size, checksum


def received(header: str | None) -> int:
    """Read the number of bytes that the store has, from the ``Range`` header of an answer.

    Raises:
        ValueError: If it has another form.
    """
    if header is None:
        return 0
    found = _RANGE.fullmatch(header)
    if found is None:
        raise ValueError("the range of the store does not begin at 0")
    return int(found[1]) + 1
