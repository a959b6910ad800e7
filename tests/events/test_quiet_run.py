"""A run in which nothing goes wrong says nothing on standard error."""

from __future__ import annotations

from pathlib import Path

from tests.support.command_line import script

RUN = """
import sys, torch, ckpipe
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
state = {"model": model, "optimizer": optimizer, "rng": ckpipe.RngState()}
for first in (0, 4):
    with ckpipe.SyncPipeline(sys.argv[1], guard=optimizer, keep_last=2) as pipeline:
        assert bool(pipeline.load(state)) == bool(first)
        for step in range(first, first + 4):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            pipeline.save(state, step=step)
"""


def test_a_run_without_cuda_warns_of_nothing(tmp_path: Path) -> None:
    done = script(RUN, tmp_path / "run")
    assert (done.code, done.out, done.err) == (0, "", "")
