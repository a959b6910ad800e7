"""Reading the parts that a rank of many needs, instead of the index that has all."""

from __future__ import annotations

from functools import partial

import anyio

from ckpipe.backend import Backend
from ckpipe.checkpoints.completion import read_member
from ckpipe.checkpoints.near_parts import FEWEST_RANKS, Member, nearest
from ckpipe.errors import CorruptCheckpoint, UnsupportedVersion
from ckpipe.format.manifest import Bundle
from ckpipe.format.merging import gathered
from ckpipe.tasks import to_thread
from ckpipe.tasks.collector import collector_paused
from ckpipe.types import CheckpointId

_READS = 8
"""Objects that are read at the same time."""


async def read_near(
    backend: Backend, id: CheckpointId, rank: int, world_size: int
) -> Bundle | None:
    """The part of a rank in a complete checkpoint, with those of the ranks that it leans on.

    Rank 0 is always among them, since its metadata and metrics are those of the checkpoint.

    Args:
        backend: The store.
        id: The checkpoint, which is complete.
        rank: The rank that loads.
        world_size: How many ranks load.

    Returns:
        A bundle of these parts; None if the index serves better, because it costs no more, or the
        checkpoint is of another world size, or one of the parts cannot be used.

    Raises:
        StoreError: If the store failed.
    """
    if world_size < FEWEST_RANKS:
        return None
    try:
        own, size = await read_member(backend, id, 0, rank, world_size)
        members = await to_thread.run_sync(_others, own, rank, size)
        if members is None:
            return None
        others = await _read(backend, id, members, world_size)
        return await to_thread.run_sync(_gathered, [own, *others])
    except (CorruptCheckpoint, UnsupportedVersion):
        # The index is whole, or says better what is wrong.
        return None


def _others(own: Bundle, rank: int, size: int) -> tuple[Member, ...] | None:
    (layout,) = own.layouts
    owners = {0, *(chunk.owner for chunk in layout.chunks if chunk.owner is not None)}
    return nearest(own.world_size, owners - {rank}, size)


async def _read(
    backend: Backend, id: CheckpointId, members: tuple[Member, ...], world_size: int
) -> list[Bundle]:
    found: dict[Member, Bundle] = {}
    limiter = anyio.CapacityLimiter(_READS)

    async def read(member: Member) -> None:
        async with limiter:
            found[member], _ = await read_member(backend, id, *member, world_size)

    try:
        async with anyio.create_task_group() as tasks:
            for member in members:
                tasks.start_soon(partial(read, member))
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
    return [found[member] for member in members]


def _gathered(bundles: list[Bundle]) -> Bundle:
    with collector_paused():
        return gathered(bundles)
