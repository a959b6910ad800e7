"""The Trainer of transformers with ckpipe: killed runs go on to the bit, and its features stay."""

from __future__ import annotations

import random
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

PROGRAM = str(Path(__file__).with_name("trainer_runs.py"))  # this process does without its imports
SAVE_STEPS = 3
STEPS = {1: 20, 2: 12}
"""The steps of a run, by the number of ranks."""


@pytest.fixture(scope="module")
def undisturbed(server: Forks, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """What runs of one and two ranks come to that nothing disturbs."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return {n: undisturbed_run(server, run_case(folder / str(n), n), n) for n in (1, 2)}


def run_case(folder: Path, ranks: int = 1, **more: Any) -> dict[str, Any]:
    # Two ranks take half as many steps for an epoch, and accumulate gradients over two batches.
    arguments = {"num_train_epochs": 4, "gradient_accumulation_steps": 2} if ranks > 1 else {}
    return new_case(folder, arguments=arguments, **more)


@pytest.mark.sample(2)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("moment", ["inside an epoch", "after a save"])
def test_a_killed_run_goes_on_to_the_bit(
    server: Forks, undisturbed: dict[int, Any], tmp_path: Path, moment: str, ranks: int
) -> None:
    chance = random.Random(SEED)
    step = chance.randrange(SAVE_STEPS + 1, STEPS[ranks])
    if moment == "after a save":
        step = SAVE_STEPS * chance.randrange(1, STEPS[ranks] // SAVE_STEPS)
    saved, batches = step - step % SAVE_STEPS, len(undisturbed[ranks][0]["seen"])
    check_killed(
        server,
        run_case(tmp_path, ranks),
        {"dies": step, "named": f"checkpoint-{saved}"},
        undisturbed[ranks],
        done=saved * batches // STEPS[ranks],
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_killed_inside_a_save_goes_on_to_the_bit(
    server: Forks, undisturbed: dict[int, Any], tmp_path: Path, ranks: int
) -> None:
    chance = random.Random(SEED)
    for number in range(8 if EVERY else 1):
        case = {**run_case(tmp_path / f"{number}", ranks), "url": "mortal://store"}
        check_killed_inside_a_save(
            server, case, undisturbed[ranks], chance, range(8, 40), chance.randrange(ranks)
        )


FEATURES = [
    "another_run_deletes_nothing",
    "best_stays_with_rules_of_the_user",
    "callbacks_can_be_copied",
    "callbacks_go_on",
    "data_is_skipped_or_not",
    "names_and_best_are_those_of_the_trainer",
    "names_that_cannot_be_written_are_told",
    "only_adapters_are_saved",
    "order_by_length_goes_on",
    "refusals_name_what_the_trainer_has",
    "resume_takes_what_it_is_given",
    "roots_of_the_trainer_go_on",
    "runs_move_to_another_folder",
    "saves_of_the_trainer_stay",
    "scalers_go_on",
    "settings_come_from_the_environment",
    "signals_and_settings_save",
    "tools_read_the_state_and_the_model",
    "weights_alone_are_saved",
    "wrong_uses_are_refused",
]


@pytest.mark.sample(3)
@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_of_the_trainer_stays(server: Forks, tmp_path: Path, feature: str) -> None:
    case = run_case(tmp_path, do=f"tests.integrations.trainer_features:{feature}")
    assert server.run(case) == 0


RESTARTS = [
    "another_order_is_told",
    "buffers_of_adapted_models_go_on",
    "finished_runs_end_at_once",
    "generators_of_samplers_go_on",
    "older_checkpoints_go_on",
    "reference_models_go_on",
    "streams_are_passed_over_again",
    "tensors_that_move_are_told",
    "what_differs_is_told",
]


@pytest.mark.sample(2)
@pytest.mark.parametrize("restart", RESTARTS)
def test_a_restart_keeps_or_tells_all_that_moves(
    server: Forks, tmp_path: Path, restart: str
) -> None:
    case = run_case(tmp_path, do=f"tests.integrations.trainer_restarts:{restart}")
    assert server.run(case) == 0


TRL = [
    "distillation",
    "dpo",
    "dpo with a moving reference",
    "dpo, precomputed",
    "grpo",
    "grpo with a moving reference",
    "grpo with an entropy that adapts",
    "kto with a moving reference",
    "reward",
    "rloo",
    "sft",
]


@pytest.mark.slow
@pytest.mark.skipif(not EVERY, reason="the extra integrations is for make test-all")
@pytest.mark.parametrize("trainer", TRL)
def test_a_trainer_of_trl_goes_on_to_the_bit(server: Forks, tmp_path: Path, trainer: str) -> None:
    pytest.importorskip("trl", reason="pip install '.[integrations]'")
    case = run_case(tmp_path, do="tests.integrations.trl_runs:go_on", trainer=trainer)
    assert server.run(case) == 0


def test_one_rank_goes_on_where_two_were(server: Forks, tmp_path: Path) -> None:
    case = run_case(tmp_path, 2)
    dies = {"dies": 7, "named": "checkpoint-6"}
    assert server.ranks({**case, **dies}, 2) == [None] * 2
    again = {"do": "tests.integrations.trainer_features:other_ranks_go_on", "saved": 6}
    assert server.run({**case, **again}) == 0
