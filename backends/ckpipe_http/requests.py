"""Requests to stores behind HTTP: their options, deadlines, headers, checksums and bodies."""

from __future__ import annotations

import base64
import re
import ssl
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TypeVar
from urllib.parse import urlsplit

from awscrt.checksums import crc32c

from ckpipe.backend import run_in_thread
from ckpipe.errors import StoreError, StoreUnavailable, TruncatedObject, UsageError

SLOWEST_BYTES_PER_SECOND = 1 << 20
"""A body may take as long as it would at this speed, beyond the time of a bare request."""

MAX_RETRY_AFTER_SECONDS = 60.0
"""The longest wait that is granted to a store that asks for one, in seconds."""

CONNECT_SECONDS = 10.0
"""The most seconds that a connection may take to be made."""

UNREACHED = "Look at 'endpoint_url', and whether this machine reaches the store"
"""The hint for a store that cannot be reached."""

_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_ON_LOOP_BYTES = 1 << 18

Number = TypeVar("Number", int, float)

# Options


def positive(name: str, value: Number) -> Number:
    """Return an option that is a number of more than 0.

    Raises:
        UsageError: If it is something else.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"{name} must be a number, not {value!r:.40}")
    if not value > 0:
        raise UsageError(f"{name} must be more than 0, not {value}")
    return value


def flag(name: str, value: bool) -> bool:
    """Return an option that is true or false.

    Raises:
        UsageError: If it is something else, such as the text ``"false"``, which counts as true.
    """
    if not isinstance(value, bool):
        raise UsageError(f"{name} must be True or False, not {value!r:.40}")
    return value


def check_endpoint(url: str, option: str = "endpoint_url") -> str:
    """Return the address of a store, if it can be one.

    It is not repeated in errors, since it may hold credentials.

    Args:
        url: The address.
        option: Where it was given, for the hint.

    Raises:
        UsageError: If it cannot.
    """
    if not _is_address(url) or "@" in url or "?" in url or "#" in url:
        message = "The address of the store's API is none"
        raise UsageError(message, hint=f"Write http://host:port as {option}")
    return url


def check_proxy(url: str | None, option: str = "as proxy") -> str | None:
    """Return the URL of a proxy, if it can be one; it may hold a name and a password.

    Args:
        url: The URL; None for no proxy.
        option: Where it was given, for the hint.

    Raises:
        UsageError: If it cannot.
    """
    if url is not None and not _is_address(url):
        raise UsageError("The URL of the proxy is none", hint=f"Write http://host:port {option}")
    return url


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return False
    plain = url.isprintable() and " " not in url
    return parts.scheme in ("http", "https") and bool(parts.hostname) and port != 0 and plain


# Deadlines and failures


def time_limit(timeout: float, nbytes: int) -> float:
    """Compute how many seconds a request may take.

    Args:
        timeout: Seconds for a request without a body.
        nbytes: The size of its body, or of the answer's.
    """
    return timeout + nbytes / SLOWEST_BYTES_PER_SECOND


def retry_after(header: str | None) -> float | None:
    """Read the seconds of a ``Retry-After`` header (RFC 9110, section 10.2.3), within reason."""
    if header is None:
        return None
    if re.fullmatch(r"\d{1,9}(\.\d+)?", header.strip()):
        seconds = float(header)
    else:
        try:
            until = parsedate_to_datetime(header)
        except ValueError:
            return None
        if until.tzinfo is None:
            return None
        seconds = (until - datetime.now(UTC)).total_seconds()
    return min(max(seconds, 0.0), MAX_RETRY_AFTER_SECONDS)


def tls_failure(error: BaseException, what: str, key: str | None) -> StoreError:
    """Make the error for a connection that could not be made secure.

    Args:
        error: The client's error.
        what: What could not be done.
        key: The key concerned.
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLError):
        cause = cause.__cause__ or cause.__context__
    if cause is None or isinstance(cause, ssl.SSLCertVerificationError):
        hint = "Set the option 'ca_bundle' to the certificates that the store's own is signed by"
        return StoreError(f"{what}: its certificate is not trusted", key=key, hint=hint)
    message = f"{what}: no TLS is spoken there ({type(error).__name__})"
    return StoreError(message, key=key, hint="Look whether 'endpoint_url' is https or http")


# Ranges of objects


def check_range(header: str | None, where: str, key: str, offset: int, wanted: int) -> None:
    """Compare an answer's ``Content-Range`` (RFC 9110, section 14.4) with the range asked for.

    Args:
        header: The header.
        where: The URL of the object.
        key: Its key.
        offset: The first byte asked for.
        wanted: How many were.

    Raises:
        TruncatedObject: If the object ends before.
        StoreError: If the store does not answer with the range.
    """
    found = _CONTENT_RANGE.fullmatch(header or "")
    if found is None or int(found[1]) != offset:
        message = f"Could not read {where}: the store does not answer with ranges"
        raise StoreError(message, key=key)
    size = int(found[3])
    if offset + wanted > size:
        raise truncated(key, offset, wanted, size)
    come = int(found[2]) + 1 - offset
    if come != wanted:
        raise cut_short(where, key, come, wanted)


def truncated(key: str, offset: int, wanted: int, size: int) -> TruncatedObject:
    """Make the error for a range that reaches beyond the end of an object."""
    message = f"The object has {size} bytes, and {wanted} from byte {offset} on were wanted"
    return TruncatedObject(message, key=key)


def cut_short(where: str, key: str, came: int, wanted: int) -> StoreError:
    """Make the error for an answer of another length than it should have."""
    message = f"Could not read {where}: {came} bytes came, and not {wanted}"
    return StoreUnavailable(message, key=key)


# Checksums, which these stores are told as CRC-32C, big endian, in base 64


async def checksum_of(data: bytes | memoryview) -> int:
    """Compute the CRC-32C of a body, in a worker thread if that takes a while."""
    if len(data) > _ON_LOOP_BYTES:
        return await run_in_thread(crc32c, data)
    value: int = crc32c(data)
    return value


def checksum_text(value: int) -> str:
    """Write a CRC-32C as headers have it."""
    return base64.b64encode(value.to_bytes(4, "big")).decode()


def read_checksum(text: str) -> int:
    """Read a CRC-32C of a header.

    Raises:
        ValueError: If it is none.
    """
    data = base64.b64decode(text, validate=True)
    if len(data) != 4:
        raise ValueError("a CRC-32C has four bytes")
    return int.from_bytes(data, "big")
