"""Processes are killed while they save, on real files; what they committed is there and right."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

import ckpipe
from tests.support import killed_runs
from tests.support.fork_server import Forks, forks
from tests.support.killed_runs import SAVES, notes, state_of
from tests.support.pipelines import checked_whole
from tests.support.sampling import EVERY

SAMPLE = 4
KILLS = 60 if EVERY else 4
STEPS = 30


@pytest.fixture(scope="module")
def mortal() -> Iterator[Forks]:
    with forks(killed_runs.__file__) as made:
        yield made


def committed(root: Path) -> list[int]:
    """The steps that runs on this root reported committed."""
    return [int(line.split()[1]) for line in notes(root) if line.startswith("committed")]


def check(root: Path) -> None:
    """Open what a killed run has left: all of it is complete and right, or does not count."""
    reported = committed(root)
    with ckpipe.SyncPipeline(root) as pipeline:
        complete = checked_whole(pipeline, state_of)
        if reported:
            assert complete[-1].step >= reported[-1]
        for info in pipeline.steps():
            if not info.complete:
                with pytest.raises(ckpipe.errors.CheckpointIncomplete):
                    pipeline.load(step=info.id)


def operations(root: Path) -> int:
    """How many store operations a run that came to its end has made."""
    return int(notes(root)[-1].removeprefix("operations "))


def test_killed_at_any_store_operation(
    mortal: Forks, chance: random.Random, tmp_path: Path
) -> None:
    undisturbed = tmp_path / "undisturbed"
    assert mortal.run({"do": "save_some", "root": str(undisturbed)}) == 0
    moments = list(itertools.product(range(1, operations(undisturbed) + 1), ("before", "after")))
    for number, landing in moments if EVERY else chance.sample(moments, SAMPLE):
        root = tmp_path / f"run-{number}-{landing}"
        case = {"do": "save_some", "root": str(root), "at": number, "landing": landing}
        if mortal.run(case) is not None:
            # A run that prunes once for two saves makes fewer operations, and is through.
            assert operations(root) < number
        check(root)
        before = len(committed(root))
        assert mortal.run({"do": "save_some", "root": str(root)}) == 0
        assert len(committed(root)) == before + SAVES
        check(root)


def test_killed_at_any_moment_again_and_again(
    mortal: Forks, chance: random.Random, tmp_path: Path
) -> None:
    root = tmp_path / "run"
    for _ in range(KILLS):
        seconds = chance.uniform(0, 0.1)
        assert (
            mortal.run({"do": "save_some", "root": str(root), "seconds": seconds, "saves": 10**6})
            is None
        )
        check(root)
    assert mortal.run({"do": "save_some", "root": str(root)}) == 0
    check(root)
    steps = committed(root)
    assert steps == sorted(steps)


@pytest.fixture(scope="module")
def undisturbed(mortal: Forks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root of a training run that nothing has disturbed."""
    root = tmp_path_factory.mktemp("training") / "undisturbed"
    assert mortal.run({"do": "train", "root": str(root), "steps": STEPS}) == 0
    return root


def losses(root: Path) -> dict[int, str]:
    """The losses of all runs on a root; a step that was trained twice must have lost the same."""
    found: dict[int, str] = {}
    for line in notes(root):
        if line.startswith("loss"):
            _, step, loss = line.split()
            assert found.setdefault(int(step), loss) == loss, f"step {step}"
    return found


MOMENTS = [
    ("write", "before", 4),
    ("write", "after", 6),
    ("complete", "before", 3),
    ("complete", "after", 5),
    ("put", "before", 7),
    ("put", "after", 6),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("verb", "landing", "nth"), MOMENTS)
def test_training_goes_on_to_the_last_bit(
    mortal: Forks, undisturbed: Path, tmp_path: Path, verb: str, landing: str, nth: int
) -> None:
    killed = tmp_path / "killed"
    case = {"do": "train", "root": str(killed), "steps": STEPS}
    assert mortal.run(case | {"verb": verb, "landing": landing, "nth": nth}) is None
    assert mortal.run(case) == 0
    resumed_from = [int(line.split()[1]) for line in notes(killed) if line.startswith("from")]
    assert resumed_from[0] == 0
    assert 0 < resumed_from[1] < STEPS
    assert losses(killed) == losses(undisturbed)
    assert len(losses(killed)) == STEPS
