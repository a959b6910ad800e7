"""accelerate with ckpipe: killed runs go on to the bit, and its features stay."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.trainer_ranks import (
    check_killed,
    check_killed_inside_a_save,
    new_case,
    undisturbed_run,
)
from tests.support.fork_server import Forks
from tests.support.sampling import EVERY, SEED

PROGRAM = str(Path(__file__).with_name("accelerate_runs.py"))  # this process does without it
SAVE_STEPS = 4
STEPS = {1: 60, 2: 30}
"""The steps of a run, by the number of ranks."""

MOMENTS = ["inside an epoch", "while it saves", "after a save", "after an epoch"]
KILLS = list(itertools.product(MOMENTS, [1, 2], [True, False]))


@pytest.fixture(scope="module")
def undisturbed(
    server: Forks, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int, bool], list[Any]]:
    """What runs of one and two ranks come to that nothing disturbs; stateful loaders draw more."""

    @cache
    def run(ranks: int, stateful: bool) -> list[Any]:
        case = new_case(tmp_path_factory.mktemp("undisturbed"), stateful=stateful)
        return undisturbed_run(server, case, ranks)

    return run


@pytest.mark.sample(2)
@pytest.mark.parametrize(("moment", "ranks", "stateful"), KILLS)
def test_a_killed_run_goes_on_to_the_bit(
    server: Forks,
    undisturbed: Callable[[int, bool], list[Any]],
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
    saving, saved = moment == "while it saves", step - step % SAVE_STEPS
    check_killed(
        server,
        new_case(tmp_path, stateful=stateful),
        {"dies": step, "just_saved": saving},
        undisturbed(ranks, stateful),
        done=0 if saving else saved,
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_killed_inside_a_save_goes_on_to_the_bit(
    server: Forks, undisturbed: Callable[[int, bool], list[Any]], tmp_path: Path, ranks: int
) -> None:
    chance = random.Random(SEED)
    for number in range(8 if EVERY else 1):
        case = new_case(tmp_path / f"{number}", url="mortal://store")
        check_killed_inside_a_save(
            server, case, undisturbed(ranks, True), chance, range(8, 40), chance.randrange(ranks)
        )


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "feature",
    [
        "another_run_deletes_nothing",
        "hooks_are_called",
        "loaders_of_evaluations_go_on",
        "loads_by_name_wait_for_their_save",
        "lost_gradients_are_told",
        "names_are_loaded",
        "names_are_those_of_accelerate",
        "names_that_cannot_be_written_are_told",
        "orders_go_on_or_are_told",
        "other_batches_are_told",
        "persistent_workers_are_told",
        "persistent_streams_are_refused",
        "pickled_objects_go_on",
        "resume_obeys_its_setting",
        "saves_of_accelerate_stay",
        "scalers_go_on",
        "several_models_go_on",
        "settings_come_from_the_environment",
        "wrong_uses_are_refused",
    ],
)
def test_a_feature_of_accelerate_stays(server: Forks, tmp_path: Path, feature: str) -> None:
    assert server.run(new_case(tmp_path, do=feature)) == 0


def test_ranks_load_by_name_what_they_have_just_saved(server: Forks, tmp_path: Path) -> None:
    assert server.ranks(new_case(tmp_path, do="ranks_load_by_name"), 2) == [0] * 2


def test_other_ranks_go_on_with_new_loaders(server: Forks, tmp_path: Path) -> None:
    case = new_case(tmp_path)
    assert server.ranks({**case, "dies": 9}, 2) == [None] * 2
    assert server.run({**case, "do": "other_ranks_go_on"}) == 0
