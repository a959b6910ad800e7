"""Stage 2, in two halves: the walk over the state, and the copy into host memory."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Sequence

import anyio
import anyio.lowlevel
import torch
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from ckpipe.errors import StateLockTimeout, UsageError
from ckpipe.events import Staged
from ckpipe.interpreter import available_cpus, gc_paused
from ckpipe.load.select import unmatched
from ckpipe.lock.holds import LockHold
from ckpipe.lock.late_copies import MutationDetector
from ckpipe.loop_thread import on_caller
from ckpipe.memory.arena import Block
from ckpipe.memory.cuda import SideStreams, events_behind
from ckpipe.plan.plan import fingerprint
from ckpipe.saves.block_copiers import BlockCopiers, Outlet, Piece, devices_of
from ckpipe.saves.copying import BlockPlan
from ckpipe.saves.programs import Division, Program, divide
from ckpipe.saves.saving import CapturedState, Deferral, FilledBlock, PlannedState, Save, resolve
from ckpipe.saves.site import Site
from ckpipe.state.capture_cache import capture_cache_of
from ckpipe.state.flatten import Captured, Walked
from ckpipe.state.flatten import walk as walk_state
from ckpipe.threads import run_sync

WAITS = 3
"""How often a save waits for the lock if its caller's event loop then comes too late to walk."""

MAX_COPIERS = 4
"""Worker threads that fill blocks at the most: about what saturates the memory of a machine."""


async def walk(
    save: Save,
    site: Site,
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
            state = None if save.head is None else save.head.found(turn)
            await out.send(state or await _looked(save, site, turn))


async def _looked(save: Save, site: Site, turn: LockHold) -> CapturedState:
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


def look(save: Save, site: Site, turn: LockHold) -> CapturedState | None:
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


def _walk(save: Save, site: Site, turn: LockHold) -> Captured:
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


def _check_selection(save: Save, site: Site, walked: Walked) -> None:
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


def _let_caller_go(save: Save, site: Site, turn: LockHold, captured: Captured) -> Deferral | None:
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
    return Deferral(program, division, watch)


def _captured(save: Save) -> None:
    save.captured_seconds = save.elapsed
    resolve(save.safe, None)


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


def _copiers(save: Save, state: PlannedState, outlet: Outlet, *, beside: bool) -> BlockCopiers:
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
    save: Save, state: PlannedState, copiers: BlockCopiers, outlet: Outlet
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
    save: Save, site: Site, state: PlannedState, division: Division, copiers: BlockCopiers
) -> None:
    """Copies what anybody may change, lets the caller go, then copies what optimizers own."""
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


def _pieces(save: Save, program: Program, division: Division) -> tuple[list[Piece], list[Piece]]:
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


async def _late_division(save: Save, site: Site, state: PlannedState) -> Division | None:
    """How a save's work is divided; None if all is to be copied before training goes on."""
    if state.deferral is not None:
        return state.deferral.division
    if not save.request.owners:
        return None
    division = await run_sync(_division, save, site, state.captured, state.program)
    state.captured.objects = []
    return division if division.owned else None


def _division(save: Save, site: Site, captured: Captured, program: Program) -> Division:
    """How a save's work is divided: as the last one's was, if nothing that matters is another."""
    last, owners = site.division, save.request.owners
    if last is None or not last.serves(captured, program, owners):
        last = site.division = divide(captured, program, owners)
    return last


def _staged(save: Save, site: Site, state: PlannedState) -> None:
    save.staged_seconds = save.elapsed
    save.status = "uploading" if site.settings.staging.overlap else "staged"
    state.captured.forget_memory()
    save.forget_state()
    resolve(save.staged, None)
    size = state.program.plan.size
    site.events.emit(Staged(save.name, save.id.step, save.rank, save.staged_seconds, size))
