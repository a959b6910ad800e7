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
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import anyio
import anyio.from_thread
import torch
from anyio.streams.memory import MemoryObjectSendStream

from ckpipe.errors import StateChanged
from ckpipe.locking.lock import Fence
from ckpipe.locking.lock_turns import Turn
from ckpipe.locking.watching import Sample, Watch
from ckpipe.saves.copying import BlockPlan, fill_block, tensors_of
from ckpipe.saves.saving import FilledBlock
from ckpipe.state.captured import Captured
from ckpipe.state.tensors import TensorLeaf


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
    sample: Sample | None = None


@dataclass(frozen=True, slots=True)
class _Launched:
    """Copies from devices that may be on their way, and the memory that they read."""

    piece: Piece
    ends: Sequence[CopyEnd]
    held: list[torch.UntypedStorage]

    def wait(self) -> None:
        for end in self.ends:
            end.wait()


class Outlet:
    """Where filled blocks leave for the next two stages.

    Checksums are held back until it is opened: they would take a core from the copy, for which
    the trainer waits. Uploads, which mostly wait for the store, begin at once if they may overlap.

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
        out: Called on the running loop with each block that is filled.
        threads: How many threads share the work, at the most.
    """

    def __init__(
        self,
        turn: Turn,
        state: Captured,
        devices: DeviceCopies,
        out: Callable[[FilledBlock], object],
        *,
        threads: int,
    ) -> None:
        self._turn, self._state, self._devices, self._out = turn, state, devices, out
        self._on_devices = any(map(devices.serves, state.derived(_devices)))
        self.threads = 1 if self._on_devices else threads
        self._places = anyio.Semaphore(self.threads)
        self._ready: deque[Piece] = deque()
        self._loop = asyncio.get_running_loop()
        self._watch: Watch | None = None

    def add(self, pieces: Iterable[Piece]) -> None:
        """Takes pieces to be worked off by copiers that are started afterwards."""
        self._ready.extend(pieces)

    async def copy(self) -> None:
        """Works in one thread until nothing is left; several tasks may do so at once."""
        async with self._places:
            while self._ready:
                await anyio.to_thread.run_sync(self._run)

    async def finish(self) -> None:
        """Works off what is left, in as many threads as are useful."""
        async with anyio.create_task_group() as tasks:
            for _ in range(min(self.threads, len(self._ready))):
                tasks.start_soon(self.copy)

    def defer(self, watch: Watch, grace: float) -> None:
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
                self._done(each.piece)
        finally:
            # No block may be used again while a device still writes to it.
            for each in launched:
                each.wait()

    def _work_off(self, launched: list[_Launched]) -> None:
        while True:
            try:
                piece = self._ready.popleft()
            except IndexError:
                return
            anyio.from_thread.check_cancelled()
            held: list[torch.UntypedStorage] = []
            if self._watch is None:
                ends = self._fill(piece)
            else:
                with self._turn.reading():
                    held = self._held_unchanged(piece, self._watch)
                    ends = self._fill(piece)
                    self._held_unchanged(piece, self._watch)
            if ends:
                launched.append(_Launched(piece, ends, held))
            else:
                self._done(piece)

    def _fill(self, piece: Piece) -> Sequence[CopyEnd]:
        def fill() -> None:
            fill_block(piece.work, self._state, piece.filled.block)

        piece.filled.began = piece.filled.began or time.perf_counter()
        devices = self._devices_of(piece.work)
        if devices:
            return self._devices.launch(devices, fill)
        fill()
        return ()

    def _held_unchanged(self, piece: Piece, watch: Watch) -> list[torch.UntypedStorage]:
        """The memory of tensors that are copied late, which nobody frees while it is held.

        Raises:
            StateChanged: If one does not lie any more where it was captured, as a program has given
                it other memory, or its sample is another; torch counts neither as a change.
        """
        leaves, memory = self._state.tensors, self._state.memory
        held = []
        for number in tensors_of(piece.work):
            held.append(memory[number].untyped_storage())
            if memory[number].data_ptr() != leaves[number].address:
                raise _changed_beside(leaves[number])
        changed = None if piece.sample is None else watch.changed_in(piece.sample)
        if changed is not None:
            raise _changed_beside(changed)
        return held

    def _devices_of(self, work: BlockPlan) -> set[str]:
        if not self._on_devices:
            return set()
        places = {self._state.tensors[number].device for number in tensors_of(work)}
        return {place for place in places if self._devices.serves(place)}

    def _done(self, piece: Piece) -> None:
        if piece.last:
            piece.filled.ended, piece.filled.copier = time.perf_counter(), threading.get_ident()
            self._loop.call_soon_threadsafe(self._out, piece.filled)


def _devices(state: Captured) -> set[str]:
    return {leaf.device for leaf in state.tensors}


def _changed_beside(leaf: TensorLeaf) -> StateChanged:
    return StateChanged(
        "A tensor of a guarded optimizer was changed outside of its step while it was copied",
        key=leaf.label,
        hint='Change it inside lock.mutating(), or save with until="staged". Embedding(max_norm=…) '
        "changes its weight in every forward pass",
    )


__all__ = ["BlockCopiers", "CopyEnd", "DeviceCopies", "Outlet", "Piece"]
