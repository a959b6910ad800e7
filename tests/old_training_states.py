"""Models and optimizers of the checkpoints in ``data/training_state``, which load for ever.

Run as a script, this file writes them: ``python tests/old_training_states.py``. The committed ones
were written by ckpipe at commit d8965ae and are never written again; new ones go beside them.
"""

from __future__ import annotations

import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forks import Case
from gang import SETTINGS, gang, tell
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

from ckpipe import SyncPipeline
from ckpipe.distributed import training_state

DATA = Path(__file__).parent / "data" / "training_state"
RANKS = {"plain": 1, "ddp": 4, "fsdp2": 4}
"""How many ranks wrote the checkpoints of each wrapper."""

Optimizers = list[Optimizer]


class Net(torch.nn.Module):
    """A few layers with sizes that four ranks cannot share evenly."""

    def __init__(self, *, norm: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 6)
        self.norm = torch.nn.BatchNorm1d(6) if norm else torch.nn.Identity()
        self.second = torch.nn.Linear(6, 4)
        self.third = torch.nn.Linear(4, 6)
        if tied:
            self.third.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.third(self.second(self.norm(self.first(x))))
        return hidden


class Unused(Net):
    """A net whose third layer is not used."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.second(self.norm(self.first(x)))
        return hidden


def adamw(net: Net) -> Optimizers:
    return [AdamW(net.parameters(), lr=0.01, weight_decay=0.1)]


def sgd(net: Net) -> Optimizers:
    return [SGD(net.parameters(), lr=0.25, momentum=0.5)]


def stateless(net: Net) -> Optimizers:
    return [SGD(net.parameters(), lr=0.25)]


def two(net: Net) -> Optimizers:
    rest = [*net.second.parameters(), *net.third.parameters()]
    return [AdamW(net.first.parameters(), lr=0.125), SGD(rest, lr=0.25, momentum=0.5)]


def grouped(net: Net) -> Optimizers:
    """One optimizer whose groups have other options, and other orders than the model."""
    weights = [net.third.weight, net.first.weight, net.second.weight]
    biases = [net.second.bias, net.first.bias, net.third.bias]
    return [
        AdamW(
            [
                {"params": weights, "lr": 0.5, "weight_decay": 0.25},
                {"params": biases, "lr": 0.125, "betas": (0.5, 0.75), "weight_decay": 0.0},
            ]
        )
    ]


@dataclass(frozen=True)
class Content:
    """A model with its optimizers at the time of a save.

    Attributes:
        step: The number of the checkpoint.
        net: Makes the model.
        optimizers: Makes its optimizers.
        steps: How many steps each optimizer had taken.
    """

    step: int
    net: Callable[[], Net]
    optimizers: Callable[[Net], Optimizers]
    steps: tuple[int, ...]


CONTENTS = {
    "stepped": Content(1, Net, adamw, (2,)),
    "unstepped": Content(2, Net, adamw, (0,)),
    "unused": Content(3, Unused, adamw, (2,)),
    "two": Content(4, Net, two, (2, 1)),
    "two-one-unstepped": Content(5, Net, two, (0, 2)),
    "tied": Content(6, lambda: Net(tied=True), adamw, (2,)),
    "norm": Content(7, lambda: Net(norm=True), adamw, (1,)),
    "groups": Content(8, Net, grouped, (2,)),
    "momentum": Content(9, Net, sgd, (2,)),
    "stateless": Content(10, Net, stateless, (2,)),
    "model-alone": Content(11, Net, lambda net: [], ()),
}


def wrapped(wrapper: str, net: Net) -> torch.nn.Module:
    if wrapper == "ddp":
        return DistributedDataParallel(net, find_unused_parameters=isinstance(net, Unused))
    if wrapper == "fsdp2":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        if net.first.weight is not net.third.weight:
            fully_shard(net.first, mesh=mesh)
        fully_shard(net, mesh=mesh)
    return net


def stepped(model: torch.nn.Module, optimizers: Optimizers, steps: tuple[int, ...]) -> None:
    for step in range(max(steps, default=0)):
        model(torch.ones(2, 4)).square().sum().backward()
        for optimizer, count in zip(optimizers, steps, strict=True):
            if step < count:
                optimizer.step()
        model.zero_grad()


def value(name: str, shape: torch.Size) -> torch.Tensor:
    """The numbers of a tensor, which depend on nothing but its name and its shape."""
    first = zlib.crc32(name.encode()) % 4096
    return (torch.arange(shape.numel()) + first).reshape(shape) / 8


def tensors(net: Net, optimizers: Optimizers) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of parameters, buffers and optimizers but counts of steps, with their names."""
    yield from net.named_parameters()
    yield from (each for each in net.named_buffers() if each[1].is_floating_point())
    names: dict[torch.Tensor, str] = {each: name for name, each in net.named_parameters()}
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            for key, tensor in state.items():
                if isinstance(tensor, torch.Tensor) and key != "step":
                    yield f"{names[parameter]}.{key}", tensor


@torch.no_grad()
def fill(net: Net, optimizers: Optimizers) -> None:
    for name, tensor in tensors(net, optimizers):
        full = value(name, tensor.shape)
        if isinstance(tensor, DTensor):
            full = distribute_tensor(full, tensor.device_mesh, tensor.placements)
        tensor.copy_(full)


def made(wrapper: str, content: Content) -> tuple[torch.nn.Module, Net, Optimizers]:
    torch.manual_seed(5)
    net = content.net()
    model = wrapped(wrapper, net)
    return model, net, content.optimizers(net)


def save(case: Case) -> None:
    """Save all contents in one wrapper."""
    with SyncPipeline(case["root"], attempt_id="old", **SETTINGS) as pipeline:
        for content in CONTENTS.values():
            model, net, optimizers = made(case["wrapper"], content)
            stepped(model, optimizers, content.steps)
            fill(net, optimizers)
            state = {"training": training_state(model, *optimizers)}
            pipeline.save(state, step=content.step).wait_complete(timeout=300)


def load(case: Case) -> None:
    """Load all that was saved into one wrapper, and tell what went wrong in each load."""
    for saved in RANKS:
        with SyncPipeline(Path(case["root"], saved), **SETTINGS) as pipeline:
            for name, content in CONTENTS.items():
                failure = None
                try:
                    check(pipeline, case["wrapper"], content)
                except Exception as error:
                    failure = f"{type(error).__name__}: {error}"
                tell(case, **{f"{saved} {name}": failure})


def check(pipeline: SyncPipeline, wrapper: str, content: Content) -> None:
    """Load a content into a model that has gone another way, and compare all of it to the bit."""
    model, net, optimizers = made(wrapper, content)
    options = [options_of(optimizer) for optimizer in optimizers]
    stepped(model, optimizers, (3,) * len(optimizers))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = 7.0
    pipeline.load({"training": training_state(model, *optimizers)}, step=content.step)
    for name, tensor in tensors(net, optimizers):
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        assert torch.equal(full, value(name, tensor.shape)), name
    assert [options_of(optimizer) for optimizer in optimizers] == options
    for optimizer, steps in zip(optimizers, content.steps, strict=True):
        parameters = {each for group in optimizer.param_groups for each in group["params"]}
        used = {each for name, each in net.named_parameters() if is_used(net, name)}
        has_state = steps and optimizer.defaults.get("momentum") != 0
        assert optimizer.state.keys() == (parameters & used if has_state else set())
        assert all(each.get("step", steps) == steps for each in optimizer.state.values())


def is_used(net: Net, name: str) -> bool:
    return not (isinstance(net, Unused) and name.startswith("third."))


def options_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def main() -> None:
    """Write the checkpoints."""
    DATA.mkdir()  # those that are there are never written again
    with gang() as world, tempfile.TemporaryDirectory() as temporary:
        for wrapper, ranks in RANKS.items():
            root = Path(temporary) / wrapper
            codes = world.run("old_training_states:save", root, ranks, wrapper=wrapper)
            assert codes == [0] * ranks
            with tarfile.open(DATA / f"{wrapper}.tar.xz", "w:xz") as archive:
                for path in sorted(root.glob("step-*")):
                    archive.add(path, path.name)


if __name__ == "__main__":
    main()
