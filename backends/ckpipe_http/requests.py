"""Options and checksums of requests to stores behind HTTP."""

from __future__ import annotations

import base64
from typing import TypeVar
from urllib.parse import urlsplit

from awscrt.checksums import crc32c

from ckpipe.backend import run_in_thread
from ckpipe.errors import UsageError

CONNECT_SECONDS = 10.0
"""The most seconds that a connection may take to be made."""

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
