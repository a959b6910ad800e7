"""Stage 7: remove old checkpoints by the retention rules, once the new one is complete."""

from __future__ import annotations

import contextlib
import logging
from datetime import datetime

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream

from ckpipe.catalog.find import write_summary
from ckpipe.catalog.leases import (
    live_subjects,
    protected_subjects,
    read_leases,
    store_time,
    time_now,
)
from ckpipe.catalog.prune import BEHIND_LINK, IN_USE, decide_on, missing_text
from ckpipe.catalog.prune import prune as prune_store
from ckpipe.errors import ObjectNotFound
from ckpipe.events import Pruned
from ckpipe.format.names import index_key, launch_id
from ckpipe.retention import Decision
from ckpipe.save.context import StoreContext
from ckpipe.save.record import SaveRecord
from ckpipe.types import CheckpointId, CheckpointInfo

logger = logging.getLogger("ckpipe")


async def run(
    save: SaveRecord, context: StoreContext, inbox: MemoryObjectReceiveStream[CheckpointInfo]
) -> None:
    """Write the summary of each checkpoint that this rank's commit completed, and prune.

    In the trainer's process, the prune is delayed, so that commit and prune do not hit the same
    training step. A prune serves all checkpoints that are complete when it begins. If another rank
    that waited for the checkpoint has written its index first, there is no summary; readers then
    read the index.

    Raises:
        StoreError: If the store failed; the next save prunes again.
    """
    async with inbox:
        async for info in inbox:
            # Here it delays neither the commit nor its waiters.
            if info.id in context.summaries:
                await write_summary(context.backend, info.key, context.summaries[info.id])
            if context.rule is None:
                continue
            prunes = context.prunes
            prunes.unpruned += 1
            if prunes.pending:
                continue
            prunes.pending = True
            async with contextlib.AsyncExitStack() as held:
                try:
                    await held.enter_async_context(prunes.lock)
                    await anyio.sleep(prunes.delay)
                finally:
                    prunes.pending = False
                with save.clock.timing("retention"):
                    decision = await prune(context, launch_id(save.id.attempt), after=save.id)
            for name in decision.remove:
                reason = decision.reasons[name]
                context.events.emit(Pruned(*save.where, name, reason))


async def decide(context: StoreContext, launch: str) -> Decision:
    """Return the decision of :func:`prune` with its reasons, without any deletion.

    Args:
        launch: The id of this launch.

    Raises:
        StoreError: If the store failed.
    """
    now = await time_now(context.retrying)
    protected = await _protected_by_all(context, now, launch)
    return await decide_on(context.retrying, context.rule, protected, context.summaries, now=now)


async def prune(context: StoreContext, launch: str, after: CheckpointId | None = None) -> Decision:
    """Delete the checkpoints that the rules do not keep; return the decision with its reasons.

    Args:
        launch: The id of this launch, whose newest checkpoint stays.
        after: A checkpoint whose index this process has just written. Its time is the store's time,
            which otherwise costs several writes.

    Raises:
        StoreError: If the store failed; another prune continues where this one stopped.
    """
    prunes = context.prunes
    waiting = prunes.unpruned
    now = await _time(context, after)
    protected = await _protected_by_all(context, now, launch)
    decision = await prune_store(
        context.retrying, context.rule, protected, context.summaries,
        sweep_after=context.sweep_after, now=now,
    )  # fmt: skip
    prunes.kept, prunes.unpruned = len(decision.keep), max(0, prunes.unpruned - waiting)
    for name in decision.keep:  # also those that cannot be deleted through a link
        reason = decision.reasons[name]
        if reason.startswith(BEHIND_LINK) and context.is_first(f"link of {name}"):
            logger.warning("Retention leaves %s: %s", name, reason)
    for metric in decision.missing_metrics if len(decision.keep) > 1 else ():
        if context.is_first(f"no metric {metric}"):
            logger.warning("%s", missing_text(metric, context.summaries))
    return decision


async def _time(context: StoreContext, after: CheckpointId | None) -> datetime:
    """Return the time by the store's own clock. It may be early: then retention keeps more."""
    if after is not None:
        with contextlib.suppress(ObjectNotFound):  # another process has deleted it already
            return (await context.retrying.stat(index_key(after))).modified
    return await store_time(context.retrying)


async def _protected_by_all(context: StoreContext, now: datetime, launch: str) -> dict[str, str]:
    """Return ids that retention must not remove, leased ones among them, and running launches."""
    leases = protected_subjects(live_subjects(await read_leases(context.retrying), now))
    return dict.fromkeys([*leases, launch], IN_USE) | context.protected()
