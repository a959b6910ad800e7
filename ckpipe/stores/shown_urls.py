"""URLs as they are shown: without the credentials that they may hold."""

from __future__ import annotations

import re

_CREDENTIALS = re.compile(
    r"(?<=:/)(/?)(?:"
    r"[^/\s?#]*@"  # user:password@host
    r"|[^/\s:@]+:(?!\d+(?:/|$))[^\s@]*@"  # the same with a slash in the password, as AWS has them
    r")"
)
_SECRET_PARAMETER = re.compile(
    r"(?i)([?&][^\s=&#]*(?:auth|cred|key|pass|secret|sig|token)[^\s=&#]*=)[^\s&#'\"]+"
)


def without_secrets(text: str) -> str:
    """Replace credentials in the URLs of a text by ``***``.

    These are what stands before an ``@`` of the host, and query parameters whose name tells of a
    key, password, signature or token.
    """
    return _SECRET_PARAMETER.sub(r"\1***", _CREDENTIALS.sub(r"\1***@", text))


__all__ = ["without_secrets"]
