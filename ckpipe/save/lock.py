"""Stage 1: waits for a moment at which no trainer changes the state, and keeps it so."""

from __future__ import annotations

import logging

from anyio.streams.memory import MemoryObjectSendStream

from ckpipe.errors import PipelineBusy, SaveError, StateChanged, UsageError
from ckpipe.lock.holds import LockHold
from ckpipe.save.context import SaveContext
from ckpipe.save.record import Save

logger = logging.getLogger("ckpipe")

TURNS = 3
"""A first walk to plan from, one to copy by, and one more if the structure changed between."""


async def run(save: Save, site: SaveContext, out: MemoryObjectSendStream[LockHold]) -> None:
    """Gives the save its turns on the state, one after the other, until one has been copied.

    Raises:
        StateLockTimeout: If trainers held the lock for too long.
        StateChanged: If the structure changed in every turn.
    """
    async with out:
        if site.program is not None and save.ration is None:
            # In a steady run the memory is there before trainers are held off.
            await _reserve_ahead(save, site, len(site.program.blocks))
        for _ in range(TURNS):
            turn = await _turn(save, site)
            try:
                await out.send(turn)
                await turn.ended.wait()
            finally:
                turn.end()
            if turn.copied:
                return
    raise StateChanged(
        "The structure of the state changed while it was being planned",
        hint="Add, drop or resize tensors inside lock.mutating(), or between saves",
    )


async def _reserve_ahead(save: Save, site: SaveContext, blocks: int) -> None:
    """Reserves what the last state needed; this one, of which nothing is known, may need less."""
    try:
        await site.reserve(save, blocks)
    except PipelineBusy:
        raise
    except (SaveError, UsageError) as error:
        logger.debug("%s: the memory of the last state cannot be had: %s", save.name, error)


async def _turn(save: Save, site: SaveContext) -> LockHold:
    caller, thread = save.request.caller, save.request.thread
    with save.clock.timing("lock"):
        if caller is not None and not caller.blocks:
            # Its event loop may be busy, or wait for a trainer: the walk itself takes the lock.
            return LockHold(site.lock, thread)
        token = await site.lock.acquire_capture_async(
            site.settings.lock.timeout_seconds, thread=thread, awaited=caller is not None
        )
    return LockHold(site.lock, thread, token)
