"""Descriptors that a child which is forked from this process must not keep open.

A child that is started as another program has none of them anyway, but one that only forks, as the
workers of a DataLoader do, has all: it would keep a socket's other end from seeing that this
process is gone, and memory in use that it has given back.
"""

from __future__ import annotations

import fcntl
import os

_FIRST = 3  # behind the standard streams

_ours: set[int] = set()


def keep_private(descriptor: int) -> int:
    """Has children that are forked from now on close a descriptor.

    Returns:
        The descriptor, or the one that has taken its place if it was 0, 1 or 2: where a program has
        closed its standard streams, what prints would write to it, and nobody could inherit it.
    """
    if descriptor < _FIRST:
        low, descriptor = descriptor, fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _FIRST)
        os.close(low)
    _ours.add(descriptor)
    return descriptor


def forget(descriptor: int) -> None:
    """Ends what :func:`keep_private` began; to be called before the descriptor is closed."""
    _ours.discard(descriptor)


def close_private(descriptor: int) -> None:
    """Closes a descriptor that was kept private."""
    forget(descriptor)
    os.close(descriptor)


def _close_in_child() -> None:
    for descriptor in list(_ours):
        os.close(descriptor)
    _ours.clear()


os.register_at_fork(after_in_child=_close_in_child)

__all__ = ["close_private", "forget", "keep_private"]
