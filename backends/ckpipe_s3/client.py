"""The client of S3, made once and without retries of its own."""

from __future__ import annotations

import asyncio
import functools
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
from aiobotocore.config import AioConfig
from aiobotocore.session import AioSession
from botocore.exceptions import BotoCoreError
from botocore.loaders import create_loader

from ckpipe.backend import run_in_thread
from ckpipe.errors import PermissionDenied, StoreError
from ckpipe_http.failures import broken
from ckpipe_http.requests import CONNECT_SECONDS
from ckpipe_s3.bucket import FOREIGN, Access

PAGED = ("list_objects_v2", "list_multipart_uploads")
"""The operations whose answers come in pages."""


@asynccontextmanager
async def open_client(access: Access) -> AsyncIterator[Any]:
    """Make a client, and close it at the end.

    Raises:
        StoreError: If no client can be made of these options.
    """
    try:
        client = await run_in_thread(make_client, access)
    except (BotoCoreError, OSError, ValueError) as error:
        found = broken(error, "Could not open the store", None, FOREIGN)
        if isinstance(found, PermissionDenied):
            raise found from error
        hint = "Look at the options of the backend and at the AWS configuration files"
        raise StoreError(f"No S3 client can be made: {type(error).__name__}", hint=hint) from error
    try:
        yield client
    finally:
        with anyio.CancelScope(shield=True):
            await client.__aexit__(None, None, None)


def make_client(access: Access) -> Any:
    """Make a client; block while it reads the service's model and looks for credentials.

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
    """Make the loader of service models, once, since they are the same for every client."""
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
