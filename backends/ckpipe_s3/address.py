"""Where a run lies on S3: the bucket and prefix of a URL, and the object name of each key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ckpipe.stores.bucket_address import BucketAddress


@dataclass(frozen=True, slots=True)
class Address(BucketAddress):
    """A root on S3."""

    scheme: ClassVar[str] = "s3"


def parse_address(url: str) -> Address:
    """The bucket and prefix of ``s3://bucket/prefix``, whose characters stand for themselves.

    Raises:
        UsageError: If the URL is of another form.
    """
    return Address.parse(url)
