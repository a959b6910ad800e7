"""The common base of :class:`~ckpipe.Pipeline` and :class:`~ckpipe.SyncPipeline`.

They differ only in how their methods wait.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from threading import Thread
from typing import Any, SupportsIndex, TypeVar, Unpack

import torch
from torch.optim import Optimizer

from ckpipe.backend import without_secrets
from ckpipe.errors import (
    CheckpointNotFound,
    PipelineClosed,
    SettingsError,
    StoreError,
    UnsupportedTopology,
    UsageError,
    naming_refusals,
)
from ckpipe.events import Completed, Event, EventBus, RankCommitted, SaveFailed, Staged
from ckpipe.format import checksum
from ckpipe.loading.request import LoadOptions, LoadRequest
from ckpipe.lock.guard import Guarded, StepGuard, guard, optimizers_of, swapped
from ckpipe.lock.state_lock import LoadHold, StateLock, lock_of
from ckpipe.loop_thread import Caller, LoopThread, call_at_exit
from ckpipe.notebook import html_table
from ckpipe.options import completed
from ckpipe.preemption.last_save import LastSave, LastState
from ckpipe.preemption.signals import SignalWatch, StopRequest
from ckpipe.ranks.world import ALONE, Topology, World
from ckpipe.running.coordinated_saves import END
from ckpipe.running.engine import Engine, serve
from ckpipe.running.listeners import Hooks, Statistics, StatisticsRecorder, in_hook
from ckpipe.running.validation import (
    absolute,
    check_savable,
    failure_text,
    has_failed,
    location,
    note_failures,
    place_of_call,
    plain_step,
    raise_or_warn,
)
from ckpipe.save.request import SaveCall, SaveOptions, SaveRequest
from ckpipe.save.save import Save
from ckpipe.settings import PipelineFields, Settings
from ckpipe.transforms.transform import transforms_of
from ckpipe.worker.crossing import refuse_to_train_as_worker

logger = logging.getLogger("ckpipe")
E = TypeVar("E", bound=Event)
Hook = Callable[[E], object]
"""The user's function or coroutine function that takes an event."""


def _close_at_exit(
    reference: weakref.ref[PipelineBase], dropped: list[PipelineBase], error: BaseException | None
) -> None:
    found = next(iter(dropped), None) or reference()
    if found is not None:
        found._close_unattended(error)


class PipelineBase:
    """A pipeline without its ways to wait."""

    _loop: LoopThread | None = None
    _ranks: Topology | None = None
    """The rank and the number of ranks, if an integration gives them; None to find them."""

    def __init__(
        self,
        url: str | os.PathLike[str] | None = None,
        *,
        guard: Guarded = None,
        state_lock: StateLock | None = None,
        settings: Settings | None = None,
        **fields: Unpack[PipelineFields],
    ) -> None:
        given: dict[str, Any] = {**fields}
        if (place := location(url)) is not None:
            given = {"url": place, **given}
        self._lock = lock_of(state_lock, fields)
        self._settings = Settings(**given) if settings is None else settings.override(**given)
        if not self._settings.url:
            raise SettingsError(
                "No url is set", hint="Say where checkpoints go: Pipeline('/ckpts')"
            )
        self._url = without_secrets(self._settings.url)
        transforms_of(self._settings.export.transform)
        self._events = EventBus()
        self._hooks = Hooks(self._events)
        self._recorder = StatisticsRecorder()
        self._events.add(self._recorder)
        self._preemption = StopRequest()
        self._watch = SignalWatch(self._settings.preemption.signals, self._preemption.tell)
        self._last_state = LastState(self._preemption)
        self._topology = ALONE
        self._guards: list[StepGuard] = []
        self._guarded = optimizers_of(guard)
        self._opened_at = ""
        self._opened: Engine | None = None
        self._served: Future[None] | None = None
        self._process = os.getpid()
        self._closing = False
        self._at_exit: Callable[[], None] = lambda: None
        self._dropped: list[PipelineBase] = []
        """This pipeline from when it is dropped until it is closed."""
        self._life = threading.RLock()

    def should_save(self, step: SupportsIndex, *, last: SupportsIndex | None = None) -> bool:
        """Tell whether to save at this step, by ``save_every_steps`` and ``save_every_seconds``.

        Once :attr:`preempted`, it is True until a save has begun, and False from then on.

        Takes microseconds and sends no request to other ranks. Several ranks save at the same step
        if each calls it after every step: when the time of the first is up, and when any of them is
        preempted. If a rank reaches that step before all have agreed on it, the call waits for
        them, for a minute at most.

        A mark that was skipped, or passed before a crash, is made up for at the next call. A call
        changes nothing: the answer stays True until a save has begun.

        Args:
            step: The step that has just been taken.
            last: The last step of the run, at which it is True too until a save has begun; the
                same on all ranks.

        Raises:
            SettingsError: If neither is set, preemption is not either, and ``last`` is not given.
            UnsupportedTopology: If a save would raise it.
            PipelineClosed: If the pipeline is not open.
        """
        final = None if last is None else plain_step(last)
        taken, saves, together = plain_step(step), self._engine.saves, self._topology.world_size > 1
        self._engine.world.check(saves=True, step=taken)
        called = saves.agreement.ask(taken) if together else frozenset()
        if self._settings.preemption.enabled:
            self._watch.renew()
            self._last_state.tell(taken, self._guards)
        if END in called:
            self._preemption.arrive()
        if self._preemption.told:
            return self._preemption.wants_save
        if saves.schedule.is_last(taken, final):
            return True
        if last is None and not saves.schedule.is_set and not self._settings.preemption.enabled:
            raise SettingsError(
                "No setting says when to save",
                step=taken,
                hint="Set save_every_steps, save_every_seconds or preemption, or pass last",
            )
        if together:  # a clock counts only once all ranks have agreed
            return bool(called) or saves.schedule.is_marked(taken)
        return saves.schedule.due(taken)

    @property
    def preempted(self) -> bool:
        """True if this process will be stopped, after a signal or a call of :meth:`preempt`.

        With several ranks, one signal is enough: the ranks agree on a step to save, and this is
        True on all of them once each has called :meth:`should_save` for that step.

        The next save waits for memory, even if ``on_busy`` would skip it; after it
        :meth:`should_save` is False. The end of the ``with`` block then waits for saves for
        ``preemption.grace_seconds`` after the signal at most.
        """
        self._watch.renew()
        return self._preemption.told

    def preempt(self) -> None:
        """Announce that this process will be stopped soon, as one of ``preemption.signals`` does.

        For notices of preemption that are no signal; any thread may call it.

        Raises:
            UnsupportedTopology: If several ranks save together and ``preemption`` is not set.
        """
        if self._topology.world_size > 1 and not self._settings.preemption.enabled:
            raise UnsupportedTopology(
                "The other ranks do not look whether one of them is preempted",
                rank=self._topology.rank,
                hint="Open the pipeline with preemption=True on all ranks",
            )
        self._preemption.tell()

    def on_staged(self, hook: Hook[Staged]) -> Hook[Staged]:
        """Call a function whenever a state has been copied, also while ``save`` awaits the commit.

        A plain function runs in a thread of its own. A coroutine function runs on the pipeline's
        own event loop, which it must not block; an awaitable that a plain function returns is
        awaited there too. No save waits for the function. It is called once the call of ``save``
        has returned or raised, and for one event after the other, in their order. Leaving the
        pipeline waits for saves that it begins, and then for the function, for
        ``drain_timeout_seconds`` at most; for a call of ``save`` that has not returned by then, a
        hook waits a second more at most. Its errors are logged, and raise or warn like a failed
        save that no call waited for.

        Args:
            hook: Takes the event.

        Returns:
            The hook, so that this works as a decorator.
        """
        self._hooks.add(hook, Staged)
        return hook

    def on_committed(self, hook: Hook[RankCommitted]) -> Hook[RankCommitted]:
        """Call a function whenever this rank's files are durable; see :meth:`on_staged`."""
        self._hooks.add(hook, RankCommitted)
        return hook

    def on_complete(self, hook: Hook[Completed]) -> Hook[Completed]:
        """Call a function whenever a checkpoint is complete; see :meth:`on_staged`."""
        self._hooks.add(hook, Completed)
        return hook

    def on_failed(self, hook: Hook[SaveFailed]) -> Hook[SaveFailed]:
        """Call a function whenever a save failed or was cancelled; see :meth:`on_staged`."""
        self._hooks.add(hook, SaveFailed)
        return hook

    def statistics(self) -> Statistics:
        """Count the work so far: saves, bytes, seconds and waits by stage, memory.

        Takes microseconds, in any thread, and also before opening and after closing.
        """
        return self._recorder.statistics(
            self._under_way(),
            lanes=self._settings.upload.lanes,
            context=self._opened.context if self._opened and self._loop else None,
        )

    def guard(self, *optimizers: Optimizer) -> None:
        """Make every ``step()`` of these optimizers wait for copies under way, until closing."""
        self._guards.append(guard(self._lock, *optimizers))

    def swapped(
        self, tensors: Iterable[torch.Tensor], values: Iterable[torch.Tensor]
    ) -> AbstractContextManager[None]:
        """Give tensors other values inside a ``with`` block, such as averaged weights for a test.

        For example ``with pipeline.swapped(model.parameters(), average.parameters()):`` around an
        evaluation. No checkpoint gets the other values: the block waits for copies under way as a
        guarded step does, and then holds :attr:`lock` as ``lock.mutating()`` does. Saves of other
        threads wait for its end. At its end, also after an exception, the tensors have their own
        values again, bit for bit. Until then a copy of these lies on their device.

        Args:
            tensors: The tensors to change, such as ``model.parameters()``.
            values: A value for each of them, in the same order, which does not share its memory. It
                is converted to the tensor's dtype and device.

        Raises:
            UsageError: On entry, if their numbers or shapes differ, or one is no tensor. Nothing is
                changed then.
            LockMisuse: On entry, if this thread is capturing the state, as a ``state_dict`` does
                that a save calls; and by a save on this thread inside the block.
        """
        # Lists, since a decorator enters the block at each call and an iterator serves only once.
        return swapped(self._lock, list(tensors), list(values))

    @property
    def lock(self) -> StateLock:
        """The lock between code that changes the state and saves that copy it."""
        return self._lock

    @property
    def url(self) -> str:
        """The root of the checkpoints: a URL without credentials, or, once opened, a whole path.

        ``f"{pipeline.url}/{info.id}"`` is the address of a checkpoint, for trackers and notes.
        """
        return self._url

    @property
    def settings(self) -> Settings:
        """The settings in force."""
        return self._settings

    @property
    def events(self) -> EventBus:
        """The typed events of this pipeline; see :mod:`ckpipe.events`."""
        return self._events

    def __getstate__(self) -> object:
        raise TypeError(
            "A pipeline can be neither copied nor pickled: it has a thread and files of its own. "
            "Open another one where it is needed, with the same settings"
        )

    def __repr__(self) -> str:
        past = self._recorder.describe(self._under_way())
        text = f"{self.url} [{self._inside()}{' | ' if past else ''}{past}]"
        return f"<{type(self).__name__} {text}>"

    def _repr_html_(self) -> str:
        rows = [("root", self.url), ("state", self._inside()), *self.statistics()._rows()]
        return html_table(type(self).__name__, rows)

    def _inside(self) -> str:
        return self._opened.describe() if self._opened and self._loop else "closed"

    def _under_way(self) -> list[Save]:
        return self._opened.saves.under_way() if self._opened else []

    # Opening and closing

    @property
    def _engine(self) -> Engine:
        """Return the engine of the open pipeline.

        Raises:
            PipelineClosed: If the pipeline is not open, or has failed.
        """
        if self._opened is None:
            raise PipelineClosed(
                "The pipeline is not open yet",
                hint="Use it inside its (async) with block, or call open() first",
            )
        if self._loop is None:
            raise PipelineClosed(
                "The pipeline is closed",
                hint="Use it inside its (async) with block, or make a new one to go on",
            )
        self._check_process()
        if self._served is not None and not self._closing and not self._opened.serves:
            raise has_failed(self._served)
        return self._opened

    @property
    def _is_closed(self) -> bool:
        """True if the pipeline was open and is closed: all its saves have ended."""
        return self._opened is not None and self._loop is None

    def _store_alone(self) -> Settings:
        """Return settings to open the store of this closed pipeline again, for one question."""
        return self._settings.override(
            solo=True, attempt_id=None, plan="local", worker="thread", preemption=False
        )

    @property
    def _forked(self) -> bool:
        """True if this process was forked from the pipeline's process: it lacks the thread."""
        return os.getpid() != self._process

    def _check_process(self) -> None:
        if self._forked:
            raise PipelineClosed(
                "The pipeline belongs to the process that this one was forked from",
                hint="Open another pipeline in this process",
            )

    def _refuse_to_wait_in_vain(self) -> None:
        """Raise if waiting would never end: on the loop, and in a forked process."""
        self._check_process()
        if self._loop is not None:
            self._loop.refuse_here()

    @contextmanager
    def _opening(self) -> Iterator[None]:
        """Watch signals while the pipeline is opened, and from then on if that succeeds.

        Raises:
            CheckpointNotFound: If it only reads, and its folder is absent.
            UsageError: If there are signals to watch and this is not the main thread.
        """
        if self._opened is None:
            self._opened_at = place_of_call()
        if self._opened is None and self._settings.preemption.enabled:
            # A new watch: another library's handler may call that of a failed open.
            self._watch = SignalWatch(self._settings.preemption.signals, self._preemption.tell)
            self._watch.begin()
        try:
            yield
        except BaseException as error:
            if self._loop is None:
                self._watch.end()
            absent = isinstance(error.__cause__, FileNotFoundError)
            if absent and isinstance(error, StoreError) and self._settings.read_only:
                message = f"{error.message}, and so no checkpoint"
                raise CheckpointNotFound(message, hint=error.hint) from error
            raise

    @contextmanager
    def _leaving(self) -> Iterator[None]:
        """Restore the handlers of signals once the pipeline is closed.

        Raises:
            UsageError: If a hook of this pipeline leaves it: the hook would wait for itself.
        """
        if in_hook() and self._hooks.describe_running():
            raise UsageError(
                "A hook cannot close its pipeline, since closing waits for the hook",
                hint="Close it on the thread that trains",
            )
        try:
            yield
        finally:
            self._watch.end()

    def _open(self) -> None:
        """Start the thread and open the store; blocking."""
        with self._life:
            if self._loop is not None:
                self._check_process()
                return
            if self._opened is not None:
                raise PipelineClosed(
                    "A pipeline is opened once", hint="Make a new one to go on saving"
                )
            self._url = absolute(self._url)
            refuse_to_train_as_worker()
            checksum.prepare()
            world = World(self._settings, given=self._ranks)
            self._topology = world.topology
            self._preemption.alone = self._topology.world_size == 1
            self._process = os.getpid()
            self._loop = loop = LoopThread("ckpipe")
            try:
                with naming_refusals():
                    self._served, self._opened = loop.portal.start_task(
                        serve,
                        self._settings,
                        self._lock,
                        self._events,
                        world,
                        self._hooks,
                        self._preemption,
                        loop,
                    )
                if self._guarded:
                    self.guard(*self._guarded)
            except BaseException:
                self._shut(cancel=True)
                self._opened = None
                raise
            # By a weak reference, so that a pipeline that is dropped is closed at once.
            self._at_exit = call_at_exit(partial(_close_at_exit, weakref.ref(self), self._dropped))

    def _close(self, *, failed: bool) -> list[Exception]:
        """Let saves finish and close; return failures that no call has seen; blocking.

        Args:
            failed: True if the caller leaves on an exception: only staged saves finish then.
        """
        if self._forked:
            return []
        with self._life:
            if self._loop is None or self._closing:  # in the call that this signal interrupted
                return []
            engine, served = self._opened, self._served
            assert engine is not None
            assert served is not None
            failures: list[Exception] = []
            try:
                interrupt = self._await_saves(engine, failed=failed)
                failures = engine.saves.take_failures()
                engine.loop.submit(engine.stop).result()
                served.result()
                failures += engine.saves.take_failures()
            except BaseException as error:
                # An interrupt ends the wait.
                for save in engine.saves.under_way():
                    if not save.committed.done():
                        error.add_note(f"Leaving did not wait for the save of step {save.id.step}")
                note_failures([*failures, *engine.saves.take_failures()], error)
                self._shut(cancel=True)
                raise
            self._shut(cancel=False)
            if interrupt is not None:
                note_failures(failures, interrupt)
                raise interrupt
            return failures

    def _await_saves(self, engine: Engine, *, failed: bool) -> BaseException | None:
        """Wait for the saves; the first interrupt bounds the wait and is returned."""
        drained: Future[None] | None = None
        interrupt: BaseException | None = None
        while True:
            try:
                self._closing = self._hooks.closing = True
                if drained is None:
                    drained = engine.loop.submit(engine.drain, staged_only=failed)
                drained.result()
                return interrupt
            except BaseException as error:
                if failed or interrupt is not None or (drained is not None and drained.done()):
                    raise
                interrupt = error
                self._hurry()
                logger.warning(
                    "Interrupted: saves have %g s to end, and another interrupt gives them up",
                    self._settings.drain_timeout_seconds,
                )

    def _last_save(self, error: BaseException | None) -> LastSave | None:
        """Return the save to make before leaving; warn of steps that are lost."""
        if self._opened is None or self._loop is None or self._closing or self._forked:
            return None
        if not self._settings.preemption.enabled or self._settings.read_only:
            return None
        last = self._last_state.take(error, self._guards, self._opened.saves.schedule)
        if last is not None and error is not None:  # else the save would raise them, and not begin
            note_failures(self._opened.saves.take_failures(), error)
        return last

    def _hurry(self) -> None:
        """Apply ``drain_timeout_seconds`` from now on, since the program is interrupted."""
        if self._loop is not None and self._opened is not None and not self._forked:
            self._opened.hurry()

    def _shut(self, *, cancel: bool) -> None:
        self._at_exit()
        self._dropped.clear()
        while self._guards:
            self._guards.pop().remove()
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.close(cancel=cancel)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """Close a pipeline that is dropped while it is open, in the background: saves take long."""
        # An argument: when the program ends, this module may be gone. By then all are closed.
        if self._loop is None or is_finalizing() or self._forked:
            return
        # Keeps it alive. A new call at exit would come too late if the program ends already.
        self._dropped.append(self)
        with contextlib.suppress(RuntimeError):  # the program ends, and starts no more threads
            Thread(target=self._close_unattended, name="ckpipe closing", daemon=True).start()
        warnings.warn(
            f"The pipeline {self.url}, opened at {self._opened_at}, was dropped and not "
            "closed. It is closed in the background, once its saves are durable. Use it in a "
            "with block, or close it before you open another",
            ResourceWarning,
            stacklevel=2,
        )

    def _close_unattended(self, error: BaseException | None = None) -> None:
        """Close a pipeline that was dropped, or is open when the program ends, as its block would.

        Args:
            error: The exception that ends the program; None for a normal end.
        """
        if self._forked or self._loop is None:
            return
        saves = [each for each in self._under_way() if not each.committed.done()]
        if saves:
            logger.info(
                "Waiting for %d saves of %s, which was not closed: steps %s",
                len(saves),
                self.url,
                ", ".join(str(each.id.step) for each in saves),
            )
        with self._leaving():
            failures = self._close(failed=error is not None)
        for each in failures:
            logger.error("%s", failure_text(each))

    # Saves and loads

    def _save_request(
        self,
        state: Any,
        step: SupportsIndex | None,
        caller: Caller | None,
        call: SaveCall,
        options: SaveOptions,
    ) -> SaveRequest:
        """Check the arguments of ``save``, and report earlier failures; on the caller's thread."""
        options = completed(f"{type(self).__name__}.save", SaveOptions, options)
        number = None if step is None else plain_step(step)
        request = SaveRequest(state, number, self._settings, self._guards, caller, call, **options)
        raise_or_warn(self._engine.saves.take_failures(), self._settings.on_error)
        if self._closing and not in_hook():  # closing waits for saves of hooks
            hint = "Make a new one to go on saving"
            raise PipelineClosed("The pipeline was closed meanwhile", step=number, hint=hint)
        check_savable(state, number, read_only=self._settings.read_only)
        self._engine.world.check(saves=True, step=number)
        self._lock.check_capture_allowed()
        if self._settings.preemption.enabled:
            self._last_state.saves(state, options, self._guards)
        request.urgent = self._preemption.answer()
        return request

    @contextmanager
    def _while_it_copies(self, request: SaveRequest) -> Iterator[None]:
        """Give a save up if its caller leaves on an exception before it may change the state."""
        try:
            yield
        except BaseException:
            if self._loop is not None and self._opened is not None and not self._forked:
                leave = self._opened.saves.leave
                if self._loop.is_here:  # a walk in a thread may end before a posted call
                    leave(request)
                else:
                    self._loop.post(leave, request)
            raise

    def _load_request(self, into: Any, caller: Caller | None, options: LoadOptions) -> LoadRequest:
        """Check the arguments of ``load``; on the caller's thread."""
        options = completed(f"{type(self).__name__}.load", LoadOptions, options)
        request = LoadRequest(into, self._settings, caller, **options)
        self._engine.world.check(saves=False)
        if self._settings.preemption.enabled:
            self._last_state.loads(into, self._guards)
        request.hold = None if into is None else LoadHold(self._lock, caller)
        return request
