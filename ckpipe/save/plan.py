"""Stage 3: finds or makes the plan, and the memory that it needs."""

from __future__ import annotations

from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from ckpipe import threads
from ckpipe.plan.plan import fingerprint
from ckpipe.save.context import SaveContext
from ckpipe.save.record import CapturedState, CopyProgram, PlannedState, Save
from ckpipe.state.flatten import Captured


async def run(
    save: Save,
    site: SaveContext,
    inbox: MemoryObjectReceiveStream[CapturedState],
    out: MemoryObjectSendStream[PlannedState],
) -> None:
    """Passes a state on if a plan and the memory for it are there.

    Else trainers may go on while it plans and waits for memory, and the next turn looks at the
    state again.

    Raises:
        UnsupportedState: If a tensor cannot be saved, or ranks contradict each other.
        PlanTimeout: If ranks do not come to plan together in time.
        PipelineBusy: If memory is short and ``on_busy`` is ``"fail"``.
        UsageError: If the state is to be copied beside training and the budget is too small.
    """
    # The site remembers one program for all saves, and saves of several structures replace each
    # other's; a save that has made one does not depend on that.
    own: CopyProgram | None = None
    async with inbox, out:
        async for state in inbox:
            if state.deferral is not None:
                known = state.deferral.program
                await out.send(
                    PlannedState(state.turn, state.captured, state.after, known, state.deferral)
                )
                continue
            with save.clock.timing("plan"):
                program = _fitting(state.captured, own, site.reusable_program)
                if program is not None and _has_memory(save, program):
                    await out.send(PlannedState(state.turn, state.captured, state.after, program))
                    continue
                state.turn.release()
                if program is None:
                    before = site.program
                    program = await threads.run_sync(site.make_program, state.captured, save.id)
                    save.replanned |= program is not before
                    site.program = program
            own = program
            await site.reserve(save, len(program.blocks))
            state.turn.end()


def _fitting(captured: Captured, *programs: CopyProgram | None) -> CopyProgram | None:
    """The first of some programs that serves a captured state."""
    wanted = fingerprint(captured)
    return next((each for each in programs if each and each.plan.fingerprint == wanted), None)


def _has_memory(save: Save, program: CopyProgram) -> bool:
    """Tell whether a save's ration is for this program, not for one that another save has
    replaced.
    """
    if save.request.owners:
        return len(save.blocks) == len(program.blocks)
    return save.ration is not None and save.ration.needed == len(program.blocks)
