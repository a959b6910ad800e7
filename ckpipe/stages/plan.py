"""Stage 3: finds or makes the plan, and the memory that it needs."""

from __future__ import annotations

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from ckpipe.saving import CapturedState, PlannedState, Save
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
    """
    async with inbox, out:
        async for state in inbox:
            with save.clock.timing("plan"):
                program = site.program
                if program is not None and save.ration is not None and site.fits(state.captured):
                    await out.send(PlannedState(state.turn, state.captured, program))
                    continue
                state.turn.end()
                if not site.fits(state.captured):
                    save.replanned = True
                    site.program = await anyio.to_thread.run_sync(site.make_program, state.captured)
            assert site.program is not None
            await site.reserve(save, len(site.program.blocks))
