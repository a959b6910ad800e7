"""Reach the store: the address of its API, the proxy before it, and the tokens of requests.

The token library also keeps and renews tokens, in a task that all callers wait for. If one caller
is cancelled, the task ends for all. The library also retries by its own policy. So ckpipe uses only
its single request for a token.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
import anyio
from gcloud.aio.auth import Token
from gcloud.aio.auth.token import TokenResponse, Type

from ckpipe.errors import CkpipeError, PermissionDenied, StoreUnavailable
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

REFRESH_TIMEOUT = 30
"""The most seconds that one request for a token may take."""


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


class Tokens:
    """The token of requests, fetched by one request at a time, however many requests wait for it.

    Args:
        source: Requests tokens; None if requests carry none.
    """

    def __init__(self, source: Token | None) -> None:
        self._source, self._lock = source, anyio.Lock()
        self._value: str | None = None
        self._renew_at = self._ends = 0.0

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

    async def _renew(self, source: Token) -> None:
        try:
            answer = await _refresh(source, first=not self._ends)
        except CkpipeError as error:
            if not error.transient or self._value is None or time.monotonic() > self._ends:
                raise
            logger.warning("The token could not be renewed yet: %s", error)
            return
        now, life = time.monotonic(), answer.expires_in
        self._value, self._ends = answer.value, now + life
        self._renew_at = now + max(life - RENEW_SECONDS, life / 2)


async def _refresh(source: Token, *, first: bool) -> TokenResponse:
    """Request a token, once.

    The library's error is not kept as the cause: it may hold the credentials.

    Args:
        source: Requests tokens.
        first: Whether it has returned no token yet.

    Raises:
        PermissionDenied: If there are no credentials, or they are refused.
        StoreUnavailable: If the token server did not answer.
    """
    what = "Could not get an access token"
    try:
        return await source.refresh(timeout=REFRESH_TIMEOUT)
    except aiohttp.ClientResponseError as error:
        said, status = f"{what}: the answer was {error.status}", error.status
    except (aiohttp.ClientError, OSError) as error:
        if (unread := unread_file(error)) is not None:
            raise PermissionDenied(f"{what}: {unread}", hint=CREDENTIALS) from None
        said, status = f"{what}: {type(error).__name__}", 0
        if first and source.token_type is Type.GCE_METADATA:
            # Without credentials the library tries this server last, and it exists only at Google.
            # If it has returned a token before, it exists.
            message = f"{what}: there are no credentials ({type(error).__name__})"
            raise PermissionDenied(message, hint=CREDENTIALS) from None
    except Exception as error:
        message = f"{what}: the credentials cannot be used ({type(error).__name__})"
        raise PermissionDenied(message, hint=CREDENTIALS) from None
    if 400 <= status < 500 and status not in (408, 429):
        raise PermissionDenied(said, hint=CREDENTIALS)
    raise StoreUnavailable(said)
