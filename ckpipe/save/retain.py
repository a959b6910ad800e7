"""Stage 7: once the new checkpoint is complete, tells what it measured and removes old ones."""

from __future__ import annotations

import contextlib

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream

from ckpipe.catalog.find import write_sidecar
from ckpipe.events import Pruned
from ckpipe.format.names import launch_id
from ckpipe.save.delivery import B, Delivery, StoreContext
from ckpipe.types import CheckpointInfo


async def run(
    save: Delivery[B], depot: StoreContext, inbox: MemoryObjectReceiveStream[CheckpointInfo]
) -> None:
    """After each checkpoint that this rank's commit completed, writes its digest, and prunes.

    In the process that trains it waits a moment before it prunes, so that commit and prune do not
    hit the same training step. A prune serves all checkpoints that are complete when it begins. If
    one who waited for the checkpoint has written its index first, there is no digest, which others
    read the index for.

    Raises:
        StoreError: If the store failed; the next save prunes again.
    """
    async with inbox:
        async for info in inbox:
            # Here it delays neither the commit nor what waits for it.
            if info.id in depot.facts:
                await write_sidecar(depot.backend, info.key, depot.facts.digest(info.id))
            if depot.rule is None:
                continue
            depot.unpruned += 1
            if depot.prune_pending:
                continue
            depot.prune_pending = True
            async with contextlib.AsyncExitStack() as held:
                try:
                    await held.enter_async_context(depot.pruning)
                    await anyio.sleep(depot.prune_delay)
                finally:
                    depot.prune_pending = False
                with save.clock.timing("retention"):
                    decision = await depot.prune(launch_id(save.id.attempt), after=save.id)
            for name in decision.remove:
                reason = decision.reasons[name]
                depot.events.emit(Pruned(save.name, save.id.step, save.rank, name, reason))
