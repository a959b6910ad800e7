"""The context that all saves of one pipeline share, and the fast path into a save.

In a steady run memory is free, no trainer holds the lock, and the caller waits with nothing to do.
Then the lock is taken and the caller set to work at once, before there are any stages: each of
these is a task, and to hand over from one to the next costs the caller more than a tenth of the
whole call.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import anyio
import torch
from anyio.from_thread import check_cancelled
from anyio.streams.memory import MemoryObjectReceiveStream

from ckpipe import threads
from ckpipe.backend import UploadLimits
from ckpipe.catalog.find import check_not_deleted
from ckpipe.catalog.leases import Sure, reading_ahead, when_sure
from ckpipe.errors import PipelineBusy, SaveError, UsageError
from ckpipe.format.data_file import DataFiles
from ckpipe.interpreter import gc_paused
from ckpipe.lock.lock import StateLock
from ckpipe.memory.arena import Arena
from ckpipe.memory.budget import ByteBudget, Ration
from ckpipe.plan.check import OWN_PLANNERS, check_plan
from ckpipe.plan.plan import RankPlan
from ckpipe.ranks.agree import agree
from ckpipe.save.delivery import StoreContext
from ckpipe.save.program import plan_blocks
from ckpipe.save.record import (
    CopyProgram,
    EarlyLateSplit,
    FilledBlock,
    Save,
    SkipSave,
)
from ckpipe.state.capture_cache import CaptureCache
from ckpipe.state.flatten import Captured
from ckpipe.types import CheckpointId, JointPlanner, Planner
from ckpipe.user_code import user_code

if TYPE_CHECKING:
    from ckpipe.settings import Settings


class Uploader(Protocol):
    """Runs the second half of saves, for each of which all methods are called once."""

    async def deliver(
        self,
        save: Save,
        depot: StoreContext,
        unsummed: MemoryObjectReceiveStream[FilledBlock],
        filled: MemoryObjectReceiveStream[FilledBlock],
    ) -> None:
        """Brings a save to the store; see :func:`ckpipe.save.upload_pipeline.run_delivery`.

        No memory of the save is in use any more when it returns or raises.
        """
        ...

    def set_out(self, save: Save) -> None:
        """Called when it is known what a save stores, before its first block is copied."""
        ...

    async def hand_over(self, save: Save) -> None:
        """Called when all of a save is copied; returns when that is in the hands of whoever
        brings it to the store, so that the trainer may be told."""
        ...


T = TypeVar("T")
L = TypeVar("L")

UNKNOWN_BYTES = 1 << 40
"""What counts as available where the system does not say."""

AVAILABLE_SHARE = 0.4
"""The largest share of the available host memory that staging takes by itself."""


class Lending(NamedTuple):
    """A loan of a save's blocks to a reader: its thread, if it is one, and the number of
    blocks.
    """

    thread: int | None
    blocks: int


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
        carrier: Brings what is copied to the store.
    """

    settings: Settings
    lock: StateLock
    arena: Arena
    budget: ByteBudget
    planner: Planner
    attempt: str
    carrier: Uploader
    program: CopyProgram | None = None
    trail: CaptureCache | None = None
    division: EarlyLateSplit | None = None
    recent_blocks: list[int] = field(default_factory=list)
    lent: dict[Save, Lending] = field(default_factory=dict)
    _plans_jointly: bool = field(init=False)

    def __post_init__(self) -> None:
        # To ask for all methods of a protocol takes longer than to look at a hundred tensors.
        self._plans_jointly = isinstance(self.planner, JointPlanner)

    async def reading(self, id: CheckpointId, work: Callable[[], Awaitable[T]]) -> T:
        """Run work on a checkpoint that no process deletes meanwhile.

        Raises:
            CheckpointIncomplete: If it is being deleted already.
            StoreError: If the store failed.
        """

        async def nothing() -> None:
            return

        async def once_sure(_: None, sure: Sure) -> T:
            await sure()
            return await work()

        return await self.reading_ahead(id, nothing, once_sure)

    async def reading_ahead(
        self,
        id: CheckpointId,
        look: Callable[[], Awaitable[L]],
        work: Callable[[L, Sure], Awaitable[T]],
    ) -> T:
        """The same for work that may begin before that is sure; see :mod:`leases`.

        Raises:
            CheckpointIncomplete: If it is being deleted already.
            StoreError: If the store failed.
        """
        if self.settings.read_only:  # a lease would be written
            return await when_sure(partial(check_not_deleted, self.patient, id), look, work)
        self.loading[str(id)] += 1
        try:
            return await reading_ahead(self.patient, id, look, work)
        finally:
            self.loading[str(id)] -= 1

    @property
    def reusable_program(self) -> CopyProgram | None:
        """The last program, if it serves another save without a question to other ranks."""
        return None if self._plans_jointly else self.program

    def make_program(self, captured: Captured, save: CheckpointId) -> CopyProgram:
        """Plans a captured state; blocking, for a worker thread.

        Raises:
            UnsupportedState: If a tensor cannot be saved.
            UsageError: If the planner is not one of ckpipe's and its plan is not valid, or it
                raised what would end the program.
            SaveError: If ranks that plan together do not come to a plan.
        """
        with gc_paused():
            plan = self._plan(captured, save)
            if self.program is not None and self.program.plan is plan:
                return self.program
            if type(self.planner) not in OWN_PLANNERS:
                check_plan(plan, captured, self.planner, rank=self.rank, world_size=self.world_size)
            blocks = plan_blocks(plan, captured.tensors, self.arena.block_bytes)
            return CopyProgram(
                plan,
                blocks,
                DataFiles(plan.files, plan.layout, blocks),
                type(self.planner).__name__,
            )

    def _plan(self, captured: Captured, save: CheckpointId) -> RankPlan:
        if type(self.planner) in OWN_PLANNERS:
            return self._asked(captured, save)
        try:
            with user_code(f"The planner {type(self.planner).__name__}", ""):
                return self._asked(captured, save)
        except UsageError:
            # A planner that waits may have been told that its save is cancelled.
            with contextlib.suppress(RuntimeError):
                check_cancelled()
            raise

    def _asked(self, captured: Captured, save: CheckpointId) -> RankPlan:
        planner, rank, world_size = self.planner, self.rank, self.world_size
        if not isinstance(planner, JointPlanner):
            return planner.plan(captured, rank=rank, world_size=world_size)
        root = sha256((self.settings.url or "").encode()).hexdigest()[:16]
        name = f"{root}/{save.attempt}/{save.step}-{save.count}"
        return planner.plan_save(captured, save=name, rank=rank, world_size=world_size)

    async def reserve(self, save: Save, blocks: int) -> None:
        """Gives a save its ration of staging memory, for a file image of so many blocks.

        Raises:
            SkipSave: If it would have to wait and ``on_busy`` is ``"skip"``.
            PipelineBusy: If it would have to wait and ``on_busy`` is ``"fail"``.
            UsageError: If it is to be copied beside training and the budget is too small, or if
                the thread that saves would wait for memory that it has been lent itself.
            SaveError: If the system has no memory left; none is held then.
        """
        if save.ration is not None:
            save.ration.close()
            save.ration = None
        size = self.arena.block_bytes
        await self._fit_budget(size * (blocks + sum(each.blocks for each in self.lent.values())))
        # A state without tensors takes none: it would have none to give back before its end.
        reserved = min(blocks, max(1, self.budget.capacity // size))
        await self._take(save, reserved * size)
        save.ration = self._ration(save, reserved, blocks)
        if save.request.owners:
            await self._take_all(save, save.ration)

    def _ration(self, save: Save, reserved: int, blocks: int) -> Ration:
        try:
            ration = Ration(self.budget, self.arena, reserved=reserved, needed=blocks)
        except MemoryError as error:
            size = reserved * self.arena.block_bytes
            self.budget.release(size)
            too_large = getattr(error.__cause__, "errno", None) == errno.EFBIG
            raise SaveError(
                f"The system has no memory for {size >> 20} MiB of staging",
                step=save.id.step,
                rank=self.rank,
                hint="A limit on file sizes (ulimit -f) counts for memory that is shared with a "
                "worker process too: raise it, or set worker='thread'"
                if too_large
                else "Lower staging_bytes; larger states stream through it",
            ) from error
        self.recent_blocks = [*self.recent_blocks[-7:], reserved]
        return ration

    async def _take_all(self, save: Save, ration: Ration) -> None:
        """Draws all blocks ahead of the copy, so that no step waits for memory.

        Raises:
            UsageError: If the budget is smaller than the state.
        """
        if not ration.is_whole:
            raise UsageError(
                f"The state needs more than the {self.budget.capacity >> 20} MiB of staging "
                'memory, so it cannot be saved with until="captured"',
                step=save.id.step,
                rank=self.rank,
                hint='Raise staging_bytes, or save with until="staged"',
            )
        save.blocks = ration.take_all()
        cold = [block for block in save.blocks if not block.touched]
        limiter = anyio.CapacityLimiter(max(1, torch.get_num_threads()))
        async with anyio.create_task_group() as tasks:
            for block in cold:
                tasks.start_soon(partial(threads.run_sync, block.touch, limiter=limiter))

    async def _take(self, save: Save, amount: int) -> None:
        busy = False
        try:
            self.budget.acquire_nowait(amount)
        except anyio.WouldBlock:
            busy = True
        try:
            if self._on_busy(save) == "skip" and await self._skips(save, busy):
                raise SkipSave("Earlier saves hold the staging memory")
        except BaseException:
            if not busy:
                self.budget.release(amount)
            raise
        if busy:
            await self._wait(save, amount)

    def _on_busy(self, save: Save) -> str:
        return "wait" if save.request.urgent else self.settings.on_busy

    async def _skips(self, save: Save, busy: bool) -> bool:
        """Decide whether a save is skipped: of many ranks the first decides for all."""
        if self.world_size == 1:
            return busy
        question = f"skip-{save.id.step}-{save.id.count}"
        return bool(await agree(self.patient, self.attempt, question, busy))

    async def _wait(self, save: Save, amount: int) -> None:
        reason = "Earlier saves hold the staging memory"
        if self._on_busy(save) == "fail":
            raise PipelineBusy(
                reason,
                step=save.id.step,
                rank=self.rank,
                hint='Save less often, raise staging_bytes, or set on_busy to "wait" or "skip"',
            )
        self._refuse_deadlock(save, amount)
        with save.clock.timing("wait"):
            await self.budget.acquire(amount)

    def _refuse_deadlock(self, save: Save, amount: int) -> None:
        if save.interrupts_another:
            raise UsageError(
                "This save began inside another of its thread, whose memory it would wait for",
                step=save.id.step,
                rank=self.rank,
                hint="Save when that has returned; a signal handler had better note that it was "
                "called, as preemption=True does",
            )
        own = sum(each.blocks for each in self.lent.values() if each.thread == save.request.thread)
        if own and own * self.arena.block_bytes + amount > self.budget.capacity:
            raise UsageError(
                "This thread has been lent the staging memory that its save would wait for",
                step=save.id.step,
                rank=self.rank,
                hint="Leave staged_state() before saving, or raise staging_bytes",
            )

    async def _fit_budget(self, wanted: int) -> None:
        """Without a bound of the user's, lets the budget grow to what is wanted, up to a point."""
        if self.settings.staging.bytes is None and wanted > self.budget.capacity:
            available = await threads.run_sync(available_bytes)
            most = int(AVAILABLE_SHARE * (available + self.budget.capacity))
            self.budget.raise_capacity(
                min(wanted, most) // self.arena.block_bytes * self.arena.block_bytes
            )

    def lend(self, save: Save, thread: int | None) -> list[FilledBlock]:
        """Keeps the memory that a save was copied to, until :meth:`take_back`.

        Args:
            save: The save.
            thread: The thread that looks at it, if no other will give it back.

        Raises:
            UsageError: If it is not all copied yet, or some of it has been used again.
        """
        try:
            held = save.hold_blocks()
        except LookupError as error:
            raise UsageError(
                f"The staged state cannot be looked at: {error.args[0]}",
                step=save.id.step,
                rank=self.rank,
                hint="Look after the save is staged and before the next save or load begins",
            ) from None
        self.lent[save] = Lending(thread, len(held))
        return held

    def take_back(self, save: Save, held: list[FilledBlock]) -> None:
        """Ends what :meth:`lend` began."""
        if not save.release_view(held):
            self.lent.pop(save, None)

    def trim(self) -> None:
        """Shrinks the arena to what the last saves needed."""
        self.arena.trim(max(self.recent_blocks, default=0))

    def give_memory_back(self) -> int:
        """Give back what no save, load or view uses; returns how many bytes."""
        before = self.arena.blocks
        self.arena.trim(0)
        return (before - self.arena.blocks) * self.arena.block_bytes

    async def warm(self) -> None:
        """Touches the memory that later saves will want, block by block, in a worker thread."""
        while (block := self.arena.next_untouched) is not None:
            await threads.run_sync(block.touch)
            self.arena.mark_touched(block)
        while (block := self.arena.next_scattered) is not None:
            await threads.run_sync(block.join_pages)


PAGE = 4096


def block_size(settings: Settings, limits: UploadLimits) -> int:
    """The size of a block of staging memory, in bytes: what was set, or what the store needs."""
    least = -(-limits.min_block_bytes // PAGE) * PAGE
    return max(settings.staging.block_bytes, least)


def initial_budget(settings: Settings, block: int) -> int:
    """The initial budget in bytes, a whole number of blocks."""
    return max(block, (settings.staging.bytes or 0) // block * block)


def available_bytes() -> int:
    """Host memory that can be had without swapping, in bytes, as the kernel estimates it."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # no such file outside Linux
        return UNKNOWN_BYTES
    sizes = (int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    return next((kibibytes * 1024 for kibibytes in sizes), UNKNOWN_BYTES)
