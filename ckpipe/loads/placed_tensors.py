"""Distributed tensors of the target: the memory that this process has, and what it is part of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ckpipe.errors import ShapeMismatch
from ckpipe.loads.stored_tensors import Region
from ckpipe.state.tensors import Shardings

PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
"""The types of tensors that nothing but their memory is to be said of."""


def is_placed(obj: Any) -> bool:
    """Whether a tensor is a DTensor: a local tensor with a mesh and placements."""
    return type(obj) not in PLAIN and hasattr(obj, "device_mesh") and hasattr(obj, "placements")


def local_tensor(obj: Any) -> torch.Tensor:
    """The part of a DTensor that this process holds, by its own memory, detached."""
    with torch.no_grad():
        local: torch.Tensor = obj.to_local()
    return local.detach()


def why_unplaceable(obj: Any) -> str:
    """What a DTensor does that cannot be loaded into; empty if nothing."""
    for placement in obj.placements:
        if placement.is_partial():
            return f"has the placement {placement}, whose values are the sum of several"
        if not placement.is_replicate() and not hasattr(placement, "dim"):
            return f"has the placement {placement}, which is unknown"
    return ""


def regions_of(obj: Any, shardings: Shardings, label: str) -> tuple[Region, ...]:
    """Which parts of the global tensor a DTensor's local tensor holds, and where in it.

    Args:
        obj: The DTensor; none of its placements is unplaceable.
        shardings: Remembers what was found out of others.
        label: Its name in the state, for errors.

    Raises:
        ShapeMismatch: If its local tensor has another shape than its placements give this rank:
            what is read would go beyond its memory.
        UnsupportedTopology: If its mesh cannot tell its ranks any more.
    """
    mesh = obj.device_mesh
    place = mesh.get_coordinate()
    if place is None:  # a process that is not on the mesh holds nothing
        return ()
    spread, rank = shardings.of(obj, label), _rank_on(mesh, place)
    given, expected = tuple(obj._local_tensor.shape), spread.local_shape(rank)
    if given != expected:
        raise ShapeMismatch(
            f"The local part of this DTensor has the shape {list(given)}, and its placements give "
            f"this rank {list(expected or ())}",
            rank=rank,
            key=label,
            hint="Lay it out with distribute_tensor, or give from_local the true global shape",
        )
    return tuple([Region(each.box, each.at) for each in spread.held(rank)])


def _rank_on(mesh: Any, place: Sequence[int]) -> int:
    """This process's rank; by its place on the mesh where the process group is gone already.

    Torch may hand out a mesh that equals the one asked for and was made when this process had
    another rank, so the place is not asked first.
    """
    return dist.get_rank() if dist.is_initialized() else int(mesh.mesh[tuple(place)])
