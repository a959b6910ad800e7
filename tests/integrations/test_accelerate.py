"""accelerate with ckpipe: killed runs go on to the bit, and its features stay."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.differences import difference
from tests.support.fork_server import Forks
from tests.support.sampling import SEED, sample

PROGRAM = str(Path(__file__).with_name("accelerate_runs.py"))  # this process does without it
SAVE_STEPS = 4
STEPS = {1: 60, 2: 30}
"""The steps of a run, by the number of ranks."""

MOMENTS = ["inside an epoch", "inside a save", "after a save", "after an epoch"]
KILLS = list(itertools.product(MOMENTS, [1, 2], [True, False]))


@pytest.fixture(scope="module")
def undisturbed(server: Forks, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """What runs of one and two ranks come to that nothing disturbs."""
    found = {}
    for ranks in (1, 2):
        case = new_case(tmp_path_factory.mktemp("undisturbed"))
        assert server.ranks(case, ranks) == [0] * ranks
        found[ranks] = [result(case, rank) for rank in range(ranks)]
    return found


def new_case(folder: Path, **more: Any) -> dict[str, Any]:
    return {"do": "train", "root": str(folder / "root"), "out": str(folder / "out"), **more}


def result(case: dict[str, Any], rank: int) -> Any:
    return torch.load(f"{case['out']}.result-{rank}", weights_only=False)


@pytest.mark.parametrize(("moment", "ranks", "stateful"), sample(KILLS, 5))
def test_a_killed_run_goes_on_to_the_bit(
    server: Forks,
    undisturbed: dict[int, Any],
    tmp_path: Path,
    moment: str,
    ranks: int,
    stateful: bool,
) -> None:
    chance = random.Random(SEED)
    step = chance.randrange(SAVE_STEPS + 1, STEPS[ranks])
    if moment != "inside an epoch":
        step = SAVE_STEPS * chance.randrange(1, STEPS[ranks] // SAVE_STEPS)
    if moment == "after an epoch":
        step = 20
    case = new_case(tmp_path, stateful=stateful)
    dies = {"dies": step, "just_saved": moment == "inside a save"}
    assert server.ranks({**case, **dies}, ranks) == [None] * ranks
    assert server.ranks(case, ranks) == [0] * ranks
    for rank, whole in enumerate(undisturbed[ranks]):
        found = result(case, rank)
        if moment != "inside a save":
            assert len(found["seen"]) == STEPS[ranks] - (step - step % SAVE_STEPS)
        expected = {
            name: value[-len(found[name]) :] if name in ("seen", "losses") else value
            for name, value in whole.items()
        }
        assert difference(found, expected) is None


@pytest.mark.parametrize(
    "feature",
    [
        "hooks_are_called",
        "lost_gradients_are_told",
        "names_are_loaded",
        "names_are_those_of_accelerate",
        "resume_obeys_its_setting",
        "several_models_go_on",
    ],
)
def test_a_feature_of_accelerate_stays(server: Forks, tmp_path: Path, feature: str) -> None:
    assert server.run(new_case(tmp_path, do=feature)) == 0
