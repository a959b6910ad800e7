"""Access tokens: found as application-default credentials, and renewed before they expire.

The library that gets tokens also keeps and renews them, in a task that all callers wait for, and
which ends for all when one of them is cancelled; and it tries again by a policy of its own. So
only its single request for a token is used here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import anyio
from gcloud.aio.auth import Token
from gcloud.aio.auth.token import TokenResponse, Type

from ckpipe.errors import CkpipeError, PermissionDenied, StoreUnavailable
from ckpipe.tasks import to_thread
from ckpipe_gcs.access import Access
from ckpipe_gcs.failures import CREDENTIALS, opening

logger = logging.getLogger("ckpipe")

SCOPES = ["https://www.googleapis.com/auth/devstorage.read_write"]
"""What tokens are asked for: to read and write objects."""

RENEW_SECONDS = 225.0
"""How long before its end a token is renewed. Metadata servers hand out a new one some time
before that."""

REFRESH_TIMEOUT = 30
"""How long one request for a token may take, in seconds."""


class Tokens:
    """The token of requests. One is asked for at a time, whoever waits for it.

    Args:
        source: Asks for tokens; None where requests carry none.
    """

    def __init__(self, source: Token | None) -> None:
        self._source, self._lock = source, anyio.Lock()
        self._value: str | None = None
        self._renew_at = self._ends = 0.0

    async def get(self) -> str | None:
        """A token that is good for some minutes; None where requests carry none.

        Raises:
            PermissionDenied: If there are no credentials, or they are refused.
            StoreUnavailable: If whoever gives tokens did not answer.
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
        """Notes that the store takes a token no longer."""
        if self._value == value:
            self._value = None

    async def _renew(self, source: Token) -> None:
        try:
            answer = await _refresh(source)
        except CkpipeError as error:
            if not error.transient or self._value is None or time.monotonic() > self._ends:
                raise
            logger.warning("The token could not be renewed yet: %s", error)
            return
        now, life = time.monotonic(), answer.expires_in
        self._value, self._ends = answer.value, now + life
        self._renew_at = now + max(life - RENEW_SECONDS, life / 2)


async def _refresh(source: Token) -> TokenResponse:
    """Asks for a token, once.

    What goes wrong is not kept as the cause: it may hold the credentials.
    """
    what = "Could not get an access token"
    try:
        return await source.refresh(timeout=REFRESH_TIMEOUT)
    except aiohttp.ClientResponseError as error:
        said, status = f"{what}: the answer was {error.status}", error.status
    except (aiohttp.ClientError, OSError) as error:
        said, status = f"{what}: {type(error).__name__}", 0
        if source.token_type is Type.GCE_METADATA:
            # Without any credentials that server is the last resort, and nowhere but at Google.
            message = f"{what}: there are no credentials ({type(error).__name__})"
            raise PermissionDenied(message, hint=CREDENTIALS) from None
    except Exception as error:
        message = f"{what}: the credentials cannot be used ({type(error).__name__})"
        raise PermissionDenied(message, hint=CREDENTIALS) from None
    if 400 <= status < 500 and status not in (408, 429):
        raise PermissionDenied(said, hint=CREDENTIALS)
    raise StoreUnavailable(said)


@asynccontextmanager
async def open_tokens(access: Access) -> AsyncIterator[Tokens]:
    """Finds the credentials; nobody is asked for a token yet.

    Raises:
        StoreError: If the file of the credentials cannot be used.
    """
    if access.anonymous:
        yield Tokens(None)
        return
    # Without an option each address has the proxy that the environment names for it.
    trusting = access.proxy is None
    async with aiohttp.ClientSession(proxy=access.proxy, trust_env=trusting) as session:
        with opening():
            source = await to_thread.run_sync(_source, access.credentials_file, session)
        yield Tokens(source)


def _source(file: str | None, session: Any) -> Token:
    return Token(service_file=file, session=session, scopes=SCOPES)
