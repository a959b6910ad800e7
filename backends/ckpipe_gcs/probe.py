"""Finds out whether a bucket is fit to commit to: see :mod:`ckpipe.fitness`."""

from __future__ import annotations

from ckpipe import fitness
from ckpipe.bucket_address import PROBE_KEY
from ckpipe_gcs.listing import pages
from ckpipe_gcs.objects import NEW, Objects
from ckpipe_gcs.requests import Requests


async def honours_create_only(requests: Requests, objects: Objects, endpoint: str) -> bool:
    """Whether the store honours ``ifGenerationMatch``; asked once per bucket and process.

    Raises:
        StoreError: If the store failed, or does not list what it holds.
    """
    address = requests.address
    name = address.prefix + PROBE_KEY

    async def create() -> None:
        await objects.write(name, fitness.PROBE_TEXT, NEW, {})

    async def listed() -> bool:
        return name in {
            entry["name"] async for page in pages(requests, name) for entry in page.get("items", ())
        }

    store = ("gs", endpoint, address.bucket)
    return await fitness.honours_create_only(store, str(address), create, listed)
