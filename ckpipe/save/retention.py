"""Stage 7: remove old checkpoints by the retention rules, once the new one is complete."""

from __future__ import annotations

import contextlib
import logging

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream

from ckpipe.catalog.catalog import BEHIND_LINK, OTHER_LINE
from ckpipe.catalog.find import write_summary
from ckpipe.errors import ObjectNotFound
from ckpipe.events import Pruned
from ckpipe.format.names import index_key
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
            summaries = context.catalog.summaries
            found = summaries.known.get(info.id)
            if found is not None:
                await write_summary(context.backend, info.key, found)
            if context.catalog.rule is None or found is None:  # its line is unknown
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
                    decision = await prune(context, save.id.attempt, found.line, after=save.id)
            for name in decision.remove:
                reason = decision.reasons[name]
                context.events.emit(Pruned(*save.where, name, reason))


async def prune(
    context: StoreContext, attempt: str, line: str | None, after: CheckpointId | None = None
) -> Decision:
    """Delete the checkpoints that the rules do not keep; return the decision with its reasons.

    Args:
        attempt: The name of this launch, whose newest checkpoint stays.
        line: The line, as for :meth:`ckpipe.catalog.catalog.Catalog.prune`.
        after: A checkpoint whose index this process has just written. Its time is the store's time,
            which otherwise costs several writes. It may be early: then retention keeps more.

    Raises:
        StoreError: If the store failed; another prune continues where this one stopped.
    """
    prunes, catalog, now = context.prunes, context.catalog, None
    waiting = prunes.unpruned
    if after is not None:
        with contextlib.suppress(ObjectNotFound):  # another process has deleted it already
            now = (await context.retrying.stat(index_key(after))).modified
    decision = await catalog.prune(attempt, now=now, line=line)
    counted = sum(decision.reasons[name] != OTHER_LINE for name in decision.keep)
    prunes.kept, prunes.unpruned = counted, max(0, prunes.unpruned - waiting)
    for name in decision.keep:  # also those that cannot be deleted through a link
        reason = decision.reasons[name]
        if reason.startswith(BEHIND_LINK) and context.is_first(f"link of {name}"):
            logger.warning("Retention leaves %s: %s", name, reason)
    for metric in decision.missing_metrics if counted > 1 else ():
        if context.is_first(f"no metric {metric}"):
            logger.warning("%s", catalog.missing_text(metric))
    return decision
