"""Who says that it is using a checkpoint, or that its launch is running.

A lease is a small object below ``.ckpipe/leases/<subject>/`` that its holder renews by creating
further ones. It is live while the newest of them is young, by the store's own clock, so that a
crash ends it without anybody's help.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from datetime import datetime, timedelta

from ckpipe.backend import Backend, ObjectInfo, PutMode
from ckpipe.object_names import LEASES, lease_key

LEASE_LIFE = timedelta(minutes=15)
"""How old the newest object of a live lease is at most."""


def live_subjects(
    leases: Iterable[ObjectInfo], now: datetime, life: timedelta = LEASE_LIFE
) -> set[str]:
    """The checkpoints and launches that somebody holds a live lease on.

    Args:
        leases: What lies below ``.ckpipe/leases/``.
        now: The time, by the store's own clock.
        life: How old a live lease is at most.
    """
    live = set()
    for each in leases:
        subject, slash, _ = each.key.removeprefix(LEASES).partition("/")
        if slash and now - each.modified <= life:
            live.add(subject)
    return live


async def read_leases(backend: Backend) -> list[ObjectInfo]:
    """All leases of a root, live or not.

    Raises:
        StoreError: If the store failed.
    """
    return [each async for each in backend.list(LEASES)]


async def store_time(backend: Backend) -> datetime:
    """The time by the store's own clock: that of a lease which is made and removed again.

    Raises:
        StoreError: If the store failed.
    """
    key = lease_key("clock", secrets.token_hex(8))
    await backend.put(key, b"{}", PutMode.CREATE)
    try:
        return (await backend.stat(key)).modified
    finally:
        await backend.delete([key])


__all__ = ["LEASE_LIFE", "live_subjects", "read_leases", "store_time"]
