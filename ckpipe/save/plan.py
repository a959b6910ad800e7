"""Stage 2: find or make the plan, and reserve its memory."""

from __future__ import annotations

import contextlib
from hashlib import sha256

from anyio.from_thread import check_cancelled
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from ckpipe import threads
from ckpipe.errors import UsageError
from ckpipe.format.data_file import DataFiles
from ckpipe.interpreter import gc_paused, user_code
from ckpipe.plan.check import OWN_PLANNERS, check_plan
from ckpipe.plan.plan import RankPlan, files_by_size, fingerprint
from ckpipe.plan.witness import Witnesses
from ckpipe.save.context import SaveContext
from ckpipe.save.memory import reserve
from ckpipe.save.program import CopyProgram, WitnessPrograms, plan_blocks
from ckpipe.save.save import CapturedState, Save
from ckpipe.state.flatten import Captured
from ckpipe.types import CheckpointId, JointPlanner


async def run(
    save: Save,
    context: SaveContext,
    inbox: MemoryObjectReceiveStream[CapturedState],
    out: MemoryObjectSendStream[tuple[CapturedState, CopyProgram]],
) -> None:
    """Pass a state on once it has a plan and memory.

    A local plan is made while the lock is held. The lock is released for a plan that may wait for
    other ranks, and during a wait for memory; then the state is captured once more.

    Raises:
        UnsupportedState: If a tensor cannot be saved, or ranks contradict each other.
        PlanTimeout: If some ranks do not join the plan in time.
        SkipSave: If memory is short and ``on_busy`` is ``"skip"``.
        PipelineBusy: If memory is short and ``on_busy`` is ``"fail"``.
        UsageError: If the state must be copied beside training and the budget is too small.
    """
    # The lock is never held for a planner that may wait for other ranks, or runs user code.
    joint = isinstance(context.planner, JointPlanner)
    may_wait = joint or type(context.planner) not in OWN_PLANNERS
    own: CopyProgram | None = None  # saves of other structures may replace the context's
    async with inbox, out:
        async for state in inbox:
            with save.clock.timing("plan"):
                wanted = fingerprint(state.captured)
                # A joint planner must be called in every save.
                known = [own] if joint else [own, context.program]
                program = next((p for p in known if p and p.plan.fingerprint == wanted), None)
                if program is None:
                    if may_wait:
                        state.hold.release()
                    program = await threads.run_sync(
                        _make_program, context, state.captured, save.id
                    )
                    save.replanned |= program is not context.program
                    own = context.program = program
            await reserve(save, context, program, state.hold)
            if state.hold.released:
                state.hold.end()
            else:
                await out.send((state, program))


def _make_program(context: SaveContext, captured: Captured, save: CheckpointId) -> CopyProgram:
    """Plan a captured state; blocking.

    Raises:
        UnsupportedState: If a tensor cannot be saved.
        UsageError: If the plan of a program's own planner is not valid, or the planner raised
            ``SystemExit`` or ``KeyboardInterrupt``.
        SaveError: If ranks that plan together do not agree on a plan.
    """
    planner, known = context.planner, context.program
    own, name = type(planner) in OWN_PLANNERS, type(planner).__name__
    with gc_paused():
        try:
            with contextlib.nullcontext() if own else user_code(f"The planner {name}", ""):
                plan = _plan(context, captured, save)
        except UsageError:
            # A waiting planner may have raised because its save was cancelled.
            with contextlib.suppress(RuntimeError):
                check_cancelled()
            raise
        if known is not None and known.drafted is plan:
            return known
        if not own:
            check_plan(plan, captured, planner, rank=context.rank, world_size=context.world_size)
        laid, block_bytes = plan, context.arena.block_bytes
        if context.store.links is not None:
            laid = files_by_size(plan, block_bytes, context.store.max_file_bytes)
        blocks = plan_blocks(laid, captured.tensors, block_bytes)
        files = DataFiles(laid.files, laid.layout, blocks)
        witnesses, replicas = None, context.settings.replicas
        if own and context.world_size > 1 and replicas.mode != "off":
            chooser = Witnesses(laid, captured, replicas.share)
            witnesses = WitnessPrograms(chooser, captured.tensors, block_bytes)
            witnesses.prepare()
        return CopyProgram(laid, blocks, files, name, plan, witnesses)


def _plan(context: SaveContext, captured: Captured, save: CheckpointId) -> RankPlan:
    planner, rank, world_size = context.planner, context.rank, context.world_size
    if not isinstance(planner, JointPlanner):
        return planner.plan(captured, rank=rank, world_size=world_size)
    root = sha256((context.settings.url or "").encode()).hexdigest()[:16]
    name = f"{root}/{save.attempt}/{save.step}-{save.count}"
    return planner.plan_save(captured, save=name, rank=rank, world_size=world_size)
