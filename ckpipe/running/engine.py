"""The work of a pipeline on its own event loop: saves under way and loads."""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections import Counter

import anyio
from anyio.abc import TaskStatus

from ckpipe.catalog.leases import Lease
from ckpipe.errors import (
    AttemptReused,
    CkpipeError,
    DrainTimeout,
    SaveCancelled,
    SaveError,
    SaveSkipped,
    StoreError,
    first_error,
)
from ckpipe.events import EventBus, SaveEnded, SaveFailed, SaveStarted
from ckpipe.events import SaveSkipped as SkippedEvent
from ckpipe.export import exported
from ckpipe.loading.load import LoadRequest
from ckpipe.lock.lock import StateLock
from ckpipe.ranks.agree import agree
from ckpipe.ranks.launch import CheckpointNames, arrange_meeting
from ckpipe.ranks.schedule import Preemption, SaveSchedule, SaveStepAgreement
from ckpipe.ranks.topology import Topology
from ckpipe.running.announcing import PATIENCE_SECONDS, CoordinatedSaves
from ckpipe.running.choose import Loading, place_of
from ckpipe.running.hooks import Hooks
from ckpipe.running.housekeeping import Housekeeping
from ckpipe.running.opening import enter, make_site, store_of
from ckpipe.save.context import SaveContext
from ckpipe.save.follow_up import Follower
from ckpipe.save.memory import lend_blocks, take_back
from ckpipe.save.run import run_save
from ckpipe.save.save import Save, SaveRequest, SkipSave, StagedBlock, fail, resolve
from ckpipe.settings import Settings
from ckpipe.types import CheckpointId, LoadResult

logger = logging.getLogger("ckpipe")

LOOK_SECONDS = 0.2
"""How often closing looks whether a signal ends the program meanwhile."""

UNSEEN_SECONDS = 10.0
"""How long a failure waits for a caller to be raised to, before a line in the log tells of it."""


class Engine(Housekeeping):
    """Everything of one pipeline that lives on its loop.

    Args:
        settings: The settings; ``url`` is set.
        lock: The state lock.
        events: Where events go.
        topology: Which rank this is, and how many save together.
        hooks: Who is called on events.
        preemption: Knows whether this process was told to stop.
    """

    def __init__(
        self,
        settings: Settings,
        lock: StateLock,
        events: EventBus,
        topology: Topology,
        hooks: Hooks,
        preemption: Preemption,
    ) -> None:
        self._settings, self._lock, self._events = settings, lock, events
        self._topology = topology
        self._site: SaveContext | None = None
        self._active: dict[Save, anyio.Event] = {}
        self._next_step = 0
        self._stop = anyio.Event()
        self._background: list[Exception] = []
        self._saved_final = self._hurries = False
        self._warming, self._beginning = anyio.Lock(), anyio.Lock()
        self.cadence = SaveSchedule(settings.save_every_steps, settings.save_every_seconds)
        self.diary = SaveStepAgreement(2 * PATIENCE_SECONDS)
        self.hooks, self._preemption = hooks, preemption

    @property
    def site(self) -> SaveContext:
        """The context of the stages; there once the engine serves."""
        assert self._site is not None
        return self._site

    async def serve(self, *, task_status: TaskStatus[None]) -> None:
        """Opens the store and serves until :meth:`stop`."""
        read_only, together = self._settings.read_only, self._topology.world_size > 1
        meeting = await anyio.to_thread.run_sync(arrange_meeting, self._topology, self._settings)
        backend = await anyio.to_thread.run_sync(store_of, self._settings)
        async with backend:
            entry = await enter(backend, self._settings, self._topology, meeting)
            self._site, worker = make_site(self._settings, entry, self._lock, self._events)
            place = await anyio.to_thread.run_sync(place_of, self._settings.url or "")
            self._events.place = place.partition("?")[0].rstrip("/")
            launch = self._launch = entry.launch
            self._follower = Follower(self._site)
            self._loading = Loading(self._site, launch, place)
            self._course = CheckpointNames(launch.attempt)
            lease = Lease(entry.patient, launch.id)

            async def keep_lease() -> None:
                await launch.claimed.wait()
                # Its first object comes with the first renewal: the claim is that new.
                await lease.keep()

            try:
                async with anyio.create_task_group() as self._tasks:
                    self._tasks.start_soon(keep_lease, name="lease of the attempt")
                    await self._tasks.start(self.hooks.serve, self._keep)
                    if together and not read_only:
                        told = (self.diary, self.cadence, self._preemption)
                        announcer = CoordinatedSaves(self._site, launch, *told)
                        self._tasks.start_soon(self._announce, announcer, name="calls")
                    if worker is not None:
                        worker.start(self._tasks)
                    task_status.started()
                    await self._stop.wait()
                    if worker is not None:
                        await worker.close()
                    self._tasks.cancel_scope.cancel()
            finally:
                self._site.arena.close()
                with anyio.CancelScope(shield=True):
                    await lease.release()
                if not self._course.has_saved:
                    await launch.withdraw()

    async def _announce(self, announcer: CoordinatedSaves) -> None:
        try:
            await announcer.serve()
        except* AttemptReused as group:
            # Calls of an earlier launch are heard. The save that is due now raises it.
            self._keep(first_error(group))
            self._preemption.arrive()

    # Saves

    async def begin(self, request: SaveRequest, step: int | None) -> Save:
        """Accept a save and start it; the first claims the launch before it looks at the state.

        Raises:
            AttemptReused: If ``attempt_id`` was used on this root before.
            StoreError: If the store failed or is not fit, unless ``on_error`` is ``"warn"``.
        """
        async with self._beginning:
            step = self._next_step if step is None else step
            if not self._course.has_saved:
                try:
                    self.site.attempt = await self._launch.claim()
                    self._course = CheckpointNames(self.site.attempt)
                except CkpipeError as error:
                    error.located(step=step, rank=self.site.rank)
                    if self._settings.on_error == "raise" or not isinstance(error, StoreError):
                        raise
                    return self._accept(request, self._course.draft(step), error)
            return self._accept(request, await next_name(self.site, self._course, step))

    def leave(self, request: SaveRequest) -> None:
        """Gives up the save of a caller who may change what is not copied yet from now on."""
        for save in self._active:
            if save.request is request and not save.safe.done():
                save.call_off()

    def _accept(
        self, request: SaveRequest, name: CheckpointId, failure: StoreError | None = None
    ) -> Save:
        save, step = Save(name, self.site.rank, request), name.step
        self._next_step = step + 1
        self._loading.give_up()
        self.cadence.begin_at(step)
        self.diary.keep(step)
        self._events.emit(SaveStarted(save.name, step, save.rank))
        if failure is not None:
            self._failed(save, failure)
            self._tell_ended(save)
            return save
        if self._settings.retention.keep_last == 0 and not request.final and not request.urgent:
            self._skip(save, "keep_last=0 keeps no intermediate checkpoints, and final is not set")
            self._tell_ended(save)
            return save
        self._saved_final |= request.final or request.urgent
        self._tasks.start_soon(self._run, save, name=f"save {save.name}")
        save.interrupts_another = any(map(save.has_the_caller_of, self._active))
        self._active[save] = anyio.Event()
        return save

    async def _run(self, save: Save) -> None:
        try:
            with anyio.CancelScope() as save.scope:
                if save.cancel_requested:
                    save.scope.cancel()
                await self._guarded(save)
        finally:
            # Cancelled through its handle, or torn down with the pipeline: waiters must know.
            self._cancelled(save)
            self._tell_ended(save)
            self._active.pop(save).set()
        self.site.trim()
        async with self._warming:
            await self.site.warm()

    def _tell_ended(self, save: Save) -> None:
        self._events.emit(SaveEnded(save.name, save.id.step, save.rank, save.status, save.report()))

    async def _guarded(self, save: Save) -> None:
        try:
            if self.site.world_size > 1:
                self._tasks.start_soon(self._look_back, name=f"look back from {save.name}")
            async with exported(self.site, save):
                await run_save(save, self.site)
            if save.unsettled is not None:
                self._follower.add(save.unsettled)
        except Exception as group:
            error = first_error(group)
            if isinstance(error, CkpipeError):
                error.located(step=save.id.step, rank=save.rank)
            if isinstance(error, SkipSave):
                self._skip(save, str(error))
            elif save.committed.done():
                error.add_note(f"Raised after the commit of {save.name}, which is durable")
                self._keep(error)
            else:
                self._failed(save, error)

    async def _look_back(self) -> None:
        """Looks what became of earlier checkpoints; a store that fails now is asked again."""
        try:
            await self._follower.look()
        except SaveError as error:
            self._keep(error)
        except CkpipeError as error:
            logger.warning("Earlier checkpoints could not be looked at: %s", error)

    def _skip(self, save: Save, reason: str) -> None:
        save.status = "skipped"
        self._events.emit(SkippedEvent(save.name, save.id.step, save.rank, reason))
        resolve(save.staged, None)
        fail(save.committed, SaveSkipped(reason, step=save.id.step, rank=save.rank))

    def _failed(self, save: Save, error: Exception) -> None:
        save.status = "failed"
        self._events.emit(
            SaveFailed(save.name, save.id.step, save.rank, f"{type(error).__name__}: {error}")
        )
        # Before anybody is told, since whoever is told takes it off the list again.
        self._keep(error)
        if isinstance(error, StoreError) and self._settings.on_error == "warn":
            # Whether a store fails before or after the last copy is chance, and must not decide
            # whether save() raises where the user asked for warnings.
            resolve(save.staged, None)
        self._end(save, error)

    def _cancelled(self, save: Save) -> None:
        if save.committed.done():
            return
        save.status = "cancelled"
        self._events.emit(SaveFailed(save.name, save.id.step, save.rank, "it was cancelled"))
        self._end(save, SaveCancelled("The save was cancelled", step=save.id.step, rank=save.rank))

    def _end(self, save: Save, error: Exception) -> None:
        save.forget_state()
        fail(save.staged, error)
        fail(save.committed, error)

    async def cancel(self, save: Save) -> None:
        """Cancels a save unless it is committed; returns when it has ended."""
        if save in self._active and not save.committed.done():
            save.call_off()
            await self._active[save].wait()

    async def hold_staged(self, save: Save, thread: int | None = None) -> list[StagedBlock]:
        """Keep the memory that a save was copied to; see :func:`lend_blocks`."""
        return lend_blocks(save, self.site, thread)

    async def release_staged(self, save: Save, held: list[StagedBlock]) -> None:
        """Ends what :meth:`hold_staged` began."""
        take_back(save, self.site, held)

    async def trim(self) -> int:
        """Give free staging memory back to the system; returns how many bytes."""
        return self.site.give_memory_back()

    def _keep(self, error: Exception) -> None:
        """Keep a failure for the next caller, and log it if none comes soon."""
        self._background.append(error)
        self._tasks.start_soon(self._log_unseen, error, name="failure to be seen")

    async def _log_unseen(self, error: Exception) -> None:
        await anyio.sleep(UNSEEN_SECONDS)
        if any(each is error for each in self._background):
            raised = "raised" if self._settings.on_error == "raise" else "warned of"
            text = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
            logger.warning("%s\nThis is %s by the next save, or on leaving", text, raised)

    def take_failures(self) -> list[Exception]:
        """Take the failures of the background that no call has seen yet; they count as seen
        then."""
        taken, self._background = self._background, []
        return taken

    @property
    def has_failures(self) -> bool:
        """Tell whether something failed that no call has seen yet."""
        return bool(self._background)

    def see(self, error: Exception) -> None:
        """Notes that a caller was told of a failure."""
        self._background = [each for each in self._background if each is not error]

    async def drain(self, *, staged_only: bool) -> None:
        """Wait until all saves have ended and hooks returned.

        There is no limit until all is durable. ``drain_timeout_seconds`` bounds what follows, such
        as retention and hooks, and everything once an exception or a signal ends the program.
        Hooks may begin further saves, which are waited for as well.

        Args:
            staged_only: Whether an exception ends it: cancels the saves that still need the
                caller's state.
        """
        if staged_only:
            self.hurry()
            for save in [each for each in self._active if not each.safe.done()]:
                await self.cancel(save)
                if save.status == "cancelled":
                    reason = "The save was given up, since its state had not been copied"
                    self._background.append(SaveCancelled(reason, step=save.id.step))
        if await self._idle_in_time():
            return
        for save in list(self._active):
            await self._give_up(save)
        with anyio.move_on_after(self._settings.drain_timeout_seconds):
            await self.hooks.drained()
        if late := self.hooks.describe_running():
            limit = self._settings.drain_timeout_seconds
            logger.error("Hooks are left behind that did not return in %g s: %s", limit, late)

    def hurry(self) -> None:
        """Have ``drain_timeout_seconds`` count for all saves from now on."""
        self._hurries = True

    async def _idle_in_time(self) -> bool:
        """Wait until all saves ended and all hooks returned; False after the limit."""
        limit, grace = self._settings.drain_timeout_seconds, self._settings.preemption.grace_seconds
        ends_at: float | None = None
        while self._active or self.hooks.describe_running():
            left = math.inf
            if self._hurries or self._preemption.signalled or self._is_durable:
                ends_at = ends_at or time.monotonic() + limit
                left = ends_at - time.monotonic()
            else:
                ends_at = None
            grace_left = self._preemption.seconds_left(grace)
            left = left if grace_left is None else min(left, grace_left)
            with anyio.move_on_after(min(left, LOOK_SECONDS)):
                await self._idle()
            if left <= 0:
                return not (self._active or self.hooks.describe_running())
        return True

    @property
    def _is_durable(self) -> bool:
        return all(save.committed.done() for save in self._active)

    async def _idle(self) -> None:
        while self._active or self.hooks.describe_running():
            for ended in list(self._active.values()):
                await ended.wait()
            await self.hooks.drained()

    async def _give_up(self, save: Save) -> None:
        if save.committed.done():
            logger.warning("What follows the commit of %s was given up on leaving", save.name)
        else:
            error = DrainTimeout(
                "The save was given up: it was not durable within drain_timeout_seconds "
                f"({self._settings.drain_timeout_seconds:g} s) or preemption.grace_seconds after "
                "an exception or a signal ended the program",
                step=save.id.step,
                rank=save.rank,
                hint="Raise the limit, or wait for the handle before leaving",
            )
            self._failed(save, error)
        save.call_off()
        if save in self._active:
            await self._active[save].wait()

    async def stop(self) -> None:
        """Ends :meth:`serve`."""
        if (
            self._settings.retention.keep_last == 0
            and not self._saved_final
            and self._course.has_saved
        ):
            warnings.warn(
                "keep_last=0 keeps only final checkpoints, and none was saved with final=True",
                RuntimeWarning,
                stacklevel=2,
            )
        await self._loading.close()
        self._stop.set()

    # Loads

    async def load(
        self, which: int | str | None, request: LoadRequest, *, fallback: bool
    ) -> LoadResult | None:
        """Loads a checkpoint; None if none was named and there is none."""
        if which is not None:
            await self.settled(which)
        result = await self._loading.load(which, request, fallback=fallback)
        if result is not None:
            self._next_step = result.step + 1
            self._course.has_loaded = True
            self.cadence.begin_at(result.step)
        return result

    async def settled(self, which: int | str) -> None:
        """Waits for saves under way here that a step or id names."""
        for save, ended in list(self._active.items()):
            if which in (save.id.step, save.name):
                await ended.wait()

    def is_writing(self, id: CheckpointId) -> bool:
        """Tell whether a save of this checkpoint is under way here."""
        return any(save.id == id and not save.committed.done() for save in self._active)

    def describe(self) -> str:
        """Describe the work under way, for a diagnostic; of committed saves only retention."""
        if self._site is None:
            return "not open"
        counts = Counter(each.status for each in self.under_way() if each.status != "committed")
        states = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
        budget = self._site.budget
        return f"{states or 'idle'} | {budget.used >> 20}/{budget.capacity >> 20} MiB"

    def under_way(self) -> list[Save]:
        """The saves that have not ended; for any thread."""
        return list(self._active)

    def budget(self) -> tuple[int, int, int]:
        """Staging memory used, its capacity, and how many saves wait for it; for any thread."""
        if self._site is None:
            return 0, 0, 0
        budget = self._site.budget
        return budget.used, budget.capacity, budget.waiting


async def next_name(site: SaveContext, course: CheckpointNames, step: int) -> CheckpointId:
    """Names a save that begins now, newer than all others if the run went back for it.

    Costs nothing, but for a save of several ranks whose step lies before an earlier one's: then the
    first that comes to it decides whether the run went back, since perhaps only some have loaded.

    Args:
        site: Where it is saved.
        course: What was saved before; changed.
        step: The step.

    Raises:
        StoreError: If ranks have to agree and the store failed.
    """
    if course.lies_back(step):
        before, went_back = course.rollbacks, course.has_loaded
        if site.world_size > 1:
            question = f"back-{before}-{step}-{course.count(step)}"
            went_back = bool(await agree(site.patient, site.attempt, question, went_back))
        if went_back and course.rollbacks == before:
            course.go_back()
    return course.name(step)
