"""Models in any wrapper are saved under the same names, and train on in any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckpipe import SyncPipeline
from ckpipe.distributed import TrainingState, training_state
from tests.support.rank_processes import Gang, told
from tests.support.sampling import EVERY
from tests.support.stored_files import entry_names
from tests.support.wrapped_models import Net, trained

WORLDS = [("fsdp", 3, "hsdp", 4)]
"""Worlds that the matrix of ``training_state`` has not; HSDP over tensor parallel takes long."""
if EVERY:
    WORLDS += [
        ("hsdp", 4, "fsdp", 3),
        ("3d", 8, "2d", 4),
        ("tp", 2, "3d", 8),
        ("3d", 8, "plain", 1),
    ]


@pytest.mark.parametrize(
    ("saved", "ranks", "loaded", "again"),
    WORLDS,
)
def test_training_goes_on_in_another_wrapper(
    world: Gang, root: Path, saved: str, ranks: int, loaded: str, again: int
) -> None:
    world.succeed("train", root, ranks, kind=saved, first=3, save=True, step=3)
    world.succeed("train", root, again, kind=loaded, first=0, save=False, step=3)
    losses = [loss for values in told(root, "loss").values() for loss in values]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-5)
    names = [each for values in told(root, "names").values() for each in values]
    assert all(each == names[0] for each in names)
    assert len(losses) == ranks + again


def test_copies_on_meshes_of_their_own_are_written_once_if_ranks_plan_together(
    world: Gang, root: Path
) -> None:
    case = {
        "kind": "copies", "first": 1, "save": True, "step": 1, "settings": {"plan": "global"},
        "replicated": True,
    }  # fmt: skip
    world.succeed("train", root, 4, **case)
    names = entry_names(root)
    halves = [name for name in names if name.startswith("training.model.first.weight@")]
    assert sorted(halves) == [
        f"training.model.first.weight@{box}" for box in ("0,0:6,8", "6,0:12,8")
    ]
    world.succeed("train", root, 1, kind="plain", first=0, save=False, step=1)
    losses = [loss for values in told(root, "loss").values() for loss in values]
    assert losses == pytest.approx([losses[0]] * 5, rel=1e-5)


def made(optimizer: type[torch.optim.Optimizer], **options: Any) -> tuple[Net, Any]:
    torch.manual_seed(3)
    net = Net()
    return net, optimizer(net.parameters(), **options)


OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}),
    (torch.optim.Adam, {"lr": 0.1, "weight_decay": 0.1}),
    (torch.optim.NAdam, {"lr": 0.1}),
    (torch.optim.Rprop, {"lr": 0.1}),
]


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS)
@pytest.mark.parametrize("steps", [0, 2])
def test_looking_at_the_state_changes_no_training(
    kind: type[torch.optim.Optimizer], options: dict[str, Any], steps: int
) -> None:
    expected = trained(*made(kind, **options), range(5))
    net, optimizer = made(kind, **options)
    trained(net, optimizer, range(steps))
    gradients = [parameter.grad for parameter in net.parameters()]
    state = training_state(net, optimizer).state_dict()
    assert [parameter.grad for parameter in net.parameters()] == gradients
    assert trained(net, optimizer, range(steps, 5)) == expected
    assert bool(state["optimizer"]["state"]) == bool(steps and any(optimizer.state.values()))


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD])
@pytest.mark.parametrize("part", ["training.model", "training.optimizer.groups"])
def test_optimizers_that_are_left_out_stay_as_they_are(
    tmp_path: Path, kind: type[torch.optim.Optimizer], part: str
) -> None:
    with SyncPipeline(tmp_path) as pipeline:
        first = made(kind, lr=0.1)
        trained(*first, range(2))
        pipeline.save({"training": training_state(*first)}, step=1).wait()
        net, optimizer = made(kind, lr=0.1)
        pipeline.load({"training": training_state(net, optimizer)}, include=[part])
        assert not optimizer.state


def test_replicated_names_parameters_and_their_state_but_no_buffers() -> None:
    net, optimizer = made(torch.optim.Adam)
    trained(net, optimizer, range(1))
    state = TrainingState(net, [optimizer], replicated=True)
    names = state.state_dict()["model"]
    own = {name for name in names if not state.__ckpipe_replicated__(f"model.{name}")}
    assert own == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert state.__ckpipe_replicated__("optimizer.state.first.weight.exp_avg") is True
    assert state.__ckpipe_replicated__("optimizer.state.first.weight.step") is True
