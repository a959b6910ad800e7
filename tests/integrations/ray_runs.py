"""Attempts of one worker of Ray Train, which Ray restarts: each looks at what the adaptor does."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.train import (
    CheckpointConsistencyMode,
    FailureConfig,
    RunConfig,
    ScalingConfig,
    get_all_reported_checkpoints,
    get_checkpoint,
)
from ray.train.torch import TorchTrainer

import ckpipe
from ckpipe.errors import CheckpointNotFound
from ckpipe.integrations.pointers import read_pointer
from ckpipe.integrations.ray import load, report


class Lines(logging.Handler):
    """Collects warnings, and the line of a resume."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logger = logging.getLogger("ckpipe")
        logger.setLevel(logging.INFO)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING or record.getMessage().startswith("resumed"):
            self.lines.append(record.getMessage())

    def taken(self) -> str:
        lines, self.lines = self.lines, []
        return "\n".join(lines)


class Restart(Exception):
    """Ends an attempt."""


def first_attempt(root: Path, lines: Lines) -> None:
    """Begin, register two checkpoints, and fail."""
    with ckpipe.SyncPipeline(root) as pipeline:
        assert load(pipeline, {"w": 0}) is None
        assert lines.taken() == ""
        report(pipeline.save({"w": 1}, step=1), {"loss": 0.5})
        report(pipeline.save({"w": 2}, step=2, until="committed"), {"loss": 0.25})
    known = get_all_reported_checkpoints(CheckpointConsistencyMode.COMMITTED)
    assert [each.metrics["loss"] for each in known] == [0.5, 0.25]
    for step, each in enumerate(known, 1):
        with each.checkpoint.as_directory() as folder:
            pointer = read_pointer(folder)
        assert pointer is not None
        assert pointer.step == step
        # The pointer has moved to Ray's storage, and still leads to the data.
        assert ckpipe.load(pointer.root, step=pointer.id).state == {"w": step}
    root.with_name("first attempt").touch()
    raise Restart


def second_attempt(root: Path, lines: Lines) -> None:
    """Load the newest, an older one if it is gone, and none at another root, but say so."""
    assert root.with_name("first attempt").exists(), "it has failed before its end"
    with ckpipe.SyncPipeline(root) as pipeline:
        state = {"w": 0}
        result = load(pipeline, state)
        assert result is not None
        assert (result.step, state) == (2, {"w": 2})
        assert lines.taken() == f"resumed step 2 from {root}/{result.id}"
        pipeline.delete(2, force=True)
    with ckpipe.SyncPipeline(root) as pipeline:
        assert load(pipeline, state) is not None
        assert state == {"w": 1}
        warning = lines.taken()
        assert f"{result.id}, which is not complete at {root}: an older one is" in warning
    other = root.with_name("other")
    with ckpipe.SyncPipeline(other) as pipeline:
        assert load(pipeline, state) is None
        assert f"which is not complete at {other}: the run begins anew" in lines.taken()
    with (
        ckpipe.SyncPipeline(other, resume="must") as pipeline,
        pytest.raises(CheckpointNotFound),
    ):
        load(pipeline, state)
    lines.taken()
    with ckpipe.SyncPipeline(other, resume="never") as pipeline:
        assert load(pipeline, state) is None
        assert lines.taken() == ""
    assert state == {"w": 1}
    # A run that begins takes the weights of another program.
    torch.save({"w": 9}, initial := root.with_name("weights.pt"))
    with ckpipe.SyncPipeline(other, initial=initial) as pipeline:
        assert load(pipeline, state) is not None
        assert state == {"w": 9}
    # A load waits for a save under way, and of two of one step takes the later.
    with ckpipe.SyncPipeline(other) as pipeline:
        for number in (10, 11):
            pipeline.save({"w": number}, step=3)
        assert load(pipeline, state) is not None
        assert state == {"w": 11}
    lines.taken()
    # Of a skipped save Ray gets the metrics, and no checkpoint.
    count = len(get_all_reported_checkpoints())
    with ckpipe.SyncPipeline(other, keep_last=0) as pipeline:
        report(pipeline.save(state, step=3), {"loss": 0.125})
    assert len(get_all_reported_checkpoints()) == count


def attempts(config: dict[str, Any]) -> None:
    root, lines = Path(config["root"]), Lines()
    attempt = first_attempt if get_checkpoint() is None else second_attempt
    attempt(root, lines)


if __name__ == "__main__":
    folder = Path(sys.argv[1]).resolve()
    ray.init(num_cpus=1, include_dashboard=False)
    TorchTrainer(
        attempts,
        train_loop_config={"root": str(folder / "root")},
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(
            name="attempts", storage_path=str(folder), failure_config=FailureConfig(max_failures=1)
        ),
    ).fit()
