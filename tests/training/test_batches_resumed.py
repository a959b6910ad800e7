"""The ordinary loop over a data loader: stopped anywhere and resumed, it is the whole run."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.support.killed_runs import notes
from tests.support.rank_processes import Gang
from tests.training.batches_runs import EPOCHS, Cell, losses_of

pytestmark = [
    pytest.mark.usefixtures("generators"),
    # torchdata calls what torch has deprecated.
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
]

LOADERS = ["DataLoader", "StatefulDataLoader"]
CELLS = [
    Cell(loader, shuffle, workers, persistent, draws)
    for loader, shuffle in itertools.product(LOADERS, [False, True])
    # Workers have generators of their own, which another test resumes.
    for workers, persistent, draws in [
        (0, False, True),
        (0, False, False),
        (2, False, False),
        (2, True, False),
    ]
]
BATCHES = 6
STOPS = [epoch * BATCHES + batch for epoch in range(EPOCHS) for batch in (0, 2, BATCHES - 1)]
KILLED_STOPS = [epoch * 3 + batch for epoch in range(EPOCHS) for batch in range(3)]
"""The same of two ranks, that have half the batches each."""


@pytest.mark.sample(3)
@pytest.mark.parametrize(("cell", "stop"), list(itertools.product(CELLS, STOPS)))
def test_a_resumed_run_takes_the_batches_and_draws_the_numbers_of_the_whole_one(
    tmp_path: Path, cell: Cell, stop: int
) -> None:
    whole = list(losses_of(cell, None))
    assert len(whole) == EPOCHS * BATCHES
    first = list(losses_of(cell, tmp_path, stop=stop, with_rng=stop % 2 == 0))
    assert first == whole[: stop + 1]
    assert list(losses_of(cell, tmp_path, with_rng=stop % 2 == 0)) == whole[stop + 1 :]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("cell", "ranks", "stop"), list(itertools.product(CELLS, [1, 2], KILLED_STOPS))
)
def test_a_killed_run_takes_the_batches_and_draws_the_numbers_of_the_whole_one(
    world: Gang, tmp_path: Path, cell: Cell, ranks: int, stop: int
) -> None:
    root, stop = tmp_path / "run", stop * 2 // ranks
    for how in ("bare", "killed", "resumed"):
        case = {"cell": cell, "how": how, "stop": stop if how == "killed" else None}
        codes = world.run("tests.training.batches_runs:run", root, ranks, **case)
        assert codes == [None if how == "killed" else 0] * ranks
    seen = {how: losses(root, how) for how in ("bare", "killed", "resumed")}
    for rank in map(str, range(ranks)):
        whole = seen["bare"][rank]
        assert len(whole) == EPOCHS * BATCHES // ranks
        assert seen["killed"][rank] == whole[: stop + 1]
        assert seen["resumed"].get(rank, []) == whole[stop + 1 :]


def losses(root: Path, how: str) -> dict[str, list[str]]:
    """Return the notes of each rank of a run, in order."""
    found: dict[str, list[str]] = {}
    for line in notes(root):
        kind, rank, rest = line.split(" ", 2)
        if kind == how:
            found.setdefault(rank, []).append(rest)
    return found
