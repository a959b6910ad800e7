"""States that several ranks have in unusual ways, each as one of four ranks makes it."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from tests.support.placed_tensors import local_part

State = dict[str, Any]
Make = Callable[[int], State]
"""Makes the state of this rank, its numbers multiplied by one."""


def _mesh_key(ranks: Any) -> Any:
    return tuple(map(_mesh_key, ranks)) if isinstance(ranks, list | tuple) else ranks


@lru_cache
def _mesh_of(key: Any) -> DeviceMesh:
    return DeviceMesh("cpu", torch.tensor(key), _init_backend=False)


def mesh_of(ranks: Any) -> DeviceMesh:
    """A mesh of some ranks, made without a word to the others."""
    return _mesh_of(_mesh_key(ranks))


def on(ranks: Any, full: torch.Tensor, *placements: Any) -> DTensor:
    """A tensor on a mesh, cut by torch's own placements; a rank outside of it holds nothing."""
    mesh = mesh_of(ranks)
    place = mesh.get_coordinate()
    local = full.new_empty(0)
    if place is not None:
        local = local_part(full, tuple(mesh.shape), placements, place)
    return wrapped(local, mesh, placements, full)


def wrapped(local: torch.Tensor, mesh: DeviceMesh, placements: Any, full: torch.Tensor) -> DTensor:
    """A local tensor as the part of a whole, whether or not it fits."""
    # Not from_local, which takes an empty shape for none.
    meta = TensorMeta(full.shape, full.stride(), full.dtype)
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=meta)
    make: Any = DTensor
    made: DTensor = make(local, spec, requires_grad=False)
    return made


FULL = torch.arange(42.0).view(7, 6)


def spread(ranks: Any, *placements: Any) -> Make:
    """A state on a mesh: uneven, with fewer rows than ranks, empty, and without dimensions."""

    def make(factor: int) -> State:
        where, everywhere = mesh_of(_own(ranks)), (Replicate(),) * len(placements)
        return {
            "w": on(where.mesh.tolist(), FULL * factor, *placements),
            "few": on(where.mesh.tolist(), FULL[:2] * factor, *placements),
            "none": on(where.mesh.tolist(), FULL[:0], *placements),
            "scalar": on(where.mesh.tolist(), torch.tensor(5.0) * factor, *everywhere),
        }

    return make


def _own(ranks: Any) -> Any:
    """Of several meshes the one that has this rank."""
    return ranks[dist.get_rank()] if isinstance(ranks, dict) else ranks


def _holey(factor: int) -> State:
    """Local parts that are every other place of larger, turned memory."""
    state = spread([0, 1, 2, 3], Shard(0))(factor)
    for name in ("w", "few"):
        local = state[name].to_local()
        memory = torch.zeros(2 * local.shape[1], 3 * local.shape[0]).t()[::3, ::2]
        memory.copy_(local)
        full = FULL if name == "w" else FULL[:2]
        state[name] = wrapped(memory, mesh_of([0, 1, 2, 3]), [Shard(0)], full)
    return state


HALVES = {0: [0, 1], 1: [0, 1], 2: [2, 3], 3: [2, 3]}
"""Two meshes, and which of them each rank is on."""

ODD: list[Make] = [
    spread([3, 1, 0, 2], Shard(0)),
    spread([[3, 1], [0, 2]], Shard(1), Replicate()),
    spread([[[0, 1, 2, 3]]], Shard(0), Shard(0), Shard(1)),
    spread([[2], [0]], Replicate(), Shard(0)),
    spread([1, 2], Shard(1)),
    spread([3], Shard(0)),
    spread(HALVES, Shard(0)),
    _holey,
]
"""Permuted meshes, those with dimensions of one, and those that some ranks are outside of."""


def wrong(rank: int, what: str) -> State:
    """A state that cannot be saved, or contradicts that of rank 1."""
    mesh = mesh_of([0, 1, 2, 3])
    odd = rank == 1
    if what == "partial":
        return {"in": {"w": DTensor.from_local(torch.ones(3), mesh, [Partial()], run_check=False)}}
    if what == "local":
        return {"in": {"w": wrapped(torch.ones(5, 6), mesh, [Shard(0)], FULL)}}
    if what == "outside":
        return {"in": {"w": on([0, 1, 2, 7], FULL, Shard(0))}}
    if what == "dtype":
        full = FULL.double() if odd else FULL
        return {"in": {"w": on([0, 1, 2, 3], full, Replicate())}}
    if what == "shape":
        return {"in": {"w": on([0, 1, 2, 3], FULL[:5] if odd else FULL, Shard(0))}}
    if what == "placement":
        return {"in": {"w": on([0, 1, 2, 3], FULL, Shard(int(odd)))}}
    if what == "absent":
        return {"in": {"v" if odd else "w": on([0, 1, 2, 3], FULL, Shard(0))}}
    raise ValueError(what)
