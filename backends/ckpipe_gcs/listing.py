"""Lists, page by page, and answers of the store as values of the contract."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime

from ckpipe.backend import ObjectInfo
from ckpipe.errors import ObjectNotFound
from ckpipe_gcs.address import Address
from ckpipe_gcs.failures import bucket_missing, requesting
from ckpipe_gcs.requests import FIELDS, Requests, Resource


def modified(resource: Resource) -> datetime:
    """When this generation of an object was written."""
    return datetime.fromisoformat(resource["timeCreated"]).astimezone(UTC)


def info(key: str, resource: Resource) -> ObjectInfo:
    """What the contract wants to know of an object."""
    return ObjectInfo(key, int(resource["size"]), modified(resource))


async def pages(requests: Requests, prefix: str, delimiter: str = "") -> AsyncIterator[Resource]:
    """The pages of a list, each under its own deadline.

    Args:
        requests: Sends the requests.
        prefix: What the names begin with.
        delimiter: Where names are cut; empty for whole names.

    Raises:
        StoreError: If the store failed.
    """
    query = {"prefix": prefix, "fields": f"items({FIELDS}),prefixes,nextPageToken"}
    if delimiter:
        query["delimiter"] = delimiter
    while True:
        try:
            page = await requests.ask("list", "GET", requests.url(_PATH, **query))
        except ObjectNotFound as error:
            raise bucket_missing(error, str(requests.address)) from error
        yield page
        if not page.get("nextPageToken"):
            return
        query["pageToken"] = str(page["nextPageToken"])


_PATH = "/storage/v1/b/{bucket}/o"


def objects(address: Address, page: Resource) -> Iterator[ObjectInfo]:
    """The objects on a page, without those that are none of ours."""
    with requesting("list", str(address)):
        for resource in page.get("items", ()):
            key = address.key(resource["name"])
            if key is not None:
                yield info(key, resource)


def prefixes(address: Address, page: Resource) -> Iterator[str]:
    """The prefixes on a page of a delimited list."""
    for prefix in page.get("prefixes", ()):
        key = address.key(prefix.removesuffix("/"))
        if key is not None:
            yield f"{key}/"
