"""What the awaiting and the blocking pipeline have in common: everything but how they wait."""

from __future__ import annotations

import json
import os
import threading
import warnings
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

from torch.optim import Optimizer

from ckpipe import cuda
from ckpipe.announcing import END
from ckpipe.caller import Caller
from ckpipe.engine import Engine
from ckpipe.errors import (
    PermissionDenied,
    PipelineClosed,
    SettingsError,
    UnsupportedTopology,
    UsageError,
)
from ckpipe.events import Event, EventBus
from ckpipe.guard import StepGuard, guard
from ckpipe.hooks import Hooks
from ckpipe.keys import LabelFilter, encode_float
from ckpipe.ledger import Ledger, Statistics
from ckpipe.lock import StateLock
from ckpipe.loop_thread import LoopThread
from ckpipe.per_rank import PerRankPolicy
from ckpipe.preemption import Preemption, SignalWatch
from ckpipe.restore import LoadRequest
from ckpipe.saving import FilledBlock, Save, SaveRequest
from ckpipe.settings import Settings
from ckpipe.topology import ALONE, find_topology
from ckpipe.types import CheckpointInfo

T = TypeVar("T")
Which = int | str | CheckpointInfo
"""A step, the exact id of a checkpoint, or what is known of one."""

E = TypeVar("E", bound=Event)
Hook = Callable[[E], object]
"""A function or coroutine function of the user's that takes an event."""

Guarded = Optimizer | Iterable[Optimizer] | None


class PipelineCore:
    """A pipeline's settings, lock and thread.

    Args:
        url: Where checkpoints lie.
        guards: The optimizers to guard from the beginning.
        settings: Settings to start from.
        fields: Settings that go before those.
    """

    def __init__(
        self,
        url: str | os.PathLike[str] | None,
        guards: Guarded,
        settings: Settings | None,
        fields: Mapping[str, Any],
    ) -> None:
        given = dict(fields) if url is None else {"url": os.fspath(url), **fields}
        self.settings = Settings(**given) if settings is None else settings.override(**given)
        if not self.settings.url:
            raise SettingsError(
                "No url is set", hint="Say where checkpoints go: Pipeline('/ckpts')"
            )
        self.lock = StateLock()
        self.events = EventBus()
        self.hooks = Hooks(self.events)
        self._ledger = Ledger()
        self.events.add(self._ledger)
        self.preemption = Preemption()
        self._watch: SignalWatch | None = None
        self._topology = ALONE
        self._guards: list[StepGuard] = []
        self._loop: LoopThread | None = None
        self._engine: Engine | None = None
        self._served: Future[None] | None = None
        self._guarded = _optimizers(guards)
        self._process = os.getpid()

    # Life

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Watches signals while the pipeline is opened, and from then on if that succeeds.

        Raises:
            UsageError: If signals are to be watched and this is not the main thread.
        """
        chosen = self.settings.preemption
        if self._engine is None and chosen.enabled:
            self._watch = SignalWatch(chosen.signals, self.preemption.tell)
            self._watch.begin()
        try:
            yield
        except BaseException:
            if self._loop is None:
                self.unwatch()
            raise

    def unwatch(self) -> None:
        """Puts the handlers of signals back."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.end()

    def open(self) -> None:
        """Starts the thread, opens the store and claims the attempt; blocking."""
        if self._engine is not None:
            raise PipelineClosed(
                "A pipeline is entered once", hint="Make a new one to go on saving"
            )
        topology = self._topology = ALONE if self.settings.solo else find_topology()
        self._process = os.getpid()
        self._loop = LoopThread("ckpipe")
        self.preemption.alone = topology.world_size == 1
        self._engine = Engine(
            self.settings, self.lock, self.events, topology, self.hooks, self.preemption
        )
        try:
            self._served, _ = self._loop.portal.start_task(self._engine.serve)
        except BaseException:
            self._shut(LoopThread.abandon)
            raise
        if self._guarded:
            self.guard(*self._guarded)

    def close(self, *, failed: bool) -> list[Exception]:
        """Lets saves finish and closes; returns failures that nobody has seen; blocking.

        Args:
            failed: Whether the caller leaves on an exception: only staged saves finish then.
        """
        if self._loop is None or self._engine is None or self._served is None or self._forked:
            return []
        try:
            within = self.preemption.seconds_left(self.settings.preemption.grace_seconds)
            self.submit(self._engine.drain, staged_only=failed, within=within).result()
            failures = self.submit(self._engine.take_failures).result()
            self.submit(self._engine.stop).result()
            self._served.result()
        except BaseException:
            # Whoever interrupts the waiting wants no more of it.
            self._shut(LoopThread.abandon)
            raise
        self._shut(LoopThread.close)
        return failures

    def _shut(self, end: Callable[[LoopThread], None]) -> None:
        for each in self._guards:
            each.remove()
        loop, self._loop = self._loop, None
        if loop is not None:
            end(loop)

    @property
    def _forked(self) -> bool:
        """Whether this process was forked from the pipeline's, whose thread it does not have."""
        return os.getpid() != self._process

    @property
    def engine(self) -> Engine:
        """What lives on the loop.

        Raises:
            PipelineClosed: If the pipeline is not open.
        """
        if self._loop is None or self._engine is None:
            state = "is not open yet" if self._engine is None else "is closed"
            raise PipelineClosed(
                f"The pipeline {state}", hint="Use it inside its (async) with block"
            )
        self._check_process()
        return self._engine

    def _check_process(self) -> None:
        if self._forked:
            raise PipelineClosed(
                "The pipeline belongs to the process that this one was forked from",
                hint="Open another pipeline in this process",
            )

    def submit(self, function: Callable[..., Awaitable[T]], *args: Any, **kwargs: Any) -> Future[T]:
        """Starts a coroutine function on the pipeline's loop."""
        if self._loop is None:
            raise PipelineClosed("The pipeline is closed", hint="Make a new one to go on")
        self._check_process()
        return self._loop.submit(function, *args, **kwargs)

    def guard(self, *optimizers: Optimizer) -> None:
        """Has every step of these optimizers hold the lock's mutating side, until closing."""
        self._guards.append(guard(self.lock, *optimizers))

    def saw(self, error: Exception) -> None:
        """Notes that a caller was told of a save's failure."""
        if self._loop is not None and self._engine is not None:
            self.submit(self._engine.see, error).result()

    def report_failures(self) -> None:
        """Raises, or warns of, failed saves that nobody has been told of."""
        if self.engine.has_failures:
            failures = self.submit(self.engine.take_failures).result()
            raise_or_warn(failures, self.settings.on_error)

    def give_back(self, save: Save, held: list[FilledBlock]) -> None:
        """Gives staging memory back that a caller has looked at; blocking."""
        if self._loop is not None:  # else it went with the pipeline
            self._loop.submit(self.engine.release_staged, save, held).result()

    # Saves and loads

    def request(
        self,
        state: Any,
        *,
        step: int | None,
        metrics: Mapping[str, float] | None,
        metadata: Mapping[str, Any] | None,
        until: str,
        final: bool,
        select: LabelFilter,
        caller: Caller | None = None,
    ) -> SaveRequest:
        """Checks what ``save`` was given, on the caller's thread."""
        _ = self.engine
        if self.settings.read_only:
            raise PermissionDenied(
                "The pipeline was opened to read only",
                step=step,
                hint="Open one without read_only=True to save",
            )
        if until not in ("captured", "staged", "committed"):
            raise UsageError(
                f"until is 'captured', 'staged' or 'committed', not {until!r}", step=step
            )
        owners = self._owners(step) if until == "captured" else ()
        if step is not None:
            _check_step(step)
        self.lock.check_capture_allowed()
        return SaveRequest(
            state,
            select,
            _metrics(metrics or {}, step),
            _metadata(metadata or {}, step),
            final,
            threading.get_ident(),
            cuda.fences(),
            owners,
            self.preemption.answer(),
            caller,
        )

    def _owners(self, step: int | None) -> tuple[Optimizer, ...]:
        """The guarded optimizers, whose tensors may be copied while training goes on."""
        owners = tuple(optimizer for each in self._guards for optimizer in each.optimizers)
        if not owners:
            raise UsageError(
                "until='captured' needs a guarded optimizer: nothing else keeps a step from "
                "changing what is still to be copied",
                step=step,
                hint="Open the pipeline with guard=optimizer, or save with until='staged'",
            )
        return owners

    def should_save(self, step: int) -> bool:
        """Whether the settings ask for a save at a step."""
        engine, together = self.engine, self._topology.world_size > 1
        _check_step(step)
        called = engine.diary.ask(step) if together else frozenset()
        if END in called:
            self.preemption.arrive()
        if self.preemption.told:
            return self.preemption.wants_save
        if not engine.cadence.is_set and not self.settings.preemption.enabled:
            raise SettingsError(
                "Nothing says when to save",
                step=step,
                hint="Set save_every_steps, save_every_seconds or preemption",
            )
        if together:  # whose clocks count only as all have agreed
            return bool(called) or engine.cadence.is_marked(step)
        return engine.cadence.due(step)

    def preempt(self) -> None:
        """Has the loop told that this process will be stopped."""
        if self._topology.world_size > 1 and not self.settings.preemption.enabled:
            raise UnsupportedTopology(
                "The other ranks do not look whether one of them is preempted",
                rank=self._topology.rank,
                hint="Open the pipeline with preemption=True on all ranks",
            )
        self.preemption.tell()

    def load_request(
        self,
        into: Any,
        select: LabelFilter,
        *,
        strict: bool,
        cast: bool,
        per_rank: PerRankPolicy,
        pickle: str,
    ) -> LoadRequest:
        """Checks what ``load`` was given."""
        if pickle not in ("refuse", "allow"):
            raise UsageError(f"pickle is 'refuse' or 'allow', not {pickle!r}")
        if not callable(per_rank) and per_rank not in ("raise", "drop", "rank0"):
            raise UsageError(
                f"per_rank is 'raise', 'drop', 'rank0' or a function, not {per_rank!r}"
            )
        self.lock.check_capture_allowed()
        return LoadRequest(into, select, strict, cast, pickle == "allow", per_rank)

    def statistics(self) -> Statistics:
        """What was done so far, in numbers; in any thread and at any time."""
        engine = self._engine
        return self._ledger.statistics(
            engine.under_way() if engine else {},
            lanes=self.settings.upload.lanes,
            budget=engine.budget() if engine and self._loop else (0, 0, 0),
        )

    def __repr__(self) -> str:
        inside = self._engine.describe() if self._engine and self._loop else "closed"
        past = str(self._ledger)
        return f"{self.settings.url} [{inside}{' | ' if past else ''}{past}]"


def which(checkpoint: Which) -> int | str:
    """The step or id that names a checkpoint."""
    return checkpoint.id if isinstance(checkpoint, CheckpointInfo) else checkpoint


def raise_or_warn(failures: list[Exception], on_error: Literal["raise", "warn"]) -> None:
    """Brings failures of the background before the user."""
    if on_error == "warn":
        for each in failures:
            warnings.warn(f"A checkpoint failed: {each}", RuntimeWarning, stacklevel=3)
        return
    if failures:
        error = failures[0]
        for other in failures[1:]:
            error.add_note(f"Besides: {other!r}")
        raise error


def _check_step(step: int) -> None:
    if type(step) is not int or not 0 <= step < 10**12:
        raise UsageError(f"A step is an int from 0 to 10**12 - 1, not {step!r}")


def _optimizers(guards: Guarded) -> tuple[Optimizer, ...]:
    if guards is None:
        return ()
    return (guards,) if isinstance(guards, Optimizer) else tuple(guards)


def _metrics(metrics: Mapping[str, float], step: int | None) -> dict[str, Any]:
    try:
        return {str(name): encode_float(float(value)) for name, value in metrics.items()}
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(f"Metrics are numbers by name: {error}", step=step) from error


def _metadata(metadata: Mapping[str, Any], step: int | None) -> dict[str, Any]:
    try:
        plain = json.loads(json.dumps(dict(metadata), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"Metadata must be plain JSON: {error}", step=step, hint="Put other things in the state"
        ) from error
    assert isinstance(plain, dict)
    return plain
