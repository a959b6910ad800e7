"""How the store is reached: the address of its API, and the session that requests go through."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
import anyio

from ckpipe.stores.http_options import check_endpoint, check_proxy
from ckpipe.tasks import to_thread
from ckpipe.version import __version__
from ckpipe_gcs.failures import opening

ENDPOINT = "https://storage.googleapis.com"
"""Where the JSON API answers."""

EMULATOR = "STORAGE_EMULATOR_HOST"
"""The variable by which all clients of the store find an emulator."""

CONNECT_SECONDS = 10.0
"""How long a connection may take to be made."""

READ_BYTES = 1 << 20
"""How much of an answer may wait to be taken."""


@dataclass(frozen=True, slots=True)
class Access:
    """How the store is reached; the meaning of each field is that of :class:`GcsBackend`.

    Args:
        endpoint: Scheme, host and port of the JSON API.
    """

    endpoint: str
    anonymous: bool = False
    credentials_file: str | None = None
    proxy: str | None = field(default=None, repr=False)
    ca_bundle: str | None = None
    max_connections: int = 32
    request_timeout: float = 60.0


def find_endpoint(option: str | None, environment: Mapping[str, str]) -> tuple[str, bool]:
    """The address of the API, and whether it is that of an emulator.

    Args:
        option: What the user gave; it goes before the environment.
        environment: Variables.

    Raises:
        UsageError: If it is no address.
    """
    emulator = environment.get(EMULATOR) or None if option is None else None
    found = option if option is not None else emulator or ENDPOINT
    if emulator and "://" not in found:
        found = f"http://{found}"
    return check_endpoint(found, f"endpoint_url or {EMULATOR}").rstrip("/"), bool(emulator)


def find_proxy(option: str | None, endpoint: str) -> str | None:
    """The proxy that requests go through; None if they go straight to the store.

    Args:
        option: What the user gave; it goes before the environment, where ``HTTPS_PROXY``,
            ``HTTP_PROXY`` and ``NO_PROXY`` mean what they mean to other programs.
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


@asynccontextmanager
async def open_session(access: Access) -> AsyncIterator[aiohttp.ClientSession]:
    """Makes a session and closes it again.

    Raises:
        StoreError: If none can be made of these options.
    """
    with opening():
        context = await to_thread.run_sync(_certificates, access.ca_bundle)
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=access.max_connections, ssl=context),
        # Each request has a deadline of its own, over all that it does.
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
        headers={"Accept-Encoding": "identity", "User-Agent": f"ckpipe/{__version__}"},
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        read_bufsize=READ_BYTES,
        proxy=find_proxy(access.proxy, access.endpoint),
    )
    try:
        yield session
    finally:
        with anyio.CancelScope(shield=True):
            await session.close()


def _certificates(ca_bundle: str | None) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=ca_bundle)
