"""What the awaiting and the blocking pipeline offer alike: all that waits for nothing."""

from __future__ import annotations

import os
from typing import SupportsIndex, Unpack

from torch.optim import Optimizer

from ckpipe.events import Completed, EventBus, RankCommitted, SaveFailed, Staged
from ckpipe.lock.guard import Guarded
from ckpipe.lock.lock import StateLock
from ckpipe.running.call_arguments import location, plain_step
from ckpipe.running.ledger import Statistics
from ckpipe.running.pipeline_core import Hook, PipelineCore
from ckpipe.settings import PipelineFields, Settings


class PipelineBase:
    """A pipeline without its ways to wait."""

    def __init__(
        self,
        url: str | os.PathLike[str] | None = None,
        *,
        guard: Guarded = None,
        state_lock: StateLock | None = None,
        settings: Settings | None = None,
        **fields: Unpack[PipelineFields],
    ) -> None:
        self._core = PipelineCore(location(url), guard, state_lock, settings, {**fields})

    def should_save(self, step: SupportsIndex, *, last: SupportsIndex | None = None) -> bool:
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
            last: The last step of the run, at which it is True too until a save has begun; the
                same on all ranks.

        Raises:
            SettingsError: If neither is set, preemption is not either, and ``last`` is not given.
            PipelineClosed: If the pipeline is not open.
        """
        last = None if last is None else plain_step(last)
        return self._core.should_save(plain_step(step), last)

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
        event loop, which it must not block; so does what a plain function returns if that can
        be awaited. No save waits for it. It is called for one event
        after the other; leaving the pipeline waits for saves that it begins, and then for it for
        ``drain_timeout_seconds`` at most.
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

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._core!r}>"
