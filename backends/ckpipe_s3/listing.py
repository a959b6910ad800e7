"""Answers of S3 as values of the contract."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Any

from ckpipe.backend import Children, ObjectInfo
from ckpipe_s3.address import Address


def whole_seconds(modified: datetime) -> datetime:
    """A time as the head of an object tells it; lists are more exact on some stores."""
    return modified.astimezone(UTC).replace(microsecond=0)


def objects(address: Address, pages: Iterable[Any]) -> Iterator[ObjectInfo]:
    """The objects on the pages of a list, without those that are none of ours."""
    for page in pages:
        for entry in page.get("Contents", ()):
            key = address.key(entry["Key"])
            if key is not None:
                yield ObjectInfo(key, entry["Size"], whole_seconds(entry["LastModified"]))


def children(address: Address, pages: list[Any]) -> Children:
    """What lies directly below a prefix, from the pages of a delimited list."""
    prefixes = {
        f"{key}/"
        for page in pages
        for entry in page.get("CommonPrefixes", ())
        if (key := address.key(entry["Prefix"].removesuffix("/"))) is not None
    }
    return Children(tuple(objects(address, pages)), tuple(sorted(prefixes)))
