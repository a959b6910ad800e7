"""What backends of stores behind HTTP have in common: deadlines, waits asked for, and ranges."""

from __future__ import annotations

import re
import ssl
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from ckpipe.errors import StoreError, StoreUnavailable, TruncatedObject

SLOWEST_BYTES_PER_SECOND = 1 << 20
"""A body may take as long as it would at this speed, beyond the time of a bare request."""

MAX_RETRY_AFTER_SECONDS = 60.0
"""The longest wait that is granted to a store that asks for one, in seconds."""

UNREACHED = "Look at 'endpoint_url', and whether this machine reaches the store"
"""What to do about a store that cannot be reached."""

_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


def time_limit(timeout: float, nbytes: int) -> float:
    """Seconds that a request may take.

    Args:
        timeout: Seconds for a request without a body.
        nbytes: The size of its body, or of the answer's.
    """
    return timeout + nbytes / SLOWEST_BYTES_PER_SECOND


def retry_after(header: str | None) -> float | None:
    """Seconds that a ``Retry-After`` header asks for (RFC 9110, section 10.2.3), within reason."""
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
    """The error for a connection that could not be made secure.

    Args:
        error: What the client raised.
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


def check_range(header: str | None, where: str, key: str, offset: int, wanted: int) -> None:
    """Looks whether an answer's ``Content-Range`` (RFC 9110, section 14.4) is what was wanted.

    Args:
        header: The header.
        where: The URL of the object.
        key: Its key.
        offset: The first byte that was wanted.
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
    """The error for a range that an object of so many bytes has not."""
    message = f"The object has {size} bytes, and {wanted} from byte {offset} on were wanted"
    return TruncatedObject(message, key=key)


def cut_short(where: str, key: str, came: int, wanted: int) -> StoreError:
    """The error for an answer of another length than it should have."""
    message = f"Could not read {where}: {came} bytes came, and not {wanted}"
    return StoreUnavailable(message, key=key)


__all__ = [
    "MAX_RETRY_AFTER_SECONDS",
    "SLOWEST_BYTES_PER_SECOND",
    "UNREACHED",
    "check_range",
    "cut_short",
    "retry_after",
    "time_limit",
    "tls_failure",
    "truncated",
]
