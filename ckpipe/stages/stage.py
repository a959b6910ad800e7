"""Stage 2, in two halves: the walk over the state, and the copy into host memory."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import anyio
import torch
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from ckpipe import cuda
from ckpipe.checksum import ChunkSums
from ckpipe.collector import collector_paused
from ckpipe.copying import BlockPlan, fill_block
from ckpipe.events import Staged
from ckpipe.saving import CapturedState, FilledBlock, PlannedState, Save, Turn, resolve
from ckpipe.site import Site
from ckpipe.structure import Captured, capture
from ckpipe.tensors import TensorLeaf

BATCH_BLOCKS = 4
"""Blocks that one visit to a worker thread fills at the most."""

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
    out: MemoryObjectSendStream[FilledBlock],
) -> None:
    """The second half: copies every byte to its place in the file, and lets trainers go on.

    The stream ``out`` needs room for all blocks of the save's ration, which is what bounds it.
    """
    async with inbox, out:
        async for state in inbox:
            save.captured, save.program = state.captured, state.program
            save.sums = ChunkSums(state.program.sizes)
            outlet = _Outlet(out, holding=not site.settings.staging.overlap)
            try:
                with save.clock.timing("stage", state.program.plan.size):
                    await _copy_blocks(save, state, outlet)
            finally:
                state.turn.end(copied=True)
            _staged(save, site, state)
            outlet.flush()


class _Outlet:
    """Where filled blocks leave for the next stage: at once, or held back until a flush."""

    def __init__(self, out: MemoryObjectSendStream[FilledBlock], *, holding: bool) -> None:
        self._out, self._holding = out, holding
        self._held: list[FilledBlock] = []

    def send(self, filled: FilledBlock) -> None:
        if self._holding:
            self._held.append(filled)
            return
        # The next stages are gone if the save failed; its blocks are given back all the same.
        with contextlib.suppress(anyio.BrokenResourceError):
            self._out.send_nowait(filled)

    def flush(self) -> None:
        held, self._held, self._holding = self._held, [], False
        for filled in held:
            self.send(filled)


async def _copy_blocks(save: Save, state: PlannedState, outlet: _Outlet) -> None:
    plans = deque(state.program.blocks)
    on_devices = any(leaf.device != "cpu" for leaf in state.captured.tensors)
    copiers = 1 if on_devices else min(MAX_COPIERS, torch.get_num_threads())
    async with anyio.create_task_group() as tasks:
        for _ in range(min(copiers, len(plans))):
            tasks.start_soon(_copier, save, state, plans, outlet)


async def _copier(
    save: Save, state: PlannedState, plans: deque[BlockPlan], outlet: _Outlet
) -> None:
    """Fills blocks until none is left; several copiers share the work."""
    ration = save.ration
    assert ration is not None
    loop = asyncio.get_running_loop()
    streams: dict[str, Any] = {}
    while plans:
        wanted = [plans.popleft() for _ in range(min(BATCH_BLOCKS, len(plans)))]
        while wanted:
            if ration.full:
                outlet.flush()  # without room for the whole state, the upload has to begin now
            blocks = await ration.take(len(wanted))
            batch = [FilledBlock(plan, block) for plan, block in zip(wanted, blocks, strict=False)]
            del wanted[: len(batch)]
            await anyio.to_thread.run_sync(_fill, save, state, batch, streams, loop, outlet.send)


def _fill(
    save: Save,
    state: PlannedState,
    batch: Sequence[FilledBlock],
    streams: dict[str, Any],
    loop: asyncio.AbstractEventLoop,
    send: Callable[[FilledBlock], None],
) -> None:
    leaves = state.captured.tensors
    with state.turn.here(), torch.no_grad():
        events = []
        for filled in batch:
            devices = _devices(filled.plan, leaves)
            if not devices:
                fill_block(filled.plan, leaves, filled.block)
                loop.call_soon_threadsafe(send, filled)
                continue
            events.append((filled, _fill_from_devices(filled, leaves, devices, streams, save)))
        for filled, pending in events:
            for event in pending:
                event.synchronize()
            loop.call_soon_threadsafe(send, filled)


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
