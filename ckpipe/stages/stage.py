"""Stage 2, in two halves: the walk over the state, and the copy into host memory."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Sequence
from typing import Any

import anyio
import anyio.from_thread
import anyio.lowlevel
import torch
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from ckpipe import cuda
from ckpipe.collector import collector_paused
from ckpipe.copying import BlockPlan, fill_block
from ckpipe.events import Staged
from ckpipe.saving import CapturedState, FilledBlock, PlannedState, Save, Turn, resolve
from ckpipe.site import Site
from ckpipe.structure import Captured, capture
from ckpipe.tensors import TensorLeaf

MAX_COPIERS = 4
"""Worker threads that fill blocks at the most: about what saturates the memory of a machine."""


async def walk(
    save: Save,
    site: Site,
    inbox: MemoryObjectReceiveStream[Turn],
    out: MemoryObjectSendStream[CapturedState],
) -> None:
    """The first half: takes the state apart in every turn.

    Raises:
        UnsupportedState: Names the first object that cannot be saved.
    """
    async with inbox, out:
        async for turn in inbox:
            save.status = "capturing"
            with save.clock.timing("walk"):
                captured = await anyio.to_thread.run_sync(_walk, save, site, turn)
            await out.send(CapturedState(turn, captured))


def _walk(save: Save, site: Site, turn: Turn) -> Captured:
    pickling = site.settings.pickle == "allow"
    with turn.here(), torch.no_grad(), collector_paused():
        return capture(save.request.state, select=save.request.select, pickling=pickling)


async def copy(
    save: Save,
    site: Site,
    inbox: MemoryObjectReceiveStream[PlannedState],
    to_serialize: MemoryObjectSendStream[FilledBlock],
    to_upload: MemoryObjectSendStream[FilledBlock],
) -> None:
    """The second half: copies every byte to its place in the file, and lets trainers go on.

    Every block goes to both streams. They need room for all blocks of the save's ration, which
    is what bounds them.
    """
    async with inbox, to_serialize, to_upload:
        async for state in inbox:
            save.captured, save.program = state.captured, state.program
            outlet = _Outlet(to_serialize, to_upload, overlap=site.settings.staging.overlap)
            try:
                with save.clock.timing("stage", state.program.plan.size):
                    await _copy_blocks(save, state, outlet)
            finally:
                state.turn.end(copied=True)
            _staged(save, site, state)
            outlet.open()


class _Outlet:
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


async def _copy_blocks(save: Save, state: PlannedState, outlet: _Outlet) -> None:
    """Hands out blocks as the ration has them, to copiers that share what is ready."""
    ration = save.ration
    assert ration is not None
    ready: deque[FilledBlock] = deque()
    fill = _Filling(save, state, ready, outlet)
    on_devices = any(leaf.device != "cpu" for leaf in state.captured.tensors)
    copiers = anyio.Semaphore(1 if on_devices else min(MAX_COPIERS, torch.get_num_threads()))
    plans = deque(state.program.blocks)
    async with anyio.create_task_group() as tasks:
        while plans:
            if ration.short:
                outlet.open()  # blocks have to come back while the copy goes on
            blocks = await ration.take(len(plans))
            ready.extend(FilledBlock(plans.popleft(), block) for block in blocks)
            for _ in range(min(len(blocks), copiers.value)):
                tasks.start_soon(_copier, ready, fill, copiers)
            await anyio.lowlevel.checkpoint()


async def _copier(ready: deque[FilledBlock], fill: _Filling, copiers: anyio.Semaphore) -> None:
    async with copiers:
        while ready:
            await anyio.to_thread.run_sync(fill.run)


class _Filling:
    """The work of the copiers' threads: fills what is ready until nothing is."""

    def __init__(
        self, save: Save, state: PlannedState, ready: deque[FilledBlock], outlet: _Outlet
    ) -> None:
        self._save, self._state, self._ready, self._outlet = save, state, ready, outlet
        self._loop = asyncio.get_running_loop()
        self._streams: dict[str, Any] = {}

    def run(self) -> None:
        leaves = self._state.captured.tensors
        events = []
        with self._state.turn.here(), torch.no_grad():
            while True:
                try:
                    filled = self._ready.popleft()
                except IndexError:
                    break
                anyio.from_thread.check_cancelled()
                devices = _devices(filled.plan, leaves)
                if not devices:
                    fill_block(filled.plan, leaves, filled.block)
                    self._send(filled)
                    continue
                pending = _fill_from_devices(filled, leaves, devices, self._streams, self._save)
                events.append((filled, pending))
            for filled, pending in events:
                for event in pending:
                    event.synchronize()
                self._send(filled)

    def _send(self, filled: FilledBlock) -> None:
        self._loop.call_soon_threadsafe(self._outlet.send, filled)


def _devices(plan: BlockPlan, leaves: Sequence[TensorLeaf]) -> set[str]:
    numbers = (getattr(step, "tensor", None) for step in plan.steps)
    devices = {leaves[number].device for number in numbers if number is not None}
    return {device for device in devices if device.startswith("cuda")}


def _fill_from_devices(
    filled: FilledBlock,
    leaves: Sequence[TensorLeaf],
    devices: set[str],
    streams: dict[str, Any],
    save: Save,
) -> list[Any]:
    """Queues a block's copies on side streams that wait for the caller's work on the device."""
    for device in devices - streams.keys():
        streams[device] = cuda.side_stream(device, save.request.fences)
    with contextlib.ExitStack() as entered:
        for device in sorted(devices):
            entered.enter_context(torch.cuda.stream(streams[device]))
        fill_block(filled.plan, leaves, filled.block)
    return [streams[device].record_event() for device in sorted(devices)]


def _staged(save: Save, site: Site, state: PlannedState) -> None:
    save.staged_seconds = save.elapsed
    save.status = "uploading" if site.settings.staging.overlap else "staged"
    for leaf in state.captured.tensors:
        del leaf.tensor
    save.forget_state()
    resolve(save.staged, None)
    size = state.program.plan.size
    site.events.emit(Staged(save.name, save.id.step, save.rank, save.staged_seconds, size))
