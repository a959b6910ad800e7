"""The context of all saves of one pipeline: its settings, its store, its memory, its lock."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, Self

import anyio

from ckpipe import threads
from ckpipe.backend import Backend
from ckpipe.catalog.catalog import Catalog
from ckpipe.errors import refusal_of
from ckpipe.events import EventBus
from ckpipe.save.links import LinkState
from ckpipe.store.retry import AimdLimiter, RetryingBackend, RetryPolicy, logging_policy
from ckpipe.types import Planner

if TYPE_CHECKING:
    from anyio.streams.memory import MemoryObjectReceiveStream

    from ckpipe.lock.state_lock import StateLock
    from ckpipe.memory.arena import Arena
    from ckpipe.memory.budget import ByteBudget
    from ckpipe.save.program import CopyProgram, EarlyLateSplit
    from ckpipe.save.record import FilledBlock
    from ckpipe.save.save import Save, StagedBlock
    from ckpipe.settings import Settings
    from ckpipe.state.capture_cache import CaptureCache

_PAGE = 4096

_MOST_UNPRUNED, _MOST_UNPRUNED_SHARE = 16, 4
"""Most complete checkpoints that may wait for a prune before the next save waits too: the first, or
the second times the number of kept ones, whichever is more."""


@dataclass(slots=True)
class PruneState:
    """The prunes of one store by one process.

    Args:
        delay: Seconds between a commit and its prune.
        lock: Held during the delay and the prune, by one save at a time.
        pending: True if a prune will begin; it serves all checkpoints complete by then.
        kept: Number of checkpoints that the last prune kept.
        unpruned: Number of checkpoints completed here that wait for a prune, or for its end.
    """

    delay: float = 0.0
    lock: anyio.Lock = field(default_factory=anyio.Lock)
    pending: bool = False
    kept: int = 0
    unpruned: int = 0

    async def catch_up(self) -> None:
        """Wait for the prune under way if many checkpoints wait for it.

        Otherwise saves that are quicker than deletions would leave ever more checkpoints.
        """
        if self.unpruned > max(_MOST_UNPRUNED, _MOST_UNPRUNED_SHARE * self.kept):
            await self.ended()

    async def ended(self) -> bool:
        """Wait for the prunes that are pending or under way; False if there are none."""
        if not self.lock.locked():
            return False
        async with self.lock:
            return True


@dataclass(slots=True, kw_only=True)
class StoreContext:
    """The context of the stages that bring saves to one store, in the trainer or in its worker.

    Args:
        settings: The settings; in the worker without ``plan`` and ``export``.
        backend: The store of checkpoints; open.
        retrying: The same store, with retries of each request after transient errors.
        catalog: The checkpoints there.
        events: The bus that gets events.
        rank: This process's rank.
        world_size: Number of ranks that save together.
        block_bytes: The size of all blocks of a file but the last.
        retry: The policy of retries.
        limiter: Admits writes of blocks, of all saves together.
        told: One-time warnings that were given.
        prunes: The prunes that wait or run.
        links: The files to which saves can link; None if saves write all.
    """

    settings: Settings
    backend: Backend
    retrying: RetryingBackend
    catalog: Catalog
    events: EventBus
    rank: int
    world_size: int
    block_bytes: int
    retry: RetryPolicy
    limiter: AimdLimiter = field(default_factory=AimdLimiter)
    told: set[str] = field(default_factory=set)
    prunes: PruneState = field(default_factory=PruneState)
    links: LinkState | None = None

    @classmethod
    def of(
        cls, settings: Settings, backend: Backend, events: EventBus, rank: int, world_size: int
    ) -> Self:
        """Make the context of an open store from the settings, in any of the processes."""
        policy, rules = logging_policy(settings.upload), settings.retention
        incremental = settings.incremental
        retrying = RetryingBackend(backend, policy, read_only=settings.read_only)
        pages = -(-backend.limits.min_block_bytes // _PAGE)
        return cls(
            settings=settings,
            backend=backend,
            retrying=retrying,
            catalog=Catalog(
                retrying, rules.rule, rules.sweep_after, settings.read_only, rules.lines == "all"
            ),
            events=events,
            rank=rank,
            world_size=world_size,
            block_bytes=max(settings.staging.block_bytes, pages * _PAGE),
            retry=policy,
            links=LinkState(incremental.full_every) if incremental.enabled else None,
        )

    @property
    def max_file_bytes(self) -> int | None:
        """The largest data file that the store takes, in bytes; None for no limit."""
        most = self.backend.limits.max_blocks
        return None if most is None else most * self.block_bytes

    def is_first(self, warning: str) -> bool:
        """Record a one-time warning; return True the first time."""
        first = warning not in self.told
        self.told.add(warning)
        return first


class Uploader(Protocol):
    """Brings saves to the store by another process."""

    async def deliver(
        self, save: Save, context: StoreContext, blocks: MemoryObjectReceiveStream[FilledBlock]
    ) -> None:
        """Upload and commit a save from ``save.ready`` on, and set ``save.handed_over``.

        When it returns or raises, it no longer uses memory of the save.
        """
        ...


@dataclass(eq=False, slots=True)
class Loan:
    """The blocks of a save that are lent to a reader of its staged state.

    The reader makes it before the loan, so that it can give the blocks back even if it is cancelled
    or interrupted before it gets the result.

    Args:
        thread: The reader's thread, if no other gives them back; None if the reader is a coroutine.
        blocks: All blocks of the save; None before the loan.
    """

    thread: int | None = None
    blocks: list[StagedBlock] | None = None

    @property
    def count(self) -> int:
        """Number of lent blocks."""
        return len(self.blocks or ())


@dataclass(slots=True, kw_only=True)
class SaveContext:
    """Store, memory, lock and cached plan of one pipeline.

    Args:
        store: The store of its checkpoints.
        events: The bus that gets events.
        rank: This process's rank.
        world_size: Number of ranks that save together.
        settings: The settings.
        lock: The lock between trainers and copies.
        arena: Host memory.
        budget: The amount of it that saves may hold.
        planner: Makes plans.
        attempt: The name of this launch.
        uploader: Brings saves to the store by a worker process; None if this process does.
        program: The copies of the last structure.
        capture_cache: The last walk, which makes the next one shorter.
        early_late: The early and late halves of the last structure.
        recent_blocks: Number of blocks of each of the last saves.
        lent: The saves whose staged state is being read.
    """

    store: StoreContext
    events: EventBus
    rank: int
    world_size: int
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

    def trim(self) -> None:
        """Shrink the arena to the need of the last saves."""
        self.arena.trim(max(self.recent_blocks, default=0))

    async def give_memory_back(self) -> int:
        """Give memory without users back to the system; return the number of bytes."""
        before = self.arena.blocks
        self.arena.trim(0)
        return (before - self.arena.blocks) * self.arena.block_bytes

    async def warm(self) -> None:
        """Touch the memory of later saves, block by block, in a worker thread if one can start."""
        try:
            while (block := self.arena.next_untouched) is not None:
                await threads.run_sync(block.touch)
            while (block := self.arena.next_small_paged) is not None:
                await threads.run_sync(block.collapse_huge_pages)
        except RuntimeError as error:
            if refusal_of(error) is None:
                raise
