"""One save from beginning to end: the picture of the library.

::

    lock ──captured──▶ plan ──planned──▶ stage ──blocks──▶ serialize ──blocks──▶ upload (lanes)
                                                                                    │ files
                                                     retention ◀──complete── commit ◀┘

The first three stages handle the state, and run in the trainer. The last four handle only bytes,
and run in the trainer too or in its worker process (:mod:`ckpipe.save.deliver`). The streams of
blocks are unbounded, since the save's reservation of memory bounds the blocks already. The other
streams have no buffer, so a slow stage slows those before it.
"""

from __future__ import annotations

import math

from anyio import create_memory_object_stream, create_task_group
from anyio.streams.memory import MemoryObjectReceiveStream

from ckpipe.interpreter import short_switch_interval
from ckpipe.save import lock, plan, stage
from ckpipe.save.context import SaveContext, StoreContext
from ckpipe.save.deliver import deliver
from ckpipe.save.program import CopyProgram
from ckpipe.save.record import FilledBlock
from ckpipe.save.save import CapturedState, Save


async def run_save(save: Save, context: SaveContext) -> None:
    """Run the seven stages of a save.

    The stages resolve the save's futures. When this returns, retention has ended too.

    Raises:
        ExceptionGroup: The error of a stage. The save is then lost, unless its ``committed`` is
            resolved.
    """
    name = save.name
    captured_out, captured = create_memory_object_stream[CapturedState](0)
    planned_out, planned = create_memory_object_stream[tuple[CapturedState, CopyProgram]](0)
    blocks_out, blocks = create_memory_object_stream[FilledBlock](math.inf)
    try:
        async with create_task_group() as tasks:
            tasks.start_soon(lock.run, save, context, captured_out, name=f"lock {name}")
            tasks.start_soon(plan.run, save, context, captured, planned_out, name=f"plan {name}")
            tasks.start_soon(stage.run, save, context, planned, blocks_out, name=f"stage {name}")
            if context.uploader is None:
                await deliver_here(save, context.store, blocks)
            else:
                await context.uploader.deliver(save, context.store, blocks)
    finally:
        save.close_reservation()


async def deliver_here(
    save: Save, context: StoreContext, blocks: MemoryObjectReceiveStream[FilledBlock]
) -> None:
    """Bring a save to the store in this process, once its data files are planned."""
    save.handed_over.set()
    async with blocks:
        await save.ready.wait()
        with short_switch_interval(context.settings.switch_interval_seconds):
            await deliver(save, context, blocks)
