"""Checkpoints of a root in a line each: what lists of names, or their indexes, say."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ckpipe.backend import Backend
from ckpipe.checkpoints.digests import list_digests
from ckpipe.checkpoints.discovery import DELETING, describe, read_index
from ckpipe.errors import CorruptCheckpoint, UnsupportedVersion
from ckpipe.format.digests import Digest, digest_of
from ckpipe.tasks.lanes import run_lanes
from ckpipe.types import CheckpointInfo

_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Summary:
    """A checkpoint in a line.

    Args:
        info: What the list of the root says of it.
        bytes: Size of its data files; None if that is not known.
        world_size: How many ranks wrote it; None if that is not known.
        metrics: What ``save`` was given as metrics.
        final: Whether it was to be the last of its run.
        copied_bytes: How many of its bytes are copies that several ranks wrote of one tensor; told
            where that is a quarter or more, else 0.
        problem: Why its index could not be read although it is there; empty if it could.
    """

    info: CheckpointInfo
    bytes: int | None = None
    world_size: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    final: bool = False
    copied_bytes: int = 0
    problem: str = ""


async def summarise(
    backend: Backend,
    infos: Sequence[CheckpointInfo],
    on_done: Callable[[], None] = lambda: None,
) -> list[Summary]:
    """Summaries of checkpoints by their digests, or by their indexes where there are none.

    Costs one delimited list, and an index for each checkpoint without a digest. A digest tells
    what was saved; whether the index is still whole is for ``verify`` or :func:`read_all` to say.

    Args:
        backend: The store.
        infos: Checkpoints of it.
        on_done: Called after each.

    Returns:
        A summary for each, in the same order.

    Raises:
        StoreError: If the store failed.
    """
    digests = await list_digests(backend) if infos else {}
    told = {each.id: digests[each.key] for each in infos if each.complete and each.key in digests}
    for _ in told:
        on_done()
    read = await read_all(backend, [each for each in infos if each.id not in told], on_done)
    by_id = {each.info.id: each for each in read}
    return [_told(each, told[each.id]) if each.id in told else by_id[each.id] for each in infos]


async def read_all(
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
    """Reads the index of one checkpoint, if it is complete; one deleted by now is incomplete.

    Raises:
        StoreError: If the store failed.
    """
    if not info.complete:
        return Summary(info)
    try:
        return _told(info, digest_of(await read_index(backend, info.key)))
    except (CorruptCheckpoint, UnsupportedVersion) as error:
        now = await describe(backend, info)
        if now.reason == DELETING:
            return Summary(now)
        return Summary(info, problem=str(error))


def _told(info: CheckpointInfo, digest: Digest) -> Summary:
    copied = digest.copied_bytes if digest.is_wasteful else 0
    return Summary(info, digest.bytes, digest.world_size, digest.metrics, digest.final, copied)


__all__ = ["Summary", "read_all", "summarise", "summary"]
