"""The last four stages of a save, in the trainer or in its worker process.

::

    blocks ──▶ serialize ──blocks──▶ upload (lanes) ──files──▶ commit ──complete──▶ retention
"""

from __future__ import annotations

import logging
import math

import anyio
from anyio import create_memory_object_stream, create_task_group
from anyio.streams.memory import MemoryObjectReceiveStream

from ckpipe.format.data_file import DataFiles
from ckpipe.save import commit, links, retention, serialize, upload
from ckpipe.save.context import StoreContext
from ckpipe.save.record import FilledBlock, SaveRecord
from ckpipe.types import CheckpointInfo

logger = logging.getLogger("ckpipe")

REMOVE_SECONDS = 5.0
"""Time limit, in seconds, for the removal of a failed save's files, which cannot be cancelled."""


async def deliver(
    save: SaveRecord, context: StoreContext, blocks: MemoryObjectReceiveStream[FilledBlock]
) -> None:
    """Bring a planned save to the store; when it returns, retention has ended too.

    If it fails before it can have committed, its data files are removed again: otherwise a store
    that was too full for the rest would stay full.

    Args:
        save: The save.
        context: The context of the store.
        blocks: All of its blocks, in any order.

    Raises:
        ExceptionGroup: The error of a stage.
        ReplicasDiffer: If copies differ, and the settings ask for the error.
    """
    name = save.name
    summed_out, summed = create_memory_object_stream[FilledBlock](math.inf)
    stored_out, stored = create_memory_object_stream[DataFiles](0)
    complete_out, complete = create_memory_object_stream[CheckpointInfo](0)
    try:
        async with links.based(save, context), create_task_group() as tasks:
            tasks.start_soon(
                serialize.run, save, context, blocks, summed_out, name=f"serialize {name}"
            )
            tasks.start_soon(upload.run, save, context, summed, stored_out, name=f"upload {name}")
            tasks.start_soon(commit.run, save, context, stored, complete_out, name=f"commit {name}")
            tasks.start_soon(retention.run, save, context, complete, name=f"retention {name}")
    except BaseException:
        unsure = save.commit_may_exist or save.redelivered or save.taken
        if save.stored and not unsure:
            # Only if the store is quick; otherwise a sweep removes them.
            with anyio.move_on_after(REMOVE_SECONDS, shield=True):
                try:
                    await context.backend.delete(save.stored)
                except Exception as error:  # the save's own error is raised
                    logger.warning("Data files of %s were left behind: %s", name, error)
        raise
    if save.differs is not None:
        raise save.differs
