"""The example for verl: killed runs of its trainer go on to the bit, and its settings keep meaning.

verl wants transformers before 5.11, so these run in an environment of their own, with
``pip install . --group dev 'verl>=0.9.1' fastapi uvicorn``, and are skipped in others.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.differences import difference
from tests.support.fork_server import Forks, forks
from tests.support.sampling import EVERY, SEED

pytestmark = pytest.mark.skipif(find_spec("verl") is None, reason="verl is not installed")

PROGRAM = str(Path(__file__).with_name("verl_runs.py"))  # this process does without it
STEPS, SAVE_FREQ, RANKS = 14, 4, 2


@pytest.fixture(scope="module")
def server() -> Iterator[Forks]:
    with forks(PROGRAM) as made:
        yield made


@pytest.fixture(scope="module")
def model(server: Forks, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of the weights that all runs begin with."""
    folder = tmp_path_factory.mktemp("model")
    assert server.run({"do": "make_model", "model": str(folder), "out": str(folder)}) == 0
    return str(folder)


@pytest.fixture(scope="module")
def undisturbed(server: Forks, model: str, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each rank of a run comes to that nothing disturbs."""
    case = new_case(tmp_path_factory.mktemp("undisturbed"), model)
    assert server.ranks(case, RANKS) == [0] * RANKS
    return [result(case, rank) for rank in range(RANKS)]


def new_case(folder: Path, model: str, **more: Any) -> dict[str, Any]:
    out = folder / "out"
    out.mkdir(parents=True)
    return {"do": "train", "root": str(out / "runs"), "out": str(out), "model": model, **more}


def result(case: dict[str, Any], rank: int) -> Any:
    return torch.load(f"{case['out']}.result-{rank}", weights_only=False)


def check_resumed(case: dict[str, Any], expected: list[Any], *, least: int) -> None:
    """Compare what a run has come to, which resumed at this step or later, with the other."""
    for rank, whole in enumerate(expected):
        found = result(case, rank)
        steps = len(found["seen"])
        assert steps <= STEPS - least
        tails = {name: whole[name][STEPS - steps :] for name in ("seen", "losses")}
        if not steps:  # generators go back with the first batch
            tails["random"] = found["random"]
        assert difference(found, {**whole, **tails}) is None


@pytest.mark.parametrize("asynchronous", [False, True], ids=["durable", "beside training"])
def test_a_killed_run_goes_on_to_the_bit(
    server: Forks, model: str, undisturbed: list[Any], tmp_path: Path, asynchronous: bool
) -> None:
    step = random.Random(SEED).randrange(SAVE_FREQ, STEPS)
    case = new_case(tmp_path, model, overrides=[f"+checkpoint.async_save={asynchronous}"])
    assert server.ranks({**case, "dies": step}, RANKS) == [None] * RANKS
    assert server.ranks(case, RANKS) == [0] * RANKS
    saved = step - step % SAVE_FREQ
    check_resumed(case, undisturbed, least=0 if asynchronous else saved)


def test_a_run_killed_inside_a_save_goes_on_to_the_bit(
    server: Forks, model: str, undisturbed: list[Any], tmp_path: Path
) -> None:
    chance = random.Random(SEED)
    for number in range(4 if EVERY else 1):
        case = new_case(tmp_path / f"{number}", model, overrides=["+checkpoint.async_save=True"])
        case["store"] = f"{case['out']}/store"
        death = {"at": chance.randrange(10, 60), "landing": chance.choice(["before", "after"])}
        victim = chance.randrange(RANKS)
        codes = server.ranks({**case, **death, "victim": victim}, RANKS)
        if codes != [0] * RANKS:  # a rank that makes fewer operations comes to its end
            assert codes[victim] is None
            assert server.ranks(case, RANKS) == [0] * RANKS
        check_resumed(case, undisturbed, least=0)


@pytest.mark.parametrize(
    "feature",
    [
        {"do": "settings_keep_their_meaning"},
        {"do": "runs_that_begin_say_so", "resume": "auto"},
        {"do": "runs_that_begin_say_so", "resume": "must"},
        {"do": "checkpoints_of_verl_go_on"},
        {"do": "adapters_are_saved_alone"},
    ],
    ids=lambda case: "-".join(case.values()),
)
def test_a_setting_of_verl_keeps_its_meaning(
    server: Forks, model: str, tmp_path: Path, feature: dict[str, str]
) -> None:
    assert server.ranks(new_case(tmp_path, model, **feature), RANKS) == [0] * RANKS
