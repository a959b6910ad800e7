"""torchtitan with ckpipe: killed runs go on to the bit, and its settings keep their meaning."""

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
    find_spec("torchtitan") is None, reason="the extra integrations is not installed"
)

PROGRAM = str(Path(__file__).with_name("torchtitan_runs.py"))  # this process does without it
STEPS, INTERVAL, RANKS = 20, 3, 2


@pytest.fixture(scope="module")
def undisturbed(server: Forks, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each rank of a run comes to that nothing disturbs."""
    case = new_case(tmp_path_factory.mktemp("undisturbed"))
    assert server.ranks(case, RANKS) == [0] * RANKS
    return [result(case, rank) for rank in range(RANKS)]


def new_case(folder: Path, **more: Any) -> dict[str, Any]:
    out = folder / "out"
    return {"do": "train", "root": str(out / "ckpt"), "out": str(out), **more}


@pytest.mark.parametrize("mode", ["disabled", "async", "async_with_pinned_mem"])
@pytest.mark.parametrize("moment", ["between saves", "after a save"])
def test_a_killed_run_goes_on_to_the_bit(
    server: Forks, undisturbed: list[Any], tmp_path: Path, moment: str, mode: str
) -> None:
    chance = random.Random(SEED)
    step = chance.randrange(INTERVAL + 1, STEPS)
    if moment == "after a save":
        step = INTERVAL * chance.randrange(1, STEPS // INTERVAL)
    case = new_case(tmp_path, fields={"async_mode": mode})
    assert server.ranks({**case, "dies": step}, RANKS) == [None] * RANKS
    assert server.ranks(case, RANKS) == [0] * RANKS
    check_resumed(case, undisturbed, done=step - step % INTERVAL)


def test_a_run_killed_inside_a_save_goes_on_to_the_bit(
    server: Forks, undisturbed: list[Any], tmp_path: Path
) -> None:
    chance = random.Random(SEED)
    for number in range(8 if EVERY else 1):
        fields = {"folder": "mortal://store", "last_save_model_only": False}
        case = new_case(tmp_path / f"{number}", fields=fields)
        Path(case["out"]).mkdir(parents=True)
        victim = chance.randrange(RANKS)
        check_killed_inside_a_save(server, case, undisturbed, chance, range(10, 50), victim)


@pytest.mark.parametrize(
    "feature",
    [
        "a_load_waits_for_its_save",
        "first_weights_are_loaded",
        "last_weights_begin_a_run",
        "mistakes_are_told_by_the_config",
        "settings_keep_their_meaning",
        "settings_of_ckpipe_hold",
        "weights_of_hugging_face_come_and_go",
    ],
)
def test_a_setting_of_torchtitan_keeps_its_meaning(
    server: Forks, tmp_path: Path, feature: str
) -> None:
    assert server.ranks(new_case(tmp_path, do=feature), RANKS) == [0] * RANKS
