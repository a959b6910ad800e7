"""The second half of a save: from blocks that are filled to a checkpoint that counts.

::

    filled ──┬──▶ serialize ──sums──┐
             └──▶ upload (lanes)    │
                     │ stored       │
                     ▼              ▼
                   commit ◀─────────┘──complete──▶ retain

It runs beside the first half, or in a process of its own.
"""

from __future__ import annotations

import logging
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import anyio
from anyio import create_memory_object_stream, create_task_group
from anyio.streams.memory import MemoryObjectReceiveStream

from ckpipe.interpreter import short_switch_interval
from ckpipe.save import commit, retain, serialize, upload
from ckpipe.save.delivery import Delivery, Filled, StoreContext, StoredFiles
from ckpipe.types import CheckpointInfo

logger = logging.getLogger("ckpipe")
B = TypeVar("B", bound=Filled)

REMOVE_SECONDS = 5.0
"""How long removing what a failed save has stored may take; nothing can cancel it meanwhile."""


async def run_delivery(
    save: Delivery[B],
    depot: StoreContext,
    unsummed: MemoryObjectReceiveStream[B],
    filled: MemoryObjectReceiveStream[B],
) -> None:
    """Runs the last four stages of a save; when this returns, retention is through too.

    Args:
        save: The save.
        depot: What the stages work with.
        unsummed: All of its blocks, for their checksums.
        filled: The same blocks, for the store.

    If it fails before it can have committed, what it has stored is removed again, for a store
    that was too full for the rest would stay full.

    Raises:
        ExceptionGroup: What went wrong in a stage.
    """
    sums_out, sums = create_memory_object_stream[list[int]](0)
    stored_out, stored = create_memory_object_stream[StoredFiles](0)
    complete_out, complete = create_memory_object_stream[CheckpointInfo](0)
    try:
        async with create_task_group() as tasks:
            tasks.start_soon(serialize.run, save, unsummed, sums_out, name=f"serialize {save.name}")
            tasks.start_soon(
                upload.run, save, depot, filled, stored_out, name=f"upload {save.name}"
            )
            tasks.start_soon(
                commit.run, save, depot, stored, sums, complete_out, name=f"commit {save.name}"
            )
            tasks.start_soon(retain.run, save, depot, complete, name=f"retention {save.name}")
    except BaseException:
        if save.stored and not save.may_count and not save.again:
            await _remove_stored(save, depot)
        raise


async def _remove_stored(save: Delivery[Any], depot: StoreContext) -> None:
    """Removes this rank's data files, if the store lets it at once; else a sweep does."""
    with anyio.move_on_after(REMOVE_SECONDS, shield=True):
        try:
            await depot.backend.delete(save.stored)
        except Exception as error:  # whatever a store raises, what made the save fail is told
            logger.warning("Data files of %s were left behind: %s", save.name, error)


class Here:
    """Runs the second half in this process, beside the first.

    It begins once it is known what to store. Nothing of it is in the way then while the caller
    waits, and the data file is opened while its first block is copied.
    """

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[Delivery[Any], anyio.Event] = WeakKeyDictionary()

    async def deliver(
        self,
        save: Delivery[B],
        depot: StoreContext,
        unsummed: MemoryObjectReceiveStream[B],
        filled: MemoryObjectReceiveStream[B],
    ) -> None:
        """See :class:`ckpipe.save.context.Uploader`."""
        known = self._known.setdefault(save, anyio.Event())
        async with unsummed, filled:
            await known.wait()
            with short_switch_interval(depot.switch_interval):
                await run_delivery(save, depot, unsummed, filled)

    def set_out(self, save: Delivery[B]) -> None:
        """Lets the second half begin."""
        self._known.setdefault(save, anyio.Event()).set()

    async def hand_over(self, save: Delivery[B]) -> None:
        """It is here already."""
        return
