"""Real ranks with states of unusual shape: each is saved and loaded, or refused by name."""

from __future__ import annotations

import itertools
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpipe
from ckpipe.errors import PerRankValue
from tests.ranks.unusual_states import FULL, ODD
from tests.support.pipelines import load_existing, loaded_state
from tests.support.rank_processes import Gang, told
from tests.support.sampling import EVERY, SEED
from tests.support.stored_files import entry_names

chance = random.Random(SEED)


def some(choices: list[Any], count: int = 1) -> list[Any]:
    """All choices in the long form, else some."""
    return choices if EVERY else chance.sample(choices, count)


def test_odd_meshes_load_into_each_other(world: Gang, root: Path) -> None:
    pairs = some(list(itertools.product(range(len(ODD)), repeat=2)), 3)
    world.succeed("tests.ranks.unusual_state_runs:layouts", root, 4, pairs=pairs)
    with ckpipe.SyncPipeline(f"{root}-local", solo=True) as pipeline:
        result = loaded_state(pipeline)
        assert torch.equal(result["w"], FULL)
        assert result["scalar"] == 5


def test_meshes_within_meshes_load_into_each_other_and_outlive_their_group(
    world: Gang, tmp_path: Path
) -> None:
    root, turns = tmp_path / "run", some(list(range(1, 6)), 2)
    world.succeed("tests.ranks.unusual_state_runs:meshes_within_meshes", root, 4, turns=turns)
    assert told(root, "refused") == {rank: [[3, "w2"]] for rank in range(4)}


REFUSED = {
    "local": {
        "partial": "UnsupportedState",
        "local": "UnsupportedState",
        "outside": "UnsupportedTopology",
        "dtype": "InvalidManifest",
    },
    "global": {
        "partial": "UnsupportedState",
        "dtype": "UnsupportedState",
        "shape": "UnsupportedState",
        "placement": "UnsupportedState",
        "absent": "UnsupportedState",
    },
}


@pytest.mark.parametrize("plan", some(list(REFUSED)))
def test_what_cannot_be_saved_is_refused_by_step_rank_and_key(
    world: Gang, tmp_path: Path, plan: str
) -> None:
    root, expected = tmp_path / "run", REFUSED[plan]
    case = {"plan": plan, "saves": list(expected)}
    world.succeed("tests.ranks.unusual_state_runs:refused", root, 4, **case)
    for found in told(root, "refused").values():
        assert [(what, kind, step, named) for what, kind, step, named, _ in found] == [
            (what, kind, step, True) for step, (what, kind) in enumerate(expected.items())
        ]
        assert {key for *_, key in found} <= {"in.w", "in.v"}


def test_surplus_layers_of_a_sharded_module_are_named(world: Gang, root: Path) -> None:
    world.succeed("tests.ranks.unusual_state_runs:fewer_layers", root, 2)
    for [[kind, said, is_untouched]] in told(root, "fewer").values():
        assert kind == "StructureMismatch"
        assert "unexpected in it: " in said
        assert "'model.2.weight'" in said
        assert "'model.2.bias'" in said
        assert is_untouched


WRAPPERS = ("none", "fsdp2", "fsdp1", "fsdp1, flat")
TIED = [
    (kind, saved, loaded)
    for kind in ("tied", "deep", "equal", "other")
    for saved in (WRAPPERS if kind in ("tied", "deep") else ["none"])
    for loaded in WRAPPERS
]


def test_tied_weights_load_into_any_wrapper_or_raise(world: Gang, root: Path) -> None:
    cells = TIED if EVERY else [*some(TIED, 8), ("other", "none", "fsdp1, flat")]
    world.succeed("tests.ranks.unusual_state_runs:tied_in_wrappers", root, 2, cells=cells)
    expected = ["SharingConflict" if kind == "other" else "loads" for kind, *_ in cells]
    for found in told(root, "tied").values():
        assert found == expected


def test_sharded_tensors_are_refused_by_key(world: Gang, root: Path) -> None:
    world.succeed("tests.ranks.unusual_state_runs:sharded_tensors", root, 2)
    for found in told(root, "sharded").values():
        for name, attempt, error in found:
            if (name, attempt) == ("in an object", "load"):
                assert error is None  # it gets a new tensor, as for any that does not fit
                continue
            assert error[0] == "UnsupportedState", (name, attempt)
            assert error[1].startswith("in."), (name, attempt)


def test_one_name_for_different_tensors_of_two_meshes_is_never_mixed(
    world: Gang, root: Path
) -> None:
    world.succeed("tests.ranks.unusual_state_runs:meshes_of_their_own", root, 4)
    for rank, [[step, by, key]] in told(root, "refused").items():
        assert (step, by) == (1, rank)
        assert key in ("w", "few")
    with ckpipe.SyncPipeline(root, solo=True) as pipeline:
        with pytest.raises(PerRankValue, match="Ranks 0 and 2"):
            pipeline.load(include=["w"])
        result = load_existing(pipeline, include=["w"], per_rank="rank0")
        assert torch.equal(result.state["w"], FULL)


@pytest.mark.parametrize("plan", some(["local", "global"]))
def test_stages_and_experts_whose_ranks_have_other_names(
    world: Gang, root: Path, plan: str
) -> None:
    world.succeed("tests.ranks.unusual_state_runs:save_stages", root, 4, plan=plan)
    names = entry_names(root)
    assert [names.count(f"bias{stage}") for stage in range(2)] == [1 + (plan == "local")] * 2
    world.succeed("tests.ranks.unusual_state_runs:load_stages", root, 2)
    with ckpipe.SyncPipeline(root, solo=True) as pipeline:
        result = load_existing(pipeline, exclude=["rng"])
        assert sorted(result.state["experts"]) == ["e0", "e1", "e2", "e3"]
        assert torch.equal(result.state["layer1"], FULL + 1)


def test_all_ranks_load_the_same_while_others_commit(world: Gang, root: Path) -> None:
    world.succeed("tests.ranks.unusual_state_runs:racing", root, 3, saves=12 if EVERY else 6)
    loaded = told(root, "loaded")
    assert loaded[0] == loaded[1] == loaded[2]


def test_straggler_of_a_launch_that_is_over_does_not_become_the_newest(
    world: Gang, root: Path
) -> None:
    world.succeed("tests.ranks.unusual_state_runs:straggle", root, 2, step=9, late=1)
    try:
        while not told(root, "waits"):
            os.sched_yield()
        world.succeed("tests.ranks.unusual_state_runs:straggle", root, 2, step=5)
    finally:
        Path(f"{root}.go").touch()
    while told(root, "committed").get(1) != [5, 9]:
        os.sched_yield()
    world.succeed("tests.ranks.unusual_state_runs:straggle", root, 2)
    assert {tuple(each) for each in told(root, "loaded").values()} == {(None, None, 5)}
    with ckpipe.SyncPipeline(root, solo=True) as pipeline:
        assert [(info.step, info.complete) for info in pipeline.steps()] == [(9, True), (5, True)]


def test_tied_weights_stay_tied_over_any_number_of_ranks(world: Gang, root: Path) -> None:
    world.succeed("tests.ranks.unusual_state_runs:tied", root, 3, save=True)
    names = entry_names(root)
    weights = [name for name in names if name.startswith("training.model.")]
    assert len(weights) == 3, "each rank writes its part once, for both names"
    world.succeed("tests.ranks.unusual_state_runs:tied", root, 2, save=False)
    losses = [each for values in told(root, "losses").values() for each in values]
    assert len(losses) == 5
    assert all(each == pytest.approx(losses[0], rel=1e-5) for each in losses)
    with ckpipe.SyncPipeline(root, solo=True) as pipeline:
        model = loaded_state(pipeline)["training"]["model"]
        assert model["embedding.weight"].shape == (9, 4)
        assert model["embedding.weight"].data_ptr() == model["head.weight"].data_ptr()
