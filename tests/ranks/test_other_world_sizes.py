"""Saved by real ranks, loaded by any other number of them, in part, and by none at all."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpipe
from ckpipe.distributed import training_state
from tests.support.pipelines import load_existing
from tests.support.rank_processes import Gang, told
from tests.support.sampling import EVERY, SEED
from tests.support.wrapped_models import Net, trained

ROWS = 5
"""Fewer than there are ranks in the largest world."""

PAIRS = list(itertools.permutations((1, 3, 4, 8), 2))


def drawn() -> list[tuple[int, int]]:
    """Two small worlds, drawn; all pairs in the long form."""
    small = [pair for pair in PAIRS if max(pair) < 8]
    return PAIRS if EVERY else [random.Random(SEED).choice(small)]


@pytest.mark.parametrize(("saved", "loaded"), drawn())
def test_any_number_of_ranks_loads_what_any_other_saved(
    world: Gang, root: Path, saved: int, loaded: int
) -> None:
    world.succeed("divide", root, saved, rows=ROWS, first=3, saves=1)
    world.succeed("divide", root, loaded, rows=ROWS, first=4, saves=0)
    steps = [step for values in told(root, "loaded").values() for step in values]
    assert sorted(steps, key=str) == [3] * loaded + [None] * saved


def bare() -> tuple[Net, torch.optim.Optimizer]:
    """The model of the ranks, in one process that knows nothing of others."""
    torch.manual_seed(3)
    net = Net()
    return net, torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1)


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_a_bare_process_takes_all_or_parts_of_what_sharded_ranks_saved(
    world: Gang, root: Path
) -> None:
    world.succeed("train", root, 2, kind="fsdp", first=3, save=True, step=3)
    net, optimizer = bare()
    trained(net, optimizer, range(3))
    expected = training_state(net, optimizer).state_dict()
    with ckpipe.SyncPipeline(root, solo=True) as pipeline:
        found = load_existing(pipeline, per_rank="rank0").state["training"]
        # What is in front of a normalization has no gradient but rounding, which Adam enlarges.
        noise = ("first.bias", "norm.running_mean")
        exact = {name: value for name, value in found["model"].items() if name not in noise}
        close(exact, {name: expected["model"][name] for name in exact})
        close(found["optimizer"]["state"], expected["optimizer"]["state"])
        assert found["optimizer"]["groups"] == expected["optimizer"]["groups"]
        only_part(pipeline, found["model"])
        only_optimizer(pipeline, found["optimizer"])


def only_part(pipeline: ckpipe.SyncPipeline, saved: dict[str, torch.Tensor]) -> None:
    """One layer into a module that is no more than it."""
    layer = torch.nn.Linear(8, 12)
    target = {"training": {"model": {f"first.{k}": v for k, v in layer.named_parameters()}}}
    load_existing(pipeline, target, include=["training.model.first"], strict=False)
    for name, value in layer.named_parameters():
        assert torch.equal(value, saved[f"first.{name}"])


def only_optimizer(pipeline: ckpipe.SyncPipeline, saved: Any) -> None:
    """The state of the optimizer, by the names of its parameters; the model stays as it is."""
    net, optimizer = bare()
    before = {name: value.clone() for name, value in net.named_parameters()}
    state = training_state(net, optimizer)
    pipeline.load({"training": state}, include=["training.optimizer"], per_rank="rank0")
    assert all(torch.equal(value, before[name]) for name, value in net.named_parameters())
    close(state.state_dict()["optimizer"]["state"], saved["state"])
