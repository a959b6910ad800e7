"""The handles that ``save`` returns: they follow a save, wait for it, and lend its staged state."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import anyio.to_thread
import torch

from ckpipe.errors import UnsupportedTopology, UsageError
from ckpipe.format.boxes import contiguous_stride
from ckpipe.format.manifest import ManifestDocument, trees_of
from ckpipe.format.tree import shared_containers
from ckpipe.loading.match import Matching
from ckpipe.loading.match_record import MatchRecord
from ckpipe.loading.request import LoadRequest
from ckpipe.loop_thread import wait_for
from ckpipe.notebook import html_table
from ckpipe.reading.chunks import StoredTensor, StoredTensors
from ckpipe.reading.fill import with_lazy_bits
from ckpipe.reading.saved_state import state_of_part
from ckpipe.reading.targets import Targets
from ckpipe.save.context import Loan, SaveContext
from ckpipe.save.save import Save, StagedBlock
from ckpipe.state.tensors import MAX_ITEM
from ckpipe.types import CheckpointInfo, SaveReport, SaveStatus, size_text

if TYPE_CHECKING:
    from ckpipe.running.base import PipelineBase
    from ckpipe.running.pipeline import Pipeline, SyncPipeline


class _LentTargets(Targets):
    """Makes tensors over the blocks of data files, instead of fresh ones."""

    def __init__(self, stored: StoredTensors, held: Sequence[StagedBlock]) -> None:
        super().__init__(stored, cast=False)
        self._block_bytes = len(held[0].block.view) if held else 1
        self._blocks = {(each.plan.file, each.plan.offset): each.block.tensor for each in held}
        self._lent: dict[int, torch.Tensor] = {}
        self._entries: dict[int, torch.Tensor] = {}

    def fresh(self, stored: StoredTensor) -> torch.Tensor:
        tensor = self._lent.get(stored.number)
        if tensor is None:
            tensor = self._lent[stored.number] = self._seen(stored)
        return tensor

    def _seen(self, stored: StoredTensor) -> torch.Tensor:
        (piece,) = self.stored.copies(stored)
        entry = self._entry(piece.entry, aligned=piece.shared)
        flat = entry[piece.start : piece.stop].view(stored.dtype)
        stride = (piece.stride if piece.shared else None) or contiguous_stride(stored.shape)
        tensor = flat.as_strided(stored.shape, stride)
        return with_lazy_bits(tensor, stored.row.lazy) if piece.shared else tensor

    def _entry(self, number: int, *, aligned: bool) -> torch.Tensor:
        """Return the bytes of an entry: a view if it lies in one block, else a copy.

        All tensors that share the entry get the same object.
        """
        entry = self._entries.get(number)
        if entry is None:
            row, data = self.stored.data.entry(number), self.stored.data
            begin, done, pieces = data.begins[number], 0, []
            while done < row.nbytes:
                at = (begin + done) % self._block_bytes
                block = self._blocks[row.file, begin + done - at]
                pieces.append(block[at : min(self._block_bytes, at + row.nbytes - done)])
                done += pieces[-1].numel()
            none = torch.empty(0, dtype=torch.uint8, device="cpu")
            entry = pieces[0] if len(pieces) == 1 else torch.cat(pieces or [none])
            if aligned and entry.data_ptr() % MAX_ITEM:
                entry = entry.clone()  # an entry of bytes may hold tensors of larger items
            self._entries[number] = entry
        return entry


def lent_state(save: Save, held: Sequence[StagedBlock]) -> Any:
    """Return the state of a save as tensors over the blocks that hold it.

    Args:
        save: A save that is staged.
        held: All of its blocks; the state may be used as long as they are held.

    Raises:
        UnsupportedTopology: If this rank stages only a part of a tensor.
    """
    captured, program = save.captured, save.program
    assert captured is not None
    assert program is not None
    for chunk in program.plan.layout.chunks:
        if chunk.owner is not None or chunk.box is not None:
            raise UnsupportedTopology(
                "This rank stages only a part of the tensor",
                key=captured.tensors[chunk.tensor].label,
                hint="Leave tensors of several ranks out of the save, or load the checkpoint",
            )
    structure, part = save.contents()
    rows = tuple(replace(row, device="cpu") for row in structure.tensors)
    structure = replace(structure, tensors=rows)
    part = replace(part, files=tuple(file.row for file in program.plan.files))
    document = ManifestDocument(
        "manifest", save.id, 1, (structure,), (program.plan.layout,), (part,)
    )
    saved = state_of_part(document, 0)
    stored = StoredTensors(document, saved.rows, saved.homes)
    targets = _LentTargets(stored, held)
    definitions = shared_containers(trees_of(captured.tree, rows))
    with torch.no_grad():
        record = MatchRecord(saved, targets, definitions, LoadRequest(pickle="allow"))
        return Matching(record).plan(captured.tree, "")()


async def _lend_blocks(save: Save, context: SaveContext, loan: Loan) -> list[StagedBlock]:
    """Keep the memory of a staged save until :func:`_take_back`.

    Args:
        save: The save.
        context: The context of the save.
        loan: The record of the loan; its blocks are set at once.

    Raises:
        UsageError: If the save is not all copied yet, or some of its memory was reused.
    """
    why, held = "", list[StagedBlock]()
    if not save.staged.done() or save.program is None:
        why = "it is not all copied yet"
    elif len({reference for _, reference, _ in save.filled}) < len(save.filled):
        why = "it went through less memory than it has bytes"
    else:
        for plan, reference, uses in save.filled:
            block = reference()
            filled = None
            if block is not None:
                filled = save.use_again(StagedBlock(save, plan, block), uses)
            if filled is None:
                why = "its memory serves a later save or load, or was given back"
                break
            held.append(filled)
    if why:
        for each in held:
            each.release()
        raise UsageError(
            f"The staged state is not available: {why}",
            step=save.id.step,
            rank=context.rank,
            hint="Use it after the save is staged and before the next save or load begins",
        )
    save.views += 1
    context.lent[save], loan.blocks = loan, held
    return held


async def _take_back(save: Save, context: SaveContext, held: list[StagedBlock]) -> None:
    """End a loan of :func:`_lend_blocks`."""
    save.views -= 1
    for each in held:
        each.release()
    if not save.views:
        context.lent.pop(save, None)


T = TypeVar("T")


class _Handle:
    _pipeline: PipelineBase
    _save: Save

    @property
    def id(self) -> str:
        """The exact name of the checkpoint; accepted wherever a step is."""
        return self._save.name

    @property
    def step(self) -> int:
        """The step of the checkpoint."""
        return self._save.id.step

    @property
    def status(self) -> SaveStatus:
        """The stage that the save has reached, or its end."""
        return self._save.status

    @property
    def report(self) -> SaveReport:
        """Seconds, bytes and waits of each stage and the way of each block, until now."""
        return self._save.report()

    @contextmanager
    def _seeing(self) -> Iterator[None]:
        """Mark an error that reaches the caller as seen, so that no later call raises it again."""
        try:
            yield
        except Exception as error:
            if self._pipeline._opened is not None:
                self._pipeline._opened.saves.see(error)
            raise

    def _give_back(self, held: list[StagedBlock]) -> None:
        """Give the staging memory of a loan back; blocking."""
        loop, engine = self._pipeline._loop, self._pipeline._opened
        if loop is not None and engine is not None:  # else the pipeline has freed it
            loop.submit(_take_back, self._save, engine.context, held).result()

    def __repr__(self) -> str:
        report = repr(self.report).partition(" ")[2].removesuffix(">")
        return f"<{type(self).__name__} {self.id} {self.status}: {report}>"

    def _repr_html_(self) -> str:
        report = self.report
        size = f"{size_text(report.bytes)} in {report.tensors} tensors"
        rows = [("step", str(self.step)), ("status", self.status), ("id", self.id), ("size", size)]
        times = (("staged", report.staged_seconds), ("durable", report.durable_seconds))
        rows += [(name, f"in {took:.3g} s") for name, took in times if took is not None]
        rows += [("bottleneck", report.bottleneck)] if report.bottleneck else []
        return html_table(type(self).__name__, rows)


class SaveHandle(_Handle):
    """A save under way. An ``await`` of the handle waits for :meth:`committed`.

    A cancelled wait does not cancel the save. Any number of tasks may wait, any number of times.
    Once the pipeline is closed, every method but :meth:`staged_state` does and returns what it did
    before.
    """

    def __init__(self, pipeline: Pipeline, save: Save) -> None:
        self._pipeline: Pipeline = pipeline
        self._save = save

    async def captured(self) -> None:
        """Wait until forward and backward may go on; see :meth:`ckpipe.Pipeline.save`.

        They may go on once the state has been copied. With ``until="captured"`` tensors of guarded
        optimizers may be copied later.

        Raises:
            CkpipeError: If the save failed or was cancelled before that.
        """
        await self._wait(self._save.safe)

    async def staged(self) -> None:
        """Wait until the state has been copied, and training may go on.

        Raises:
            CkpipeError: If the save failed or was cancelled before that.
        """
        await self._wait(self._save.staged)

    async def committed(self) -> CheckpointInfo:
        """Wait until this rank's files are durable.

        Raises:
            SaveSkipped: If the save was skipped.
            CkpipeError: If the save failed or was cancelled.
        """
        return await self._wait(self._save.committed)

    async def _wait(self, future: Future[T]) -> T:
        with self._seeing():
            return await wait_for(future)

    async def complete(self, timeout: float | None = None) -> CheckpointInfo:
        """Wait until every rank's files are durable, and ask the store whether they are.

        With many ranks, the store is asked again and again, with growing pauses of up to 5 s. Once
        the pipeline is closed, a checkpoint that is known to be complete is not asked for again;
        for any other the store is opened for the time of the call.

        Args:
            timeout: Seconds to wait; None waits for as long as it takes.

        Raises:
            TimeoutError: If it is not complete by then; names ranks that have not committed.
            CheckpointIncomplete: If it was deleted meanwhile.
            CkpipeError: If this rank's save failed.
        """
        began = time.monotonic()
        with anyio.fail_after(timeout):
            info = await self.committed()
        left = None if timeout is None else max(0.0, timeout - (time.monotonic() - began))
        return await self._pipeline._complete(info, left)

    async def cancel(self) -> None:
        """Give the save up unless it is committed already; return once it has ended."""
        if not self._pipeline._is_closed:  # else it has ended
            await self._pipeline._run(self._pipeline._engine.saves.cancel, self._save)

    @asynccontextmanager
    async def staged_state(self) -> AsyncIterator[Any]:
        """Lend the copied state, for checks and uses of your own.

        An async context manager. The tensors lie in the staging memory itself, on the CPU, with
        all structure and sharing. A tensor that crosses from a block to the next is a copy, and a
        tensor that shares no bytes is contiguous. They must not be changed, or used after the
        ``async with`` block. The memory counts as in use until then, also beyond the commit: a
        bounded ``staging_bytes`` must hold it and the saves of that time.

        The state is available once the save is staged, and until a later save or load uses the
        memory, or it goes back to the system because states have become smaller. A save that
        streams through less memory than it has bytes is never in memory as a whole. That is a save
        larger than ``staging_bytes``, and a save that finds only fresh memory, as the first does,
        unless it is made with ``until="captured"``.

        Raises:
            PipelineClosed: If the pipeline is closed: its memory is given back.
            UsageError: If the state is not all copied yet, or not all in memory any more.
        """
        context, loan = self._pipeline._engine.context, Loan()
        try:
            held = await self._pipeline._run(_lend_blocks, self._save, context, loan)
            yield await anyio.to_thread.run_sync(lent_state, self._save, held)
        finally:
            if loan.blocks is not None:  # also after a cancellation before _lend_blocks returned
                with anyio.CancelScope(shield=True):
                    await anyio.to_thread.run_sync(self._give_back, loan.blocks)

    def __await__(self) -> Generator[Any, Any, CheckpointInfo]:
        return self.committed().__await__()


class SyncSaveHandle(_Handle):
    """A save under way, for code without an event loop.

    Once the pipeline is closed, every method but :meth:`staged_state` does and returns what it did
    before.
    """

    def __init__(self, pipeline: SyncPipeline, save: Save) -> None:
        self._pipeline: SyncPipeline = pipeline
        self._save = save

    def wait_captured(self, timeout: float | None = None) -> None:
        """Block until forward and backward may go on; see :meth:`ckpipe.SaveHandle.captured`.

        Args:
            timeout: Seconds to wait; None waits for as long as it takes.

        Raises:
            TimeoutError: If it is not captured by then.
            CkpipeError: If the save failed or was cancelled before that.
        """
        self._wait(self._save.safe, timeout)

    def wait_staged(self, timeout: float | None = None) -> None:
        """Block until the state has been copied, and training may go on.

        Args:
            timeout: Seconds to wait; None waits for as long as it takes.

        Raises:
            TimeoutError: If it is not staged by then.
            CkpipeError: If the save failed or was cancelled before that.
        """
        self._wait(self._save.staged, timeout)

    def wait(self, timeout: float | None = None) -> CheckpointInfo:
        """Block until this rank's files are durable.

        Args:
            timeout: Seconds to wait; None waits for as long as it takes.

        Raises:
            TimeoutError: If it is not durable by then.
            SaveSkipped: If the save was skipped.
            CkpipeError: If the save failed or was cancelled.
        """
        return self._wait(self._save.committed, timeout)

    def wait_complete(self, timeout: float | None = None) -> CheckpointInfo:
        """Block until every rank's files are durable, and ask the store whether they are.

        With many ranks, the store is asked again and again, with growing pauses of up to 5 s. Once
        the pipeline is closed, a checkpoint that is known to be complete is not asked for again;
        for any other the store is opened for the time of the call.

        Args:
            timeout: Seconds to wait; None waits for as long as it takes.

        Raises:
            TimeoutError: If it is not complete by then; names ranks that have not committed.
            CheckpointIncomplete: If it was deleted meanwhile.
            CkpipeError: If this rank's save failed.
        """
        began = time.monotonic()
        info = self.wait(timeout)
        left = None if timeout is None else max(0.0, timeout - (time.monotonic() - began))
        return self._pipeline._complete(info, left)

    def cancel(self) -> None:
        """Give the save up unless it is committed already; return once it has ended."""
        if not self._pipeline._is_closed:  # else it has ended
            self._pipeline._call(self._pipeline._engine.saves.cancel, self._save)

    def _wait(self, future: Future[T], timeout: float | None = None) -> T:
        if not future.done():
            self._pipeline._refuse_to_wait_in_vain()
        with self._seeing():
            return future.result(timeout)

    @contextmanager
    def staged_state(self) -> Iterator[Any]:
        """Lend the copied state; see :meth:`ckpipe.SaveHandle.staged_state`.

        Raises:
            PipelineClosed: If the pipeline is closed: its memory is given back.
            UsageError: If the state is not all copied yet, or not all in memory any more.
        """
        context, loan = self._pipeline._engine.context, Loan(threading.get_ident())
        try:
            held = self._pipeline._call(_lend_blocks, self._save, context, loan)
            yield lent_state(self._save, held)
        finally:
            if loan.blocks is not None:  # also after an interrupt before _lend_blocks returned
                self._give_back(loan.blocks)
