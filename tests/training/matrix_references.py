"""All that a training consists of, taken, given to another and compared without ckpipe."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    StateDictType,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from tests.support.differences import bits
from tests.training.matrix_models import Trained
from tests.training.matrix_variants import Counter
from tests.training.matrix_wrappers import bare

NEVER_LOADED = ("params", "foreach", "fused", "capturable", "differentiable")
"""Options of a group that a load leaves as they are."""

Reference = dict[str, Any]
"""Full tensors: ``model`` and ``state`` by names, and ``options`` of each parameter's group."""


def fsdp1(trained: Trained) -> FullyShardedDataParallel | None:
    model = trained.model
    return model if isinstance(model, FullyShardedDataParallel) else None


def taken(trained: Trained) -> Reference:
    """Take the whole of a training, as full tensors; all ranks call it together."""
    flat = fsdp1(trained)
    found = _taken_flat(flat, trained) if flat is not None else _taken(trained)
    if not isinstance(trained.model, list):
        return found
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, found)
    return {part: {k: v for each in every for k, v in each[part].items()} for part in found}


def _taken(trained: Trained) -> Reference:
    names = names_of(trained)
    model: dict[str, Any] = {name: full(tensor) for name, tensor in tensors_of(trained)}
    model |= {name: counter.calls for name, counter in counters_of(trained)}
    state: dict[str, Any] = {}
    options: dict[str, Any] = {}
    for optimizer in trained.optimizers:
        for parameter, kept in optimizer.state.items():
            name = names[parameter] if isinstance(parameter, torch.Tensor) else parameter
            state[name] = full(dict(kept))
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                options[names[parameter]] = options_of(group)
    return {"model": model, "state": state, "options": options}


def _taken_flat(model: FullyShardedDataParallel, trained: Trained) -> Reference:
    state: dict[str, Any] = {}
    options: dict[str, Any] = {}
    with sharded_state_dicts(model):
        tensors = {
            name: full(each) for name, each in model.state_dict().items() if "_extra" not in name
        }
        tensors |= {name: counter.calls for name, counter in counters_of(trained)}
        for optimizer in trained.optimizers:
            packed = FullyShardedDataParallel.optim_state_dict(model, optimizer)
            state |= {name: full(dict(each)) for name, each in packed["state"].items()}
            for group in packed["param_groups"]:
                options |= {name: options_of(group) for name in group["params"]}
    return {"model": tensors, "state": state, "options": options}


@contextlib.contextmanager
def sharded_state_dicts(model: nn.Module) -> Iterator[None]:
    """Have FSDP1 make DTensors: its full tensors of one parameter share memory in torch 2.13."""
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        yield


@torch.no_grad()
def give(reference: Reference, trained: Trained) -> None:
    """Make another training go on from what was taken."""
    flat = fsdp1(trained)
    if flat is not None:
        _give_flat(reference, flat, trained)
        return
    for name, tensor in tensors_of(trained):
        tensor.copy_(placed_like(reference["model"][name], tensor))
    for name, counter in counters_of(trained):
        counter.calls = reference["model"][name]
    names = names_of(trained)
    for optimizer in trained.optimizers:
        optimizer.state.clear()
        if "total" in reference["state"]:
            optimizer.state["total"] = full(reference["state"]["total"])  # type: ignore[index]
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                group.update(reference["options"][names[parameter]])
                kept = reference["state"].get(names[parameter])
                if kept is not None:
                    optimizer.state[parameter] = {
                        key: placed_like(value, parameter) for key, value in kept.items()
                    }


def _give_flat(reference: Reference, model: FullyShardedDataParallel, trained: Trained) -> None:
    with sharded_state_dicts(model):
        held = model.state_dict()
        given = {n: placed_like(t, held[n]) for n, t in reference["model"].items() if n in held}
        model.load_state_dict(held | given)
        for name, counter in counters_of(trained):
            counter.calls = reference["model"][name]
        for optimizer in trained.optimizers:
            packed = FullyShardedDataParallel.optim_state_dict(model, optimizer)
            own = [name for group in packed["param_groups"] for name in group["params"]]
            packed["state"] = {
                name: {key: placed_like(value, held[name]) for key, value in kept.items()}
                for name, kept in reference["state"].items()
                if name in own
            }
            for group in packed["param_groups"]:
                group.update(reference["options"][group["params"][0]])
            loaded = FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, packed)
            optimizer.load_state_dict(loaded)
            groups = zip(optimizer.param_groups, loaded["param_groups"], strict=True)
            for live, given in groups:  # torch has cast what it got
                for parameter, number in zip(live["params"], given["params"], strict=True):
                    for key, value in loaded["state"].get(number, {}).items():
                        optimizer.state[parameter][key] = full(value)


def names_of(trained: Trained) -> dict[torch.Tensor, str]:
    return {each: bare(name) for name, each in trained.net.named_parameters()}


def tensors_of(trained: Trained) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of the model that are saved, by all their names."""
    held = trained.model if isinstance(trained.model, list) else [trained.net]
    for module in held:
        for name, parameter in module.named_parameters(remove_duplicate=False):
            yield bare(name), parameter
        for name, buffer in module.named_buffers():
            if not name.endswith("scratch"):
                yield bare(name), buffer


def without_parameters(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def counters_of(trained: Trained) -> Iterator[tuple[str, Counter]]:
    for module in trained.modules:
        for name, each in module.named_modules():
            if isinstance(each, Counter):
                yield f"{bare(name)}.calls", each


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in NEVER_LOADED}


def full(value: Any) -> Any:
    """Copy a value of an optimizer's state, with full tensors."""
    if isinstance(value, torch.Tensor):
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        return whole.detach().clone()
    if isinstance(value, dict):
        return {key: full(each) for key, each in value.items()}
    return [full(each) for each in value] if isinstance(value, list) else value


def placed_like(value: Any, tensor: torch.Tensor) -> Any:
    if (
        isinstance(tensor, DTensor)
        and isinstance(value, torch.Tensor)
        and value.shape == tensor.shape
    ):
        return distribute_tensor(value, tensor.device_mesh, tensor.placements)
    return full(value)


def kept_by_loads(trained: Trained) -> list[Any]:
    """List the objects and values that a load leaves as they are."""
    groups = [group for each in trained.optimizers for group in each.param_groups]
    return [
        bits(torch.get_rng_state()),
        list(trained.hook_runs),
        [id(each) for module in trained.modules for each in module.parameters()],
        [[id(group), *map(id, group["params"])] for group in groups],
        [id(group["lr"]) for group in groups if trained.variant.options == "target"],
        [{key: group.get(key) for key in NEVER_LOADED[1:]} for group in groups],
    ]


def fingerprint(trained: Trained) -> list[tuple[str, Any]]:
    """List all that a save or a failed load must leave as it is, the objects included."""
    found: list[tuple[str, Any]] = [("random numbers", bits(torch.get_rng_state()))]
    for number, module in enumerate(trained.modules):
        tensors = [*module.named_parameters(), *module.named_buffers()]
        found += [(f"{number}.{name}", (id(each), bits(each))) for name, each in tensors]
        found += [(f"{number}.{name}.grad", bits(each.grad)) for name, each in tensors]
    for number, optimizer in enumerate(trained.optimizers):
        found += _of_optimizer(f"optimizer {number}", optimizer)
    found += [(name, counter.calls) for name, counter in counters_of(trained)]
    return [*found, ("hooks", list(trained.hook_runs))]


def _of_optimizer(label: str, optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    for number, group in enumerate(optimizer.param_groups):
        ids = [id(each) for each in group["params"]]
        yield f"{label} group {number}", (id(group), ids, bits(without_parameters(group)))
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            yield f"{label} state {key}", (id(parameter), id(value), bits(value))
