"""The wrappers of the training-state matrix: all ways to distribute a model."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.training.matrix_variants import Net, Variant


@cache
def mesh_of(*shape: int) -> DeviceMesh:
    names = ("outer", "inner")[-len(shape) :]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def _outer() -> tuple[int, int]:
    size = dist.get_world_size()
    return (2, size // 2) if size == 4 else (1, size)


def _stages(net: Net) -> list[nn.Module]:
    """Make the stages of one rank: modules whose names are those of the whole model."""
    size, rank = dist.get_world_size(), dist.get_rank()
    stages: list[nn.Module] = []
    for names in (("embed",), ("first",), ("second",), ("third", "spare", "extra")):
        stages.append(nn.Module())
        for name in names:
            if hasattr(net, name):
                stages[-1].add_module(name, getattr(net, name))
    return stages[rank::size]


def _ddp(net: Net) -> nn.Module:
    return DistributedDataParallel(
        net, find_unused_parameters=net.variant != Variant(dtype=net.variant.dtype)
    )


def _ddp_halves(net: Net) -> nn.Module:
    """Wrap it in DDP over the lower or the upper half of the ranks."""
    return DistributedDataParallel(
        net,
        find_unused_parameters=net.variant != Variant(dtype=net.variant.dtype),
        process_group=half_of(dist.get_world_size()),
    )


@cache
def half_of(size: int) -> Any:
    halves = [range(size)] if size == 1 else [range(size // 2), range(size // 2, size)]
    groups = [dist.new_group(list(half)) for half in halves]
    return groups[dist.get_rank() >= size // 2 and size > 1]


def _replicate(net: Net) -> nn.Module:
    unused = net.variant != Variant(dtype=net.variant.dtype)
    return replicate(net, find_unused_parameters=unused)


def _fsdp1(net: Net) -> nn.Module:
    return FullyShardedDataParallel(net, use_orig_params=True, device_id=torch.device("cpu"))


def _fsdp1_mesh(net: Net) -> nn.Module:
    return FullyShardedDataParallel(
        net,
        use_orig_params=True,
        device_id=torch.device("cpu"),
        device_mesh=mesh_of(dist.get_world_size()),
    )


def _fsdp2(net: Net) -> nn.Module:
    mesh = mesh_of(dist.get_world_size())
    fully_shard(net.first, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net


def _hsdp(net: Net) -> nn.Module:
    mesh = mesh_of(*_outer())
    fully_shard(net.second, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net


def _tp(net: Net, mesh: DeviceMesh | None = None) -> nn.Module:
    plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
    parallelize_module(net, mesh or mesh_of(dist.get_world_size()), plan)
    return net


def _two_d(net: Net) -> nn.Module:
    mesh = mesh_of(*_outer())
    _tp(net, mesh["inner"])
    fully_shard(net, mesh=mesh["outer"])
    return net


def _compiled(net: Net) -> nn.Module:
    second = torch.compile(net.second, backend="eager")
    model = torch.compile(net, backend="eager")
    assert isinstance(second, nn.Module)
    assert isinstance(model, nn.Module)
    net.add_module("second", second)
    return model


def _checkpointed(net: Net) -> nn.Module:
    for name in ("first", "spare"):
        net.add_module(name, checkpoint_wrapper(getattr(net, name)))
    return net


WRAPPERS: dict[str, Callable[[Net], nn.Module | list[nn.Module]]] = {
    "plain": lambda net: net,
    "compiled": _compiled,
    "checkpointed": _checkpointed,
    "stages": _stages,
    "ddp": _ddp,
    "ddp-halves": _ddp_halves,
    "replicate": _replicate,
    "fsdp1": _fsdp1,
    "fsdp1-mesh": _fsdp1_mesh,
    "fsdp2": _fsdp2,
    "hsdp": _hsdp,
    "tp": _tp,
    "2d": _two_d,
}


def bare(name: str) -> str:
    """Strip the names of wrappers from that of a parameter."""
    for wrapper in ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "module"):
        name = name.replace(f"{wrapper}.", "")
    return name
