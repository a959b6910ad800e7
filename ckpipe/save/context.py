"""The context that all saves of one pipeline share: its store, and in the trainer its memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

import anyio

from ckpipe import threads
from ckpipe.backend import Backend
from ckpipe.catalog.leases import reading
from ckpipe.catalog.metadata_cache import MetadataCache
from ckpipe.events import EventBus
from ckpipe.retention import Rule
from ckpipe.store.retry import AimdLimiter, RetryPolicy
from ckpipe.types import CheckpointId, Planner

if TYPE_CHECKING:
    from anyio.streams.memory import MemoryObjectReceiveStream

    from ckpipe.format.manifest import ManifestDocument
    from ckpipe.lock.state_lock import StateLock
    from ckpipe.memory.arena import Arena
    from ckpipe.memory.budget import ByteBudget
    from ckpipe.save.program import CopyProgram, EarlyLateSplit
    from ckpipe.save.record import FilledBlock
    from ckpipe.save.save import Save, StagedBlock
    from ckpipe.settings import Settings
    from ckpipe.state.capture_cache import CaptureCache

_MOST_UNPRUNED, _MOST_UNPRUNED_SHARE = 16, 4
"""So many complete checkpoints, or this many times those that are kept, may wait for a prune before
the next save waits too."""


@dataclass(slots=True, kw_only=True)
class StoreContext:
    """The context of the stages that bring saves to the store.

    Args:
        backend: Where checkpoints go; open.
        patient: The same store, each request tried again after an error that may pass.
        events: Where events go.
        rank: This process's rank.
        world_size: How many ranks save together.
        block_bytes: The size of all blocks of a file but the last.
        lanes: Blocks of one save under way to the store at the same time.
        retry: How often and how long to try.
        sweep_after: How long the mark of a deleted checkpoint stays.
        rule: Which checkpoints to keep; None for all.
        keep_reports: Whether manifests keep the reports of their saves.
        switch_interval: The switch interval of the GIL while a save is brought to the store, in
            seconds; None leaves it alone.
        resumed_from: The checkpoint that this run resumed from, which is kept.
        facts: Metadata of checkpoints that was read already.
        loading: How many loads and copies read each checkpoint just now.
        limiter: Admits writes of blocks, of all saves together.
        told: Warnings that are given once, and were given.
        prune_delay: How many seconds retention waits after a commit.
        pruning: Held while retention waits or prunes, by one at a time.
        prune_pending: Whether a prune is to begin, which serves all that is complete by then.
        kept: How many checkpoints the last prune kept.
        unpruned: How many have become complete here and wait for a prune, or for its end.
    """

    backend: Backend
    patient: Backend
    events: EventBus
    rank: int
    world_size: int
    block_bytes: int
    lanes: int
    retry: RetryPolicy
    sweep_after: timedelta
    rule: Rule | None = None
    keep_reports: bool = True
    switch_interval: float | None = None
    resumed_from: str | None = None
    facts: MetadataCache = field(default_factory=MetadataCache)
    loading: Counter[str] = field(default_factory=Counter)
    limiter: AimdLimiter = field(default_factory=AimdLimiter)
    told: set[str] = field(default_factory=set)
    prune_delay: float = 0.0
    pruning: anyio.Lock = field(default_factory=anyio.Lock)
    prune_pending: bool = False
    kept: int = 0
    unpruned: int = 0

    def protected(self) -> dict[str, str]:
        """Ids that retention must not remove, each with its reason."""
        kept = {name: "it is being loaded" for name, count in self.loading.items() if count}
        if self.resumed_from is not None:
            kept[self.resumed_from] = "this run resumed from it"
        return kept

    def is_first(self, warning: str) -> bool:
        """Note a warning that is given once; tell whether this is the first time."""
        first = warning not in self.told
        self.told.add(warning)
        return first

    async def let_retention_catch_up(self) -> None:
        """Wait until what is being pruned is gone, if many checkpoints wait for it.

        Saves that are quicker than deletions would else leave ever more of them on the store.
        """
        if self.unpruned > max(_MOST_UNPRUNED, _MOST_UNPRUNED_SHARE * self.kept):
            await self.pruned()

    async def pruned(self) -> bool:
        """Wait for the prunes that are pending or under way; False if there are none."""
        if not self.pruning.locked():
            return False
        async with self.pruning:
            return True


class Uploader(Protocol):
    """Brings saves to the store by another process."""

    async def deliver(
        self, save: Save, context: StoreContext, blocks: MemoryObjectReceiveStream[FilledBlock]
    ) -> None:
        """Do so from ``save.ready`` on, and set ``save.handed_over``.

        No memory of the save is in use any more when it returns or raises.
        """
        ...


@dataclass(eq=False, slots=True)
class Loan:
    """The blocks of a save that are lent to a reader of its staged state.

    The reader makes it, so that it can give back what it was lent even if it is cancelled or
    interrupted before it hears of that.

    Args:
        thread: The reader's thread, if no other will give them back; None if it is a coroutine.
        blocks: All blocks of the save; None while nothing is lent.
    """

    thread: int | None = None
    blocks: list[StagedBlock] | None = None

    @property
    def count(self) -> int:
        """How many blocks are lent."""
        return len(self.blocks or ())


@dataclass(slots=True, kw_only=True)
class SaveContext(StoreContext):
    """Backend, memory, lock and cached plan of one pipeline.

    Args:
        settings: The settings.
        lock: Keeps trainers and copies apart.
        arena: Host memory.
        budget: How much of it saves may hold.
        planner: Makes plans.
        attempt: The name of this launch.
        uploader: Brings saves to the store by a worker process; None if this process does.
        program: The copies of the last structure.
        capture_cache: The last walk, by which the next one is shorter.
        early_late: What of the last structure is copied in the call, and what beside steps.
        recent_blocks: How many blocks each of the last saves took.
        lent: The saves whose staged state is being read.
    """

    settings: Settings
    lock: StateLock
    arena: Arena
    budget: ByteBudget
    planner: Planner
    attempt: str
    uploader: Uploader | None = None
    program: CopyProgram | None = None
    capture_cache: CaptureCache | None = None
    early_late: EarlyLateSplit | None = None
    recent_blocks: list[int] = field(default_factory=list)
    lent: dict[Save, Loan] = field(default_factory=dict)

    @asynccontextmanager
    async def reading(
        self, id: CheckpointId, look: Callable[[], Awaitable[ManifestDocument]] | None = None
    ) -> AsyncIterator[ManifestDocument]:
        """Hold a checkpoint over a block, as :func:`ckpipe.catalog.leases.reading` does."""
        self.loading[str(id)] += 1
        read_only = self.settings.read_only
        try:
            async with reading(self.patient, id, look, read_only=read_only) as found:
                yield found
        finally:
            self.loading[str(id)] -= 1

    def trim(self) -> None:
        """Shrink the arena to what the last saves needed."""
        self.arena.trim(max(self.recent_blocks, default=0))

    async def give_memory_back(self) -> int:
        """Give back what no save, load or view uses; returns how many bytes."""
        before = self.arena.blocks
        self.arena.trim(0)
        return (before - self.arena.blocks) * self.arena.block_bytes

    async def warm(self) -> None:
        """Touch the memory that later saves will want, block by block, in a worker thread."""
        while (block := self.arena.next_untouched) is not None:
            await threads.run_sync(block.touch)
        while (block := self.arena.next_scattered) is not None:
            await threads.run_sync(block.join_pages)
