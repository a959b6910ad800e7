"""The client of S3: made once, tuned for large bodies, with no retries of its own."""

from __future__ import annotations

import asyncio
import functools
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import anyio
from aiobotocore.config import AioConfig
from aiobotocore.session import AioSession
from botocore.loaders import create_loader

from ckpipe.tasks import to_thread
from ckpipe_s3.failures import opening

AddressingStyle = Literal["auto", "path", "virtual"]

CONNECT_SECONDS = 10.0
"""How long a connection may take to be made."""

PAGED = ("list_objects_v2", "list_multipart_uploads")
"""The operations whose answers come in pages."""


@dataclass(frozen=True, slots=True)
class Access:
    """How the store is reached; the meaning of each field is that of :class:`S3Backend`."""

    endpoint_url: str | None = None
    region: str | None = None
    profile: str | None = None
    addressing_style: AddressingStyle | None = None
    proxy: str | None = field(default=None, repr=False)
    ca_bundle: str | None = None
    max_connections: int = 32
    request_timeout: float = 60.0


@asynccontextmanager
async def open_client(access: Access) -> AsyncIterator[Any]:
    """Makes a client and closes it again.

    Raises:
        StoreError: If no client can be made of these options.
    """
    with opening():
        client = await to_thread.run_sync(make_client, access)
    try:
        yield client
    finally:
        with anyio.CancelScope(shield=True):
            await client.__aexit__(None, None, None)


def make_client(access: Access) -> Any:
    """Makes a client; blocks while it reads the service's model and looks for credentials.

    All of that is files, for which the client's library has no other way than to read them on
    an event loop. So it gets a short-lived loop in a worker thread. The client is bound to a
    loop by its first request only, which comes later.
    """
    if access.ca_bundle is not None:
        ssl.create_default_context(cafile=access.ca_bundle)  # raises if it is none
    session = AioSession(profile=access.profile)
    session.register_component("data_loader", _models())
    region = access.region or session.get_config_variable("region")
    context = session.create_client(
        "s3",
        endpoint_url=access.endpoint_url,
        # A compatible server seldom cares, but requests cannot be signed without a region.
        region_name=region or ("us-east-1" if access.endpoint_url else None),
        verify=access.ca_bundle,
        config=_config(access),
    )
    return asyncio.run(_entered(context))


@functools.cache
def _models() -> Any:
    """What reads and remembers the models of services, which are the same for every client."""
    return create_loader()


async def _entered(context: Any) -> Any:
    client = await context.__aenter__()
    for operation in PAGED:
        client.get_paginator(operation)  # reads one more file, at the first call
    return client


def _config(access: Access) -> AioConfig:
    style = access.addressing_style or ("path" if access.endpoint_url else "auto")
    return AioConfig(
        signature_version="s3v4",
        # Bodies are not hashed for the signature, since each has a CRC-32C in its header.
        s3={"addressing_style": style, "payload_signing_enabled": False},
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        retries={"total_max_attempts": 1, "mode": "standard"},
        connect_timeout=min(CONNECT_SECONDS, access.request_timeout),
        read_timeout=access.request_timeout,
        max_pool_connections=access.max_connections,
        proxies={"http": access.proxy, "https": access.proxy} if access.proxy else None,
        tcp_keepalive=True,
    )
