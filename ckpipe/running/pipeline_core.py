"""The core of the awaiting and the blocking pipeline: everything but how they wait."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

from torch.optim import Optimizer

from ckpipe.backend import without_secrets
from ckpipe.errors import (
    PermissionDenied,
    PipelineClosed,
    SettingsError,
    UnsupportedTopology,
    UsageError,
)
from ckpipe.events import Event, EventBus
from ckpipe.format import checksum
from ckpipe.format.keys import LabelFilter
from ckpipe.loading.load import LoadRequest
from ckpipe.loading.select import PerRankPolicy
from ckpipe.lock.guard import Guarded, StepGuard, guard, optimizers_of
from ckpipe.lock.holds import LoadHold
from ckpipe.lock.lock import StateLock, lock_of
from ckpipe.loop_thread import Caller, LoopThread, call_at_exit, this_loop
from ckpipe.ranks.schedule import Preemption, SignalWatch
from ckpipe.ranks.topology import ALONE, find_topology
from ckpipe.running.announcing import END
from ckpipe.running.calls import (
    check_load,
    check_until,
    has_failed,
    note_failures,
    plain_metadata,
    plain_metrics,
    raise_or_warn,
)
from ckpipe.running.engine import Engine
from ckpipe.running.hooks import Hooks, in_hook
from ckpipe.running.statistics import Ledger, Statistics
from ckpipe.save.save import Save, SaveRequest, StagedBlock
from ckpipe.settings import Settings
from ckpipe.worker.crossing import refuse_to_train_as_worker

logger = logging.getLogger("ckpipe")
T = TypeVar("T")
E = TypeVar("E", bound=Event)
Hook = Callable[[E], object]
"""A function or coroutine function of the user's that takes an event."""


class PipelineCore:
    """A pipeline's settings, lock and thread.

    Args:
        url: Where checkpoints lie.
        guards: The optimizers to guard from the beginning.
        state_lock: The lock of the state; None for one of its own.
        settings: Settings to start from.
        fields: Settings that go before those.
    """

    def __init__(
        self,
        url: str | os.PathLike[str] | None,
        guards: Guarded,
        state_lock: StateLock | None,
        settings: Settings | None,
        fields: Mapping[str, Any],
    ) -> None:
        self.lock = lock_of(state_lock, fields)
        given = dict(fields) if url is None else {"url": os.fspath(url), **fields}
        self.settings = Settings(**given) if settings is None else settings.override(**given)
        if not self.settings.url:
            raise SettingsError(
                "No url is set", hint="Say where checkpoints go: Pipeline('/ckpts')"
            )
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
        self._guarded = optimizers_of(guards)
        self._process = os.getpid()
        self._closing = False
        self._at_exit: Callable[[], None] = lambda: None
        self._life = threading.RLock()

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

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """Put the handlers of signals back once the pipeline is closed.

        Raises:
            UsageError: If a hook of this pipeline leaves it, which would wait for itself.
        """
        if in_hook() and self.hooks.describe_running():
            raise UsageError(
                "A hook cannot close its pipeline, since closing waits for the hook",
                hint="Close it on the thread that trains",
            )
        try:
            yield
        finally:
            self.unwatch()

    def unwatch(self) -> None:
        """Puts the handlers of signals back."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.end()

    def open(self) -> None:
        """Starts the thread and opens the store; blocking."""
        with self._life:
            if self._loop is not None:
                self._check_process()
            elif self._engine is not None:
                raise PipelineClosed(
                    "A pipeline is opened once", hint="Make a new one to go on saving"
                )
            else:
                self._start()

    def _start(self) -> None:
        refuse_to_train_as_worker()
        checksum.prepare()
        topology = self._topology = ALONE if self.settings.solo else find_topology()
        self._process = os.getpid()
        self._loop = LoopThread("ckpipe")
        self.preemption.alone = topology.world_size == 1
        self._engine = Engine(
            self.settings, self.lock, self.events, topology, self.hooks, self.preemption
        )
        try:
            self._served, _ = self._loop.portal.start_task(self._engine.serve)
            if self._guarded:
                self.guard(*self._guarded)
        except BaseException:
            self._shut(LoopThread.abandon)
            raise
        self._at_exit = call_at_exit(self._close_at_exit)

    def close(self, *, failed: bool) -> list[Exception]:
        """Lets saves finish and closes; returns failures that no call has seen; blocking.

        Args:
            failed: Whether the caller leaves on an exception: only staged saves finish then.
        """
        if self._forked:
            return []
        with self._life:
            if self._loop is None or self._closing:  # by the thread that a signal interrupted
                return []
            return self._drain(failed=failed)

    def _drain(self, *, failed: bool) -> list[Exception]:
        assert self._loop is not None
        assert self._engine is not None
        assert self._served is not None
        failures: list[Exception] = []
        try:
            interrupt = self._await_saves(self._engine, failed=failed)
            failures = self._loop.at_once(self._engine.take_failures)
            self.submit(self._engine.stop).result()
            self._served.result()
        except BaseException as error:
            # An interrupt of this waiting, which ends it.
            for save in self._engine.under_way():
                if not save.committed.done():
                    error.add_note(f"Leaving did not wait for the save of step {save.id.step}")
            note_failures([*failures, *self._engine.take_failures()], error)
            self._shut(LoopThread.abandon)
            raise
        self._shut(LoopThread.close)
        if interrupt is not None:
            note_failures(failures, interrupt)
            raise interrupt
        return failures

    def _await_saves(self, engine: Engine, *, failed: bool) -> BaseException | None:
        """Wait for the saves; a first interrupt bounds the waiting and is returned."""
        drained: Future[None] | None = None
        interrupt: BaseException | None = None
        while True:
            try:
                self._closing = True
                if drained is None:
                    drained = self.submit(engine.drain, staged_only=failed)
                drained.result()
                return interrupt
            except BaseException as error:
                if failed or interrupt is not None or (drained is not None and drained.done()):
                    raise
                interrupt = error
                self.hurry()
                logger.warning(
                    "Interrupted: saves have %g s to end, and another interrupt gives them up",
                    self.settings.drain_timeout_seconds,
                )

    def hurry(self) -> None:
        """Have ``drain_timeout_seconds`` count from now on, since the program is interrupted."""
        loop, engine = self._loop, self._engine
        if loop is not None and engine is not None and not self._forked:
            loop.post(engine.hurry)

    def _shut(self, end: Callable[[LoopThread], None]) -> None:
        self._at_exit()
        for each in self._guards:
            each.remove()
        loop, self._loop = self._loop, None
        if loop is not None:
            end(loop)

    def _close_at_exit(self, error: BaseException | None) -> None:
        """Close a pipeline that is open when the program ends, as leaving it would do.

        Args:
            error: The exception that ends the program; None for a normal end.
        """
        if self._forked or self._loop is None or self._engine is None:
            return
        saves = [each for each in self._engine.under_way() if not each.committed.done()]
        if saves:
            logger.info(
                "The program ends and waits for %d saves of %s, which was not closed: steps %s",
                len(saves),
                self._shown_url,
                ", ".join(str(each.id.step) for each in saves),
            )
        with self.leaving():
            failures = self.close(failed=error is not None)
        for each in failures:
            logger.error("A checkpoint failed: %s", each)

    @property
    def _forked(self) -> bool:
        """Tell whether this process was forked from the pipeline's, whose thread it does not
        have.
        """
        return os.getpid() != self._process

    @property
    def engine(self) -> Engine:
        """The engine that lives on the loop.

        Raises:
            PipelineClosed: If the pipeline is not open, or has failed.
        """
        if self._loop is None or self._engine is None:
            if self._engine is None:
                raise PipelineClosed(
                    "The pipeline is not open yet",
                    hint="Use it inside its (async) with block, or call open() first",
                )
            raise PipelineClosed(
                "The pipeline is closed",
                hint="Use it inside its (async) with block, or make a new one to go on",
            )
        self._check_process()
        if self._served is not None and not self._closing and not self._engine.serves:
            raise has_failed(self._served)
        return self._engine

    def _check_process(self) -> None:
        if self._forked:
            raise PipelineClosed(
                "The pipeline belongs to the process that this one was forked from",
                hint="Open another pipeline in this process",
            )

    def submit(self, function: Callable[..., Awaitable[T]], *args: Any, **kwargs: Any) -> Future[T]:
        """Starts a coroutine function on the pipeline's loop, from another thread."""
        return self._open_loop().submit(function, *args, **kwargs)

    async def run(self, function: Callable[..., Awaitable[T]], *args: Any, **kwargs: Any) -> T:
        """Runs a coroutine function on the pipeline's loop, and awaits it on any."""
        return await self._open_loop().run(function, *args, **kwargs)

    def begin(self, request: SaveRequest, step: int | None) -> Save:
        """Has the pipeline accept a save; blocking."""
        loop = self._open_loop()
        loop.refuse_here()
        return loop.call(self.engine.begin, request, step)

    @contextmanager
    def while_it_copies(self, request: SaveRequest) -> Iterator[None]:
        """Gives a save up if its caller leaves on an exception before it may change the state."""
        try:
            yield
        except BaseException:
            if self._loop is not None and self._engine is not None and not self._forked:
                leave = self._engine.leave
                if self._loop.is_here:  # a walk in a thread may end before a posted call
                    leave(request)
                else:
                    self._loop.post(leave, request)
            raise

    def call(self, function: Callable[..., Awaitable[T]], *args: Any, **kwargs: Any) -> T:
        """Runs a coroutine function on the pipeline's loop; blocking."""
        return self._open_loop().call(function, *args, **kwargs)

    def calling_task(self) -> AbstractContextManager[Caller | None]:
        """Have user code run in the calling task; in a thread where a hook runs on this loop."""
        own = self._loop is not None and self._loop.is_here
        return nullcontext() if own else Caller(this_loop())

    def refuse_in_vain(self) -> None:
        """Raises an error where waiting would never end: on the loop, and in a forked process."""
        self._check_process()
        if self._loop is not None:
            self._loop.refuse_here()

    def _open_loop(self) -> LoopThread:
        if self._loop is None:
            raise PipelineClosed("The pipeline is closed", hint="Make a new one to go on")
        self._check_process()
        return self._loop

    def guard(self, *optimizers: Optimizer) -> None:
        """Has every step of these optimizers hold the lock's mutating side, until closing."""
        self._guards.append(guard(self.lock, *optimizers))

    def saw(self, error: Exception) -> None:
        """Notes that a caller was told of a save's failure."""
        if self._loop is not None and self._engine is not None:
            self._loop.at_once(self._engine.see, error)

    def report_failures(self) -> None:
        """Raise, or warn of, failed saves that no call has reported."""
        if self.engine.has_failures:
            failures = self._open_loop().at_once(self.engine.take_failures)
            raise_or_warn(failures, self.settings.on_error)

    def give_back(self, save: Save, held: list[StagedBlock]) -> None:
        """Gives staging memory back that a caller has looked at; blocking."""
        if self._loop is not None and self._engine is not None:  # else it went with the pipeline
            self._loop.submit(self._engine.release_staged, save, held).result()

    # Saves and loads

    def request(
        self,
        state: Any,
        step: int | None,
        until: str,
        metrics: Mapping[str, float] | None,
        metadata: Mapping[str, Any] | None,
        select: LabelFilter,
        final: bool,
        caller: Caller | None,
    ) -> SaveRequest:
        """Checks what ``save`` was given, on the caller's thread, once failures are told."""
        self.report_failures()
        if self._closing and not in_hook():  # whose saves are waited for
            hint = "Make a new one to go on saving"
            raise PipelineClosed("The pipeline was closed meanwhile", step=step, hint=hint)
        if self.settings.read_only:
            raise PermissionDenied(
                "The pipeline was opened to read only",
                step=step,
                hint="Open one without read_only=True to save",
            )
        if state is None:
            raise UsageError(
                "There is no state to save: it is None",
                step=step,
                hint="Pass what is to be saved, such as a dict of model and optimizer",
            )
        check_until(until, step)
        owners = self._owners(step) if until == "captured" else ()
        self.lock.check_capture_allowed()
        return SaveRequest(
            state,
            select,
            plain_metrics(metrics, step) if metrics else {},
            plain_metadata(metadata, step) if metadata else {},
            final,
            threading.get_ident(),
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

    def should_save(self, step: int, last: int | None) -> bool:
        """Tell whether the settings ask for a save at a step."""
        engine, together = self.engine, self._topology.world_size > 1
        called = engine.diary.ask(step) if together else frozenset()
        if END in called:
            self.preemption.arrive()
        if self.preemption.told:
            return self.preemption.wants_save
        if engine.cadence.is_last(step, last):
            return True
        if last is None and not engine.cadence.is_set and not self.settings.preemption.enabled:
            raise SettingsError(
                "Nothing says when to save",
                step=step,
                hint="Set save_every_steps, save_every_seconds or preemption, or pass last",
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
        per_rank: PerRankPolicy | None,
        pickle: str,
        caller: Caller | None,
    ) -> LoadRequest:
        """Checks what ``load`` was given, on the caller's thread."""
        per_rank = self.settings.per_rank if per_rank is None else per_rank
        check_load(per_rank, pickle)
        hold = None if into is None else LoadHold(self.lock, caller)
        interval = self.settings.switch_interval_seconds
        return LoadRequest(
            into, select, strict, cast, pickle == "allow", per_rank, hold, caller, interval
        )

    def statistics(self) -> Statistics:
        """The work so far, in numbers; in any thread and at any time."""
        engine = self._engine
        return self._ledger.statistics(
            engine.under_way() if engine else [],
            lanes=self.settings.upload.lanes,
            budget=engine.budget() if engine and self._loop else (0, 0, 0),
        )

    def __getstate__(self) -> object:
        """Refuses copies.

        Raises:
            TypeError: Always.
        """
        raise TypeError(
            "A pipeline can be neither copied nor pickled: it has a thread and files of its own. "
            "Open another one where it is needed, with the same settings"
        )

    @property
    def _shown_url(self) -> str:
        return without_secrets(str(self.settings.url))

    def __repr__(self) -> str:
        engine = self._engine
        past = self._ledger.describe(engine.under_way() if engine else [])
        inside = engine.describe() if engine and self._loop else "closed"
        return f"{self._shown_url} [{inside}{' | ' if past else ''}{past}]"
