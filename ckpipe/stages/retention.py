"""Stage 7: removes the checkpoints that the rules do not keep, once the new one is complete."""

from __future__ import annotations

from anyio.streams.memory import MemoryObjectReceiveStream

from ckpipe.events import Pruned
from ckpipe.format.object_names import launch_id
from ckpipe.saves.delivery import B, Delivery, Depot
from ckpipe.types import CheckpointInfo


async def run(
    save: Delivery[B], depot: Depot, inbox: MemoryObjectReceiveStream[CheckpointInfo]
) -> None:
    """Prunes after each checkpoint whose index this rank created; the save is through by then.

    Raises:
        StoreError: If the store failed; the next save prunes again.
    """
    async with inbox:
        async for _ in inbox:
            if depot.rule is None:
                continue
            with save.clock.timing("retention"):
                decision = await depot.prune(launch_id(save.id.attempt))
            for name in decision.remove:
                reason = decision.reasons[name]
                depot.events.emit(Pruned(save.name, save.id.step, save.rank, name, reason))
