"""Where a run lies: the bucket and prefix of a URL, and the object name of each key."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ckpipe.backend import check_key
from ckpipe.errors import InvalidKey, UsageError

MAX_NAME_BYTES = 1024
"""The longest name of an object, prefix included, in bytes of UTF-8; a limit of S3 itself."""

PROBE_KEY = ".ckpipe-probe"
"""The object directly below the root by which the store was probed; no method shows it."""

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True)
class Address:
    """A root on S3.

    Args:
        bucket: The bucket's name.
        prefix: What stands before every key: empty, or whole parts with a ``/`` at the end.
    """

    bucket: str
    prefix: str

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}"

    def name(self, key: str) -> str:
        """The whole name of a key's object.

        Raises:
            InvalidKey: If S3 cannot hold the key, or it is the probe's own.
        """
        name = self.prefix + check_key(key)
        if len(name.encode("utf-8", "surrogateescape")) > MAX_NAME_BYTES:
            message = f"The object's name is longer than the {MAX_NAME_BYTES} bytes of S3"
            raise InvalidKey(message, key=key, hint="Use a shorter prefix")
        if key == PROBE_KEY:
            raise InvalidKey("The key is reserved for probing the store", key=key)
        return name

    def below(self, prefix: str) -> str:
        """The whole prefix for a prefix of keys, which is empty or ends in ``/``.

        Raises:
            InvalidKey: If it is something else.
        """
        if prefix:
            check_key(prefix.removesuffix("/"))
            if not prefix.endswith("/"):
                raise InvalidKey("A prefix ends in '/'", key=prefix)
        return self.prefix + prefix

    def key(self, name: str) -> str | None:
        """The key of an object's name; None for objects that are none of ours.

        Other programs may put objects below the root whose names are no keys, such as the
        empty ``folder/`` of a file browser.
        """
        key = name.removeprefix(self.prefix)
        try:
            check_key(key)
        except InvalidKey:
            return None
        return None if key == PROBE_KEY else key


def parse_address(url: str) -> Address:
    """The bucket and prefix of ``s3://bucket/prefix``, whose characters stand for themselves.

    Raises:
        UsageError: If the URL is of another form.
    """
    scheme, separator, rest = url.partition("://")
    bucket, _, prefix = rest.partition("/")
    if scheme.lower() != "s3" or not separator or not _BUCKET.fullmatch(bucket):
        # The URL is not repeated: somebody may have written credentials into it.
        message = "The URL does not name a bucket"
        raise UsageError(message, hint="Write s3://bucket/prefix, without credentials or port")
    prefix = prefix.strip("/")
    if prefix:
        try:
            check_key(prefix)
        except InvalidKey as error:
            message = f"The prefix {prefix!r} has an empty part, '.' or '..'"
            raise UsageError(message, hint="Write s3://bucket/prefix") from error
    return Address(bucket, f"{prefix}/" if prefix else "")
