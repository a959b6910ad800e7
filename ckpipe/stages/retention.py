"""Stage 7: removes the checkpoints that the rules do not keep, once the new one is complete."""

from __future__ import annotations

from datetime import timedelta

from anyio.streams.memory import MemoryObjectReceiveStream

from ckpipe.events import Pruned
from ckpipe.pruning import prune
from ckpipe.saving import Save
from ckpipe.site import Site
from ckpipe.types import CheckpointInfo


async def run(save: Save, site: Site, inbox: MemoryObjectReceiveStream[CheckpointInfo]) -> None:
    """Prunes after each completed checkpoint; the save itself is through by then.

    Raises:
        StoreError: If the store failed; the next save prunes again.
    """
    sweep_after = timedelta(seconds=site.settings.retention.sweep_after_seconds)
    async with inbox:
        async for _ in inbox:
            if site.rule is None:
                continue
            with save.clock.timing("retention"):
                decision = await prune(
                    site.backend, site.rule, site.protected(), site.facts, sweep_after=sweep_after
                )
            for name in decision.remove:
                reason = decision.reasons[name]
                site.events.emit(Pruned(save.name, save.id.step, save.rank, name, reason))
