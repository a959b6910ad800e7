"""The pipeline for code that awaits."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import anyio
from torch.optim import Optimizer

from ckpipe.events import Completed, EventBus, RankCommitted, SaveFailed, Staged
from ckpipe.handles import SaveHandle
from ckpipe.keys import label_filter
from ckpipe.ledger import Statistics
from ckpipe.lock import StateLock
from ckpipe.loop_thread import wait_for
from ckpipe.per_rank import PerRankPolicy
from ckpipe.pipeline_core import Guarded, Hook, PipelineCore, Which, raise_or_warn, which
from ckpipe.retention import Decision
from ckpipe.settings import Settings
from ckpipe.sweeping import SweepReport
from ckpipe.types import CheckpointInfo, LoadResult, VerifyResult

T = TypeVar("T")


class Pipeline:
    """Saves and loads training state while training goes on.

    An async context manager, entered once. Entering opens the store; leaving waits for saves
    under way and raises what failed and was not yet seen. Leaving on an exception still lets
    saves finish whose state is staged, and cancels the others. Everything runs on an event loop
    of the pipeline's own, in a thread of its own, so a coroutine that trains without ever
    awaiting holds no upload back.

    Args:
        url: Where checkpoints lie: a plain path, ``file:///…``, or the URL of another backend.
        guard: Optimizers whose steps must not run into a copy; see :meth:`guard`.
        settings: Settings to start from.
        fields: Fields of :class:`~ckpipe.Settings`; they go before ``settings``.

    Raises:
        SettingsError: If a setting is unknown or out of range, or there is no url.
    """

    def __init__(
        self,
        url: str | os.PathLike[str] | None = None,
        *,
        guard: Guarded = None,
        settings: Settings | None = None,
        **fields: Any,
    ) -> None:
        self._core = PipelineCore(url, guard, settings, fields)

    async def __aenter__(self) -> Self:
        """Opens the store and claims the attempt.

        Raises:
            BackendNotFound: If no backend is there for the url.
            AttemptReused: If ``attempt_id`` was used on this root before.
            UnsupportedTopology: If several ranks run and cannot agree on a name for the launch,
                or some of them do not open the pipeline in time.
            UsageError: If ``preemption`` is set and this is not the main thread.
            StoreError: If the store cannot be used.
        """
        with self._core.opening():
            await anyio.to_thread.run_sync(self._core.open)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            with anyio.CancelScope(shield=True):
                failures = await anyio.to_thread.run_sync(
                    lambda: self._core.close(failed=exc is not None)
                )
        finally:
            self._core.unwatch()
        if exc is None:
            raise_or_warn(failures, self._core.settings.on_error)

    async def save(
        self,
        state: Any,
        *,
        step: int | None = None,
        metrics: Mapping[str, float] | None = None,
        metadata: Mapping[str, Any] | None = None,
        until: Literal["captured", "staged", "committed"] = "staged",
        final: bool = False,
        include: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
    ) -> SaveHandle:
        """Saves a state; returns when it has been copied, so that training may go on.

        The checkpoint is the state at one instant, if whoever changes it does so under
        :attr:`lock` or after this has returned. Nothing on the store is ever overwritten: saving
        a step again makes another checkpoint of it.

        Args:
            state: Any nesting of containers, tensors, arrays, plain values and objects that have
                ``state_dict`` and ``load_state_dict``.
            step: The training step; by default one more than that of the last save or load.
            metrics: Numbers by name, kept in the checkpoint; NaN is allowed.
            metadata: Plain JSON, kept in the checkpoint.
            until: ``"staged"`` returns when the state is copied, ``"committed"`` when the
                checkpoint is durable. ``"captured"`` returns when all is copied but what guarded
                optimizers own: their parameters and the tensors of their state. These are copied
                while forward and backward run, and only a guarded ``step()``, or
                ``lock.mutating()``, waits for what is left. Nothing else may change them; a
                step's hyperparameters are copied before.
            final: Whether this is the run's final checkpoint.
            include: Globs of labels to save, such as ``"model.*"``; None saves all.
            exclude: Globs of labels to leave out.

        Returns:
            A handle to wait for the commit; its status is ``skipped`` if the save was skipped.

        Raises:
            UnsupportedState: If something in the state cannot be saved; names it.
            LockMisuse: If this thread is inside ``lock.mutating()``.
            StateLockTimeout: If trainers held the lock for too long.
            PipelineBusy: If memory is short and ``on_busy`` is ``"fail"``.
            PipelineClosed: If the pipeline is not open.
            UsageError: With ``until="captured"``, if no optimizer is guarded or the state does
                not fit the staging memory. After it returned, the save fails with
                ``CaptureTooSlow`` if a step would wait longer than
                ``lock.max_step_wait_seconds``, and with ``StateChanged`` if an optimizer's
                tensor is changed outside of a guarded step.
            CkpipeError: With ``until="committed"``, whatever made the save fail; and whatever
                made an earlier save fail that nobody waited for, unless ``on_error`` is
                ``"warn"``.
        """
        self._core.report_failures()
        request = self._core.request(
            state,
            step=step,
            metrics=metrics,
            metadata=metadata,
            until=until,
            final=final,
            select=label_filter(include, exclude),
        )
        save = await self._run(self._core.engine.begin, request, step)
        handle = SaveHandle(self._core, save)
        await (handle.captured() if until == "captured" else handle.staged())
        if until == "committed" and handle.status != "skipped":
            await handle.committed()
        return handle

    async def load(
        self,
        into: Any = None,
        *,
        step: Which | None = None,
        include: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
        strict: bool = True,
        cast: bool = False,
        fallback: bool = False,
        per_rank: PerRankPolicy = "raise",
        pickle: Literal["refuse", "allow"] = "refuse",
    ) -> LoadResult | None:
        """Loads a checkpoint, into a state or as a fresh one.

        Every byte is checked before it reaches its place. Before the first is written, it is
        certain that the checkpoint fits the target and covers it.

        Args:
            into: The state to load into, of the same form as the one that was saved; its tensors
                are filled where they are. None makes a fresh state, on the CPU.
            step: A step, the id of a checkpoint, or its info; None takes the newest complete one.
            include: Globs of labels to load; None loads all.
            exclude: Globs of labels to leave as they are.
            strict: Whether keys of plain containers must be the same on both sides.
            cast: Whether tensors may change their dtype on the way.
            fallback: Whether to go on to the next older checkpoint if one is damaged. Of several
                ranks all call alike, and damage that one finds counts for all.
            per_rank: What becomes of values that were different on each rank, if the number of
                ranks is another now: an error, or what the target has, or those of rank 0, or
                what a function makes of a label and the values in the order of ranks.
            pickle: Whether pickled objects may be loaded, which runs code from the checkpoint.

        Returns:
            What was loaded; None if no step was given and there is no complete checkpoint.

        Raises:
            CheckpointNotFound: If the step given is absent or incomplete.
            TargetMismatch: If the checkpoint does not fit the target, which is untouched then.
            CorruptCheckpoint: If the checkpoint is damaged; ``target_touched`` says whether
                parts of it had been loaded by then.
            UnsupportedVersion: If it is of a newer format.
            UnsupportedTopology: With ``fallback``, if other ranks do not say in time whether the
                checkpoint is whole for them.
            StoreError: If the store failed.
        """
        request = self._core.load_request(
            into,
            label_filter(include, exclude),
            strict=strict,
            cast=cast,
            per_rank=per_rank,
            pickle=pickle,
        )
        chosen = None if step is None else which(step)
        return await self._run(self._core.engine.load, chosen, request, fallback=fallback)

    async def steps(self) -> list[CheckpointInfo]:
        """All checkpoints of the root, complete or not, the oldest first."""
        return await self._run(self._core.engine.steps)

    async def latest(self) -> CheckpointInfo | None:
        """The newest complete checkpoint; None if there is none."""
        return await self._run(self._core.engine.latest)

    async def best(
        self, metric: str, *, mode: Literal["min", "max"] = "min"
    ) -> CheckpointInfo | None:
        """The complete checkpoint with the best value of a metric; None if none has it.

        Reads each index once. NaN never wins, and of equals the newest does.

        Args:
            metric: A name that ``save`` was given in ``metrics``.
            mode: Whether the least or the greatest value is the best.

        Raises:
            SettingsError: If there is no such mode.
            StoreError: If the store failed.
        """
        return await self._run(self._core.engine.best, metric, mode)

    async def verify(self, step: Which) -> VerifyResult:
        """Reads a checkpoint whole and checks every byte of it.

        Raises:
            CheckpointNotFound: If it is absent or incomplete.
            CorruptCheckpoint: If a single bit of it is not what was saved.
        """
        return await self._run(self._core.engine.verify, which(step))

    async def delete(self, step: Which, *, force: bool = False) -> None:
        """Deletes a checkpoint, with a tombstone, so that a crash cannot leave half of one.

        An exact id also deletes an incomplete one. What retention never removes is refused: the
        newest complete checkpoint, a pinned one, one that is being loaded, and the one that this
        run or that of the newest resumed from.

        Args:
            step: A step, the id of a checkpoint, or its info.
            force: Whether to delete it all the same. Who is loading it then may fail.

        Raises:
            CheckpointNotFound: If it is absent.
            UsageError: If it is protected, or this pipeline is writing it, which nothing forces.
            StoreError: If the store failed; deleting it again goes on where it stopped.
        """
        await self._run(self._core.engine.delete, which(step), force=force)

    async def pin(self, step: Which) -> None:
        """Protects a checkpoint from retention until it is unpinned.

        Raises:
            CheckpointNotFound: If it is absent, incomplete, or being deleted at this moment.
        """
        await self._run(self._core.engine.pin, which(step))

    async def unpin(self, step: Which) -> None:
        """Ends the protection of a checkpoint."""
        await self._run(self._core.engine.unpin, which(step))

    async def prune(self, *, dry_run: bool = False) -> Decision:
        """Applies the retention rules now.

        Args:
            dry_run: Whether to say only what would be done, and why.
        """
        return await self._run(self._core.engine.prune, dry_run=dry_run)

    async def sweep(self, *, dry_run: bool = False) -> SweepReport:
        """Removes what crashed runs left: incomplete checkpoints, uploads, old marks and leases.

        Only what is older than ``retention.sweep_after_seconds`` by the store's own clock and
        belongs to no launch that seems to be running; never names that ckpipe did not write.

        Args:
            dry_run: Whether to say only what would be done, and why.

        Raises:
            StoreError: If the store failed; sweeping again goes on where it stopped.
        """
        return await self._run(self._core.engine.sweep, dry_run=dry_run)

    def should_save(self, step: int) -> bool:
        """Whether to save at this step, by ``save_every_steps`` and ``save_every_seconds``.

        Once :attr:`preempted`, it is True until a save has begun, and False from then on.

        Takes microseconds and asks nobody. Several ranks save at the same step, if all of them ask
        after every step: by the clock of the first, and when any of them is preempted. Should they
        come to that step before all have agreed on it, this waits for them, for a minute at most.

        A mark that was skipped, or passed before a crash, is
        made up for at the next step asked about. Asking changes nothing: the answer stays yes
        until a save has begun.

        Args:
            step: The step that has just been taken.

        Raises:
            SettingsError: If neither is set, and preemption is not either.
            PipelineClosed: If the pipeline is not open.
        """
        return self._core.should_save(step)

    @property
    def preempted(self) -> bool:
        """Whether this process was told that it will be stopped, by a signal or :meth:`preempt`.

        Of several ranks it is enough that one was told: then this is True on all of them after the
        step that they agreed to save, once :meth:`should_save` has been asked about it.

        The first save that begins from then on waits for memory where others are skipped; after
        it :meth:`should_save` is False. Leaving the pipeline waits for saves for
        ``preemption.grace_seconds`` after the signal at most.
        """
        return self._core.preemption.told

    def preempt(self) -> None:
        """Says that this process will be stopped soon, as one of ``preemption.signals`` does.

        May be called in any thread, for those who learn of it in another way.

        Raises:
            UnsupportedTopology: If several ranks save together and ``preemption`` is not set.
        """
        self._core.preempt()

    def on_staged(self, hook: Hook[Staged]) -> Hook[Staged]:
        """Has a function called whenever a state has been copied.

        A plain function runs in a thread of its own, a coroutine function on the pipeline's own
        event loop, which it must not block. No save waits for it. It is called for one event
        after the other; leaving the pipeline waits for it, for ``drain_timeout_seconds`` at most.
        What it raises is logged, and raises or warns like a failed save that nobody waited for.

        Args:
            hook: Takes the event.

        Returns:
            The hook, so that this may stand above it as a decorator.
        """
        self._core.hooks.add(Staged, hook)
        return hook

    def on_committed(self, hook: Hook[RankCommitted]) -> Hook[RankCommitted]:
        """Has a function called whenever this rank's part is durable; see :meth:`on_staged`."""
        self._core.hooks.add(RankCommitted, hook)
        return hook

    def on_complete(self, hook: Hook[Completed]) -> Hook[Completed]:
        """Has a function called whenever a checkpoint is complete; see :meth:`on_staged`."""
        self._core.hooks.add(Completed, hook)
        return hook

    def on_failed(self, hook: Hook[SaveFailed]) -> Hook[SaveFailed]:
        """Has a function called whenever a save failed or was cancelled; see :meth:`on_staged`."""
        self._core.hooks.add(SaveFailed, hook)
        return hook

    def statistics(self) -> Statistics:
        """What was done so far, in numbers: saves, bytes, seconds and waits by stage, memory.

        Takes microseconds, in any thread, and also before opening and after closing.
        """
        return self._core.statistics()

    def guard(self, *optimizers: Optimizer) -> None:
        """Has every ``step()`` of these optimizers wait for copies under way, until closing."""
        self._core.guard(*optimizers)

    @property
    def lock(self) -> StateLock:
        """Keeps those who change the state and those who copy it apart."""
        return self._core.lock

    @property
    def settings(self) -> Settings:
        """The settings in force."""
        return self._core.settings

    @property
    def events(self) -> EventBus:
        """What happens, as typed events; see :mod:`ckpipe.events`."""
        return self._core.events

    async def _run(self, function: Callable[..., Awaitable[T]], *args: Any, **kwargs: Any) -> T:
        future = self._core.submit(function, *args, **kwargs)
        try:
            return await wait_for(future)
        except BaseException:
            future.cancel()
            raise

    def __repr__(self) -> str:
        return f"<Pipeline {self._core!r}>"
