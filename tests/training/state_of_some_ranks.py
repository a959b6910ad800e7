"""Ranks of which only some have state for a sharded parameter."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import SGD, AdamW, Optimizer

from ckpipe import CkpipeError, SyncPipeline
from ckpipe.distributed import training_state
from tests.support.fork_server import Case
from tests.support.pipelines import load_existing
from tests.support.rank_processes import SETTINGS, tell


class Counting(Optimizer):
    """Keeps a number beside sharded moments."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for each in self.param_groups[0]["params"]:
            if each.grad is not None:
                state = self.state[each]
                state["count"] = state.get("count", 0) + 1
                state["velocity"] = each.grad * state["count"]


KINDS: dict[str, Any] = {
    "sgd": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9),
    "counting": Counting,
    "adamw": AdamW,
}
CASES = [("sgd", 0), ("sgd", 1), ("counting", 1), ("adamw", 0), ("adamw", 1)]
"""A kind of optimizer, and the rank that has state."""
SHAPE = torch.Size((6, 4))


def experts(kind: str, mesh: DeviceMesh, placement: Placement) -> tuple[nn.Module, Optimizer]:
    net = nn.Module()
    whole = torch.arange(24.0).view(SHAPE)
    net.experts = nn.Parameter(distribute_tensor(whole, mesh, [placement]))
    return net, KINDS[kind](net.parameters())


def step(net: nn.Module, optimizer: Optimizer, *ranks: int) -> None:
    """Step the parameter on some ranks, whose experts have got tokens."""
    parameter: Any = net.experts
    if dist.get_rank() in ranks:
        local = torch.full_like(parameter.to_local(), 1.0 + dist.get_rank())
        grad = DTensor.from_local(
            local, parameter.device_mesh, parameter.placements, run_check=False, shape=SHAPE,
            stride=(4, 1),
        )  # fmt: skip
        parameter.grad = grad
    optimizer.step()


def local_state(net: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    kept = optimizer.state.get(net.get_parameter("experts"), {})
    return {
        key: (value.to_local() if isinstance(value, DTensor) else torch.as_tensor(value)).tolist()
        for key, value in kept.items()
    }


def save_and_load(case: Case) -> None:
    """Save state that one rank has, and load it into several layouts."""
    mesh = init_device_mesh("cpu", (2,))
    turned = DeviceMesh("cpu", [1, 0])
    with SyncPipeline(Path(case["root"]), attempt_id="partial", **SETTINGS) as pipeline:
        for number, (kind, had) in enumerate(CASES):
            net, optimizer = experts(kind, mesh, Shard(0))
            step(net, optimizer, had)
            state = {"t": training_state(net, optimizer)}
            pipeline.save(state, step=number).wait_complete(timeout=60)
            saved = local_state(net, optimizer)
            for name, layout, placement in (
                ("same", mesh, Shard(0)), ("turned", turned, Shard(0)), ("columns", mesh, Shard(1)),
            ):  # fmt: skip
                for stepped in ((), (0, 1)):
                    dist.barrier()
                    net, optimizer = experts(kind, layout, placement)
                    step(net, optimizer, *stepped)
                    before = local_state(net, optimizer)
                    missing: Any = ()
                    try:
                        target = {"t": training_state(net, optimizer)}
                        missing = load_existing(pipeline, target, step=number).missing
                        error = None
                    except CkpipeError as caught:
                        error = f"{type(caught).__name__}: {caught}"
                    found = local_state(net, optimizer)
                    tell(
                        case, loads=[kind, had, name, bool(stepped), saved, before, found,
                                     list(missing), error],
                    )  # fmt: skip


def flat_over_tensor_parallel(case: Case) -> None:
    """Save FSDP1 on one dimension of a mesh, with tensor-parallel parameters or without."""
    warnings.simplefilter("ignore")  # torch's own
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))

    def made(seed: int, parallel: bool) -> tuple[nn.Module, Optimizer]:
        torch.manual_seed(seed)
        net: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        if parallel:
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(net, mesh["inner"], plan)
        net = FullyShardedDataParallel(
            net, device_mesh=mesh["outer"], use_orig_params=True, device_id=torch.device("cpu")
        )
        return net, AdamW(net.parameters(), lr=0.1)

    def trained(net: nn.Module, optimizer: Optimizer, steps: int) -> list[float]:
        losses = []
        for number in range(steps):
            optimizer.zero_grad()
            loss = net(torch.arange(12.0).view(3, 4).sin() + number).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    with SyncPipeline(Path(case["root"]), attempt_id="flat", **SETTINGS) as pipeline:
        for number, parallel in enumerate([True, False]):
            net, optimizer = made(0, parallel)
            trained(net, optimizer, 2)
            error = None
            try:
                pipeline.save({"t": training_state(net, optimizer)}, step=number).wait()
            except CkpipeError as caught:
                error = f"{type(caught).__name__}: {caught}"
            pipeline.save({"m": training_state(net)}, step=10 + number).wait_complete(timeout=60)
            other, its = made(1, parallel)
            trained(other, its, 1)
            if error is None:
                pipeline.load({"t": training_state(other, its)}, step=number)
                same = trained(other, its, 2) == trained(net, optimizer, 2)
            else:
                pipeline.load({"m": training_state(other)}, step=10 + number)
                pairs = zip(other.parameters(), net.parameters(), strict=True)
                same = all(torch.equal(_local(one), _local(two)) for one, two in pairs)
            tell(case, flat=[parallel, error, same])


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
