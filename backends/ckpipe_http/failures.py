"""Translate errors of stores and of their clients to errors of ckpipe, by a table for each store.

Messages repeat the store's own text, in one line and without credentials. They do not repeat texts
of the client's errors: some hold URLs, and these may hold passwords of proxies.

An answer of 4xx is permanent, except those that the tables name: a conflict, a time limit, too many
requests, or bytes that were damaged on the way.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import NamedTuple

import aiohttp

from ckpipe.backend import without_secrets
from ckpipe.errors import (
    ObjectExists,
    ObjectNotFound,
    PermissionDenied,
    StoreError,
    StoreUnavailable,
    Throttled,
)

MAX_RETRY_AFTER_SECONDS = 60.0
"""The longest wait that a store may request, in seconds."""

MAX_TEXT = 300
"""The most characters of a store's own text that a message repeats."""

NETWORK = "If this happens again, check the network"
UNREACHED = "Check 'endpoint_url', and that this machine reaches the store"
BUCKET = "Create the bucket, or name another one"

_CHECKSUMS_DIFFER = re.compile(
    r"(?=.*(?:checksum|crc|md5|sha-?256|digest))"
    r".*(?:not match|n't match|(?<!type )mismatch|differs?\b|different from|different than)",
    re.IGNORECASE,
)
"""The text of an answer to bytes that were damaged on the way. An answer that refuses the checksum
itself also names it, but compares nothing."""


class Meaning(NamedTuple):
    """The error of ckpipe for an error of a store or of its client.

    Args:
        kind: Its type.
        hint: Its hint.
        said: The message for an error without an answer, with the name of its type.
    """

    kind: type[StoreError]
    hint: str | None = None
    said: str = "the connection broke off ({name})"


Table = Mapping[str | int | type[BaseException], Meaning]
"""Errors by the code or the status of an answer, and by the type of the client's error."""


class Refused(Exception):
    """An answer that refuses the request.

    Args:
        status: Its HTTP status.
        code: The store's word for the reason.
        text: The store's own message, which is untrusted; kept as one line, cut, and without the
            credentials of URLs.
        request: The store's id of the request.
        asked: Seconds that the store requests to wait.
    """

    def __init__(
        self,
        status: int,
        code: str,
        text: str = "",
        request: str | None = None,
        asked: float | None = None,
    ) -> None:
        line = without_secrets(" ".join(text.split()))
        printable = "".join(each if each.isprintable() else "?" for each in line)
        self.status, self.code, self.text = status, code, printable[:MAX_TEXT].rstrip(". ")
        self.request, self.asked = request, asked
        super().__init__(f"status {status} {code}")


TLS = Meaning(StoreError)
"""The meaning of errors of insecure connections."""

_TIMEOUT = Meaning(
    StoreUnavailable,
    "If the store is only slow, raise the option 'request_timeout'",
    "no answer in time",
)
_NONSENSE = Meaning(StoreUnavailable, None, "the answer makes no sense")

SHARED: Table = {
    ssl.SSLCertVerificationError: TLS,
    aiohttp.ClientSSLError: TLS,
    **dict.fromkeys((aiohttp.ServerTimeoutError, TimeoutError), _TIMEOUT),
    **dict.fromkeys((aiohttp.ClientError, OSError), Meaning(StoreUnavailable)),
    # A truncated answer, as its parser reports it.
    **dict.fromkeys((ValueError, LookupError, TypeError), _NONSENSE),
    404: Meaning(ObjectNotFound),
    408: Meaning(StoreUnavailable),
    412: Meaning(ObjectExists),
    429: Meaning(Throttled),
}
"""The common rows of the stores' tables: errors of the HTTP client and of the readers of its
answers, and statuses with one meaning for all stores."""


def refused(answer: Refused, what: str, key: str | None, table: Table) -> StoreError:
    """Make the error for an answer that refuses the request.

    Args:
        answer: The answer.
        what: The failed action.
        key: The key; without one, a 404 is about the bucket.
        table: Errors by the code of an answer or, if that is unknown, by the status.
    """
    status = answer.status
    passing = status >= 500 and status != 501
    found = table.get(answer.code) or table.get(status)
    found = found or Meaning(StoreUnavailable if passing else StoreError)
    if status == 400 and _CHECKSUMS_DIFFER.search(answer.text):
        # The network damaged the bytes; sending them again helps.
        found = Meaning(StoreUnavailable, NETWORK)
    elif status == 503 and answer.asked is not None:
        found = Meaning(Throttled)
    elif found.kind is ObjectNotFound and key is None:
        found = Meaning(StoreError, BUCKET)
    request = f", request {answer.request}" if answer.request else ""
    message = f"{what}: {answer.code} (status {status}{request})"
    message += f": {answer.text}" if answer.text else ""
    made = found.kind(message, key=key, hint=found.hint)
    if isinstance(made, Throttled):
        made.retry_after = answer.asked
    return made


FILES = "Check the options and environment variables that name files of credentials"


def unread_file(error: BaseException) -> str | None:
    """Name the file of this machine that could not be read; None for other errors."""
    if not isinstance(error, OSError) or not error.filename:
        return None
    return f"the file {error.filename!r:.300} cannot be read ({type(error).__name__})"


def broken(error: Exception, what: str, key: str | None, table: Table) -> StoreError | None:
    """Make the error for a request that got no answer; None if the table does not know its type.

    Args:
        error: The client's error.
        what: The failed action.
        key: The key.
        table: Errors by the type of the client's error.
    """
    if (unread := unread_file(error)) is not None:
        return PermissionDenied(f"{what}: {unread}", key=key, hint=FILES)
    found = next((table[kind] for kind in type(error).__mro__ if kind in table), None)
    if found is None:
        return None
    name = type(error).__name__
    if found is not TLS:
        return found.kind(f"{what}: {found.said.format(name=name)}", key=key, hint=found.hint)
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLError):
        cause = cause.__cause__ or cause.__context__
    if cause is None or isinstance(cause, ssl.SSLCertVerificationError):
        hint = "Set the option 'ca_bundle' to the certificates that sign the store's certificate"
        return StoreError(f"{what}: its certificate is not trusted", key=key, hint=hint)
    message = f"{what}: the server does not use TLS ({name})"
    return StoreError(message, key=key, hint="Check whether 'endpoint_url' is https or http")


def retry_after(header: str | None) -> float | None:
    """Read the seconds of a ``Retry-After`` header (RFC 9110, section 10.2.3), within bounds."""
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
