"""Real ranks save incrementally: what rests is linked, and each checkpoint is right to the bit."""

from __future__ import annotations

import importlib.util
from itertools import product
from pathlib import Path

import pytest

from tests.support.rank_processes import Gang, told
from tests.support.sampling import SEED

RUNS = "tests.ranks.incremental_runs"
KINDS = {"ddp": 2, "fsdp": 2, "hsdp": 4, "low bit": 2, "quantised": 2}
"""The number of ranks of each kind of trainer."""

CELLS = list(
    product(KINDS, ("local", "global"), ("thread", "process"), ("captured", "staged", "committed"))
)
DCP_CELLS = list(product(("ddp", "fsdp", "hsdp"), ("thread", "process")))


@pytest.mark.sample(1)
@pytest.mark.parametrize(("kind", "plan", "worker", "until"), CELLS)
def test_each_checkpoint_has_its_own_values(
    world: Gang, root: Path, kind: str, plan: str, worker: str, until: str
) -> None:
    if kind in ("low bit", "quantised") and importlib.util.find_spec("torchao") is None:
        pytest.skip("torchao is not installed")
    cell = {"kind": kind, "plan": plan, "worker": worker, "until": until, "seed": SEED}
    world.succeed(f"{RUNS}:save", root, KINDS[kind], **cell)
    assert any(linked for (linked,) in told(root, "linked").values())


@pytest.mark.sample(1)
@pytest.mark.parametrize(("kind", "worker"), DCP_CELLS)
def test_checkpoints_of_dcp_have_their_own_values(
    world: Gang, root: Path, kind: str, worker: str
) -> None:
    world.succeed(f"{RUNS}:save_by_dcp", root, KINDS[kind], kind=kind, worker=worker, seed=SEED)
    assert any(linked for (linked,) in told(root, "linked").values())
