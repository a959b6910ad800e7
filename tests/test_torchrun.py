"""A launcher that restarts its ranks, with a rendezvous store that outlives them."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from gang import told
from restarted import SAVES
from sampling import EVERY, SEED

import ckpipe

SCRIPT = Path(__file__).with_name("restarted.py")


PLANS = ["local", "global"]


@pytest.mark.parametrize("plan", PLANS if EVERY else random.Random(SEED).sample(PLANS, 1))
def test_restarted_ranks_are_a_new_attempt_and_go_on(plan: str, tmp_path: Path) -> None:
    root = tmp_path / "run"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
        "--max-restarts=1", "--monitor-interval=0.1", str(SCRIPT), str(root), plan,
    ]  # fmt: skip
    # Without it torch's own restart over gloo meets the keys of the launch before.
    environment = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=100)
    first, second = told(root, "launch").values()
    assert first == second
    (_, attempt, begin), (_, again, resumed) = first
    assert begin == 0
    assert resumed >= 2
    assert again > attempt
    with ckpipe.SyncPipeline(root) as pipeline:
        newest = pipeline.latest()
        assert newest is not None
        assert (newest.step, newest.attempt) == (SAVES - 1, again)
        pipeline.verify(newest)
