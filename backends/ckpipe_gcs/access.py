"""Reach the store: the address of its API, the proxy before it, and the tokens of requests.

The token library also keeps and renews tokens, in a task that all callers wait for. If one caller
is cancelled, the task ends for all. The library also retries by its own policy. So ckpipe uses only
its single request for a token.

The library takes the machine's own identity if it cannot use a file of credentials. So ckpipe reads
and checks the file itself. It reads the file again for each token, as another program may have
renewed it.
"""

from __future__ import annotations

import io
import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
import anyio
from gcloud.aio.auth import Token
from gcloud.aio.auth.token import TokenResponse, Type

from ckpipe.backend import run_in_thread
from ckpipe.errors import CkpipeError, PermissionDenied, StoreError, StoreUnavailable
from ckpipe_http.failures import unread_file
from ckpipe_http.requests import check_endpoint, check_proxy

CREDENTIALS = (
    "Check the credentials that this process finds: the option 'credentials_file', "
    "GOOGLE_APPLICATION_CREDENTIALS, gcloud auth application-default login, or the machine's own"
)

logger = logging.getLogger("ckpipe")

ENDPOINT = "https://storage.googleapis.com"
"""The address of the JSON API."""

EMULATOR = "STORAGE_EMULATOR_HOST"
"""The variable that names an emulator to all clients of the store."""

SCOPES = ["https://www.googleapis.com/auth/devstorage.read_write"]
"""The requested rights of tokens: to read and write objects."""

RENEW_SECONDS = 225.0
"""A token is renewed so many seconds before its end. Metadata servers issue a new one somewhat
earlier."""

RETRY_SECONDS = 10
"""Seconds from a request for a token that failed to the next one, while the former is valid."""

REFRESH_TIMEOUT = 30
"""The most seconds that one request for a token may take."""

NAMED = "GOOGLE_APPLICATION_CREDENTIALS"
"""The variable that names a file of credentials to all clients of Google Cloud."""

_FIELDS = {
    "authorized_user": {"client_id", "client_secret", "refresh_token"},
    "external_account": {"audience", "credential_source", "subject_token_type", "token_url"},
    "impersonated_service_account": {"service_account_impersonation_url", "source_credentials"},
    "service_account": {"client_email", "private_key"},
}
"""The types of files of credentials that the library knows, and the fields that each needs."""


def find_endpoint(option: str | None, environment: Mapping[str, str]) -> tuple[str, bool]:
    """Find the address of the API, and whether it belongs to an emulator.

    Args:
        option: The option, if given; it overrides the environment.
        environment: The environment variables.

    Raises:
        UsageError: If it is no address.
    """
    emulator = environment.get(EMULATOR) or None if option is None else None
    found = option if option is not None else emulator or ENDPOINT
    if emulator and "://" not in found:
        found = f"http://{found}"
    return check_endpoint(found, f"endpoint_url or {EMULATOR}").rstrip("/"), bool(emulator)


def find_proxy(option: str | None, endpoint: str) -> str | None:
    """Find the proxy that requests go through; None if they go straight to the store.

    Args:
        option: The option, if given; it overrides the environment, where ``HTTPS_PROXY``,
            ``HTTP_PROXY`` and ``NO_PROXY`` have their usual meaning.
        endpoint: The address of the API.

    Raises:
        UsageError: If it is no URL.
    """
    if option is not None:
        return check_proxy(option)
    parts = urlsplit(endpoint)
    found = getproxies().get(parts.scheme)
    if not found or proxy_bypass(parts.netloc):
        return None
    return check_proxy(found if "://" in found else f"http://{found}", "in the environment")


class TokenSource(NamedTuple):
    """The source of tokens.

    Args:
        tokens: Requests them.
        name: The file of the credentials; None for the machine's own.
    """

    tokens: Token
    name: str | None


def find_source(option: str | None, session: Any) -> TokenSource:
    """Find the credentials that tokens are requested with; block while their file is read.

    Args:
        option: The option that names a file, if given; it overrides the environment.
        session: The HTTP session of the requests.

    Raises:
        PermissionDenied: If the file cannot be used. No other credentials are taken then.
    """
    folder = os.environ.get("CLOUDSDK_CONFIG") or os.path.expanduser("~/.config/gcloud")
    stored = os.path.join(folder, "application_default_credentials.json")
    if option is not None:
        file, by = option, "the option 'credentials_file'"
    elif named := os.environ.get(NAMED):
        file, by = named, NAMED
    elif os.path.lexists(stored):
        file, by = stored, "gcloud auth application-default login"
    else:
        return TokenSource(Token(session=session, scopes=SCOPES), None)
    try:
        with open(file, encoding="utf-8") as opened:
            text = opened.read()
        why = _fault(text)
    except (OSError, UnicodeDecodeError) as error:
        why = f"cannot be read ({type(error).__name__})"
    if why is not None:
        message = f"The file of credentials {file!r:.300}, which {by} names, {why}"
        hint = "Write a service account's key or a credential configuration there, or name none"
        raise PermissionDenied(message, hint=hint)
    return TokenSource(Token(service_file=io.StringIO(text), session=session, scopes=SCOPES), file)


def _fault(text: str) -> str | None:
    """Find the reason why the text of a file of credentials cannot be used; None if it can be."""
    try:
        data = json.loads(text)
    except ValueError:
        return "is cut or is no JSON" if text.strip() else "is empty"
    kind = data.get("type") if isinstance(data, dict) else None
    if kind is None:
        return "holds no credentials: it has no 'type'"
    if not isinstance(kind, str) or kind not in _FIELDS:
        return f"has the type {kind!r:.60}; known are {', '.join(_FIELDS)}"
    absent = _FIELDS[kind] - data.keys()
    return f"lacks {', '.join(sorted(absent))}" if absent else None


class Tokens:
    """The token of requests, fetched by one request at a time, however many requests wait for it.

    Args:
        find: Finds the source of tokens, and blocks; None if requests carry none.
    """

    def __init__(self, find: Callable[[], TokenSource] | None) -> None:
        self._find, self._lock = find, anyio.Lock()
        self._source: TokenSource | None = None
        self._value: str | None = None
        self._renew_at = self._ends = 0.0

    async def open(self) -> None:
        """Find the credentials; send no request yet.

        Raises:
            PermissionDenied: If their file cannot be used.
        """
        if self._find is not None:
            self._source = await run_in_thread(self._find)

    async def get(self) -> str | None:
        """Return a token that is valid for some minutes; None if requests carry none.

        Raises:
            PermissionDenied: If there are no credentials, or they are refused.
            StoreUnavailable: If the token server did not answer.
        """
        if self._source is None or self._is_fresh():
            return self._value
        async with self._lock:
            if not self._is_fresh():
                await self._renew(self._source)
            return self._value

    def _is_fresh(self) -> bool:
        return self._value is not None and time.monotonic() < self._renew_at

    def forget(self, value: str) -> None:
        """Note that the store refuses a token."""
        if self._value == value:
            self._value = None

    async def _renew(self, source: TokenSource) -> None:
        assert self._find is not None
        try:
            found = await run_in_thread(self._find)
        except StoreError as error:
            # Another program may be writing the file. What it held before may still be valid.
            logger.debug("The credentials cannot be read again yet: %s", error)
        else:
            # If the file that gcloud stores has come or gone, this is another identity.
            if found.name == source.name:
                self._source = source = found
        try:
            answer = await _refresh(source, first=not self._ends)
        except CkpipeError as error:
            if self._value is None or time.monotonic() > self._ends:
                raise
            logger.warning("The token could not be renewed yet: %s", error)
            self._renew_at = min(self._ends, time.monotonic() + RETRY_SECONDS)
            return
        now, life = time.monotonic(), answer.expires_in
        self._value, self._ends = answer.value, now + life
        self._renew_at = now + max(life - RENEW_SECONDS, life / 2)


async def _refresh(source: TokenSource, *, first: bool) -> TokenResponse:
    """Request a token, once.

    The library's error is not kept as the cause: it may hold the credentials.

    Args:
        source: The source of tokens.
        first: Whether it has returned no token yet.

    Raises:
        PermissionDenied: If there are no credentials, or they are refused.
        StoreUnavailable: If the token server did not answer.
    """
    what = "Could not get an access token"
    what += f" with {source.name!r:.300}" if source.name else ""
    try:
        return await source.tokens.refresh(timeout=REFRESH_TIMEOUT)
    except aiohttp.ClientResponseError as error:
        said, status = f"{what}: the answer was {error.status}", error.status
    except (aiohttp.ClientError, OSError) as error:
        if (unread := unread_file(error)) is not None:
            raise PermissionDenied(f"{what}: {unread}", hint=CREDENTIALS) from None
        said, status = f"{what}: {type(error).__name__}", 0
        if first and source.tokens.token_type is Type.GCE_METADATA:
            # Without credentials the library tries this server last, and it exists only at Google.
            # If it has returned a token before, it exists.
            message = f"{what}: there are no credentials ({type(error).__name__})"
            raise PermissionDenied(message, hint=CREDENTIALS) from None
    except Exception as error:
        # The library reads a workload identity's token from a file of its own.
        cause = unread_file(error.__cause__) if error.__cause__ else None
        why = cause or f"the credentials cannot be used ({type(error).__name__})"
        message = f"{what}: {why}"
        raise PermissionDenied(message, hint=CREDENTIALS) from None
    if 400 <= status < 500 and status not in (408, 429):
        raise PermissionDenied(said, hint=CREDENTIALS)
    raise StoreUnavailable(said)
