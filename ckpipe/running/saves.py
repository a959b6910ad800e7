"""The saves of one pipeline: each is named, run by :func:`~ckpipe.save.run.run_save`, and ended."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator
from operator import attrgetter

import anyio
from anyio.abc import TaskGroup

from ckpipe.convert.exports import exported
from ckpipe.errors import (
    CkpipeError,
    DrainTimeout,
    PipelineClosed,
    SaveCancelled,
    SaveError,
    SaveSkipped,
    StoreError,
    UsageError,
    first_error,
    naming_refusals,
    refusal_of,
)
from ckpipe.events import Completed, Event, SaveEnded, SaveFailed, SaveStarted
from ckpipe.events import SaveSkipped as SkippedEvent
from ckpipe.loop_thread import wait_for
from ckpipe.ranks.agree import agree
from ckpipe.ranks.launch import CheckpointNames, Launch
from ckpipe.ranks.schedule import SaveSchedule, SaveStepAgreement
from ckpipe.running import lines
from ckpipe.running.coordinated_saves import PATIENCE_SECONDS
from ckpipe.running.listeners import Hooks
from ckpipe.save.context import SaveContext
from ckpipe.save.follow_up import CompletionWatcher
from ckpipe.save.record import fail, resolve
from ckpipe.save.request import SaveRequest
from ckpipe.save.run import run_save
from ckpipe.save.save import Save, SkipSave
from ckpipe.types import CheckpointId, CheckpointInfo

logger = logging.getLogger("ckpipe")

UNSEEN_SECONDS = 10.0
"""Seconds after which a failure that no call has raised is logged."""


class Saves:
    """The saves of one pipeline, from the call to the end.

    Attributes:
        unseen: Failures that no call has reported yet; may be changed on any thread.
        accepted: Number of saves so far.
        have_begun: True once a save has claimed the launch.
        saved_final: True once a save was final, or the last one before a stop.
        schedule: Gets the steps of saves and loads.
        agreement: Gets the steps of saves.

    Args:
        context: The context of the saves.
        launch: The launch, which the first save claims.
        tasks: The task group that runs them.
        hooks: The functions that are called on their events.
        place: The root, for messages.
    """

    def __init__(
        self, context: SaveContext, launch: Launch, tasks: TaskGroup, hooks: Hooks, place: str
    ) -> None:
        self._context, self._launch, self._tasks, self._hooks = context, launch, tasks, hooks
        self._place = place
        settings = context.settings
        self.schedule = SaveSchedule(settings.save_every_steps, settings.save_every_seconds)
        self.agreement = SaveStepAgreement(2 * PATIENCE_SECONDS)
        self._names = CheckpointNames(launch.attempt)
        self._completions = CompletionWatcher(context)
        self._active: dict[Save, anyio.Event] = {}
        self._accepting: dict[anyio.CancelScope, anyio.Event] = {}
        """Saves that have no name yet: the first waits until the launch is claimed."""
        self._closed = False
        self._next_step: int | None = None
        self._first_complete: CheckpointInfo | None = None
        context.events.add(self._note_complete)
        self.have_begun = False
        self.saved_final = False
        self._warming, self._beginning = anyio.Lock(), anyio.Lock()
        self.unseen: list[Exception] = []
        self.accepted = 0

    async def begin(self, request: SaveRequest) -> Save:
        """Accept a save and start it; the first claims the launch before it reads the state.

        Raises:
            AttemptReused: If ``attempt_id`` was used on this root before.
            PipelineClosed: If the pipeline was closed meanwhile.
            SaveCancelled: If closing did not wait for it.
            StoreError: If the store failed or is unsuitable, unless ``on_error`` is ``"warn"``.
        """
        context, retention = self._context, self._context.settings.retention
        async with self._accepted(request.step):
            failure = None if self.have_begun else await self._claim(request.step)
            step = await self._follow_up() if request.step is None else request.step
            # A failed save counts too, since the same save counts on the other ranks.
            id = self._names.name(step) if failure else await self._next_name(step)
            save = Save(id, context.rank, request)
            self.accepted += 1
            self._next_step = step + 1
            self.schedule.begin_at(step)
            self.agreement.consume(step)
            self._hooks.await_call(save.name, request.call)
            context.events.emit(SaveStarted(*save.where))
            if failure is not None:
                self._failed(save, failure)
                self._tell_ended(save)
            elif retention.keep_last == 0 and not request.final and not request.urgent:
                reason = "keep_last=0 keeps no intermediate checkpoints, and final is not set"
                self._skip(save, reason)
                self._tell_ended(save)
            else:
                self.saved_final |= request.final or request.urgent
                self._tasks.start_soon(self._run, save, name=f"save {save.name}")
                save.interrupts_another = any(map(save.has_the_caller_of, self._active))
                self._active[save] = anyio.Event()
            return save

    @contextlib.asynccontextmanager
    async def _accepted(self, step: int | None) -> AsyncIterator[None]:
        if self._closed:
            hint = "Make a new one to go on saving"
            raise PipelineClosed("The pipeline was closed meanwhile", step=step, hint=hint)
        ended = anyio.Event()
        with anyio.CancelScope() as scope:
            self._accepting[scope] = ended
            try:
                async with self._beginning:
                    yield
            finally:
                del self._accepting[scope]
                ended.set()
        if scope.cancelled_caught:
            reason = "The save was given up, since the pipeline was closed before it began"
            error = SaveCancelled(reason, step=step)
            self.unseen.append(error)
            raise error

    async def _run(self, save: Save) -> None:
        try:
            with anyio.CancelScope() as save.scope:
                if save.cancel_requested:
                    save.scope.cancel()
                if self._context.world_size > 1:
                    self._tasks.start_soon(self._look_back, name=f"look back from {save.name}")
                async with exported(self._context, save):
                    await run_save(save, self._context)
                await self._tell_line()
        except Exception as group:
            error = refusal_of(group, SaveError) or first_error(group)
            if isinstance(error, CkpipeError):
                error.located(step=save.id.step, rank=save.rank)
            if isinstance(error, SkipSave):
                self._skip(save, str(error))
            elif save.committed.done():
                error.add_note(f"Raised after the commit of {save.name}, which is durable")
                self.keep(error)
            else:
                self._failed(save, error)
        finally:
            if save.unsettled is not None:  # also if the work after the commit failed
                self._completions.add(save.unsettled)
            if not save.committed.done():
                # Cancelled through its handle, or torn down with the pipeline: waiters must know.
                save.status = "cancelled"
                self._context.events.emit(SaveFailed(*save.where, "it was cancelled"))
                cancelled = "The save was cancelled"
                self._end(save, SaveCancelled(cancelled, step=save.id.step, rank=save.rank))
            self._tell_ended(save)
            self._active.pop(save).set()
        self._context.trim()
        async with self._warming:
            await self._context.warm()

    async def _follow_up(self) -> int:
        """Return the step of a save that was given none.

        Raises:
            UsageError: If the first such step is another one on another rank.
        """
        context, step = self._context, self._next_step or 0
        if self._next_step is None and (id := CheckpointId.parse(self._launch.greatest)):
            step = id.step + 1
            told = "save() was given no step, and nothing was loaded: it goes on with step %d at %s"
            logger.info(told, step, self._place)
        if context.world_size > 1 and not self.accepted and self.have_begun:
            agreed = await agree(context.store.retrying, context.attempt, "first-step", step)
            if agreed != step:
                raise UsageError(
                    f"save() was given no step: on this rank it would be {step}, on another "
                    f"{agreed}, since only some have loaded",
                    rank=context.rank,
                    hint="Load the same checkpoint on all ranks, or pass step=",
                )
        return step

    def _note_complete(self, event: Event) -> None:
        if isinstance(event, Completed) and self._first_complete is None:
            self._first_complete = event.info

    async def _tell_line(self) -> None:
        """Warn, once in a launch, that it begins a line beside the checkpoints of others."""
        context, launch, info = self._context, self._launch, self._first_complete
        if info is None or not context.store.is_first("a line begins"):
            return
        if not launch.greatest or info.line != launch.id:
            return
        if context.settings.retention.lines == "all":
            return
        backend, rank = context.store.retrying, context.rank
        with contextlib.suppress(CkpipeError):
            teller = rank
            if context.world_size > 1:
                teller = await agree(backend, context.attempt, "tells-line", rank)
            if teller != rank:
                return
            await lines.tell_begun(context.store.catalog, launch, self._place)

    async def _claim(self, step: int | None) -> StoreError | None:
        """Claim the launch; return the error of the store if ``on_error`` is ``"warn"``."""
        try:
            self._context.attempt = self._names.attempt = await self._launch.claim()
            self.have_begun = True
            catalog = self._context.store.catalog
            lines.settle(catalog, self._launch, self._context.settings.resume)
            if self._next_step is None and catalog.resumed_from is not None:
                id = CheckpointId.parse(catalog.resumed_from)
                self._next_step = None if id is None else id.step + 1
        except CkpipeError as error:
            error.located(step=step, rank=self._context.rank)
            if self._context.settings.on_error == "raise" or not isinstance(error, StoreError):
                raise
            return error
        return None

    async def _next_name(self, step: int) -> CheckpointId:
        """Name a save that begins now; after a rollback it is newer than all others.

        Usually this sends no request. With several ranks, if the step is less than a saved one, the
        first rank decides for all whether the run went back, since perhaps only some have loaded.
        """
        names, context = self._names, self._context
        if names.lies_back(step):
            before, went_back = names.rollbacks, names.has_loaded
            if context.world_size > 1:
                question = f"back-{before}-{step}-{names.count(step)}"
                went_back = bool(
                    await agree(context.store.retrying, context.attempt, question, went_back)
                )
            if went_back and names.rollbacks == before:
                names.go_back()
        return names.name(step)

    def loaded(self, step: int) -> None:
        """Record that training continues after a loaded step."""
        self._next_step = step + 1
        self._names.has_loaded = True
        self.schedule.begin_at(step)

    async def _look_back(self) -> None:
        """Check that earlier checkpoints are complete; if that fails, the next save repeats it."""
        try:
            with naming_refusals():
                await self._completions.look()
        except SaveError as error:
            self.keep(error)
        except CkpipeError as error:
            logger.warning("Earlier checkpoints could not be checked: %s", error)

    # The end of a save

    def _skip(self, save: Save, reason: str) -> None:
        save.status = "skipped"
        self._context.events.emit(SkippedEvent(*save.where, reason))
        resolve(save.staged, None)
        fail(save.committed, SaveSkipped(reason, step=save.id.step, rank=save.rank))

    def _failed(self, save: Save, error: Exception) -> None:
        save.status = "failed"
        text = f"{type(error).__name__}: {error}"
        self._context.events.emit(SaveFailed(*save.where, text))
        # Before a waiter gets the error, since that removes it from the list again.
        self.keep(error)
        if isinstance(error, StoreError) and self._context.settings.on_error == "warn":
            # By chance a store fails before or after the last copy. That must not decide whether
            # save() raises: the user asked for warnings.
            resolve(save.staged, None)
        self._end(save, error)

    def _end(self, save: Save, error: Exception) -> None:
        save.forget_state()
        fail(save.staged, error)
        fail(save.committed, error)

    def _tell_ended(self, save: Save) -> None:
        self._context.events.emit(SaveEnded(*save.where, save.status, save.report()))

    def leave(self, request: SaveRequest) -> None:
        """Give up the save of a caller that left: it may change tensors that are not copied yet."""
        for save in self._active:
            if save.request is request and not save.safe.done():
                save.call_off()

    async def cancel(self, save: Save) -> None:
        """Cancel a save unless it is committed; return when it has ended."""
        if save in self._active and not save.committed.done():
            save.call_off()
            await self._active[save].wait()

    async def give_up_accepting(self) -> None:
        """End the calls whose save has not begun."""
        for scope, ended in list(self._accepting.items()):
            scope.cancel()
            await ended.wait()

    async def close(self) -> None:
        """Accept no more saves."""
        self._closed = True
        await self.give_up_accepting()

    async def give_up(self, save: Save) -> None:
        """End a save, or the work after its commit, since the pipeline closes."""
        limit = self._context.settings.drain_timeout_seconds
        if save.committed.done():
            logger.warning("The work after the commit of %s was given up on leaving", save.name)
        else:
            error = DrainTimeout(
                "The save was given up: it was not durable within drain_timeout_seconds "
                f"({limit:g} s) or preemption.grace_seconds after "
                "an exception or a signal ended the program",
                step=save.id.step,
                rank=save.rank,
                hint="Raise the limit, or wait for the handle before leaving",
            )
            self._failed(save, error)
        save.call_off()
        if save in self._active:
            await self._active[save].wait()

    # Failures that no call has reported

    def keep(self, error: Exception) -> None:
        """Keep a failure for the next call, and log it if none comes soon."""
        self.unseen.append(error)
        self._tasks.start_soon(self._log_unseen, error, name="failure to be seen")

    async def _log_unseen(self, error: Exception) -> None:
        await anyio.sleep(UNSEEN_SECONDS)
        if error in self.unseen:
            raised = "raised" if self._context.settings.on_error == "raise" else "warned of"
            text = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
            logger.warning("%s\nThis is %s by the next save, or on leaving", text, raised)

    def take_failures(self) -> list[Exception]:
        """Take the failures that no call has reported; for any thread."""
        taken = self.unseen.copy()
        for error in taken:
            self.see(error)
        return taken

    def see(self, error: Exception) -> None:
        """Record that a call has raised a failure; for any thread."""
        with contextlib.suppress(ValueError):
            self.unseen.remove(error)

    # For the rest of the pipeline

    def under_way(self) -> list[Save]:
        """Return the saves that have not ended; for any thread."""
        return list(self._active)

    @property
    def is_accepting(self) -> bool:
        """True while a save was asked for and has not begun."""
        return bool(self._accepting)

    async def ended(self) -> None:
        """Wait for all saves under way, and for the beginning of those that were asked for."""
        for ended in [*self._accepting.values(), *self._active.values()]:
            await ended.wait()

    async def durable(self) -> CheckpointInfo | None:
        """Wait until every save that has been copied by now is durable, or has failed.

        No save that is still being copied is awaited: it may need the caller, or its lock.

        Returns:
            The newest checkpoint that this rank has committed and not seen complete on all ranks.
        """
        for save in self.under_way():
            if save.safe.done():
                with contextlib.suppress(Exception):  # the next save raises it, or leaving
                    await wait_for(save.committed)
        committed = [save.unsettled for save in self._active if save.unsettled is not None]
        return max([*committed, *self._completions.followed], key=attrgetter("key"), default=None)

    async def settled(self, which: int | str) -> None:
        """Wait for saves of this process under a step or id."""
        for save, ended in list(self._active.items()):
            if which in (save.id.step, save.name):
                await ended.wait()

    def is_writing(self, id: CheckpointId) -> bool:
        """True if this process is writing the checkpoint."""
        return any(save.id == id and not save.committed.done() for save in self._active)
