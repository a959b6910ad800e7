"""One small model in every wrapper that distributed programs use, and its training."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel


class Net(torch.nn.Module):
    """A few layers, with a normalization that has buffers if it is asked for."""

    def __init__(self, *, normalized: bool = True) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 12)
        self.norm = torch.nn.BatchNorm1d(12) if normalized else torch.nn.Identity()
        self.second = torch.nn.Linear(12, 8, bias=False)
        self.tied = torch.nn.Linear(8, 12, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.tied(self.second(torch.relu(self.norm(self.first(x)))))
        return hidden


def wrapped(kind: str) -> torch.nn.Module:
    """The same model, with the same numbers, in a wrapper."""
    torch.manual_seed(3)
    net = Net(normalized=kind not in ("tp", "plain", "2d", "3d", "copies"))
    size = dist.get_world_size()
    if kind == "fsdp":
        fully_shard(net.first, mesh=init_device_mesh("cpu", (size,)))
        fully_shard(net, mesh=init_device_mesh("cpu", (size,)))
    if kind in ("tp", "2d", "copies"):
        plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
        outer = 1 if kind == "tp" else 2
        mesh = init_device_mesh("cpu", (outer, size // outer), mesh_dim_names=("dp", "tp"))
        parallelize_module(net, mesh["tp"], plan)
        if kind == "2d":
            fully_shard(net, mesh=mesh["dp"])
    if kind == "3d":  # whole shards of a tensor-parallel model, in two copies
        names = ("outer", "inner", "tp")
        cube = init_device_mesh("cpu", (2, 2, size // 4), mesh_dim_names=names)
        parallelize_module(
            net, cube["tp"], {"first": ColwiseParallel(), "second": RowwiseParallel()}
        )
        fully_shard(net, mesh=cube["outer", "inner"])
    if kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("outer", "inner"))
        fully_shard(net.first, mesh=mesh)
        fully_shard(net, mesh=mesh)
    if kind == "fsdp1":  # without shards
        mesh = init_device_mesh("cpu", (size,))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # it is deprecated
            return FullyShardedDataParallel(
                net, device_mesh=mesh, sharding_strategy=ShardingStrategy.NO_SHARD,
                use_orig_params=True, device_id=torch.device("cpu"),
            )  # fmt: skip
    return DistributedDataParallel(net) if kind == "ddp" else net


def trained(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> float:
    """Train on data that depend on nothing but the step; return the last loss."""
    model.train()
    loss = torch.zeros(())
    for step in steps:
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()
