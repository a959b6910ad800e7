"""Waiting for checkpoints that the workers of a trainer that is gone are still finishing.

Such a worker holds a lease on the checkpoint. Whoever starts again and loads the newest would else
take the one before, and train again what is just being stored.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable

import anyio

from ckpipe.backend import Backend
from ckpipe.catalog.find import NO_INDEX, discover
from ckpipe.catalog.leases import leased
from ckpipe.errors import StoreError
from ckpipe.types import CheckpointId

logger = logging.getLogger("ckpipe")

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.05, 2.0


async def until_finished(
    backend: Backend,
    which: int | str | None,
    seconds: float,
    decided: Callable[[], Awaitable[bool]] | None = None,
) -> None:
    """Waits until nobody is finishing a checkpoint that a load might take.

    Costs one list if nobody holds a lease on anything. Where leases cannot be told from old ones,
    because the store is full, failing or may not be written to, nothing is waited for: a load goes
    before what it might miss.

    Args:
        backend: The store.
        which: The step or id to be loaded; None for the newest.
        seconds: How long to wait at most.
        decided: Tells whether another rank has decided meanwhile what all load.
    """
    until, pause = time.monotonic() + seconds, _FIRST_PAUSE_SECONDS
    told = False
    while names := await _unfinished(backend, which):
        if decided is not None and await decided():
            return
        left = until - time.monotonic()
        if left <= 0:
            logger.warning("Not waited for longer: %s", ", ".join(names))
            return
        if not told:
            logger.info("Workers of an earlier launch still finish %s", ", ".join(names))
            told = True
        await anyio.sleep(min(pause, left))
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


async def _unfinished(backend: Backend, which: int | str | None) -> list[str]:
    try:
        held = {CheckpointId.parse(subject) for subject in await leased(backend)} - {None}
        known = await discover(backend) if held else []
    except StoreError as error:
        logger.warning("Whether somebody finishes a newer checkpoint is not known: %s", error)
        return []
    settled = {info.key for info in known if info.complete or info.reason != NO_INDEX}
    newest = max((info.key for info in known if info.complete), default=None)
    # Of what is only staged, nothing may be on the store yet but the lease.
    open_ones = [id for id in held if id is not None and id not in settled]
    if which is None:
        return [str(id) for id in open_ones if newest is None or id > newest]
    if any(info.complete for info in known if which in (info.id, info.step)):
        return []
    return [str(id) for id in open_ones if which in (str(id), id.step)]


__all__ = ["until_finished"]
