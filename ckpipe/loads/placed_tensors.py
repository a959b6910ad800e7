"""Distributed tensors of the target: the memory that this process has, and what it is part of."""

from __future__ import annotations

from typing import Any

import torch

from ckpipe.loads.stored_tensors import Region
from ckpipe.state.dtensors import Shardings

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


def regions_of(obj: Any, shardings: Shardings) -> tuple[Region, ...]:
    """Which parts of the global tensor a DTensor's local tensor holds, and where in it.

    Args:
        obj: The DTensor; none of its placements is unplaceable.
        shardings: Remembers what was found out of others.
    """
    mesh = obj.device_mesh
    place = mesh.get_coordinate()
    if place is None:  # a process that is not on the mesh holds nothing
        return ()
    spread = shardings.of(obj, "")
    # A mesh knows it even when the process group that it was made for is gone.
    held = spread.held(int(mesh.mesh[tuple(place)]))
    return tuple([Region(each.box, each.at) for each in held])
