"""Stage 3: copy every byte of the state into blocks of its data files, and let trainers go on.

The copy computes the checksums of bytes in host memory; `serialize.py` computes the others.

Worker threads fill the blocks: all work at once, or the early half before the late half. A block
with work in both halves is filled in two pieces, and is passed on after the second. Late pieces are
*deferred*: each asks the lock before it reads, and fails if a trainer has waited too long. Copies
from a device are queued on a side stream. Deferred ones let the trainer go on as soon as all are
queued, and make its device wait for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import anyio
import anyio.from_thread
import anyio.lowlevel
import numpy as np
import torch
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from ckpipe.errors import StateChanged
from ckpipe.events import Staged
from ckpipe.format.checksum import ChunkSums, crc32c_of_each
from ckpipe.interpreter import available_cpus
from ckpipe.lock.late_copies import ByteSample, MutationDetector
from ckpipe.lock.state_lock import LockHold
from ckpipe.memory.cuda import SideStreams, StreamFence
from ckpipe.plan.witness import Witnessed
from ckpipe.save.context import SaveContext
from ckpipe.save.program import (
    WITNESS,
    BlockPlan,
    CopyProgram,
    EarlyLateSplit,
    WitnessProgram,
    devices_of,
    fill_blocks,
    split_blocks,
    split_early_late,
)
from ckpipe.save.record import UNKNOWN, FilledBlock, resolve
from ckpipe.save.save import CapturedState, Save, StagedBlock
from ckpipe.state.flatten import Captured
from ckpipe.state.tensors import TensorLeaf
from ckpipe.threads import run_sync

MAX_COPIERS = 4
"""Most worker threads that fill blocks: about as many as saturate the memory of a machine."""


async def run(
    save: Save,
    context: SaveContext,
    inbox: MemoryObjectReceiveStream[tuple[CapturedState, CopyProgram]],
    out: MemoryObjectSendStream[FilledBlock],
) -> None:
    """Copy a state, and pass its blocks on as they are filled.

    The stream needs room for all blocks; the save's reservation bounds them.

    Raises:
        CaptureTooSlow: If a step would have had to wait too long for a copy beside training.
        StateChanged: If a tensor was changed without the lock while it was copied beside training.
    """

    def pass_on(some: Sequence[StagedBlock]) -> None:
        # The next stages have ended if the save failed; its blocks are given back nevertheless.
        with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            for filled in some:
                if filled.plan.file == WITNESS:
                    witnessed.send_nowait(filled)
                    continue
                save.note(filled)
                out.send_nowait(filled)

    async with inbox, out:
        async for state, program in inbox:
            save.captured, save.program = state.captured, program
            save.files, size = program.files, program.plan.size
            if context.settings.staging.overlap:
                save.ready.set()
            owners = save.request.owners
            witnessed, to_sum = anyio.create_memory_object_stream[StagedBlock](math.inf)
            async with to_sum, anyio.create_task_group() as tasks:
                if save.witness is not None:
                    tasks.start_soon(_witness, save, save.witness, to_sum)
                try:
                    with witnessed, save.clock.timing("stage", size), state.hold.in_use():
                        split = await _split(save, context, state, program) if owners else None
                        # Copies beside training use no more processors than the trainer gave to
                        # torch. For other copies the trainer waits, so all processors are free.
                        cores = available_cpus() if split is None else torch.get_num_threads()
                        copiers = BlockCopiers(
                            state.hold, state.captured, SideStreams(state.after), pass_on,
                            threads=min(MAX_COPIERS, cores),
                        )  # fmt: skip
                        if split is None:
                            await _copy_at_once(save, program, copiers)
                        else:
                            await _copy_beside_training(save, context, state, split, copiers)
                finally:
                    state.hold.end(copied=True)
                if owners and split is None:
                    _captured(save)
            save.ready.set()
            save.copied.set()
            out.close()
            await save.handed_over.wait()
            save.staged_seconds = save.elapsed
            save.status = "uploading" if context.settings.staging.overlap else "staged"
            state.captured.forget_memory()
            save.forget_state()
            resolve(save.staged, None)
            if program.witnesses is not None:
                program.witnesses.prepare()
            context.events.emit(Staged(*save.where, save.staged_seconds, size))


def _captured(save: Save) -> None:
    save.captured_seconds = save.elapsed
    resolve(save.safe, None)


async def _split(
    save: Save, context: SaveContext, state: CapturedState, program: CopyProgram
) -> EarlyLateSplit | None:
    """Return the early and late halves; None if all is copied at once."""
    split, owners = context.early_late, save.request.owners
    if split is None or not split.serves(state.captured, program, owners):
        split = context.early_late = await run_sync(
            split_early_late, state.captured, program, owners
        )
    state.captured.objects = []
    return split if split.owned else None


async def _copy_at_once(save: Save, program: CopyProgram, copiers: BlockCopiers) -> None:
    """Hand out blocks to copiers as they are drawn from the reservation."""
    reservation = save.reservation
    assert reservation is not None
    # Witnessed ones come first, so that their checksums are computed beside other copies.
    plans = deque([*(save.witness.blocks if save.witness else ()), *program.blocks])
    async with anyio.create_task_group() as tasks:
        while plans:
            blocks = save.blocks  # a save with guarded optimizers has drawn all of them
            if not blocks:
                if reservation.short:
                    save.ready.set()  # the copy needs blocks back from the upload
                blocks = await reservation.take(len(plans))
            for block in blocks:
                plan = plans.popleft()
                copiers.add([CopyPiece(StagedBlock(save, plan, block), plan)])
            for _ in range(min(len(blocks), copiers.threads)):
                tasks.start_soon(copiers.copy)
            await anyio.lowlevel.checkpoint()


async def _copy_beside_training(
    save: Save,
    context: SaveContext,
    state: CapturedState,
    split: EarlyLateSplit,
    copiers: BlockCopiers,
) -> None:
    """Copy the early half, let the caller go on, then copy the tensors of optimizers."""
    late: list[CopyPiece] = []
    witness = split_blocks(save.witness.blocks if save.witness else (), split.owned, state.captured)
    plans = [*(save.witness.blocks if save.witness else ()), *split.program.blocks]
    halves, samples = [*witness[0], *split.halves], [*witness[1], *split.samples]
    for plan, block, (at_once, later), sample in zip(
        plans, save.blocks, halves, samples, strict=True
    ):
        filled = StagedBlock(save, plan, block)
        if not at_once.is_empty:
            copiers.add([CopyPiece(filled, at_once, last=later.is_empty)])
        if not later.is_empty or at_once.is_empty:
            late.append(CopyPiece(filled, later, sample=sample))
    await copiers.finish()
    watch = MutationDetector(state.captured, split.owned, samples)
    copiers.defer(watch, context.settings.lock.max_step_wait_seconds)
    _captured(save)
    copiers.add(late)
    await copiers.finish()
    await run_sync(copiers.check_and_release)


async def _witness(
    save: Save, program: WitnessProgram, inbox: MemoryObjectReceiveStream[StagedBlock]
) -> None:
    """Complete the checksums of witnessed blocks, and give each block back."""
    sums = ChunkSums(program.table)
    async for filled in inbox:
        cuts = program.table.cuts(filled.plan.spans)
        values = filled.sums.tolist()
        if UNKNOWN in values:
            (values,) = await run_sync(crc32c_of_each, [(filled.data, cuts.begins, cuts.ends)])
        sums.add_block(cuts, values)
        save.free(filled)
    save.witnessed = _witness_rows(program.chosen, sums.finished())


def _witness_rows(chosen: Sequence[Witnessed], sums: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Join the checksums of each chunk: its number, the first mebibyte, and the checksums."""
    rows: list[list[int]] = []
    last = None
    for each, value in zip(chosen, sums, strict=True):
        if last is None or (last.chunk, last.mebibyte + 1) != (each.chunk, each.mebibyte):
            rows.append([each.chunk, each.mebibyte])
        rows[-1].append(value)
        last = each
    return tuple(map(tuple, rows))


FIRST_TOGETHER = 2
"""Number of blocks that the first call fills beside a trainer; they are passed on together. Each
call takes the GIL from a trainer in Python, and so does the loop for each message and for each
write of blocks that came together. But the store waits for the first blocks, and copies are mostly
faster than the store. So each call fills twice as many blocks as the one before, but at most half
of a thread's share of the rest."""

MOST_BYTES_TOGETHER = 256 << 20
"""Most bytes that all threads together fill by one call each, unless a block for each is more. A
step whose wait has timed out still waits for these calls."""


@dataclass(frozen=True, slots=True)
class CopyPiece:
    """Work on one block.

    Args:
        filled: The block.
        work: The copies of this piece.
        last: True if the block is filled then.
        sample: A sample of the bytes that are copied late, which must be unchanged.
    """

    filled: StagedBlock
    work: BlockPlan
    last: bool = True
    sample: ByteSample | None = None


class BlockCopiers:
    """The threads that fill the blocks of one save.

    Args:
        hold: The hold of the lock under which they read.
        state: The state to copy.
        devices: Queues copies from devices.
        out: Called on the running loop with filled blocks.
        threads: Most threads that share the work.
    """

    def __init__(
        self,
        hold: LockHold,
        state: Captured,
        devices: SideStreams,
        out: Callable[[Sequence[StagedBlock]], object],
        *,
        threads: int,
    ) -> None:
        self._hold, self._state, self._devices, self._out = hold, state, devices, out
        self._on_devices = any(map(devices.serves, state.derived(devices_of)))
        self.threads = 1 if self._on_devices else threads
        self._places = anyio.Semaphore(self.threads)
        self._ready: deque[CopyPiece] = deque()
        self._loop = asyncio.get_running_loop()
        self._watch: MutationDetector | None = None
        self._together = FIRST_TOGETHER

    def add(self, pieces: Iterable[CopyPiece]) -> None:
        """Queue pieces for copiers that are started afterwards."""
        self._ready.extend(pieces)

    async def copy(self) -> None:
        """Copy in one thread until the queue is empty; several tasks may do so at once."""
        async with self._places:
            while self._ready:
                await run_sync(self._run)

    async def finish(self) -> None:
        """Copy all queued pieces, in as many threads as are useful."""
        async with anyio.create_task_group() as tasks:
            for _ in range(min(self.threads, len(self._ready))):
                tasks.start_soon(self.copy)

    def defer(self, watch: MutationDetector, grace: float) -> None:
        """Make all further pieces deferred; for any thread.

        Args:
            watch: Detects changes without the lock of the tensors that they read.
            grace: Seconds that a trainer waits for them.
        """
        self._watch = watch
        self._hold.defer(grace)

    def check_and_release(self, ends: Sequence[StreamFence] = ()) -> None:
        """Let trainers go on after the deferred pieces, if no tensor was changed without the lock.

        A second call does nothing.

        Args:
            ends: Fences of copies that are still queued on devices.

        Raises:
            StateChanged: Names a tensor that was changed without the lock.
            CaptureTooSlow: If a trainer took the lock before, after its wait.
        """
        if self._watch is None:
            return
        with self._hold.reading():
            changed = self._watch.changed()
            if changed is not None:
                raise _changed_beside(changed)
            self._hold.release(ends)
        self._watch = None

    def _run(self) -> None:
        """Copy all queued pieces in this thread."""
        # Copies from devices that may be under way, with the tensors whose memory they read.
        launched: list[tuple[list[CopyPiece], Sequence[StreamFence], _LateTensors | None]] = []
        try:
            with self._hold.here(), torch.no_grad():
                while pieces := self._next():
                    anyio.from_thread.check_cancelled()
                    late = None
                    if self._watch is None:
                        ends = self._fill(pieces)
                    else:
                        with self._hold.reading():
                            late = _LateTensors(self._state, pieces)
                            late.check_unchanged(self._watch)
                            ends = self._fill(pieces)
                            late.check_unchanged(self._watch, copied=True)
                    if ends:
                        launched.append((pieces, ends, late))
                    else:
                        self._done(pieces)
            if launched:
                self.check_and_release([end for _, ends, _ in launched for end in ends])
            for pieces, ends, _ in launched:
                for end in ends:
                    end.wait()
                self._done(pieces)
        finally:
            # No block may be reused while a device still writes to it.
            for _, ends, _ in launched:
                for end in ends:
                    end.wait()

    def _next(self) -> list[CopyPiece]:
        """Take the next pieces: several deferred ones, or one; none at the end."""
        count = 1
        pieces: list[CopyPiece] = []
        with contextlib.suppress(IndexError):
            if self._watch is not None and not self._on_devices:
                block_bytes = len(self._ready[0].filled.block.view)
                most = max(1, MOST_BYTES_TOGETHER // (block_bytes * self.threads))
                count = min(self._together, most, -(-len(self._ready) // (2 * self.threads)))
                self._together *= 2
            while len(pieces) < count:
                pieces.append(self._ready.popleft())
        return pieces

    def _fill(self, pieces: Sequence[CopyPiece]) -> Sequence[StreamFence]:
        now = time.perf_counter()
        for each in pieces:
            each.filled.began = each.filled.began or now
        devices: set[str] = set()
        if self._on_devices:
            places = {self._state.tensors[n].device for each in pieces for n in each.work.tensors}
            devices = {place for place in places if self._devices.serves(place)}
        if devices:
            return self._devices.launch(devices, partial(_copy_and_sum, pieces, self._state))
        _copy_and_sum(pieces, self._state)
        return ()

    def _done(self, pieces: Sequence[CopyPiece]) -> None:
        now, copier = time.perf_counter(), threading.get_ident()
        filled = [piece.filled for piece in pieces if piece.last]
        for each in filled:
            each.ended, each.copier = now, copier
        if filled:
            self._loop.call_soon_threadsafe(self._out, filled)


def _copy_and_sum(pieces: Sequence[CopyPiece], state: Captured) -> None:
    work = [(each.work, each.filled.block) for each in pieces]
    for each, (slots, values) in zip(pieces, fill_blocks(work, state), strict=True):
        each.filled.sums[slots] = values


class _LateTensors:
    """The tensors of some late pieces, with references that keep their memory alive.

    Args:
        state: The state of the tensors.
        pieces: The pieces.
    """

    def __init__(self, state: Captured, pieces: Sequence[CopyPiece]) -> None:
        numbers = np.concatenate([np.asarray(each.work.tensors) for each in pieces])
        numbers = numbers[np.diff(numbers, prepend=-1) != 0]  # equal numbers are adjacent
        self._leaves, self._pieces, self._numbers = state.tensors, pieces, numbers.tolist()
        self._tensors = [state.memory[number] for number in self._numbers]
        self._addresses = state.addresses[numbers].tolist()
        self._memory = list(map(torch.Tensor.untyped_storage, self._tensors))

    def check_unchanged(self, watch: MutationDetector, *, copied: bool = False) -> None:
        """Check that the tensors have not changed since they were captured.

        Args:
            watch: Detects the changes.
            copied: True to check the copies too, in which a change may be that was undone since.

        Raises:
            StateChanged: If a tensor has other memory now, or its sample has changed; torch counts
                neither as a change.
        """
        found = list(map(torch.Tensor.data_ptr, self._tensors))
        if found != self._addresses:
            pairs = zip(self._numbers, found, self._addresses, strict=True)
            raise _changed_beside(self._leaves[next(n for n, now, at in pairs if now != at)])
        for piece in self._pieces:
            for block in (None, piece.filled.block.address) if copied else (None,):
                changed = None if piece.sample is None else watch.changed_in(piece.sample, block)
                if changed is not None:
                    raise _changed_beside(changed)


def _changed_beside(leaf: TensorLeaf) -> StateChanged:
    return StateChanged(
        "A tensor of a guarded optimizer was changed outside of its step while it was copied",
        key=leaf.label,
        hint="Swap weights with pipeline.swapped(), make other changes inside lock.mutating(), or "
        'save with until="staged". Embedding(max_norm=…) changes its weight in every forward pass',
    )
