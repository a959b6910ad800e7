"""Objects that call collectives when they are saved or loaded: no rank is left alone in one."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.objects_with_collectives import JOINT, STATES
from tests.support.rank_processes import Gang, told
from tests.support.sampling import EVERY, sample

pytestmark = pytest.mark.timeout(1200)


def test_objects_are_asked_in_one_order_on_all_ranks(world: Gang, tmp_path: Path) -> None:
    case = {"states": list(STATES)}
    world.succeed("tests.ranks.objects_with_collectives:another_order", tmp_path / "run", 2, **case)


FAULTS: dict[str, tuple[Any, Any]] = {
    "damage": (
        ["CorruptCheckpoint", 2, 1, "Rank 1 found ChecksumMismatch"],
        ["ChecksumMismatch", 2, 1, "Chunk"],
    ),
    "shape": (["UnsupportedTopology", 2, 1, "Rank 1 cannot"], ["ShapeMismatch", 2, 1, "The shape"]),
    "store": (["StoreUnavailable", 2, 1, "Rank 1 cannot"], ["StoreUnavailable", 2, 1, "down"]),
    "stays away": (["UnsupportedTopology", 2, 0, "Ranks 1 did not join"], None),
}
"""For each fault of rank 1 the errors of both: class, step, rank and the beginning."""

CELLS = list(itertools.product(JOINT, FAULTS, (False, True), (None, 2)))


def test_no_rank_waits_in_a_collective_for_one_that_failed(world: Gang, root: Path) -> None:
    cells = sample(CELLS, 6)
    if not EVERY:
        cells.append(("training state", "damage", False, None))
        cells.append(("declared", "stays away", False, None))
    world.succeed("tests.ranks.objects_with_collectives:fails_on_one_rank", root, 2, cells=cells)
    found = told(root, "found")
    for number, cell in enumerate(cells):
        _, fault, fallback, _ = cell
        for rank, expected in enumerate(FAULTS[fault]):
            got = found[rank][number]
            if fault == "damage" and fallback:
                assert got == 1, cell
            elif expected is None:
                assert got is None, cell
            else:
                assert got[:3] == expected[:3], cell
                assert got[3].startswith(expected[3]), cell
