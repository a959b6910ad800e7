"""The two classes that users call: one for async code, one with the same methods that block."""

from __future__ import annotations

import inspect
import os
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, Literal, NoReturn, Self, SupportsIndex, TypeVar, Unpack

import anyio
import torch

from ckpipe.catalog.sweep import SweepReport
from ckpipe.errors import UsageError, naming_refusals
from ckpipe.handles import SaveHandle, SyncSaveHandle
from ckpipe.loading.labelled_tensors import boxes_of
from ckpipe.loading.request import LoadOptions
from ckpipe.loop_thread import Caller, this_loop
from ckpipe.options import showing
from ckpipe.preemption.signals import errors_of_handlers_deferred
from ckpipe.retention import Decision
from ckpipe.running.base import PipelineBase
from ckpipe.running.validation import Which, location, note_failures, raise_or_warn, which
from ckpipe.save.request import SaveCall, SaveOptions
from ckpipe.types import CheckpointInfo, LoadResult, VerifyResult

T = TypeVar("T")


class Pipeline(PipelineBase):
    """Saves and loads training state while training goes on.

    An async context manager, entered once, or opened and closed by :meth:`open` and
    :meth:`aclose`. Entering it opens the store. Leaving it waits for saves under way, without a
    limit, and raises failures that no call has reported yet. If it is left on an exception, staged
    saves have ``drain_timeout_seconds`` to finish, and the others are cancelled; all lost saves are
    logged and noted on the exception. An interrupt of that wait does the same; a second interrupt
    gives the saves up. The pipeline runs on an event loop of its own, in a thread of its own, so a
    coroutine that trains without an ``await`` delays no upload. Only user code, such as
    ``state_dict`` and ``load_state_dict``, runs on the caller's event loop, in the task that
    awaits.

    Args:
        url: The root of the checkpoints: a plain path, ``file:///…``, or the URL of another
            backend.
        guard: Optimizers whose steps must not run into a copy; see :meth:`guard`.
        state_lock: A lock that other users of the same state share, such as the :attr:`lock` of
            another pipeline; None for a lock of its own.
        settings: Settings to start from.
        fields: Fields of :class:`~ckpipe.Settings`; they override ``settings``.

    Raises:
        SettingsError: If a setting is unknown or out of range, or there is no url.
    """

    async def open(self) -> Self:
        """Open the store and write nothing; return the pipeline, open or opened.

        For objects that own a pipeline; otherwise use ``async with``. On an open pipeline it does
        nothing. After a failure it may be called again. A closed pipeline cannot be opened again. A
        pipeline without a save leaves no object on the store.

        Raises:
            PipelineClosed: If the pipeline was closed before.
            BackendNotFound: If no backend exists for the url.
            CheckpointNotFound: With ``read_only``, if the folder is absent.
            UnsupportedTopology: If several ranks run and cannot agree on a name for the launch,
                or some of them do not open the pipeline in time.
            UsageError: If ``preemption`` is set and this is not the main thread.
            StoreError: If the store cannot be used.
        """
        with self._opening(), naming_refusals():
            await anyio.to_thread.run_sync(self._open)
        return self

    async def aclose(self) -> None:
        """Wait until all saves are durable and close, as leaving ``async with`` does.

        On a pipeline that is closed, or was never opened, it does nothing.

        Raises:
            CkpipeError: If a save failed and no call has reported it, unless ``on_error`` is
                ``"warn"``.
            UsageError: If a hook of this pipeline calls it, since closing waits for hooks.
        """
        await self._leave(None)

    async def __aenter__(self) -> Self:
        """Open the pipeline; see :meth:`open`."""
        return await self.open()

    def __enter__(self) -> NoReturn:
        raise UsageError(
            "Pipeline is for code that awaits, and cannot be entered by a plain with",
            hint="Write with ckpipe.SyncPipeline(...), or async with ckpipe.Pipeline(...)",
        )

    def __exit__(self, *exc: object) -> None:
        """Exist only so that ``with`` calls :meth:`__enter__`, whose error names the right form."""

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._leave(exc)

    async def _leave(self, error: BaseException | None) -> None:
        with self._leaving():
            try:
                if (last := self._last_save(error)) is not None:
                    with last.beside(error):
                        if last.begins(await self._run(self._engine.leave_together, last.step)):
                            await self.save(last.state, last.step, **last.selection)
            except BaseException as failure:
                await self._close_on(failure)
                raise
            failures = await self._close_on(error)
        if error is None:
            raise_or_warn(failures, self._settings.on_error)

    async def _close_on(self, error: BaseException | None) -> list[Exception]:
        """Close, and return failures that no call has seen; an error is told of them."""
        closed: Future[list[Exception]] = Future()
        try:
            await self._close_in_thread(closed, failed=error is not None)
        except BaseException as cancelled:
            error = cancelled
            raise
        finally:
            failures = closed.result()
            if error is not None:
                note_failures(failures, error)
        return failures

    async def _close_in_thread(self, closed: Future[list[Exception]], *, failed: bool) -> None:
        """Close in a thread; after a cancellation, ``drain_timeout_seconds`` applies."""
        ended = anyio.Event()

        def close() -> None:
            try:
                closed.set_result(self._close(failed=failed))
            except BaseException as error:
                closed.set_exception(error)

        async def close_in_thread() -> None:
            with anyio.CancelScope(shield=True):
                try:
                    await anyio.to_thread.run_sync(close)
                except RuntimeError:  # the system starts no thread, and close() raises nothing
                    close()
            ended.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(close_in_thread)
            with anyio.CancelScope(shield=failed):
                try:
                    await ended.wait()
                except anyio.get_cancelled_exc_class():
                    self._hurry()
                    raise

    async def _run(self, function: Callable[..., Awaitable[T]], *args: Any, **kwargs: Any) -> T:
        """Run a coroutine function of the engine on the pipeline's loop."""
        return await self._engine.loop.run(function, *args, **kwargs)

    async def _complete(self, info: CheckpointInfo, timeout: float | None) -> CheckpointInfo:
        """Wait until all ranks have committed; see :meth:`ckpipe.SaveHandle.complete`."""
        ranks = self._topology.world_size
        if not self._is_closed:
            return await self._run(self._engine.complete, info, timeout, ranks)
        if info.complete:
            return info
        async with Pipeline(settings=self._store_alone()) as store:
            return await store._run(store._engine.complete, info, timeout, ranks)

    def _calling_task(self) -> AbstractContextManager[Caller | None]:
        """Run user code in the calling task; in a thread if a hook calls from this loop."""
        on_loop = self._loop is not None and self._loop.is_here
        return nullcontext() if on_loop else Caller(this_loop())

    @showing(SaveOptions)
    async def save(
        self,
        state: Any,
        step: SupportsIndex | None = None,
        **options: Unpack[SaveOptions],
    ) -> SaveHandle:
        """Save a state; return when it has been copied, so that training may go on.

        The first save of a pipeline claims its launch. It raises ``AttemptReused``, and errors of
        an unsuitable store, before it reads the state.

        The checkpoint is the state at one instant, if the state is changed only under :attr:`lock`
        or after the call has returned. No object on the store is ever overwritten: a second save
        of a step makes another checkpoint of it. If the call is cancelled, or left by any
        exception, before the state is copied, the save is given up; afterwards the save goes on.
        An ``Exception`` that a signal handler raises meanwhile, as torch's does when a worker of a
        data loader dies, is raised once the state is copied. Handlers of timers, such as SIGALRM,
        raise at once.

        Args:
            state: Any nesting of containers, tensors, arrays, plain values and objects that have
                ``state_dict`` and ``load_state_dict``.
            step: The training step; by default one more than that of the last save or load, or,
                without any, than the greatest that was at the root when the pipeline was opened.
            options: As :class:`~ckpipe.save.request.SaveOptions` describes them.

        Returns:
            A handle to wait for the commit; its status is ``skipped`` if the save was skipped.

        Raises:
            UnsupportedTopology: If a process group has appeared or changed since opening, or a
                launcher has started several processes that have none; see ``solo``.
            AttemptReused: If ``attempt_id`` was used on this root before; by the first save.
            UnsupportedState: If an object in the state cannot be saved; names it.
            LockMisuse: If this thread is inside ``lock.mutating()``.
            StateLockTimeout: If trainers held the lock for too long, or the caller's event loop did
                not run while the lock was free for it.
            PipelineBusy: If memory is short and ``on_busy`` is ``"fail"``.
            PipelineClosed: If the pipeline is not open.
            SaveCancelled: If the pipeline is left on an exception before the state is copied.
            UsageError: If an argument is wrong. If ``include`` and ``exclude`` leave nothing to
                save, with one rank, or a part of an object of a registered type. With
                ``until="captured"``, if no optimizer is guarded or the state does not fit the
                staging memory. After it returned, the save fails with ``CaptureTooSlow`` if a step
                would wait longer than ``lock.max_step_wait_seconds``, and with ``StateChanged`` if
                an optimizer's tensor is changed outside of a guarded step.
            StoreError: If the first save cannot write, unless ``on_error`` is ``"warn"``.
            CkpipeError: With ``until="committed"``, the error of this save. Also the error of an
                earlier save that no call waited for, unless ``on_error`` is ``"warn"``.
        """
        call = SaveCall()
        try:
            with errors_of_handlers_deferred(), self._calling_task() as caller:
                request = self._save_request(state, step, caller, call, options)
                with self._while_it_copies(request):
                    save = await self._run(self._engine.saves.begin, request)
                    handle = SaveHandle(self, save)
                    copied = save.safe if call.until == "captured" else save.staged
                    if caller is not None:
                        await caller.serve(copied)
                    await handle._wait(copied)
            if call.until == "committed" and handle.status != "skipped":
                await handle.committed()
            return handle
        finally:
            call.is_over = True

    @showing(LoadOptions)
    async def load(
        self,
        into: Any = None,
        step: Which | None = None,
        *,
        source: str | os.PathLike[str] | None = None,
        **options: Unpack[LoadOptions],
    ) -> LoadResult | None:
        """Load a checkpoint, into a state or as a fresh one.

        Every byte is verified before it reaches the target. Before the first byte is written, the
        load has proved that the checkpoint fits the target and covers it.

        From its first read of ``into`` to its end, the load holds the lock as ``mutating()`` does:
        it waits for copies of saves, and saves, guarded steps and ``mutating()`` of other threads
        wait for it. Inside ``lock.mutating()`` it runs under that. A fresh state takes no lock.

        Args:
            into: The state to load into, of the same structure as the saved one; its tensors are
                filled in place. None makes a fresh state, on the CPU.
            step: A step, the id of a checkpoint, or its info; None takes the newest complete one.
                It then waits until the saves of this pipeline that have been copied are durable; a
                save that fails does not count, and its error is raised as always. Several ranks
                also wait until the newest of them is complete on all, for
                ``load.agreement_timeout_seconds`` at most.
            options: As :class:`~ckpipe.loading.request.LoadOptions` describes them.
            source: The path or URL of a checkpoint that another program wrote, in any store: a
                ``.safetensors`` file, a folder of Hugging Face weights, a file of ``torch.save``
                (``.pt``, ``.pth``, ``.bin``, ``.ckpt``), or a folder of
                ``torch.distributed.checkpoint``. It begins a run: it counts as no checkpoint, and
                the result has no id. Its bytes have no checksums, so they are not
                verified, and are counted in ``LoadReport.unverified_bytes``; a file that is
                replaced meanwhile is an error. What shares no key with the state are weights,
                which go to the one model in it. The rest of the state keeps its values, and is
                named in ``missing``.

        Returns:
            The loaded state with its facts; None if neither step nor source was given and there is
            no complete checkpoint.

        Raises:
            CheckpointNotFound: If the step given is absent or incomplete, or this run has saved it
                and some ranks have not committed it within ``load.agreement_timeout_seconds``. If
                the source is none that ckpipe opens.
            TargetMismatch: If the checkpoint does not fit the target, or a tensor of the target
                lies in memory that is mapped read-only; or if a transform does not fit the
                checkpoint. The target is untouched then.
            UsageError: If ``include`` and ``exclude`` leave a part of an object of a registered
                type, a source is given beside a step or ``fallback``, or its format is known and
                not opened; or a step or a source beside ``without_nan``.
            CorruptCheckpoint: If it is damaged; with ``fallback``, if all are, or if it has filled
                a part of the target that the next older one would not fill. As in all errors of a
                load, ``target_touched`` is True if the target has new values.
            LockMisuse: If ``into`` is given and this thread is capturing the state, as a
                ``state_dict`` that a save calls does.
            PipelineClosed: If the pipeline is left before the load has a checkpoint and the lock.
            CheckpointNotFound: If there is no complete checkpoint and the setting ``resume`` is
                ``"must"``; or with ``without_nan``, if all complete ones have NaN.
            UnsupportedVersion: If it is of a newer format.
            UnsupportedTopology: If several ranks must agree on a checkpoint, and cannot, or some do
                not join in time. If a process group has appeared or changed since opening.
            AttemptReused: If ranks without a process group must agree, and ``attempt_id`` was used
                on this root before.
            StoreError: If the store failed.
        """
        chosen = None if step is None else which(step)
        with self._calling_task() as caller:
            request = self._load_request(into, caller, options)
            return await self._run(
                self._engine.loads.load,
                chosen,
                request,
                source=location(source),
                caller=caller,
            )

    async def steps(self, *, metadata: bool = False) -> list[CheckpointInfo]:
        """List all checkpoints of the root, complete or not, the oldest first.

        Those that are being deleted are left out. Waits for no save: a checkpoint that is being
        stored is incomplete, or not yet there. Costs four delimited lists for any number of
        checkpoints, two more for each without an index, and once in a process a small read for
        each that it did not write. A checkpoint that lacks only its index is completed; if it
        cannot be, since a manifest is damaged, its ``reason`` says so.

        Args:
            metadata: True to read the index of each complete checkpoint, once in a process, or each
                time if its metadata are longer than 4 KiB, for its ``metadata``; and for
                ``metrics``, ``bytes`` and ``world_size`` if the lists do not have these.

        Raises:
            StoreError: If the store failed.
        """
        return await self._run(self._engine.catalog.steps, metadata=metadata)

    async def latest(self) -> CheckpointInfo | None:
        """Find the newest complete checkpoint; None if there is none.

        Waits for no save under way, unlike :meth:`load` without a step. Costs one delimited list,
        two concurrent requests for the newest and for each newer one that is not complete, and its
        index, which is read once as long as it is the newest.

        Raises:
            StoreError: If the store failed.
        """
        return await self._run(self._engine.catalog.latest)

    async def choose(
        self, step: Which | None = None, *, name: str | None = None
    ) -> CheckpointInfo | None:
        """Choose the checkpoint that a load would take, the same on all ranks, with its metadata.

        For programs that need a fact of the checkpoint before they have built what it loads into:
        ``load(state, chosen)`` then loads it. Several ranks call alike; the first decides for all.
        Waits for saves as :meth:`load` does, and obeys the setting ``resume``. Reads the index.

        Args:
            step: A step, the id of a checkpoint, or its info; None takes the newest complete one.
            name: A text that a save was given as ``metadata={"name": …}``: the newest complete
                checkpoint of this name is taken, whatever ``resume`` says. Costs four delimited
                lists, the index of the checkpoint, and once in a process a small read for each
                checkpoint that it did not write.

        Returns:
            The checkpoint, with the metadata and metrics of rank 0, which are None if its index is
            damaged, with ``reason`` and a warning; None if there is none.

        Raises:
            UsageError: If step and name are given.
            CorruptCheckpoint: If the index of a newer checkpoint that might have the name is
                damaged.
            UnsupportedVersion: If it is of a newer format.
            CheckpointNotFound: If the step given is absent or incomplete; or if nothing is given,
                there is no complete checkpoint, and the setting ``resume`` is ``"must"``.
            PipelineClosed: If the pipeline is left meanwhile.
            UnsupportedTopology: If several ranks must agree and cannot.
            StoreError: If the store failed.
        """
        chosen = None if step is None else which(step)
        self._engine.world.check(saves=False)
        return await self._run(self._engine.loads.choose, chosen, name)

    async def best(
        self, metric: str, *, mode: Literal["min", "max"] = "min"
    ) -> CheckpointInfo | None:
        """Find the complete checkpoint with the best value of a metric; None if there is none yet.

        NaN never wins, and of equal values the newest does. Waits for no save under way. Costs four
        delimited lists and the index of the winner, and once in a process a small read for each
        checkpoint that it did not write: of its summary, or of its index if it has none. Summaries
        are trusted only as long as the index of the winner agrees with its own.

        Args:
            metric: A name in the ``metrics`` of ``save``.
            mode: ``"min"`` if the least value is the best, ``"max"`` if the greatest is.

        Raises:
            CheckpointNotFound: If no complete checkpoint has a number for the metric, as when its
                name is mistyped; names the existing metrics.
            CorruptCheckpoint: If the index of a checkpoint that might be the best is damaged.
            UnsupportedVersion: If it is of a newer format.
            SettingsError: If there is no such mode.
            StoreError: If the store failed.
        """
        return await self._run(self._engine.catalog.best, metric, mode)

    async def read_boxes(
        self, step: Which, boxes: Iterable[tuple[str, Sequence[int], torch.Tensor]]
    ) -> None:
        """Fill tensors with boxes of saved ones, whichever ranks have saved them.

        For programs that plan a load by themselves. Each rank calls it for itself, and reads and
        verifies only the chunks with its boxes. It takes no lock, and ``state_dict`` and the like
        are not called. A tensor that each rank has saved as its own is that of the first such rank.

        Args:
            step: A step, the id of a checkpoint, or its info.
            boxes: For each box the label of the saved tensor, as :func:`ckpipe.inspect` lists it;
                the lower corner of the box, with an index for each dimension; and the tensor to
                fill, whose shape is that of the box. Its device and dtype may differ: values are
                converted.

        Raises:
            UsageError: If an argument is wrong.
            CheckpointNotFound: If the checkpoint is absent or incomplete.
            StructureMismatch: If there is no tensor of a label, or one to fill has no memory of its
                own that may be written; no tensor is changed then.
            ShapeMismatch: If a box does not lie in its tensor; no tensor is changed then.
            SharingConflict: If tensors to fill share memory and would get different values.
            CorruptCheckpoint: If the checkpoint is damaged. Other boxes may be filled then, and no
                unverified byte reaches a tensor.
            PipelineClosed: If the pipeline is left meanwhile.
            StoreError: If the store failed.
        """
        await self._run(self._engine.loads.read_boxes, which(step), boxes_of(boxes))

    async def verify(self, step: Which) -> VerifyResult:
        """Read a checkpoint whole and check every byte of it.

        Raises:
            CheckpointNotFound: If it is absent or incomplete.
            CorruptCheckpoint: If a single bit differs from the saved one.
        """
        return await self._run(self._engine.verify, which(step))

    async def delete(self, step: Which, *, force: bool = False) -> None:
        """Delete a checkpoint, with a tombstone, so that a crash cannot leave half of one.

        An exact id also deletes an incomplete checkpoint. Protected checkpoints are refused, which
        retention never removes either: the newest complete one, a pinned one, one that is being
        loaded, and the one from which this run, or the run of the newest, has resumed.

        Args:
            step: A step, the id of a checkpoint, or its info.
            force: True to delete a protected checkpoint too. A load of it may then fail.

        Raises:
            CheckpointNotFound: If it is absent.
            UsageError: If it is protected, or this pipeline is writing it (also with ``force``).
            LinkRefused: If its directory is a symbolic link; the checkpoint is then unchanged.
            StoreError: If the store failed; another call continues where this one stopped.
        """
        await self._run(self._engine.delete, which(step), force=force)

    async def pin(self, step: Which) -> None:
        """Protect a checkpoint from retention until it is unpinned.

        Raises:
            CheckpointNotFound: If it is absent, incomplete, or being deleted at this moment.
        """
        await self._run(self._engine.pin, which(step))

    async def unpin(self, step: Which) -> None:
        """End the protection of a checkpoint."""
        await self._run(self._engine.catalog.unpin, which(step))

    async def prune(self, *, dry_run: bool = False) -> Decision:
        """Apply the retention rules now, to the line of this launch.

        A launch that has neither saved nor loaded applies them to the line of the newest
        checkpoint. ``retention.lines`` tells about lines.

        Args:
            dry_run: True to only return the decision with its reasons.
        """
        return await self._run(self._engine.prune, dry_run=dry_run)

    async def trim(self) -> int:
        """Give unused staging memory back to the system; return the number of bytes.

        A pipeline keeps the memory of its last saves, about the size of the state, so that the next
        save finds touched pages. After a trim the next save takes as long as the first one. Memory
        of a lent staged state stays, and so does memory of saves and loads under way.
        """
        return await self._run(self._engine.context.give_memory_back)

    async def sweep(self, *, dry_run: bool = False) -> SweepReport:
        """Remove the remains of crashed runs: incomplete checkpoints, uploads, marks and leases.

        Remains are older than ``retention.sweep_after_seconds`` by the store's own clock, and
        belong to no launch that seems to be running. Names that ckpipe did not write are never
        removed.

        Args:
            dry_run: True to only return the report of the remains, with reasons.

        Raises:
            StoreError: If the store failed; another call continues where this one stopped.
        """
        return await self._run(self._engine.sweep, dry_run=dry_run)


class SyncPipeline(PipelineBase):
    """:class:`~ckpipe.Pipeline` for a plain loop: a context manager whose methods block.

    :meth:`open` and :meth:`close` do the same as entering and leaving it.

    Each method has the effect, arguments, results and errors of the same method there.

    Args:
        url: The root of the checkpoints: a plain path, ``file:///…``, or the URL of another
            backend.
        guard: Optimizers whose steps must not run into a copy.
        state_lock: A lock that other users of the same state share, such as the :attr:`lock` of
            another pipeline; None for a lock of its own.
        settings: Settings to start from.
        fields: Fields of :class:`~ckpipe.Settings`; they override ``settings``.

    Raises:
        SettingsError: If a setting is unknown or out of range, or there is no url.
    """

    def open(self) -> Self:
        """Open the store and write nothing; see :meth:`ckpipe.Pipeline.open`."""
        with self._opening():
            self._open()
        return self

    def close(self) -> None:
        """Wait until all saves are durable and close; see :meth:`ckpipe.Pipeline.aclose`."""
        self._leave(None)

    def __enter__(self) -> Self:
        """Open the pipeline; see :meth:`open`."""
        return self.open()

    async def __aenter__(self) -> NoReturn:
        raise UsageError(
            "SyncPipeline blocks, and cannot be entered by async with",
            hint="Write async with ckpipe.Pipeline(...), or with ckpipe.SyncPipeline(...)",
        )

    async def __aexit__(self, *exc: object) -> None:
        """Exist only so that ``async with`` calls :meth:`__aenter__`."""

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._leave(exc)

    def _leave(self, error: BaseException | None) -> None:
        with self._leaving():
            try:
                if (last := self._last_save(error)) is not None:
                    with last.beside(error):
                        if last.begins(self._call(self._engine.leave_together, last.step)):
                            self.save(last.state, last.step, **last.selection)
            except BaseException as failure:
                note_failures(self._close(failed=True), failure)
                raise
            # Workers of data loaders may die one after the other, and each gave the saves up.
            with nullcontext() if error is None else errors_of_handlers_deferred():
                failures = self._close(failed=error is not None)
        if error is None:
            raise_or_warn(failures, self._settings.on_error)
        else:
            note_failures(failures, error)

    def _call(self, function: Callable[..., Awaitable[T]], *args: Any, **kwargs: Any) -> T:
        """Run a coroutine function of the engine on the pipeline's loop; blocking."""
        return self._engine.loop.call(function, *args, **kwargs)

    def _complete(self, info: CheckpointInfo, timeout: float | None) -> CheckpointInfo:
        """Wait until all ranks have committed; see :meth:`ckpipe.SaveHandle.complete`."""
        ranks = self._topology.world_size
        if not self._is_closed:
            return self._call(self._engine.complete, info, timeout, ranks)
        if info.complete:
            return info
        with SyncPipeline(settings=self._store_alone()) as store:
            return store._call(store._engine.complete, info, timeout, ranks)

    @showing(SaveOptions)
    def save(
        self,
        state: Any,
        step: SupportsIndex | None = None,
        **options: Unpack[SaveOptions],
    ) -> SyncSaveHandle:
        """Save a state; return as ``until`` asks. See :meth:`ckpipe.Pipeline.save`."""
        call = SaveCall()
        try:
            with errors_of_handlers_deferred(), Caller() as caller:
                request = self._save_request(state, step, caller, call, options)
                with self._while_it_copies(request):
                    save = self._call(self._engine.saves.begin, request)
                    handle = SyncSaveHandle(self, save)
                    copied = save.safe if call.until == "captured" else save.staged
                    caller.serve_until(copied)
            handle._wait(copied)
            if call.until == "committed" and handle.status != "skipped":
                handle.wait()
            return handle
        finally:
            call.is_over = True

    @showing(LoadOptions)
    def load(
        self,
        into: Any = None,
        step: Which | None = None,
        *,
        source: str | os.PathLike[str] | None = None,
        **options: Unpack[LoadOptions],
    ) -> LoadResult | None:
        """Load a checkpoint, into a state or as a fresh one. See :meth:`ckpipe.Pipeline.load`."""
        chosen = None if step is None else which(step)
        with Caller() as caller:
            request = self._load_request(into, caller, options)
            return self._call(
                self._engine.loads.load,
                chosen,
                request,
                source=location(source),
                caller=caller,
            )

    def steps(self, *, metadata: bool = False) -> list[CheckpointInfo]:
        """List all checkpoints, the oldest first. See :meth:`ckpipe.Pipeline.steps`."""
        return self._call(self._engine.catalog.steps, metadata=metadata)

    def latest(self) -> CheckpointInfo | None:
        """Find the newest complete checkpoint; None if there is none."""
        return self._call(self._engine.catalog.latest)

    def choose(
        self, step: Which | None = None, *, name: str | None = None
    ) -> CheckpointInfo | None:
        """Choose the checkpoint that a load would take. See :meth:`ckpipe.Pipeline.choose`."""
        chosen = None if step is None else which(step)
        self._engine.world.check(saves=False)
        return self._call(self._engine.loads.choose, chosen, name)

    def best(self, metric: str, *, mode: Literal["min", "max"] = "min") -> CheckpointInfo | None:
        """Find the checkpoint with the best value of a metric. See :meth:`ckpipe.Pipeline.best`."""
        return self._call(self._engine.catalog.best, metric, mode)

    def read_boxes(
        self, step: Which, boxes: Iterable[tuple[str, Sequence[int], torch.Tensor]]
    ) -> None:
        """Fill tensors with boxes of saved ones. See :meth:`ckpipe.Pipeline.read_boxes`."""
        self._call(self._engine.loads.read_boxes, which(step), boxes_of(boxes))

    def verify(self, step: Which) -> VerifyResult:
        """Read a checkpoint whole and check every byte of it."""
        return self._call(self._engine.verify, which(step))

    def delete(self, step: Which, *, force: bool = False) -> None:
        """Delete a checkpoint. See :meth:`ckpipe.Pipeline.delete`."""
        self._call(self._engine.delete, which(step), force=force)

    def pin(self, step: Which) -> None:
        """Protect a checkpoint from retention until it is unpinned.

        Raises:
            CheckpointNotFound: If it is absent, incomplete, or being deleted at this moment.
        """
        self._call(self._engine.pin, which(step))

    def unpin(self, step: Which) -> None:
        """End the protection of a checkpoint."""
        self._call(self._engine.catalog.unpin, which(step))

    def prune(self, *, dry_run: bool = False) -> Decision:
        """Apply the retention rules now, or only decide."""
        return self._call(self._engine.prune, dry_run=dry_run)

    def trim(self) -> int:
        """Give staging memory back to the system. See :meth:`ckpipe.Pipeline.trim`."""
        return self._call(self._engine.context.give_memory_back)

    def sweep(self, *, dry_run: bool = False) -> SweepReport:
        """Remove the remains of crashed runs. See :meth:`ckpipe.Pipeline.sweep`."""
        return self._call(self._engine.sweep, dry_run=dry_run)


def _complete_docstrings() -> None:
    """Append the docstrings of :class:`Pipeline` to the first lines of the same methods here."""
    for name, method in vars(SyncPipeline).items():
        text = inspect.getdoc(getattr(Pipeline, name, None))
        if not name.startswith("_") and method.__doc__ and text:
            own = method.__doc__.partition("\n")[0].partition(" See :meth:`ckpipe.Pipeline")[0]
            _, _, rest = text.partition("\n")
            method.__doc__ = f"{own}\n{rest}" if rest else own


_complete_docstrings()
