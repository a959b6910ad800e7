"""Lightning with ckpipe: killed runs go on to the bit, and its features stay."""

from __future__ import annotations

import random
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.trainer_ranks import check_killed_inside_a_save, check_resumed, result
from tests.support.fork_server import Forks
from tests.support.sampling import EVERY, SEED

pytestmark = pytest.mark.skipif(
    find_spec("lightning") is None, reason="the extra integrations is not installed"
)

PROGRAM = str(Path(__file__).with_name("lightning_runs.py"))  # this process does without it
STEPS, SAVE_STEPS = 30, 3
RANKS = {"alone": 1, "ddp": 2, "fsdp2": 2}


@pytest.fixture(scope="module")
def undisturbed(server: Forks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What runs of each strategy come to that nothing disturbs."""
    found = {}
    for strategy, ranks in RANKS.items():
        case = new_case(tmp_path_factory.mktemp("undisturbed"), strategy)
        assert server.ranks(case, ranks) == [0] * ranks
        found[strategy] = [result(case, rank) for rank in range(ranks)]
    return found


def new_case(folder: Path, strategy: str = "alone", **more: Any) -> dict[str, Any]:
    return {
        "do": "train",
        "root": str(folder / "root"),
        "out": str(folder / "out"),
        "sharded": strategy == "fsdp2",
        **more,
    }


@pytest.mark.parametrize("strategy", RANKS)
@pytest.mark.parametrize("moment", ["inside an epoch", "after a save"])
def test_a_killed_run_goes_on_to_the_bit(
    server: Forks, undisturbed: dict[str, Any], tmp_path: Path, moment: str, strategy: str
) -> None:
    chance, ranks = random.Random(SEED), RANKS[strategy]
    step = chance.randrange(SAVE_STEPS + 1, STEPS)
    if moment == "after a save":
        step = SAVE_STEPS * chance.randrange(1, STEPS // SAVE_STEPS)
    case = new_case(tmp_path, strategy)
    saved = step - step % SAVE_STEPS
    assert server.ranks({**case, "dies": step, "saved": saved}, ranks) == [None] * ranks
    assert server.ranks(case, ranks) == [0] * ranks
    check_resumed(case, undisturbed[strategy], done=saved)


@pytest.mark.parametrize("strategy", RANKS)
def test_a_run_killed_inside_a_save_goes_on_to_the_bit(
    server: Forks, undisturbed: dict[str, Any], tmp_path: Path, strategy: str
) -> None:
    chance, ranks = random.Random(SEED), RANKS[strategy]
    for number in range(8 if EVERY else 1):
        case = new_case(tmp_path / f"{number}", strategy, url="mortal://store")
        Path(case["root"]).parent.mkdir()
        victim = chance.randrange(ranks) if strategy == "fsdp2" else 0
        check_killed_inside_a_save(
            server, case, undisturbed[strategy], chance, range(20, 90), victim
        )


@pytest.mark.parametrize(
    "feature",
    [
        "a_failed_save_leaves_no_name",
        "a_link_stays_in_place_of_a_late_save",
        "loads_wait_for_the_save_of_their_name",
        "names_are_loaded",
        "names_are_there_at_once",
        "names_are_those_of_lightning",
        "no_run_begins_in_silence",
        "other_numbers_are_told",
        "other_ways_work",
        "removals_are_remembered",
        "signals_end_a_run_that_goes_on",
        "slurm_requeues_what_is_durable",
        "whole_epochs_go_on",
        "wrong_uses_are_refused",
    ],
)
def test_a_feature_of_lightning_stays(server: Forks, tmp_path: Path, feature: str) -> None:
    assert server.run(new_case(tmp_path, do=feature)) == 0


def test_a_name_whose_save_was_killed_is_never_an_older_one(server: Forks, tmp_path: Path) -> None:
    case = new_case(tmp_path)
    assert server.run({**case, "do": "dies_inside_saves"}) is None
    assert server.run({**case, "do": "a_killed_name_is_never_an_older_one"}) == 0


@pytest.mark.parametrize(("kept", "complete"), [(True, False), ("link", True)])
def test_last_goes_on_after_a_killed_save(
    server: Forks, tmp_path: Path, kept: Any, complete: bool
) -> None:
    names = {"save_last": kept, "save_top_k": -1}
    case = new_case(tmp_path, url="slow://store", complete=complete, names=names)
    assert server.run({**case, "do": "dies_inside_its_saves"}) is None
    assert server.run({**case, "do": "last_goes_on_after_a_killed_save"}) == 0


def test_all_ranks_wait_for_the_save_of_a_name(server: Forks, tmp_path: Path) -> None:
    case = new_case(tmp_path, "ddp", do="ranks_wait_for_a_name")
    assert server.ranks(case, 2) == [0, 0]


def test_names_of_tensor_parallel_ranks_stay(server: Forks, tmp_path: Path) -> None:
    case = new_case(tmp_path, "fsdp2", do="names_of_shards_stay", tensor=True)
    assert server.ranks(case, 2) == [0, 0]
