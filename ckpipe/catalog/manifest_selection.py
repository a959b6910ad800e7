"""Select and read the manifests that one rank of many needs, instead of the whole index.

Theory. A rank that loads its own save needs its own manifest and those of the ranks that wrote the
chunks it shares with them, whether there are 64 ranks or 16,384. It can read these manifests one by
one, in a group object, or in the index. Each object costs a request, and each rank in it costs
bytes and the time to check them. The objects form a tree. The cheapest choice for a node is the
cheaper of the node itself and the cheapest choices for its children.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

from ckpipe import threads
from ckpipe.backend import Backend
from ckpipe.catalog.complete import Member, read_member, read_members
from ckpipe.errors import CorruptCheckpoint, UnsupportedVersion
from ckpipe.format.manifest import ManifestDocument
from ckpipe.format.merge import gathered
from ckpipe.format.names import GROUP_SIZE, group_ranks, level_sizes
from ckpipe.interpreter import gc_paused
from ckpipe.types import CheckpointId

FEWEST_RANKS = 17
"""Least number of ranks for a selection: fewer ranks have a small index, which is one request."""

REQUEST_BYTES = 64 << 10
"""Bytes of metadata that cost as much as a request: 30 ms, at 2 MB/s to check and use them."""

_MERGED_SHARE = 8
"""Ratio of a part's size in a manifest and in a merged object, which writes structures once and is
compressed."""


def nearest(
    world_size: int, ranks: Collection[int], manifest_bytes: int
) -> tuple[Member, ...] | None:
    """Return the objects that provide the parts of some ranks at the least cost.

    Args:
        world_size: The number of ranks of the checkpoint.
        ranks: The ranks whose parts are needed.
        manifest_bytes: The size of a manifest; the sizes of merged objects are estimated from it.

    Returns:
        Manifests and group objects, in the order of ranks; None for the index.
    """
    found: dict[int, tuple[int, tuple[Member, ...]]] = {
        rank: (REQUEST_BYTES + manifest_bytes, ((0, rank),)) for rank in sorted(ranks)
    }
    for level in range(1, len(level_sizes(world_size))):
        below: defaultdict[int, list[tuple[int, tuple[Member, ...]]]] = defaultdict(list)
        for number, choice in found.items():
            below[number // GROUP_SIZE].append(choice)
        found = {
            number: min(
                _together(choices),
                (
                    _merged(len(group_ranks(level, number, world_size)), manifest_bytes),
                    ((level, number),),
                ),
            )
            for number, choices in below.items()
        }
    cost, members = _together(list(found.values()))
    return members if cost < _merged(world_size, manifest_bytes) else None


def _together(
    choices: Collection[tuple[int, tuple[Member, ...]]],
) -> tuple[int, tuple[Member, ...]]:
    members = tuple(member for _, chosen in choices for member in chosen)
    return sum(cost for cost, _ in choices), members


def _merged(ranks: int, manifest_bytes: int) -> int:
    """Return the cost of a read of a merged object with so many ranks."""
    return REQUEST_BYTES + manifest_bytes + ranks * manifest_bytes // _MERGED_SHARE


async def read_near(
    backend: Backend, id: CheckpointId, rank: int, world_size: int
) -> ManifestDocument | None:
    """Read the part of a rank in a complete checkpoint, and the parts of owners of its chunks.

    Rank 0 is always among them, since its metadata and metrics are those of the checkpoint.

    Args:
        backend: The store.
        id: The checkpoint, which is complete.
        rank: The rank that loads.
        world_size: The number of ranks that load.

    Returns:
        A document of these parts. None if the caller should read the index instead: it costs no
        more, or the checkpoint has another world size, or one of the parts cannot be used.

    Raises:
        StoreError: If the store failed.
    """
    if world_size < FEWEST_RANKS:
        return None
    try:
        own, data = await read_member(backend, id, 0, rank, world_size)
        members = await threads.run_sync(_others, own, rank, len(data))
        if members is None:
            return None
        others = await read_members(backend, id, members, world_size)
        return await threads.run_sync(_gathered, [own, *others])
    except (CorruptCheckpoint, UnsupportedVersion):
        # The index is intact, or its error is more helpful.
        return None


def _others(own: ManifestDocument, rank: int, size: int) -> tuple[Member, ...] | None:
    (layout,) = own.layouts
    owners = {0, *(owner for owner in layout.chunks.owner if owner is not None)}
    return nearest(own.world_size, owners - {rank}, size)


def _gathered(documents: list[ManifestDocument]) -> ManifestDocument:
    with gc_paused():
        return gathered(documents)
