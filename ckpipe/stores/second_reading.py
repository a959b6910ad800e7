"""Damage on the store, told from damage on the way by reading once more what came damaged."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from ckpipe.backend import Backend
from ckpipe.errors import CorruptCheckpoint
from ckpipe.tasks import to_thread

logger = logging.getLogger("ckpipe")

T = TypeVar("T")
Corrupt = TypeVar("Corrupt", bound=CorruptCheckpoint)

LOOK = "Look at the network, at the disk's connection and at this machine's memory"


async def read_decoded(
    backend: Backend, key: str, max_bytes: int, decode: Callable[[bytes], T]
) -> T:
    """Read a small object and decode it; read it once more if it comes damaged.

    Args:
        backend: The store.
        key: The object's key.
        max_bytes: The largest size to accept.
        decode: Checks and decodes the object, in a worker thread.

    Raises:
        CorruptCheckpoint: What ``decode`` raises of both readings, with :func:`told`.
        ObjectNotFound: If no object has the key.
        StoreError: If the store failed.
    """
    data = await backend.get(key, max_bytes=max_bytes)
    try:
        return await to_thread.run_sync(decode, data)
    except CorruptCheckpoint as error:
        again = await backend.get(key, max_bytes=max_bytes)
        if again == data:
            raise told(error, same=True) from None
    try:
        found = await to_thread.run_sync(decode, again)
    except CorruptCheckpoint as error:
        raise told(error, same=False) from None
    warn(key)
    return found


def told(error: Corrupt, *, same: bool) -> Corrupt:
    """Say in an error where bytes are damaged that came damaged twice.

    Args:
        error: The error of one of the readings.
        same: Whether both readings brought the same bytes.
    """
    if same:
        error.message += "; it was read twice and came the same, so the store has it like this"
    else:
        error.message += "; it was read twice and came differently, so it is damaged on the way"
        error.hint = error.hint or f"{LOOK}, and load again"
    return error


def warn(what: str) -> None:
    """Log that bytes were damaged on the way and right when they were read again."""
    logger.warning("%s came damaged and was right when it was read again. %s", what, LOOK)


__all__ = ["read_decoded", "told", "warn"]
