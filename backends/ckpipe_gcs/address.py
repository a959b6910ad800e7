"""Where a run lies on Google Cloud Storage: bucket, prefix, and the names of temporary objects."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from ckpipe.errors import InvalidKey
from ckpipe.stores.bucket_address import BucketAddress

PART_PREFIX = ".ckpipe-upload-"
PART_SUFFIX = ".ckpipe-part"
"""Temporary objects lie beside the object that they become, and have names of this form. The end
is what lifecycle rules and conditions on rights can match."""

_PART = re.compile(
    rf"(?:.*/)?{re.escape(PART_PREFIX)}([0-9a-f]{{16}})-\d+-\d+{re.escape(PART_SUFFIX)}", re.DOTALL
)


@dataclass(frozen=True, slots=True)
class Address(BucketAddress):
    """A root on Google Cloud Storage, whose names may hold no line ends besides."""

    scheme: ClassVar[str] = "gs"

    def is_reserved(self, key: str) -> bool:
        return BucketAddress.is_reserved(self, key) or upload_of(key) is not None

    def name(self, key: str) -> str:
        name = BucketAddress.name(self, key)
        if "\n" in name or "\r" in name:
            raise InvalidKey("The name of an object on this store holds no line ends", key=key)
        return name

    def part(self, key: str, token: str, level: int, number: int) -> str:
        """The whole name of a temporary object.

        Args:
            key: The key of the object that it becomes a part of.
            token: 16 hexadecimal digits that tell one upload from all others.
            level: How often what is in it was composed.
            number: Its number on that level.

        Raises:
            InvalidKey: If the store cannot hold it.
        """
        folder = key.rpartition("/")[0]
        last = f"{PART_PREFIX}{token}-{level}-{number}{PART_SUFFIX}"
        # A long key is met here too, with a name of its own length instead of the part's.
        BucketAddress.name(self, f"{folder}/{'x' * len(last)}" if folder else "x" * len(last))
        return f"{self.prefix}{folder}/{last}" if folder else self.prefix + last


def upload_of(name: str) -> str | None:
    """The token of the upload that a temporary object belongs to; None for other names."""
    found = _PART.fullmatch(name)
    return found[1] if found else None


__all__ = ["PART_PREFIX", "PART_SUFFIX", "Address", "upload_of"]
