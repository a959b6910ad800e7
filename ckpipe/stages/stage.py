"""Stage 2, in two halves: the walk over the state, and the copy into host memory."""

from __future__ import annotations

from collections import deque

import anyio
import anyio.lowlevel
import torch
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from ckpipe.arena import Block
from ckpipe.block_copiers import BlockCopiers, Outlet, Piece
from ckpipe.collector import collector_paused
from ckpipe.copying import BlockPlan, split_block
from ckpipe.cuda import SideStreams
from ckpipe.events import Staged
from ckpipe.ownership import memory_facts, owned_leaves, owned_tensors
from ckpipe.saving import CapturedState, Division, FilledBlock, PlannedState, Save, Turn, resolve
from ckpipe.site import Site
from ckpipe.structure import Captured
from ckpipe.structure import walk as walk_state
from ckpipe.trail import trail_of

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
            with save.clock.timing("walk"), turn.in_use():
                captured = await anyio.to_thread.run_sync(_walk, save, site, turn)
            await out.send(CapturedState(turn, captured))


def _walk(save: Save, site: Site, turn: Turn) -> Captured:
    pickling = site.settings.pickle == "allow"
    state, select = save.request.state, save.request.select
    with turn.here(), torch.no_grad(), collector_paused():
        captured = None if site.trail is None else site.trail.follow(state, select)
        if captured is None:
            walked = walk_state(state, select, pickling=pickling)
            site.trail = trail_of(walked, select)
            captured = walked.captured
        return captured


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

    Raises:
        CaptureTooSlow: If a step would have had to wait too long for a copy beside training.
        StateChanged: If what is copied beside training was changed without the lock.
    """
    async with inbox, to_serialize, to_upload:
        async for state in inbox:
            save.take_up(state)
            site.carrier.set_out(save)
            outlet = Outlet(to_serialize, to_upload, overlap=site.settings.staging.overlap)
            copiers = _copiers(save, state, outlet)
            try:
                with save.clock.timing("stage", state.program.plan.size), state.turn.in_use():
                    if save.request.owners:
                        await _copy_beside_training(save, site, state, copiers)
                    else:
                        await _copy_at_once(save, state, copiers, outlet)
            finally:
                state.turn.end(copied=True)
            outlet.open()
            await site.carrier.hand_over(save)
            _staged(save, site, state)


def _copiers(save: Save, state: PlannedState, outlet: Outlet) -> BlockCopiers:
    def out(filled: FilledBlock) -> None:
        save.note(filled)
        outlet.send(filled)

    streams = SideStreams(save.request.fences)
    threads = min(MAX_COPIERS, torch.get_num_threads())
    return BlockCopiers(state.turn, state.captured, streams, out, threads=threads)


async def _copy_at_once(
    save: Save, state: PlannedState, copiers: BlockCopiers, outlet: Outlet
) -> None:
    """Hands out blocks as the ration has them, to copiers that share what is ready."""
    ration = save.ration
    assert ration is not None
    plans = deque(state.program.blocks)
    async with anyio.create_task_group() as tasks:
        while plans:
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
    save: Save, site: Site, state: PlannedState, copiers: BlockCopiers
) -> None:
    """Copies what anybody may change, lets the caller go, then copies what optimizers own."""
    soon, late, owned = await anyio.to_thread.run_sync(_divide, save, site, state)
    copiers.add(soon)
    await copiers.finish()
    copiers.defer(owned, site.settings.lock.max_step_wait_seconds)
    save.captured_seconds = save.elapsed
    resolve(save.safe, None)
    copiers.add(late)
    await copiers.finish()
    await anyio.to_thread.run_sync(copiers.let_go)


def _divide(
    save: Save, site: Site, state: PlannedState
) -> tuple[list[Piece], list[Piece], list[int]]:
    """The pieces to copy at once, those to copy later, and the tensors that the latter read."""
    division = _division(save, site, state)
    soon, late = [], []
    for plan, block, halves in zip(state.program.blocks, save.blocks, division.halves, strict=True):
        filled = FilledBlock(plan, block)
        at_once, later = halves
        if at_once.steps:
            soon.append(Piece(filled, at_once, last=not later.steps))
        if later.steps or not at_once.steps:
            late.append(Piece(filled, later))
    return soon, late, division.owned


def _division(save: Save, site: Site, state: PlannedState) -> Division:
    """How a save's work is divided: as the last one's was, if nothing that matters is another."""
    leaves, owners = state.captured.tensors, save.request.owners
    facts = memory_facts(owned_tensors(owners))
    last = site.division
    if last is not None and last.serves(leaves, state.program, facts):
        return last
    owned = owned_leaves(leaves, owners)
    halves = [split_block(plan, owned) for plan in state.program.blocks]
    site.division = made = Division(leaves, state.program, facts, sorted(owned), halves)
    return made


def _staged(save: Save, site: Site, state: PlannedState) -> None:
    save.staged_seconds = save.elapsed
    save.status = "uploading" if site.settings.staging.overlap else "staged"
    state.captured.forget_memory()
    save.forget_state()
    resolve(save.staged, None)
    size = state.program.plan.size
    site.events.emit(Staged(save.name, save.id.step, save.rank, save.staged_seconds, size))
