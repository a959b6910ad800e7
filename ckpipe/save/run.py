"""One save from beginning to end: the picture of the library.

::

    lock ──holds──▶ walk ──states──▶ plan ──planned──▶ copy ──filled──▶ second half

    second half, here or in a process of its own (ckpipe.save.upload_pipeline):

    filled ──┬──▶ serialize ──sums──┐
             └──▶ upload (lanes)    │
                     │ stored       │
                   commit ◀─────────┘──complete──▶ retain

Streams hold nothing, so that a slow stage slows those before it; only those of filled blocks take
as many as come, since the save's ration of memory bounds those already. A block is free again when
its checksums are computed and it is uploaded.
"""

from __future__ import annotations

import math

from anyio import create_memory_object_stream, create_task_group

from ckpipe.lock.holds import LockHold
from ckpipe.save import lock, plan, stage
from ckpipe.save.context import SaveContext
from ckpipe.save.record import CapturedState, FilledBlock, PlannedState, Save


async def run_save(save: Save, site: SaveContext) -> None:
    """Runs the seven stages of a save.

    The save's futures are resolved by the stages; when this returns, retention is through too.

    Raises:
        ExceptionGroup: What went wrong in a stage; nothing of the save counts then, unless its
            ``committed`` is resolved.
    """
    turns_out, turns = create_memory_object_stream[LockHold](0)
    states_out, states = create_memory_object_stream[CapturedState](0)
    planned_out, planned = create_memory_object_stream[PlannedState](0)
    unsummed_out, unsummed = create_memory_object_stream[FilledBlock](math.inf)
    filled_out, filled = create_memory_object_stream[FilledBlock](math.inf)
    try:
        async with create_task_group() as tasks:
            tasks.start_soon(lock.run, save, site, turns_out, name=f"lock {save.name}")
            tasks.start_soon(stage.walk, save, site, turns, states_out, name=f"walk {save.name}")
            tasks.start_soon(plan.run, save, site, states, planned_out, name=f"plan {save.name}")
            tasks.start_soon(
                stage.copy, save, site, planned, unsummed_out, filled_out, name=f"copy {save.name}"
            )
            tasks.start_soon(
                site.carrier.deliver, save, site, unsummed, filled, name=f"deliver {save.name}"
            )
    finally:
        save.close_ration()
