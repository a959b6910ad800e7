"""Distributed tensors as one rank of a made-up world holds them, without other processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def rank_of(rank: int, world_size: int) -> Iterator[None]:
    """Make this process one rank of a world in which nobody else answers."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def placed(full: torch.Tensor, mesh_shape: Sequence[int], placements: Sequence[Any]) -> DTensor:
    """The DTensor that a rank has of a tensor, cut by torch's own placements."""
    mesh = init_device_mesh("cpu", tuple(mesh_shape))
    local = local_part(full, mesh_shape, placements, mesh.get_coordinate())
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
    )


def local_part(
    full: torch.Tensor, mesh_shape: Sequence[int], placements: Sequence[Any], coordinate: Any
) -> torch.Tensor:
    """What a rank has of a tensor, in memory of its own."""
    local = full
    for placement, n, index in zip(placements, mesh_shape, coordinate, strict=True):
        if not placement.is_replicate():
            local = placement._split_tensor(local, n, with_padding=False)[0][index]
    return local.clone(memory_format=torch.contiguous_format)
