"""Stage 2, in two halves: the walk over the state, and the copy into host memory.

Blocks are filled in worker threads: all of their work at once, or what is urgent before the rest.
A block of which a part is copied later is filled in two pieces, and leaves with the second. The
pieces that come later are *deferred*: each asks the lock before it reads, and a trainer that has
waited too long makes it fail. Copies from a device are queued on a side stream; deferred ones let
the trainer go on as soon as all are queued, and have its device wait for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import warnings
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import anyio
import anyio.from_thread
import anyio.lowlevel
import numpy as np
import torch
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from ckpipe.errors import StateChanged, StateLockTimeout, UsageError
from ckpipe.events import Staged
from ckpipe.interpreter import available_cpus, gc_paused
from ckpipe.loading.select import unmatched
from ckpipe.lock.holds import LockHold
from ckpipe.lock.late_copies import ByteSample, MutationDetector
from ckpipe.lock.lock import Fence
from ckpipe.loop_thread import on_caller
from ckpipe.memory.arena import Block
from ckpipe.memory.cuda import SideStreams, events_behind
from ckpipe.plan.plan import fingerprint
from ckpipe.save.context import SaveContext
from ckpipe.save.program import BlockPlan, fill_blocks, tensors_of
from ckpipe.save.record import (
    CapturedState,
    CopyProgram,
    DeferredCopy,
    EarlyLateSplit,
    FilledBlock,
    PlannedState,
    Save,
    divide,
    resolve,
)
from ckpipe.state.capture_cache import capture_cache_of
from ckpipe.state.flatten import Captured, Walked
from ckpipe.state.flatten import walk as walk_state
from ckpipe.state.tensors import TensorLeaf
from ckpipe.threads import run_sync

WAITS = 3
"""How often a save waits for the lock if its caller's event loop then comes too late to walk."""

MAX_COPIERS = 4
"""Worker threads that fill blocks at the most: about what saturates the memory of a machine."""


async def walk(
    save: Save,
    site: SaveContext,
    inbox: MemoryObjectReceiveStream[LockHold],
    out: MemoryObjectSendStream[CapturedState],
) -> None:
    """The first half: takes the state apart in every turn.

    Raises:
        UnsupportedState: Names the first object that cannot be saved.
    """
    async with inbox, out:
        async for turn in inbox:
            save.status = "capturing"
            await out.send(await _looked(save, site, turn))


async def _looked(save: Save, site: SaveContext, turn: LockHold) -> CapturedState:
    """Have the thread that called take the state apart, once it comes to that under the lock."""
    caller, limits = save.request.caller, site.settings.lock
    with turn.in_use():
        for waits_left in reversed(range(WAITS + 1)):
            with save.clock.timing("walk"):
                state = await on_caller(caller, look, save, site, turn)
            if state is not None:
                return state
            if caller is not None and waits_left:
                patience, grace = limits.timeout_seconds, limits.max_step_wait_seconds
                with save.clock.timing("lock"):
                    await turn.wait(patience, grace, caller.do_pending)
    raise StateLockTimeout(
        f"The event loop that called save() did not run within {limits.max_step_wait_seconds:g} s "
        "while the state lock was free for it, and trainers went on",
        hint="Let the loop run while save() is awaited: move what blocks it to a thread",
    )


def look(save: Save, site: SaveContext, turn: LockHold) -> CapturedState | None:
    """Takes the state apart, and lets the caller go if all is known already; blocking.

    Returns:
        None if the lock has to be waited for first.

    Raises:
        UnsupportedState: Names the first object that cannot be saved.
    """
    if not turn.begin():
        return None
    captured = _walk(save, site, turn)
    after = events_behind(captured.derived(devices_of))
    deferral = _let_caller_go(save, site, turn, captured) if save.request.owners else None
    if deferral is not None or not save.request.owners:
        captured.objects = []  # only a division is made of them
    return CapturedState(turn, captured, after, deferral)


def _walk(save: Save, site: SaveContext, turn: LockHold) -> Captured:
    pickling = site.settings.pickle == "allow"
    state, select = save.request.state, save.request.select
    with turn.here(), torch.no_grad(), gc_paused():
        captured = None if site.trail is None else site.trail.follow(state, select)
        if captured is None:
            walked = walk_state(state, select, pickling=pickling)
            _check_selection(save, site, walked)
            site.trail = capture_cache_of(walked, select)
            captured = walked.captured
        return captured


def _check_selection(save: Save, site: SaveContext, walked: Walked) -> None:
    """Tells of globs of ``include`` that name nothing; of many ranks one may well have nothing.

    Raises:
        UsageError: If nothing would be saved because of ``include`` or ``exclude``.
    """
    captured, select, step = walked.captured, save.request.select, save.id.step
    if site.world_size > 1 or select.selects_all:
        return
    absent = unmatched(select, [captured.tree])
    said = f"include names what is not in the state: {', '.join(absent)}"
    if absent and not captured.tensors and not captured.values:
        hint = "Globs match whole labels, such as 'model.*' or 'optimizer'"
        raise UsageError(said, step=step, hint=hint)
    if walked.emptied_by(select):
        raise UsageError(
            "include and exclude leave nothing of the state to save",
            step=step,
            hint="Include something, or call save only when there is something to save",
        )
    if absent:
        warnings.warn(f"{said} [step {step}]", RuntimeWarning, stacklevel=2)


def _let_caller_go(
    save: Save, site: SaveContext, turn: LockHold, captured: Captured
) -> DeferredCopy | None:
    """Lets training go on if all is known already and nothing has to be copied before.

    In a steady run of ``until="captured"`` that is so, and the caller need not wait until the
    pipeline's loop has come to the same end.
    """
    program = site.reusable_program
    if program is None or program.plan.fingerprint != fingerprint(captured):
        return None
    if len(save.blocks) != len(program.blocks):
        return None
    division = _division(save, site, captured, program)
    if not division.all_later:
        return None
    watch = MutationDetector(captured, division.owned, division.samples)
    turn.defer(site.settings.lock.max_step_wait_seconds)
    _captured(save)
    return DeferredCopy(program, division, watch)


def _captured(save: Save) -> None:
    save.captured_seconds = save.elapsed
    resolve(save.safe, None)


async def copy(
    save: Save,
    site: SaveContext,
    inbox: MemoryObjectReceiveStream[PlannedState],
    to_serialize: MemoryObjectSendStream[FilledBlock],
    to_upload: MemoryObjectSendStream[FilledBlock],
) -> None:
    """The second half: copies every byte to its place in the file, and lets trainers go on.

    Every block goes to both streams. They need room for all blocks of the save's ration, which
    is what bounds them.

    Raises:
        CaptureTooSlow: If a step would have had to wait too long for a copy beside training.
        StateChanged: If what is copied beside training was changed without the lock.
    """
    async with inbox, to_serialize, to_upload:
        async for state in inbox:
            save.take_up(state)
            site.carrier.set_out(save)
            outlet = BlockQueue(to_serialize, to_upload, overlap=site.settings.staging.overlap)
            try:
                with save.clock.timing("stage", state.program.plan.size), state.turn.in_use():
                    division = await _late_division(save, site, state)
                    copiers = _copiers(save, state, outlet, beside=division is not None)
                    if division is None:
                        await _copy_at_once(save, state, copiers, outlet)
                    else:
                        await _copy_beside_training(save, site, state, division, copiers)
            finally:
                state.turn.end(copied=True)
            if save.request.owners and division is None:
                _captured(save)
            outlet.open()
            await site.carrier.hand_over(save)
            _staged(save, site, state)


def _copiers(save: Save, state: PlannedState, outlet: BlockQueue, *, beside: bool) -> BlockCopiers:
    def out(filled: Sequence[FilledBlock]) -> None:
        for each in filled:
            save.note(each)
            outlet.send(each)

    streams = SideStreams(state.after)
    # Copies beside training take no processor that the trainer did not give to torch; for all
    # others it waits, so that its own are free.
    cores = torch.get_num_threads() if beside else available_cpus()
    threads = min(MAX_COPIERS, cores)
    return BlockCopiers(state.turn, state.captured, streams, out, threads=threads)


async def _copy_at_once(
    save: Save, state: PlannedState, copiers: BlockCopiers, outlet: BlockQueue
) -> None:
    """Hands out blocks as they are drawn from the ration, to copiers that share what is ready."""
    ration = save.ration
    assert ration is not None
    plans = deque(state.program.blocks)
    async with anyio.create_task_group() as tasks:
        while plans:
            blocks = save.blocks  # there if any of it might have been copied beside training
            if not blocks:
                if ration.short:
                    outlet.open()  # blocks have to come back while the copy goes on
                blocks = await ration.take(len(plans))
            copiers.add(_whole(plans.popleft(), block) for block in blocks)
            for _ in range(min(len(blocks), copiers.threads)):
                tasks.start_soon(copiers.copy)
            await anyio.lowlevel.checkpoint()


def _whole(plan: BlockPlan, block: Block) -> Piece:
    return Piece(FilledBlock(plan, block), plan)


async def _copy_beside_training(
    save: Save,
    site: SaveContext,
    state: PlannedState,
    division: EarlyLateSplit,
    copiers: BlockCopiers,
) -> None:
    """Copy what any code may change, let the caller go, then copy what optimizers own."""
    grace = site.settings.lock.max_step_wait_seconds
    soon, late = _pieces(save, state.program, division)
    if state.deferral is not None:
        copiers.defer(state.deferral.watch, grace)
    else:
        copiers.add(soon)
        await copiers.finish()
        copiers.defer(MutationDetector(state.captured, division.owned, division.samples), grace)
        _captured(save)
    copiers.add(late)
    await copiers.finish()
    await run_sync(copiers.let_go)


def _pieces(
    save: Save, program: CopyProgram, division: EarlyLateSplit
) -> tuple[list[Piece], list[Piece]]:
    """The pieces to copy at once, and those to copy later."""
    soon, late = [], []
    for plan, block, (at_once, later), sample in zip(
        program.blocks, save.blocks, division.halves, division.samples, strict=True
    ):
        filled = FilledBlock(plan, block)
        if at_once.steps:
            soon.append(Piece(filled, at_once, last=not later.steps))
        if later.steps or not at_once.steps:
            late.append(Piece(filled, later, sample=sample))
    return soon, late


async def _late_division(
    save: Save, site: SaveContext, state: PlannedState
) -> EarlyLateSplit | None:
    """The division of a save's work; None if all is to be copied before training goes on."""
    if state.deferral is not None:
        return state.deferral.division
    if not save.request.owners:
        return None
    division = await run_sync(_division, save, site, state.captured, state.program)
    state.captured.objects = []
    return division if division.owned else None


def _division(
    save: Save, site: SaveContext, captured: Captured, program: CopyProgram
) -> EarlyLateSplit:
    """The division of a save's work: the last one's, if nothing that matters has changed."""
    last, owners = site.division, save.request.owners
    if last is None or not last.serves(captured, program, owners):
        last = site.division = divide(captured, program, owners)
    return last


def _staged(save: Save, site: SaveContext, state: PlannedState) -> None:
    save.staged_seconds = save.elapsed
    save.status = "uploading" if site.settings.staging.overlap else "staged"
    state.captured.forget_memory()
    save.forget_state()
    resolve(save.staged, None)
    size = state.program.plan.size
    site.events.emit(Staged(save.name, save.id.step, save.rank, save.staged_seconds, size))


FIRST_TOGETHER = 2
"""How many blocks the first call fills while a trainer runs beside it; they leave together. Each
call takes the interpreter from a trainer in Python, and so do the loop for whatever it hears of and
each write of what came together. But the store waits for the first, and copies mostly outrun it; so
each call fills twice as many as the one before, while more than as many again are left."""

MOST_BYTES_TOGETHER = 256 << 20
"""How many bytes all threads fill by one call each, unless a block for each is more: a step that
has waited for as long as it may waits for them too."""


class CopyEnd(Fence, Protocol):
    """A fence that can also be waited for."""

    def wait(self) -> None:
        """Blocks until the copies are done."""
        ...


class DeviceCopies(Protocol):
    """Queues copies from devices; :class:`ckpipe.memory.cuda.SideStreams` is the one for CUDA."""

    def serves(self, device: str) -> bool:
        """Tell whether tensors on a device are copied by it; else they are in host memory."""
        ...

    def launch(self, devices: Iterable[str], copy: Callable[[], object]) -> Sequence[CopyEnd]:
        """Queues copies; returns their ends."""
        ...


@dataclass(frozen=True, slots=True)
class Piece:
    """Work on one block.

    Args:
        filled: The block.
        work: What to copy into it now.
        last: Whether the block is filled then.
        sample: Of what is copied late, some bytes, which must be what they were.
    """

    filled: FilledBlock
    work: BlockPlan
    last: bool = True
    sample: ByteSample | None = None


@dataclass(frozen=True, slots=True)
class _Launched:
    """Copies from devices that may be on their way, and the memory that they read."""

    pieces: Sequence[Piece]
    ends: Sequence[CopyEnd]
    held: list[torch.UntypedStorage]

    def wait(self) -> None:
        for end in self.ends:
            end.wait()


class BlockQueue:
    """The queue by which filled blocks leave for the next two stages.

    Checksums are held back until it is opened: those that are not known from the copy would take a
    core from it, for which the trainer waits. Uploads, which mostly wait for the store, begin at
    once if they may overlap.

    Args:
        to_serialize: Where blocks get their checksums.
        to_upload: Where they are written to the store.
        overlap: Whether uploads begin before it is opened.
    """

    def __init__(
        self,
        to_serialize: MemoryObjectSendStream[FilledBlock],
        to_upload: MemoryObjectSendStream[FilledBlock],
        *,
        overlap: bool,
    ) -> None:
        self._to_serialize, self._to_upload, self._overlap = to_serialize, to_upload, overlap
        self._held: list[FilledBlock] = []
        self._opened = False

    def send(self, filled: FilledBlock) -> None:
        """Takes a block that is filled."""
        self._held.append(filled)
        if self._overlap:
            _send(self._to_upload, filled)
        if self._opened:
            self.open()

    def open(self) -> None:
        """Lets all go that was held back, and holds nothing back any more."""
        self._opened = True
        held, self._held = self._held, []
        for filled in held:
            _send(self._to_serialize, filled)
            if not self._overlap:
                _send(self._to_upload, filled)


def _send(stream: MemoryObjectSendStream[FilledBlock], filled: FilledBlock) -> None:
    # The next stages are gone if the save failed; its blocks are given back all the same.
    with contextlib.suppress(anyio.BrokenResourceError):
        stream.send_nowait(filled)


class BlockCopiers:
    """The threads that fill the blocks of one save.

    Args:
        turn: The hold of the lock under which they read.
        state: What they read.
        devices: What queues copies from devices.
        out: Called on the running loop with blocks that are filled.
        threads: How many threads share the work, at the most.
    """

    def __init__(
        self,
        turn: LockHold,
        state: Captured,
        devices: DeviceCopies,
        out: Callable[[Sequence[FilledBlock]], object],
        *,
        threads: int,
    ) -> None:
        self._turn, self._state, self._devices, self._out = turn, state, devices, out
        self._on_devices = any(map(devices.serves, state.derived(devices_of)))
        self.threads = 1 if self._on_devices else threads
        self._places = anyio.Semaphore(self.threads)
        self._ready: deque[Piece] = deque()
        self._loop = asyncio.get_running_loop()
        self._watch: MutationDetector | None = None
        self._together = FIRST_TOGETHER

    def add(self, pieces: Iterable[Piece]) -> None:
        """Takes pieces to be worked off by copiers that are started afterwards."""
        self._ready.extend(pieces)

    async def copy(self) -> None:
        """Works in one thread until nothing is left; several tasks may do so at once."""
        async with self._places:
            while self._ready:
                await run_sync(self._run)

    async def finish(self) -> None:
        """Works off what is left, in as many threads as are useful."""
        async with anyio.create_task_group() as tasks:
            for _ in range(min(self.threads, len(self._ready))):
                tasks.start_soon(self.copy)

    def defer(self, watch: MutationDetector, grace: float) -> None:
        """Says that all further pieces are deferred; for any thread.

        Args:
            watch: What notices if the tensors that they read are changed without the lock.
            grace: Seconds that a trainer waits for them.
        """
        self._watch = watch
        self._turn.defer(grace)

    def let_go(self, ends: Sequence[Fence] = ()) -> None:
        """Lets trainers go on after the deferred pieces, if all have been true to the lock.

        Does nothing if it was done before.

        Args:
            ends: Copies that devices have still to do.

        Raises:
            StateChanged: Names a tensor that was changed without the lock.
            CaptureTooSlow: If a trainer took the lock before.
        """
        if self._watch is None:
            return
        with self._turn.reading():
            changed = self._watch.changed()
            if changed is not None:
                raise _changed_beside(changed)
            self._turn.let_go(ends)
        self._watch = None

    def _run(self) -> None:
        launched: list[_Launched] = []
        try:
            with self._turn.here(), torch.no_grad():
                self._work_off(launched)
            if launched:
                self.let_go([end for each in launched for end in each.ends])
            for each in launched:
                each.wait()
                self._done(each.pieces)
        finally:
            # No block may be used again while a device still writes to it.
            for each in launched:
                each.wait()

    def _work_off(self, launched: list[_Launched]) -> None:
        while pieces := self._next():
            anyio.from_thread.check_cancelled()
            held: list[torch.UntypedStorage] = []
            if self._watch is None:
                ends = self._fill(pieces)
            else:
                with self._turn.reading():
                    late = _LateTensors(self._state, pieces)
                    held = late.held()
                    late.check_unchanged(self._watch)
                    ends = self._fill(pieces)
                    late.check_unchanged(self._watch)
            if ends:
                launched.append(_Launched(pieces, ends, held))
            else:
                self._done(pieces)

    def _next(self) -> list[Piece]:
        """The next work: some pieces that are deferred, or one; nothing at the end."""
        count = 1
        pieces: list[Piece] = []
        with contextlib.suppress(IndexError):
            if self._watch is not None and not self._on_devices:
                block_bytes = len(self._ready[0].filled.block.view)
                most = max(1, MOST_BYTES_TOGETHER // (block_bytes * self.threads))
                count = min(self._together, most, -(-len(self._ready) // (2 * self.threads)))
                self._together *= 2
            while len(pieces) < count:
                pieces.append(self._ready.popleft())
        return pieces

    def _fill(self, pieces: Sequence[Piece]) -> Sequence[CopyEnd]:
        def fill() -> None:
            work = [(each.work, each.filled.block) for each in pieces]
            for each, found in zip(pieces, fill_blocks(work, self._state), strict=True):
                if found is not None:
                    each.filled.sums.learn(each.work.sum_count, found.slots, found.values)

        for each in pieces:
            each.filled.began = each.filled.began or time.perf_counter()
        devices = self._devices_of(pieces)
        if devices:
            return self._devices.launch(devices, fill)
        fill()
        return ()

    def _devices_of(self, pieces: Sequence[Piece]) -> set[str]:
        if not self._on_devices:
            return set()
        places = {self._state.tensors[number].device for number in _numbers(pieces)}
        return {place for place in places if self._devices.serves(place)}

    def _done(self, pieces: Sequence[Piece]) -> None:
        now, copier = time.perf_counter(), threading.get_ident()
        filled = [piece.filled for piece in pieces if piece.last]
        for each in filled:
            each.ended, each.copier = now, copier
        if filled:
            self._loop.call_soon_threadsafe(self._out, filled)


class _LateTensors:
    """The places of the tensors that some pieces copy late.

    Args:
        state: The state that they are of.
        pieces: The pieces.
    """

    def __init__(self, state: Captured, pieces: Sequence[Piece]) -> None:
        numbers = np.array(_numbers(pieces), np.int64)
        numbers = numbers[np.diff(numbers, prepend=-1) != 0]  # the pieces of one are neighbours
        self._leaves, self._pieces, self._numbers = state.tensors, pieces, numbers.tolist()
        self._tensors = [state.memory[number] for number in self._numbers]
        self._addresses = state.addresses[numbers].tolist()

    def held(self) -> list[torch.UntypedStorage]:
        """Their memory, which is not freed while it is held."""
        return list(map(torch.Tensor.untyped_storage, self._tensors))

    def check_unchanged(self, watch: MutationDetector) -> None:
        """Looks whether they are what they were when they were captured.

        Raises:
            StateChanged: If one does not lie any more where it did, as a program has given it
                other memory, or its sample is another; torch counts neither as a change.
        """
        found = list(map(torch.Tensor.data_ptr, self._tensors))
        if found != self._addresses:
            pairs = zip(self._numbers, found, self._addresses, strict=True)
            raise _changed_beside(self._leaves[next(n for n, now, at in pairs if now != at)])
        for piece in self._pieces:
            changed = None if piece.sample is None else watch.changed_in(piece.sample)
            if changed is not None:
                raise _changed_beside(changed)


def _numbers(pieces: Sequence[Piece]) -> array[int]:
    numbers = array("q")
    for piece in pieces:
        numbers.extend(tensors_of(piece.work))
    return numbers


def devices_of(state: Captured) -> set[str]:
    """The devices that tensors of a state are on."""
    return {leaf.device for leaf in state.tensors}


def _changed_beside(leaf: TensorLeaf) -> StateChanged:
    return StateChanged(
        "A tensor of a guarded optimizer was changed outside of its step while it was copied",
        key=leaf.label,
        hint='Change it inside lock.mutating(), or save with until="staged". Embedding(max_norm=…) '
        "changes its weight in every forward pass",
    )
