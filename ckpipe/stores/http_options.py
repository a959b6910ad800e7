"""Options of backends of stores behind HTTP: what can be known to be wrong before any request."""

from __future__ import annotations

from typing import TypeVar
from urllib.parse import urlsplit

from ckpipe.errors import UsageError

Number = TypeVar("Number", int, float)


def positive(name: str, value: Number) -> Number:
    """Returns an option that is a number of more than 0.

    Raises:
        UsageError: If it is something else.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"{name} must be a number, not {value!r:.40}")
    if not value > 0:
        raise UsageError(f"{name} must be more than 0, not {value}")
    return value


def flag(name: str, value: bool) -> bool:
    """Returns an option that is true or false.

    Raises:
        UsageError: If it is something else, such as the text ``"false"``, which counts as true.
    """
    if not isinstance(value, bool):
        raise UsageError(f"{name} must be True or False, not {value!r:.40}")
    return value


def check_endpoint(url: str, option: str = "endpoint_url") -> str:
    """Returns the address of a store, if it can be one.

    It is not repeated in errors, since somebody may have written credentials into it.

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
    """Returns the URL of a proxy, if it can be one; it may hold a name and a password.

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


__all__ = ["check_endpoint", "check_proxy", "flag", "positive"]
