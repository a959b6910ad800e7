"""Finds out whether a bucket is fit to commit to: see :mod:`ckpipe.fitness`."""

from __future__ import annotations

from ckpipe import fitness
from ckpipe.bucket_address import PROBE_KEY
from ckpipe_s3.objects import Objects
from ckpipe_s3.requests import Requests


async def honours_create_only(requests: Requests, objects: Objects, endpoint: str | None) -> bool:
    """Whether the store honours ``If-None-Match``; asked once per bucket and process.

    Raises:
        StoreError: If the store failed, or does not list what it holds.
    """
    address = requests.address
    name = address.prefix + PROBE_KEY

    async def create() -> None:
        await objects.write(name, fitness.PROBE_TEXT, {"IfNoneMatch": "*"})

    async def listed() -> bool:
        pages = await requests.pages("list_objects_v2", Prefix=name)
        return name in {entry["Key"] for page in pages for entry in page.get("Contents", ())}

    store = ("s3", endpoint, address.bucket)
    return await fitness.honours_create_only(store, str(address), create, listed)
