"""A run in which nothing goes wrong says nothing on standard error."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

RUN = """
import sys, torch, ckpipe
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
state = {"model": model, "optimizer": optimizer, "rng": ckpipe.RngState()}
with ckpipe.SyncPipeline(sys.argv[1], guard=optimizer, keep_last=2) as pipeline:
    pipeline.load(state)
    for step in range(4):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        pipeline.save(state, step=step)
"""


def test_a_run_without_cuda_warns_of_nothing(tmp_path: Path) -> None:
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", RUN, str(tmp_path / "run")],
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stderr == ""
        assert done.stdout == ""
