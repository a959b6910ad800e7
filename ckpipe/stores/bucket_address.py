"""Where a run lies in a bucket: the bucket and prefix of a URL, and the object name of each key.

Stores of buckets have much in common: a flat space of names, of at most 1024 bytes of UTF-8 each,
in which a root is a prefix. A backend subclasses :class:`BucketAddress` with what is its own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar, Self

from ckpipe.backend import check_key
from ckpipe.errors import InvalidKey, UsageError

MAX_NAME_BYTES = 1024
"""The longest name of an object, prefix included, in bytes of UTF-8: a limit of the stores."""

PROBE_KEY = ".ckpipe-probe"
"""The object directly below the root by which the store was probed; no method shows it."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True)
class BucketAddress:
    """A root in a bucket.

    Args:
        bucket: The bucket's name.
        prefix: What stands before every key: empty, or whole parts with a ``/`` at the end.
    """

    bucket: str
    prefix: str
    scheme: ClassVar[str] = "bucket"
    """What stands before ``://`` in the URL."""

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.prefix}"

    @classmethod
    def parse(cls, url: str) -> Self:
        """The bucket and prefix of ``scheme://bucket/prefix``; characters stand for themselves.

        Raises:
            UsageError: If the URL is of another form.
        """
        form = f"Write {cls.scheme}://bucket/prefix"
        scheme, separator, rest = url.partition("://")
        bucket, _, prefix = rest.partition("/")
        if scheme.lower() != cls.scheme or not separator or not _BUCKET.fullmatch(bucket):
            # The URL is not repeated: somebody may have written credentials into it.
            short = len(bucket) == 1 and bucket.isalnum()
            message = "The URL does not name a bucket"
            message += ": names of one character are none" if short else ""
            raise UsageError(message, hint=f"{form}, without credentials or port")
        prefix = prefix.strip("/")
        if "\\" in prefix or _CONTROL.search(prefix):
            # Some stores take a backslash for a slash, and would list what was written elsewhere.
            message = f"The prefix {prefix!r} has a backslash or a control character"
            raise UsageError(message, hint=form)
        if prefix:
            try:
                check_key(prefix)
            except InvalidKey as error:
                message = f"The prefix {prefix!r} has an empty part, '.' or '..'"
                raise UsageError(message, hint=form) from error
        return cls(bucket, f"{prefix}/" if prefix else "")

    def is_reserved(self, key: str) -> bool:
        """Whether a key is that of an object of the backend's own, which no method shows."""
        return key == PROBE_KEY

    def name(self, key: str) -> str:
        """The whole name of a key's object.

        Raises:
            InvalidKey: If the store cannot hold the key, or it is the backend's own.
        """
        name = self.prefix + check_key(key)
        try:
            nbytes = len(name.encode())
        except UnicodeEncodeError as error:
            raise InvalidKey("The name of an object is Unicode text", key=key) from error
        if nbytes > MAX_NAME_BYTES:
            message = f"The object's name is longer than the {MAX_NAME_BYTES} bytes of the store"
            raise InvalidKey(message, key=key, hint="Use a shorter prefix")
        if self.is_reserved(key):
            raise InvalidKey("The key is reserved for the backend itself", key=key)
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
        return None if self.is_reserved(key) else key


__all__ = ["MAX_NAME_BYTES", "PROBE_KEY", "BucketAddress"]
