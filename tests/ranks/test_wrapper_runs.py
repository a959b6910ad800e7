"""Real ranks that train with wrapper tensors of torchao: each goes on to the bit."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.support.rank_processes import Gang, told
from tests.support.stored_files import data_bytes

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="torchao is not installed"
)

RUNS = "tests.ranks.wrapper_runs"


def test_training_with_wrappers_goes_on_to_the_bit(world: Gang, tmp_path: Path) -> None:
    root, moments = tmp_path / "run", str(tmp_path / "moments.pt")
    world.succeed(f"{RUNS}:go_on", root, 2, moments=moments)
    assert len(told(root, "done")) == 2
    once = 64 * 128 * 2 * (4 + 2)  # weights in float32, two moments of a byte
    assert once < sum(data_bytes(f"{root}-ddp 8 bit")) < 1.2 * once
    once = 64 * 64 * (4 + 8)  # the trained weight with its moments
    assert once < sum(data_bytes(f"{root}-ddp frozen")) < 1.2 * once
    other = tmp_path / "other"
    case = {"saved": str(root), "moments": moments}
    world.succeed(f"{RUNS}:another_world", other, 1, **case)
    (refused,) = told(other, "refused")[0]
    assert refused.startswith("t.optimizer.state.0.weight")
