"""Stage 3: finds or makes the plan, and the memory that it needs."""

from __future__ import annotations

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from ckpipe.saving import CapturedState, PlannedState, Program, Save
from ckpipe.site import Site


async def run(
    save: Save,
    site: Site,
    inbox: MemoryObjectReceiveStream[CapturedState],
    out: MemoryObjectSendStream[PlannedState],
) -> None:
    """Passes a state on if a plan and the memory for it are there.

    Else trainers may go on while it plans and waits for memory, and the next turn looks at the
    state again.

    Raises:
        UnsupportedState: If a tensor cannot be saved.
        PipelineBusy: If memory is short and ``on_busy`` is ``"fail"``.
        UsageError: If the state is to be copied beside training and the budget is too small.
    """
    async with inbox, out:
        async for state in inbox:
            with save.clock.timing("plan"):
                program = site.program
                fits = site.fits(state.captured)
                if program is not None and fits and _has_memory(save, program):
                    await out.send(PlannedState(state.turn, state.captured, program))
                    continue
                state.turn.end()
                if not fits:
                    save.replanned = True
                    site.program = await anyio.to_thread.run_sync(site.make_program, state.captured)
            assert site.program is not None
            await site.reserve(save, len(site.program.blocks))


def _has_memory(save: Save, program: Program) -> bool:
    """Whether the save's memory serves a program; another save may have changed that meanwhile."""
    if save.request.owners:
        return len(save.blocks) == len(program.blocks)
    return save.ration is not None
