"""Checkpoints of a root in a line each: what a list of names and their indexes say."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ckpipe.backend import Backend
from ckpipe.checkpoints.discovery import read_index
from ckpipe.checkpoints.inspection import data_bytes
from ckpipe.errors import CorruptCheckpoint, UnsupportedVersion
from ckpipe.format.keys import decode_float
from ckpipe.tasks.lanes import run_lanes
from ckpipe.types import CheckpointId, CheckpointInfo

_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Summary:
    """A checkpoint in a line.

    Args:
        info: What the list of the root says of it.
        bytes: Size of its data files; None if its index was not read.
        world_size: How many ranks wrote it; None if its index was not read.
        metrics: What ``save`` was given as metrics.
        final: Whether it was to be the last of its run.
        problem: Why its index could not be read although it is there; empty if it could.
    """

    info: CheckpointInfo
    bytes: int | None = None
    world_size: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    final: bool = False
    problem: str = ""


async def summarise(
    backend: Backend,
    infos: Sequence[CheckpointInfo],
    on_done: Callable[[], None] = lambda: None,
) -> list[Summary]:
    """Reads the indexes of checkpoints, several at once; damaged ones are told, not raised.

    Args:
        backend: The store.
        infos: Checkpoints of it. Incomplete ones have no index and cost no request.
        on_done: Called after each.

    Returns:
        A summary for each, in the same order.

    Raises:
        StoreError: If the store failed.
    """
    found: dict[str, Summary] = {}
    pending = iter(infos)

    async def lane() -> None:
        for info in pending:
            found[info.id] = await summary(backend, info)
            on_done()

    await run_lanes(min(_AT_ONCE, len(infos)), lane)
    return [found[info.id] for info in infos]


async def summary(backend: Backend, info: CheckpointInfo) -> Summary:
    """Reads the index of one checkpoint, if it is complete.

    Raises:
        StoreError: If the store failed.
    """
    id = CheckpointId.parse(info.id)
    if id is None or not info.complete:
        return Summary(info)
    try:
        bundle = await read_index(backend, id)
    except (CorruptCheckpoint, UnsupportedVersion) as error:
        return Summary(info, problem=str(error))
    part = bundle.parts[0]
    return Summary(
        info,
        data_bytes(bundle),
        bundle.world_size,
        {name: decode_float(value) for name, value in part.metrics.items()},
        any(each.final for each in bundle.parts),
    )


__all__ = ["Summary", "summarise", "summary"]
