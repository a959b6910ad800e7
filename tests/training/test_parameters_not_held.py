"""An optimizer in a state whose parameters the state does not hold is told of, and no other one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW, Optimizer

from ckpipe import SyncPipeline
from ckpipe.distributed import training_state
from ckpipe.errors import UnsupportedState
from tests.support.rank_pipelines import ranks
from tests.training.test_accumulated_gradients import sharded

State = dict[str, Any]


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).to(dtype)


def stepped(optimizer: Optimizer) -> Optimizer:
    """The optimizer after a step, with moments of the shapes and dtypes of its parameters."""
    for group in optimizer.param_groups:
        for each in group["params"]:
            each.grad = torch.ones_like(each) if each.requires_grad else None
    optimizer.step()
    return optimizer


def masters(model: nn.Module) -> list[torch.Tensor]:
    return [each.detach().float().clone().requires_grad_() for each in model.parameters()]


# States whose optimizers step tensors that nothing in them holds: the label and how many


def of_masters() -> tuple[State, str, int]:
    model = net(torch.bfloat16)
    return {"model": model, "optimizer": stepped(AdamW(masters(model)))}, "optimizer", 4


def of_a_model_that_was_forgotten() -> tuple[State, str, int]:
    generator, critic = net(), nn.Linear(2, 1)
    state = {"g": generator, "og": Adam(generator.parameters())}
    return {**state, "oc": stepped(Adam(critic.parameters()))}, "oc", 2


def of_a_head_that_was_forgotten() -> tuple[State, str, int]:
    model, head = net(), nn.Linear(2, 9)
    both = [*model.parameters(), *head.parameters()]
    return {"train": [model, {"adam": stepped(Adam(both))}]}, "train.1.adam", 2


def of_a_model_in_another_dtype() -> tuple[State, str, int]:
    model = net()
    optimizer = Adam(model.parameters())
    model = net(torch.float64)
    return {"model": model, "optimizer": stepped(optimizer)}, "optimizer", 4


def of_masters_before_a_step() -> tuple[State, str, int]:
    model = net(torch.float16)
    return {"model": model.state_dict(), "optimizer": SGD(masters(model))}, "optimizer", 4


FOREIGN = [
    of_masters, of_a_model_that_was_forgotten, of_a_head_that_was_forgotten,
    of_a_model_in_another_dtype, of_masters_before_a_step,
]  # fmt: skip


@pytest.mark.parametrize("make", FOREIGN)
def test_an_optimizer_of_other_parameters_is_told_of_once(
    make: Callable[[], tuple[State, str, int]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    state, label, count = make()
    with SyncPipeline(tmp_path) as pipeline:
        for step in range(3):
            pipeline.save({**state, "step": [0] * step}, step=step)
    (told,) = [each.getMessage() for each in caplog.records]
    assert f"at {label!r}" in told
    assert f"{count} tensors that nothing in the state holds" in told
    assert "step 0" in told
    assert "model.parameters()" in told


# States that hold what their optimizers step


def plain() -> State:
    model = net()
    return {"model": model, "optimizer": Adam(model.parameters())}


def as_dicts() -> State:
    model = net()
    return {"model": model.state_dict(), "optimizer": Adam(model.parameters())}


def optimizer_as_dict() -> State:
    model = net(torch.bfloat16)
    return {"model": model, "optimizer": stepped(Adam(masters(model))).state_dict()}


def cloned() -> State:
    model = net()
    weights = {name: each.detach().clone() for name, each in model.named_parameters()}
    return {"weights": weights, "optimizer": Adam(model.parameters())}


def arrays() -> State:
    model = net()
    weights = [each.detach().numpy().copy() for each in model.parameters()]
    return {"weights": weights, "optimizer": Adam(model.parameters())}


def masters_too() -> State:
    model = net(torch.bfloat16)
    own = masters(model)
    return {"model": model, "masters": own, "optimizer": Adam(own)}


class OwnMasters(Adam):
    """An optimizer whose state_dict has its masters, as wrappers for half precision have it."""

    def state_dict(self) -> dict[str, Any]:
        params = [each for group in self.param_groups for each in group["params"]]
        return {**super().state_dict(), "masters": [each.detach().clone() for each in params]}


def masters_in_the_optimizer() -> State:
    model = net(torch.bfloat16)
    return {"model": model, "optimizer": OwnMasters(masters(model))}


def flat_with_views() -> State:
    flat = torch.zeros(12, requires_grad=True)
    views = {"a": flat.detach()[:4].view(2, 2), "b": flat.detach()[5:9]}
    return {"views": views, "optimizer": Adam([flat])}


def views_of_flat() -> State:
    flat = torch.zeros(12)
    low, high = flat[:6], flat[6:]
    optimizer = Adam([low.requires_grad_(), high.requires_grad_()])
    return {"flat": flat, "optimizer": optimizer}


def tied() -> State:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    return {"model": model, "optimizer": Adam(model.parameters())}


def compiled() -> State:
    model = torch.compile(net())
    return {"model": model, "optimizer": Adam(model.parameters())}  # type: ignore[attr-defined]


def frozen_and_left_out() -> State:
    """The whole model is in the optimizer, and the state has only the trained adapter."""
    base, adapter = net().requires_grad_(False), nn.Linear(4, 1)
    groups: list[State] = [
        {"params": [*base.parameters()], "lr": 0.0},
        {"params": [*adapter.parameters()]},
    ]
    return {"adapter": adapter, "optimizer": stepped(Adam(groups))}


def two_models() -> State:
    generator, critic = net(), nn.Linear(2, 1)
    optimizers = Adam(generator.parameters()), Adam(critic.parameters())
    return {"models": [generator, critic], "optimizers": optimizers}


def average_elsewhere() -> State:
    model = net()
    copy.deepcopy(model)  # the average is in no state
    return {"model": model, "optimizer": Adam(model.parameters())}


def lazy() -> State:
    model = nn.LazyLinear(2)
    return {"model": model, "optimizer": SGD(model.parameters(), lr=0.1)}


def in_training_state() -> State:
    model = net()
    return {"train": training_state(model, stepped(Adam(model.parameters())))}


HELD = [
    plain, as_dicts, optimizer_as_dict, cloned, arrays, masters_too, masters_in_the_optimizer,
    flat_with_views, views_of_flat, tied, compiled, frozen_and_left_out, two_models,
    average_elsewhere, lazy, in_training_state,
]  # fmt: skip


def saved(state: State, root: Path, **filters: Any) -> None:
    with SyncPipeline(root) as pipeline:
        pipeline.save(state, step=1, **filters)


@pytest.mark.sample(8)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("make", HELD)
def test_an_optimizer_of_the_states_own_parameters_is_no_alarm(
    make: Callable[[], State], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(make(), tmp_path, exclude=["model.*"] if make is lazy else None)
    assert not caplog.records


@pytest.mark.parametrize("filters", [{"exclude": ["model.0.*"]}, {"include": ["optimizer"]}])
def test_labels_that_are_left_out_on_purpose_are_no_alarm(
    filters: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(plain(), tmp_path, **filters)
    assert not caplog.records


# Wrappers of a process group


def flattened(model: nn.Module, *, use_orig_params: bool = False) -> nn.Module:
    device, mesh = torch.device("cpu"), init_device_mesh("cpu", (1,))
    return FullyShardedDataParallel(
        model, device_id=device, device_mesh=mesh, use_orig_params=use_orig_params
    )


def flattened_with_names(model: nn.Module) -> nn.Module:
    return flattened(model, use_orig_params=True)


@pytest.mark.usefixtures("process_group")
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    "wrap", [DistributedDataParallel, sharded, flattened, flattened_with_names]
)
def test_wrapped_models_are_no_alarm(
    wrap: Callable[[nn.Module], nn.Module], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = wrap(net())
    optimizer = Adam(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    saved({"model": model, "optimizer": optimizer}, tmp_path / "whole")
    gathered = {
        name: each.full_tensor() if hasattr(each, "full_tensor") else each.detach().clone()
        for name, each in model.state_dict().items()
    }
    saved({"model": gathered, "optimizer": optimizer}, tmp_path / "gathered")
    assert not [each for each in caplog.records if each.name.startswith("ckpipe")]


def test_one_rank_tells_and_may_be_the_only_one_with_the_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = net()
    states: list[State] = [{"model": model.state_dict()}, {"model": {}}]
    with ranks(str(tmp_path / "gathered"), 2) as pipelines:
        for pipeline, state in zip(pipelines, states, strict=True):
            pipeline.save({**state, "optimizer": Adam(model.parameters())}, step=1)
    assert not caplog.records
    with ranks(str(tmp_path / "foreign"), 2) as pipelines:
        for pipeline in pipelines:
            pipeline.save(of_masters()[0], step=1)
    assert len(caplog.records) == 1


def test_training_state_refuses_an_optimizer_of_other_parameters(tmp_path: Path) -> None:
    model = net(torch.bfloat16)
    state = {"train": training_state(model, AdamW(masters(model)))}
    with (
        pytest.raises(UnsupportedState, match="no parameter of the model"),
        SyncPipeline(tmp_path) as pipeline,
    ):
        pipeline.save(state, step=1)
