"""The pipeline for code without an event loop: the same methods, blocking."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self

from torch.optim import Optimizer

from ckpipe.caller import Caller
from ckpipe.events import Completed, EventBus, RankCommitted, SaveFailed, Staged
from ckpipe.handles import SyncSaveHandle
from ckpipe.keys import label_filter
from ckpipe.ledger import Statistics
from ckpipe.lock import StateLock
from ckpipe.per_rank import PerRankPolicy
from ckpipe.pipeline_core import Guarded, Hook, PipelineCore, Which, raise_or_warn, which
from ckpipe.retention import Decision
from ckpipe.settings import Settings
from ckpipe.sweeping import SweepReport
from ckpipe.types import CheckpointInfo, LoadResult, VerifyResult


class SyncPipeline:
    """:class:`~ckpipe.Pipeline` for a plain loop: a context manager whose methods block.

    What a method does, takes, returns and raises is what the method of the same name does there.

    Args:
        url: Where checkpoints lie: a plain path, ``file:///…``, or the URL of another backend.
        guard: Optimizers whose steps must not run into a copy.
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

    def __enter__(self) -> Self:
        """Opens the store and claims the attempt."""
        with self._core.opening():
            self._core.open()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            failures = self._core.close(failed=exc is not None)
        finally:
            self._core.unwatch()
        if exc is None:
            raise_or_warn(failures, self._core.settings.on_error)

    def save(
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
    ) -> SyncSaveHandle:
        """Saves a state; returns as ``until`` says. See :meth:`ckpipe.Pipeline.save`."""
        self._core.report_failures()
        with Caller() as caller:
            request = self._core.request(
                state,
                step=step,
                metrics=metrics,
                metadata=metadata,
                until=until,
                final=final,
                select=label_filter(include, exclude),
                caller=caller,
            )
            save = self._core.submit(self._core.engine.begin, request, step).result()
            caller.serve_until(save.safe if until == "captured" else save.staged)
        handle = SyncSaveHandle(self._core, save)
        if until == "captured":
            handle.wait_captured()
        else:
            handle.wait_staged()
        if until == "committed" and handle.status != "skipped":
            handle.wait()
        return handle

    def load(
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
        """Loads a checkpoint, into a state or as a fresh one. See :meth:`ckpipe.Pipeline.load`."""
        request = self._core.load_request(
            into,
            label_filter(include, exclude),
            strict=strict,
            cast=cast,
            per_rank=per_rank,
            pickle=pickle,
        )
        chosen = None if step is None else which(step)
        load = self._core.engine.load
        return self._core.submit(load, chosen, request, fallback=fallback).result()

    def steps(self) -> list[CheckpointInfo]:
        """All checkpoints of the root, complete or not, the oldest first."""
        return self._core.submit(self._core.engine.steps).result()

    def latest(self) -> CheckpointInfo | None:
        """The newest complete checkpoint; None if there is none."""
        return self._core.submit(self._core.engine.latest).result()

    def best(self, metric: str, *, mode: Literal["min", "max"] = "min") -> CheckpointInfo | None:
        """The checkpoint with the best value of a metric. See :meth:`ckpipe.Pipeline.best`."""
        return self._core.submit(self._core.engine.best, metric, mode).result()

    def verify(self, step: Which) -> VerifyResult:
        """Reads a checkpoint whole and checks every byte of it."""
        return self._core.submit(self._core.engine.verify, which(step)).result()

    def delete(self, step: Which, *, force: bool = False) -> None:
        """Deletes a checkpoint. See :meth:`ckpipe.Pipeline.delete`."""
        self._core.submit(self._core.engine.delete, which(step), force=force).result()

    def pin(self, step: Which) -> None:
        """Protects a checkpoint from retention until it is unpinned.

        Raises:
            CheckpointNotFound: If it is absent, incomplete, or being deleted at this moment.
        """
        self._core.submit(self._core.engine.pin, which(step)).result()

    def unpin(self, step: Which) -> None:
        """Ends the protection of a checkpoint."""
        self._core.submit(self._core.engine.unpin, which(step)).result()

    def prune(self, *, dry_run: bool = False) -> Decision:
        """Applies the retention rules now, or says only what they would do, and why."""
        return self._core.submit(self._core.engine.prune, dry_run=dry_run).result()

    def sweep(self, *, dry_run: bool = False) -> SweepReport:
        """Removes what crashed runs left. See :meth:`ckpipe.Pipeline.sweep`."""
        return self._core.submit(self._core.engine.sweep, dry_run=dry_run).result()

    def should_save(self, step: int) -> bool:
        """Whether to save at this step. See :meth:`ckpipe.Pipeline.should_save`."""
        return self._core.should_save(step)

    @property
    def preempted(self) -> bool:
        """Whether this process will be stopped. See :attr:`ckpipe.Pipeline.preempted`."""
        return self._core.preemption.told

    def preempt(self) -> None:
        """Says that this process will be stopped. See :meth:`ckpipe.Pipeline.preempt`."""
        self._core.preempt()

    def on_staged(self, hook: Hook[Staged]) -> Hook[Staged]:
        """Has a function called whenever a state has been copied.

        See :meth:`ckpipe.Pipeline.on_staged`.
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
        """What was done so far, in numbers. See :meth:`ckpipe.Pipeline.statistics`."""
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

    def __repr__(self) -> str:
        return f"<SyncPipeline {self._core!r}>"
