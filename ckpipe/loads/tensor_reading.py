"""Reading chosen tensors of a checkpoint by their labels, as plain tensors on the CPU.

For programs that look at a checkpoint without having the objects that were saved: none of the
classes that the state was made of is needed, and nothing but the named tensors is read.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch

from ckpipe.backend import Backend
from ckpipe.format.keys import LabelFilter
from ckpipe.format.manifest import Bundle, Structure
from ckpipe.format.tree import Node
from ckpipe.loads.restore import LoadRequest, restore
from ckpipe.memory.arena import Arena


async def read_tensors(
    backend: Backend,
    bundle: Bundle,
    labels: Collection[str],
    arena: Arena,
    *,
    lanes: int,
    rank: int | None = None,
) -> dict[str, torch.Tensor]:
    """Reads tensors whole, every byte verified.

    Args:
        backend: The store.
        bundle: The checkpoint's index, validated.
        labels: Labels of tensors; those that the checkpoint has not are left out.
        arena: Lends the blocks that are read into; used on the caller's thread only.
        lanes: How many reads run at once.
        rank: Whose tensors to read, where ranks hold them whole and not alike; None assembles
            tensors of all ranks, and takes what each has for itself from the lowest.

    Returns:
        The tensors by label. Tensors that shared memory when they were saved do so again.

    Raises:
        UnsupportedTopology: If ranks saved states of different structure.
        CorruptCheckpoint: If the checkpoint is not what was saved.
        StoreError: If the store failed.
    """
    flat = replace(bundle, structures=tuple(_flat(each, labels) for each in bundle.structures))
    # Not strict, since that would be taken to need all that was saved.
    request = LoadRequest(
        None, LabelFilter(), strict=False, cast=False, pickling=False, per_rank="rank0"
    )
    place = (0, 1) if rank is None else (rank, bundle.world_size)
    result = await restore(
        backend, flat, request, arena, lanes=lanes, rank=place[0], world_size=place[1]
    )
    return {name: value for name, value in result.state.items() if isinstance(value, torch.Tensor)}


def _flat(structure: Structure, labels: Collection[str]) -> Structure:
    """A structure whose state is one dict of plain tensors by label."""
    rows = tuple(
        replace(row, kind="tensor", detail=None, requires_grad=False, attributes=None)
        for row in structure.tensors
    )
    wanted = set(labels)
    numbers = [number for number, row in enumerate(rows) if row.label in wanted]
    nodes: list[Node] = [["tensor", number] for number in numbers]
    tree: Node = ["dict", [rows[number].label for number in numbers], nodes]
    return replace(structure, tree=tree, tensors=rows)


__all__ = ["read_tensors"]
