"""Modules whose tensors something keeps equal on several ranks, or does not."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, Optimizer

from ckpipe import CkpipeError, SyncPipeline
from ckpipe.distributed import training_state
from tests.support.fork_server import Case
from tests.support.rank_processes import SETTINGS, tell

LARGE, SMALL = (400, 250), (3,)
"""Shapes of 400 kB, which is cut over ranks, and of a few bytes, which one rank writes."""

Tensors = Callable[[], list[torch.Tensor]]


class Net(nn.Module):
    """A large and a small parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.zeros(LARGE))
        self.small = nn.Parameter(torch.zeros(SMALL))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.large + self.small.sum()


class Extra(Net):
    """Has tensors in its extra state; of other lengths on other ranks if ``ragged``."""

    def __init__(self, *, ragged: bool = False) -> None:
        super().__init__()
        more = dist.get_rank() if ragged else 0
        self.seen = [torch.zeros(LARGE[0] + more, LARGE[1]), torch.zeros(3 + more)]

    def get_extra_state(self) -> list[torch.Tensor]:
        return self.seen

    def set_extra_state(self, state: list[torch.Tensor]) -> None:
        self.seen = [each.clone() for each in state]


class Cloning(Net):
    """Gives copies of its parameters."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        for key in state:
            state[key] = state[key].detach().clone()
        return state


class Buffered(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(LARGE))
        self.register_buffer("spread", torch.zeros(SMALL))


class PerShard(Optimizer):
    """Keeps a tensor of one element and one of several for each shard."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for each in group["params"]:
                self.state[each] = {"norm": torch.zeros(()), "rows": torch.zeros(LARGE)}


Trained = tuple[nn.Module | list[nn.Module], list[Optimizer], Tensors]
"""A saved state, and the tensors in it that are compared."""


def params(net: nn.Module, *names: str) -> Tensors:
    return lambda: [net.get_parameter(name) for name in names or ("large", "small")]


def ddp(net: nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(net, **options)


def half() -> Any:
    """This rank's half of the world; a single rank is the world."""
    size = dist.get_world_size()
    if size == 1:
        return None
    halves = [list(range(size // 2)), list(range(size // 2, size))]
    groups = [dist.new_group(each) for each in halves]
    return groups[dist.get_rank() >= size // 2]


def _extra(*, ragged: bool, wrap: Callable[[nn.Module], Any]) -> Trained:
    net = Extra(ragged=ragged)
    wrapped = wrap(net)
    return wrapped, [], lambda: net.seen


def _sharded(net: nn.Module) -> nn.Module:
    fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return net


def _ignored() -> Trained:
    net = Net()
    net.inner = nn.Linear(2, 2)
    ignore: Any = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    ignore(net, ["large", "small"])
    return ddp(net), [], params(net)


def _cloned() -> Trained:
    net = Cloning()
    return ddp(net), [], params(net)


def _adapted(*, unfreeze: bool) -> Trained:
    net = Net().requires_grad_(False)
    net.adapter = nn.Linear(2, 2)
    wrapped = ddp(net)
    net.requires_grad_(unfreeze)
    return wrapped, [], params(net)


def _local_steps() -> Trained:
    net = Net()
    wrapped = ddp(net)
    state: Any = PostLocalSGDState
    wrapped.register_comm_hook(state(None, None, 10), post_localSGD_hook)
    return wrapped, [], params(net)


def _own_hook() -> Trained:
    net = Net()
    wrapped = ddp(net)
    wrapped.register_comm_hook(None, lambda _, bucket: _done(bucket.buffer()))
    return wrapped, [], params(net)


def _done(value: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(value)
    return future


def _plain(make: Callable[[nn.Module], nn.Module]) -> Trained:
    net = Net()
    made = make(net)
    return made, [], lambda: list(made.parameters())


def _composable() -> Trained:
    net = replicate(Net())
    net(torch.zeros(2, LARGE[0]))  # it begins in the first forward pass
    return net, [], params(net)


def _copied() -> Trained:
    wrapped = copy.deepcopy(ddp(Net()))
    return wrapped, [], params(wrapped.module)


def _with_adam(make: Callable[[nn.Module], nn.Module], *, step: bool = False) -> Trained:
    net = Net()
    wrapped = make(net)
    optimizer = Adam(net.parameters(), lr=0.1)
    net(torch.zeros(2, LARGE[0])).sum().backward()
    optimizer.step()
    states = [optimizer.state[each] for each in net.parameters()]
    if step:
        return wrapped, [optimizer], lambda: [state["step"] for state in states]
    moments = [state[key] for state in states for key in ("exp_avg", "exp_avg_sq")]
    return wrapped, [optimizer], lambda: [*net.parameters(), *moments]


def _partly_reduced() -> Trained:
    net, other = Net(), Net()
    both = nn.ModuleList([ddp(net), other])
    optimizer = SGD(both.parameters(), lr=0.1, momentum=0.9)
    for each in (net, other):
        each(torch.zeros(2, LARGE[0])).sum().backward()
    optimizer.step()
    states = [optimizer.state[each] for each in net.parameters()]
    return both, [optimizer], lambda: [state["momentum_buffer"] for state in states]


def _per_shard() -> Trained:
    net = Net()
    _sharded(net)
    optimizer = PerShard([net.large])
    optimizer.step()
    state = optimizer.state[net.large]
    return net, [optimizer], lambda: [state["norm"], state["rows"]]


def _cast_buffers() -> Trained:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    net = FullyShardedDataParallel(
        Buffered(),
        device_mesh=mesh,
        device_id=torch.device("cpu"),
        mixed_precision=MixedPrecision(buffer_dtype=torch.bfloat16),
    )
    return net, [], lambda: list(net.buffers())


def _unsharded(net: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(
        net,
        device_mesh=init_device_mesh("cpu", (dist.get_world_size(),)),
        device_id=torch.device("cpu"),
        sharding_strategy=ShardingStrategy.NO_SHARD,
        use_orig_params=True,
    )


def _shards_of_one_element() -> Trained:
    net: Any = _sharded(nn.Sequential(*(nn.LayerNorm(RANKS) for _ in range(8))))
    return net, [], lambda: [each.to_local() for each in net.parameters()]


def _tensor_parallel() -> Trained:
    net = Net()
    net.inner = nn.Linear(2, 4)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(net, mesh, {"inner": ColwiseParallel()})
    return net, [], params(net)


def _buffers() -> Trained:
    net = Buffered()
    return ddp(net), [], lambda: list(net.buffers())


def _all_of_it() -> Trained:
    net = Buffered()
    return net, [], lambda: [*net.parameters(), *net.buffers()]


@dataclass(frozen=True)
class Row:
    """A module, and how its tensors relate to those of other ranks.

    Attributes:
        make: Makes the module, its optimizers, and a function for the compared tensors.
        values: The values that ranks give them: of their own, those of their half, or one for all.
        times: How often their bytes are to be written.
        raw: Whether the module itself is a state too, beside its ``training_state``.
        options: Arguments of ``training_state``.
    """

    make: Callable[[], Trained]
    values: Literal["own", "half", "all"] = "own"
    times: int | None = None
    raw: bool = True
    replicated: bool | Sequence[str] = False


def _on_half() -> Trained:
    """DTensors that each half holds on a mesh of its own."""
    size, rank = dist.get_world_size(), dist.get_rank()
    ranks = [each for each in range(size) if (each >= size // 2) == (rank >= size // 2)]
    mesh = DeviceMesh("cpu", ranks, _init_backend=False)
    net = Net()
    for name, each in list(net.named_parameters()):
        placed = DTensor.from_local(each.detach(), mesh, [Replicate()], run_check=False)
        net.register_parameter(name, nn.Parameter(placed))
    placed_params: list[Any] = list(net.parameters())
    return net, [], lambda: [each.detach().to_local() for each in placed_params]


def _bare() -> Trained:
    return _plain(lambda net: net)


def _of_half(net: nn.Module) -> nn.Module:
    return ddp(net, process_group=half())


def _reduced_late(net: Any) -> nn.Module:
    """Wrap so that all gradients are reduced late: then DDP broadcasts no frozen parameter."""
    net.large.requires_grad_(False)
    late = [("0.small", net.small)]
    outer = nn.Sequential(net)
    return ddp(outer, delay_all_reduce_named_params=late, param_to_hook_all_reduce=net.small)


RANKS = 4

ROWS: dict[str, Row] = {
    "extra state": Row(lambda: _extra(ragged=False, wrap=lambda net: net)),
    "extra state under DDP": Row(lambda: _extra(ragged=False, wrap=ddp)),
    "extra state of other lengths": Row(lambda: _extra(ragged=True, wrap=ddp)),
    "extra state of other lengths under FSDP2": Row(
        lambda: _extra(ragged=True, wrap=_sharded), raw=False
    ),
    "copies of parameters": Row(_cloned),
    "buffers": Row(_buffers),
    "buffers that FSDP1 casts": Row(_cast_buffers, raw=False),
    "parameters that DDP ignores": Row(_ignored),
    "init_sync=False": Row(lambda: _plain(lambda net: ddp(net, init_sync=False))),
    "reduced late": Row(lambda: _plain(_reduced_late)),
    "a copy of a DDP object": Row(_copied),
    "frozen, and trained later": Row(lambda: _adapted(unfreeze=True)),
    "post-local SGD": Row(_local_steps),
    "a hook of the program": Row(_own_hook),
    "state of a shard": Row(_per_shard, raw=False),
    "steps under DDP": Row(lambda: _with_adam(ddp, step=True), raw=False),
    "an optimizer with other parameters": Row(_partly_reduced, raw=False),
    "a bare module": Row(_bare),
    "DDP over halves": Row(lambda: _plain(_of_half), "half", times=2),
    "DTensors on halves": Row(_on_half, "half", times=2),
    "equal on both halves": Row(lambda: _plain(_of_half), "all", times=2),
    "DTensors that are equal on both halves": Row(_on_half, "all", times=2),
    "moments under DDP over halves": Row(lambda: _with_adam(_of_half), "half", times=2, raw=False),
    "DDP": Row(lambda: _plain(ddp), "all", times=1),
    "DDP inside of a module": Row(
        lambda: _plain(lambda net: nn.Sequential(ddp(net))), "all", times=1
    ),
    "composable replicate": Row(_composable, "all", times=1),
    "a frozen base under DDP": Row(lambda: _adapted(unfreeze=False), "all", times=1),
    "moments under DDP": Row(lambda: _with_adam(ddp), "all", times=1, raw=False),
    "equal by chance": Row(_bare, "all"),
    "replicated=True": Row(_bare, "all", times=1, raw=False, replicated=True),
    "FSDP1 with NO_SHARD": Row(
        lambda: _plain(_unsharded), "all", times=1, raw=False, replicated=True
    ),
    "moments of a bare module": Row(
        lambda: _with_adam(lambda net: net), "all", times=1, raw=False, replicated=True
    ),
    "plain parameters beside tensor-parallel ones": Row(
        _tensor_parallel, "all", times=1, raw=False, replicated=True
    ),
    "shards of one element": Row(_shards_of_one_element, "all", times=RANKS),
    "named by globs": Row(
        _all_of_it, "all", times=1, raw=False, replicated=["model.average", "*.spread", "model.*l*"]
    ),
}  # fmt: skip


def value_of(row: Row, rank: int) -> float:
    """The value that a rank gives its tensors."""
    return {"own": rank, "half": rank // (RANKS // 2), "all": 0}[row.values] + 1.0


def _states(row: Row, made: Trained) -> dict[str, Any]:
    module, optimizers, _ = made
    state = training_state(module, *optimizers, replicated=row.replicated)
    return {"state": {"m": state}} | ({"raw": {"m": module}} if row.raw else {})


def _distinct(made: Trained) -> list[list[float]]:
    return [sorted(set(each.flatten().tolist())) for each in made[2]()]


def save(case: Case) -> None:
    """Save some rows, and load each into another of the same ranks."""
    warnings.simplefilter("ignore")  # torch's own
    torch.manual_seed(dist.get_rank())
    root, rank = Path(case["root"]), dist.get_rank()
    settings = SETTINGS | {"plan": case["plan"]}
    with SyncPipeline(root / "store", attempt_id="equal", **settings) as pipeline:
        saved = []
        for name in case["rows"]:
            row = ROWS[name]
            made = row.make()
            for each in made[2]():
                each.data.fill_(value_of(row, rank))
            for form, state in _states(row, made).items():
                saved.append((name, form, pipeline.save(state)))
                tell(
                    case,
                    saved=[name, form, saved[-1][2].id, sum(each.nbytes for each in made[2]())],
                )
        for _, _, handle in saved:
            handle.wait_complete(timeout=60)
        targets = {name: ROWS[name].make() for name in case["rows"]}
        for name, form, handle in saved:
            pipeline.load(_states(ROWS[name], targets[name])[form], step=handle.id)
            values = _distinct(targets[name])
            tell(case, loaded=[name, form, values])
            for each in targets[name][2]():
                each.data.zero_()


def load_alone(case: Case) -> None:
    """Load the rows with other ranks, and tell what came of it."""
    warnings.simplefilter("ignore")
    with SyncPipeline(Path(case["saved"], "store"), **SETTINGS) as pipeline:
        for name, form, step in case["steps"]:
            row = ROWS[name]
            made = row.make()
            try:
                pipeline.load(_states(row, made)[form], step=step)
                values: Any = _distinct(made)
            except CkpipeError as error:
                values = type(error).__name__ if error.key else str(error)
            tell(case, alone=[name, form, values])
