"""The work of an open pipeline on its own event loop: :func:`serve` opens the store and serves."""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections import Counter

import anyio
from anyio.abc import TaskGroup, TaskStatus

from ckpipe.backend import without_secrets
from ckpipe.catalog.complete import find_repaired
from ckpipe.catalog.leases import Lease
from ckpipe.catalog.sweep import SweepReport
from ckpipe.errors import (
    AttemptReused,
    CorruptCheckpoint,
    SaveCancelled,
    UsageError,
    first_error,
    naming_refusals,
)
from ckpipe.events import EventBus
from ckpipe.lock.state_lock import StateLock
from ckpipe.loop_thread import LoopThread
from ckpipe.memory.arena import Arena
from ckpipe.memory.budget import ByteBudget
from ckpipe.plan.check import choose_planner, refuse_unlinkable
from ckpipe.preemption.signals import StopRequest
from ckpipe.ranks.launch import (
    Launch,
    Rendezvous,
    arrange_meeting,
    draft_launch,
    unclaimed_attempt,
)
from ckpipe.ranks.world import Topology, World
from ckpipe.reading.reader import verify
from ckpipe.retention import Decision
from ckpipe.running import lines
from ckpipe.running.coordinated_saves import CoordinatedSaves
from ckpipe.running.listeners import Hooks
from ckpipe.running.loads import Loads
from ckpipe.running.saves import Saves
from ckpipe.running.validation import absolute
from ckpipe.save import retention
from ckpipe.save.context import SaveContext, StoreContext
from ckpipe.save.follow_up import until_complete
from ckpipe.settings import Settings
from ckpipe.store.registry import backend_of
from ckpipe.types import CheckpointId, CheckpointInfo, VerifyResult, size_text
from ckpipe.worker.crossing import make_init, uses_process
from ckpipe.worker.uploader import WorkerUploader

logger = logging.getLogger("ckpipe")

LOOK_SECONDS = 0.2
"""Seconds between checks, while closing, whether a signal has announced the end."""

_PRUNE_DELAY_SECONDS = 0.1
"""Delay of the prune after a commit, so that both do not hit the same training step."""

_PASS_OVER = "Load another checkpoint; load(fallback=True) skips this one"


class Engine:
    """The objects and calls of one open pipeline on its loop.

    Args:
        context: The context of its saves.
        launch: The name of this launch, claimed by the first save.
        world: The world of the pipeline; each save and load checks it.
        hooks: Functions called on events.
        preemption: Tells whether this process will be stopped.
        loop: The loop.
        tasks: Tasks that end with the pipeline.
        place: The root, for messages.
    """

    def __init__(
        self,
        context: SaveContext,
        launch: Launch,
        world: World,
        hooks: Hooks,
        preemption: StopRequest,
        loop: LoopThread,
        tasks: TaskGroup,
        place: str,
    ) -> None:
        settings = context.settings
        self.context, self.world, self.loop = context, world, loop
        self.catalog = context.store.catalog
        self.saves = Saves(context, launch, tasks, hooks, place)
        self.loads = Loads(context, launch, self.saves, place)
        self.stopped = anyio.Event()
        self._settings, self._tasks, self._launch = settings, tasks, launch
        self._hooks, self._preemption = hooks, preemption
        agreement, schedule = self.saves.agreement, self.saves.schedule
        self._calls = CoordinatedSaves(context, launch, agreement, schedule, preemption)
        self._hurries = False

    @property
    def serves(self) -> bool:
        """True until a call to stop or a failure ends it; for any thread."""
        return not self._tasks.cancel_scope.cancel_called

    async def stop(self) -> None:
        """End :func:`serve`."""
        await self.saves.close()
        without_final = self.saves.have_begun and not self.saves.saved_final
        if self._settings.retention.keep_last == 0 and without_final:
            warnings.warn(
                "keep_last=0 keeps only final checkpoints, and none was saved with final=True",
                RuntimeWarning,
                stacklevel=2,
            )
        await self.loads.close()
        self.stopped.set()

    async def announce(self) -> None:
        """Agree with the other ranks on steps to save, until it is cancelled."""
        try:
            await self._calls.serve()
        except* AttemptReused as group:
            # The calls may be those of an earlier launch. The save that is due now raises it.
            self.saves.keep(first_error(group))
            self._preemption.arrive()

    async def leave_together(self, step: int) -> bool:
        """Tell whether all ranks leave after this step, of which they make the last save."""
        return self.context.world_size == 1 or await self._calls.leave_at(step)

    async def drain(self, *, staged_only: bool) -> None:
        """Wait until all saves have ended and all hooks have returned.

        There is no limit until all saves are durable. ``drain_timeout_seconds`` bounds the rest,
        such as retention and hooks; it bounds all of it once an exception or a signal ends the
        program. Hooks may begin further saves, which are awaited too.

        Args:
            staged_only: True after an exception: cancel the saves that still need the caller's
                state.
        """
        if staged_only:
            self.hurry()
            await self.saves.give_up_accepting()
            for save in [each for each in self.saves.under_way() if not each.safe.done()]:
                await self.saves.cancel(save)
                if save.status == "cancelled":
                    reason = "The save was given up, since its state had not been copied"
                    self.saves.unseen.append(SaveCancelled(reason, step=save.id.step))
        if await self._idle_in_time():
            return
        await self.saves.give_up_accepting()
        for save in self.saves.under_way():
            await self.saves.give_up(save)
        with anyio.move_on_after(self._settings.drain_timeout_seconds):
            await self._hooks.drained()
        if late := self._hooks.describe_running():
            limit = self._settings.drain_timeout_seconds
            logger.error("Hooks did not return within %g s and are abandoned: %s", limit, late)

    def hurry(self) -> None:
        """Apply ``drain_timeout_seconds`` to all saves from now on; for any thread."""
        self._hurries = True

    async def _idle_in_time(self) -> bool:
        """Wait until all saves have ended and all hooks have returned; False after the limit."""
        limit, grace = self._settings.drain_timeout_seconds, self._settings.preemption.grace_seconds
        ends_at: float | None = None
        while self._is_busy:
            left = math.inf
            under_way = self.saves.under_way()
            durable = all(each.committed.done() for each in under_way)
            durable &= not self.saves.is_accepting
            if self._hurries or self._preemption.signalled or durable:
                ends_at = ends_at or time.monotonic() + limit
                left = ends_at - time.monotonic()
            else:
                ends_at = None
            grace_left = self._preemption.seconds_left(grace)
            left = left if grace_left is None else min(left, grace_left)
            with anyio.move_on_after(min(left, LOOK_SECONDS)):
                while self._is_busy:
                    await self.saves.ended()
                    await self._hooks.drained()
            if left <= 0:
                return not self._is_busy
        return True

    @property
    def _is_busy(self) -> bool:
        saves = self.saves
        return bool(saves.is_accepting or saves.under_way() or self._hooks.describe_running())

    def describe(self) -> str:
        """Describe uncommitted saves and the staging memory, for a diagnostic."""
        statuses = (each.status for each in self.saves.under_way())
        counts = Counter(status for status in statuses if status != "committed")
        states = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
        budget = self.context.budget
        memory = f"{size_text(budget.used)} of {size_text(budget.capacity)}"
        return f"{states or 'idle'} | {memory}"

    # The verbs of the catalog that concern saves under way; the others are called there

    async def complete(
        self, info: CheckpointInfo, timeout: float | None, ranks: int
    ) -> CheckpointInfo:
        """Poll until a checkpoint that this rank has committed is complete on all ranks."""
        known = await until_complete(self.context.store, info, timeout, ranks)
        return await self.catalog.inspected(known)

    async def verify(self, which: int | str) -> VerifyResult:
        """Read and check every byte of a checkpoint."""
        await self.saves.settled(which)
        with naming_refusals(step=which if isinstance(which, int) else None):
            info = await find_repaired(self.catalog.backend, which)
        try:
            async with self.catalog.opened(info.key) as opened:
                return await verify(opened, self.context.arena, lanes=self._settings.load.lanes)
        except CorruptCheckpoint as error:
            error.hint = error.hint or _PASS_OVER
            raise error.located(step=info.step) from error.__cause__

    async def delete(self, which: int | str, *, force: bool) -> None:
        """Delete a checkpoint, also an incomplete one if its exact id is given."""
        id = CheckpointId.parse(which) if isinstance(which, str) else None
        if id is None:
            id = (await find_repaired(self.catalog.backend, which)).key
        if self.saves.is_writing(id):
            raise UsageError(
                f"{id} cannot be deleted now: it is being written",
                step=id.step,
                hint="Cancel the save, or wait for it",
            )
        await self.catalog.delete(str(id), force=force)

    async def pin(self, which: int | str) -> None:
        """Protect a checkpoint from retention."""
        await self.saves.settled(which)
        await self.catalog.pin(which)

    async def prune(self, *, dry_run: bool) -> Decision:
        """Apply the retention rules now, or only decide."""
        resume, line = self._settings.resume, self.catalog.line
        if line is None and (found := lines.line_to_join(self.catalog, self._launch, resume)):
            line = found[1]
        elif line is None and resume == "never":
            line = self._launch.id
        if dry_run:
            return await self.catalog.prune(self.context.attempt, line=line, dry_run=True)
        async with self.context.store.prunes.lock:  # not beside that of a save
            return await retention.prune(self.context.store, self.context.attempt, line)

    async def sweep(self, *, dry_run: bool) -> SweepReport:
        """Remove the remains of crashed runs, or only list them."""
        return await self.catalog.sweep(self.context.attempt, dry_run=dry_run)


async def serve(
    settings: Settings,
    lock: StateLock,
    events: EventBus,
    world: World,
    hooks: Hooks,
    preemption: StopRequest,
    loop: LoopThread,
    *,
    task_status: TaskStatus[Engine],
) -> None:
    """Open the store, hand over the engine, and serve until :meth:`Engine.stop`.

    Raises:
        BackendNotFound: If the scheme is not registered.
        UnsupportedTopology: If ranks cannot agree on the name of this launch.
        SettingsError: If the settings ask for an unavailable backend, planner or worker.
        StoreError: If the store failed.
    """
    topology = world.topology
    meeting = await anyio.to_thread.run_sync(arrange_meeting, topology, settings)
    backend = await anyio.to_thread.run_sync(backend_of, settings)
    async with backend:
        store = StoreContext.of(settings, backend, events, topology.rank, topology.world_size)
        if settings.incremental.enabled and not settings.read_only:
            refuse_unlinkable(settings, backend)
        store.prunes.delay = _PRUNE_DELAY_SECONDS
        worker = None
        if await anyio.to_thread.run_sync(uses_process, settings, backend):
            init = await anyio.to_thread.run_sync(make_init, settings, store.rank, store.world_size)
            worker = WorkerUploader(init, store)
        launch = await _launch_of(store, topology, meeting)
        store.catalog.greatest = CheckpointId.parse(launch.greatest)
        context = await _context_of(store, lock, topology, launch.attempt, worker)
        place = await anyio.to_thread.run_sync(absolute, without_secrets(settings.url or ""))
        events.place = place.partition("?")[0].rstrip("/")
        lease = Lease(store.retrying, launch.id)
        try:
            async with anyio.create_task_group() as tasks:
                engine = Engine(context, launch, world, hooks, preemption, loop, tasks, place)
                tasks.start_soon(_keep, lease, launch, name="lease of the attempt")
                hooks.start(tasks, engine.saves.keep)
                if topology.world_size > 1 and not settings.read_only:
                    tasks.start_soon(engine.announce, name="calls")
                if worker is not None:
                    worker.start(tasks)
                task_status.started(engine)
                await engine.stopped.wait()
                if worker is not None:
                    await worker.close()
                tasks.cancel_scope.cancel()
        finally:
            context.arena.close()
            if not engine.saves.have_begun:
                lines.leave_to_next(store.catalog)
            with anyio.CancelScope(shield=True):
                await lease.release()
            if launch.claimed.is_set() and not engine.saves.have_begun:  # else nothing was written
                await launch.withdraw()


async def _launch_of(store: StoreContext, topology: Topology, meeting: Rendezvous | None) -> Launch:
    """Name this launch; a read-only pipeline never claims the name."""
    if store.settings.read_only:
        return Launch(store.retrying, unclaimed_attempt(), topology)
    return await draft_launch(store.retrying, store.settings.attempt_id, topology, meeting)


async def _keep(lease: Lease, launch: Launch) -> None:
    """Keep the lease of a launch from its claim on."""
    await launch.claimed.wait()
    # No object before the first renewal: the claim is as new as the lease would be.
    await lease.keep()


async def _context_of(
    store: StoreContext,
    lock: StateLock,
    topology: Topology,
    attempt: str,
    worker: WorkerUploader | None,
) -> SaveContext:
    """Make the context of the saves; with shared memory if a worker process uploads it."""
    settings = store.settings
    block, largest_file = store.block_bytes, store.max_file_bytes
    arena = Arena(block, pin=settings.staging.pinned != "never", shared=worker is not None)
    if worker is not None:
        arena.on_drop = worker.drop
    return SaveContext(
        store=store,
        settings=settings,
        lock=lock,
        events=store.events,
        arena=arena,
        budget=ByteBudget(max(block, (settings.staging.bytes or 0) // block * block)),
        planner=await anyio.to_thread.run_sync(choose_planner, topology, settings, largest_file),
        rank=store.rank,
        world_size=store.world_size,
        attempt=attempt,
        uploader=worker,
    )
