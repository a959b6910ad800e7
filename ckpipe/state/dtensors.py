"""DTensors as a state holds them: their local part, and how the whole lies on its mesh.

Only attributes are read: nothing here communicates, and nothing is traced by autograd. A program
that has no DTensor never imports torch's module of them.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from ckpipe.errors import UnsupportedState, UnsupportedTopology
from ckpipe.state.placements import Mesh, Placement, Sharding, mesh_of, sharding


def is_dtensor_type(kind: type[Any]) -> bool:
    """Whether a class is torch's DTensor itself."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and kind is getattr(module, "DTensor", None)


def local_part(tensor: Any) -> torch.Tensor:
    """The tensor on this rank that a DTensor stands for, ready to be read."""
    local: torch.Tensor = tensor._local_tensor
    if type(local) is not torch.Tensor and hasattr(local, "trigger_wait"):
        # The result of a collective that the program began itself, and that may still be under way.
        local = local.trigger_wait()
    return local


class Shardings:
    """Reads the shardings of DTensors; remembers meshes and placements for one walk.

    Within a walk the meshes stay alive, so that their ids name them.
    """

    def __init__(self) -> None:
        self._meshes: dict[int, tuple[Any, Mesh]] = {}
        self._known: dict[tuple[Any, ...], Sharding] = {}

    def of(self, tensor: Any, label: str) -> Sharding:
        """How a DTensor lies on its mesh.

        Raises:
            UnsupportedState: If it has a placement that cannot be saved, ``Partial`` above all.
            UnsupportedTopology: If its mesh cannot tell its ranks any more.
        """
        mesh, placements, shape = tensor.device_mesh, tensor.placements, tensor.shape
        key = (id(mesh), placements, shape)
        known = self._known.get(key)
        if known is None:
            cut = tuple(_placement(each, label) for each in placements)
            known = self._known[key] = sharding(self._mesh(mesh, label), cut, tuple(shape))
        return known

    def _mesh(self, device_mesh: Any, label: str) -> Mesh:
        known = self._meshes.get(id(device_mesh))
        if known is None:
            ranks = _ranks_of(device_mesh, label)
            data = ranks.to("cpu", torch.int64).contiguous().numpy().tobytes()
            made = mesh_of(tuple(ranks.shape), data)
            known = self._meshes[id(device_mesh)] = (device_mesh, made)
        return known[1]


def _ranks_of(device_mesh: Any, label: str) -> torch.Tensor:
    try:
        ranks: torch.Tensor = device_mesh.mesh
    except (RuntimeError, ValueError) as error:
        # A part of a mesh looks for this process in the whole, by the default process group.
        raise UnsupportedTopology(
            f"The ranks of the mesh that this DTensor lies on cannot be told: {error}",
            key=label or None,
            hint="Close the pipeline before torch.distributed.destroy_process_group",
        ) from error
    return ranks


def _placement(placement: Any, label: str) -> Placement:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    if type(placement) is Replicate:
        return Placement()
    # Older releases of torch derive the strided shard from the plain one.
    if type(placement) is _StridedShard:
        return Placement(placement.dim, int(placement.split_factor))
    if type(placement) is Shard:
        return Placement(placement.dim)
    raise UnsupportedState(
        f"This DTensor has the placement {placement!r:.100}",
        key=label,
        hint="Redistribute it to Shard or Replicate before it is saved",
    )
