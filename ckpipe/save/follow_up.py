"""Check the outcome of a checkpoint after this rank's commit; no save waits for it."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence

import anyio

from ckpipe.catalog.complete import complete_from_top
from ckpipe.catalog.find import DELETING, NO_INDEX, recheck, write_summary_of
from ckpipe.catalog.summaries import inspected
from ckpipe.errors import CheckpointIncomplete, CkpipeError, SaveError, StoreError
from ckpipe.events import Completed, IncompleteCheckpoint
from ckpipe.format.summary import summary_of
from ckpipe.save.context import SaveContext, StoreContext
from ckpipe.store.retry import pauses
from ckpipe.types import CheckpointInfo, first_of

_LOOKS = 2
_MOST_WAITING = 64
_MOST_HOLES = 4
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.02, 5.0


class CompletionWatcher:
    """Checks at each save whether earlier checkpoints of this rank have become complete.

    A save checks at most two, the oldest first. So its requests do not grow with the number of
    ranks, or with their delay.

    Args:
        context: The context of the saves.
    """

    def __init__(self, context: SaveContext) -> None:
        self._context = context
        self._open: deque[tuple[CheckpointInfo, float]] = deque(maxlen=_MOST_WAITING)
        self._incomplete = 0
        self._looking = anyio.Lock()

    def add(self, info: CheckpointInfo) -> None:
        """Follow a checkpoint that this rank has committed and not seen complete."""
        self._open.append((info, time.monotonic()))

    @property
    def followed(self) -> list[CheckpointInfo]:
        """The checkpoints that it follows, in the order of their commits."""
        return [info for info, _ in self._open]

    async def look(self) -> None:
        """Check the oldest ones; emit an event for one that is not complete in time.

        Raises:
            SaveError: If too many in a row were not complete in time.
            CorruptCheckpoint: If one cannot be completed, since it is damaged.
            StoreError: If the store failed; the next call begins with the same one.
        """
        async with self._looking:  # concurrent saves call it too
            for _ in range(min(_LOOKS, len(self._open))):
                oldest = self._open[0]
                info, committed_at = oldest
                try:
                    if not await self._settled(info, time.monotonic() - committed_at):
                        return  # not late yet, and the others are younger
                except StoreError:
                    raise  # the next call begins with the same one
                except CkpipeError:
                    self._drop(oldest)
                    raise
                self._drop(oldest)

    def _drop(self, oldest: tuple[CheckpointInfo, float]) -> None:
        if self._open[0] is oldest:  # else later ones have displaced it
            self._open.popleft()

    async def _settled(self, info: CheckpointInfo, seconds: float) -> bool:
        context, store = self._context, self._context.store
        known = await recheck(store.retrying, info)
        if known.complete:
            self._incomplete = 0
        if known.complete or known.reason == DELETING:
            return True
        if seconds < context.settings.incomplete_after_seconds:
            return False
        outcome = await complete_from_top(
            store.retrying, info.key, context.world_size, most_holes=_MOST_HOLES
        )
        await write_summary_of(store.backend, outcome.index)
        if outcome.complete:
            self._incomplete = 0
            if outcome.index is not None:
                store.catalog.summaries.learn(info.id, summary_of(outcome.index))
            known = await recheck(store.retrying, info)
            (info,) = await inspected(store.retrying, [known], store.catalog.summaries)
            context.events.emit(Completed(info.id, info.step, context.rank, info))
        elif not outcome.deleted:
            context.events.emit(
                IncompleteCheckpoint(info.id, info.step, context.rank, outcome.absent, seconds)
            )
            self._count(info, outcome.absent)
        return True

    def _count(self, info: CheckpointInfo, absent: Sequence[int]) -> None:
        self._incomplete += 1
        most = self._context.settings.incomplete_in_a_row
        if most is not None and self._incomplete >= most:
            self._incomplete = 0
            raise SaveError(
                f"The last {most} checkpoints were not completed; known to be without a commit in "
                f"the last one: ranks {first_of(absent) or 'unknown'}",
                step=info.step,
                rank=self._context.rank,
                hint="Look at those ranks; older checkpoints are intact",
            )


async def until_complete(
    store: StoreContext, info: CheckpointInfo, timeout: float | None, ranks: int | None = None
) -> CheckpointInfo:
    """Poll with growing pauses until a checkpoint is complete.

    Args:
        store: The context of its store.
        info: The checkpoint.
        timeout: Seconds to poll; None polls for as long as it takes.
        ranks: Number of ranks that save it; None for those of the context.

    Raises:
        CheckpointIncomplete: If it was deleted.
        TimeoutError: If it is not complete in time; names some ranks without a commit.
        CorruptCheckpoint: If it cannot be completed, since it is damaged.
        StoreError: If the store failed.
    """
    until = math.inf if timeout is None else time.monotonic() + timeout
    ranks = ranks or store.world_size
    for pause in pauses(until, _FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS):
        await anyio.sleep(pause)
        known = await recheck(store.retrying, info)
        if not known.complete and known.reason == NO_INDEX and ranks > 1:
            outcome = await complete_from_top(store.retrying, info.key, ranks)
            if not outcome.complete:
                continue
            await write_summary_of(store.backend, outcome.index)
            known = await recheck(store.retrying, info)
        if known.complete:
            return known
        raise CheckpointIncomplete(
            f"The checkpoint {info.id} is not complete: {known.reason}", step=info.step
        )
    named = first_of(outcome.absent) or "unknown"
    raise TimeoutError(f"{info.id} is not complete; ranks known to be without a commit: {named}")
