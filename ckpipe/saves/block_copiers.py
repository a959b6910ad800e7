"""Fills blocks in worker threads: all of their work at once, or what is urgent before the rest.

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
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import anyio
import anyio.from_thread
import numpy as np
import torch
from anyio.streams.memory import MemoryObjectSendStream

from ckpipe.errors import StateChanged
from ckpipe.lock.holds import LockHold
from ckpipe.lock.late_copies import ByteSample, MutationDetector
from ckpipe.lock.lock import Fence
from ckpipe.saves.copying import BlockPlan, fill_blocks, tensors_of
from ckpipe.saves.saving import FilledBlock
from ckpipe.state.flatten import Captured
from ckpipe.state.tensors import TensorLeaf
from ckpipe.threads import run_sync

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
        """Whether tensors on a device are copied by it; else they are in host memory."""
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


class Outlet:
    """Where filled blocks leave for the next two stages.

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
        """What to work on now: some pieces that are deferred, or one; nothing at the end."""
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
    """Where the tensors lie that some pieces copy late.

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
        """Their memory, which nobody frees while it is held."""
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


__all__ = ["BlockCopiers", "CopyEnd", "DeviceCopies", "Outlet", "Piece", "devices_of"]
