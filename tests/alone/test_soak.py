"""Many saves in a row: neither memory nor descriptors nor threads grow."""

from __future__ import annotations

import gc
import itertools
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpipe
from tests.alone.usage import MOST_WORKERS, check_that_nothing_grows
from tests.support.sampling import EVERY, sample
from tests.support.settling import SettlingPipeline, settle

TAKEN = sample(["saves", "pipelines", "small saves"], 1)
"""The soaks of this run."""

SAVES, WARM_UP = (180, 20) if EVERY else (10, 10)


def state() -> dict[str, Any]:
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 256)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "rng": ckpipe.RngState()}


@pytest.mark.skipif("saves" not in TAKEN, reason="another soak was drawn")
def test_many_saves_leave_nothing_behind(tmp_path: Path) -> None:
    training = state()
    with SettlingPipeline(tmp_path, keep_last=2, staging={"block_bytes": 1 << 20}) as pipeline:
        steps = itertools.count()

        def saves(count: int) -> None:
            for step in itertools.islice(steps, count):
                pipeline.save(training, step=step).wait()
            settle(pipeline)

        saves(WARM_UP)
        check_that_nothing_grows(lambda: saves(SAVES), threads=MOST_WORKERS)
        assert len([info for info in pipeline.steps() if info.complete]) == 2


def one_pipeline(root: Path, training: dict[str, Any], step: int) -> list[weakref.ref[Any]]:
    """Open, saves, loads, meets an error and close; what must be gone after that."""
    with ckpipe.SyncPipeline(root, keep_last=2, guard=training["optimizer"]) as pipeline:
        pipeline.on_complete(lambda event: repr(pipeline))
        handle = pipeline.save(training, step=step)
        pipeline.load(training, step=step)
        with pytest.raises(ckpipe.CkpipeError):
            pipeline.load({"model": torch.nn.Linear(1, 1)}, step=step)
    assert pipeline._opened is not None
    held = [pipeline, pipeline._opened, pipeline._opened.context.arena, handle._save]
    return [weakref.ref(each) for each in held]


@pytest.mark.skipif("pipelines" not in TAKEN, reason="another soak was drawn")
def test_many_pipelines_leave_nothing_behind(tmp_path: Path) -> None:
    training = state()
    steps = itertools.count()

    def pipelines(count: int) -> None:
        held: list[weakref.ref[Any]] = []
        for step in itertools.islice(steps, count):
            held += one_pipeline(tmp_path, training, step)
        gc.collect()
        assert [each() for each in held if each() is not None] == []

    pipelines(WARM_UP)
    check_that_nothing_grows(lambda: pipelines(SAVES))


@pytest.mark.skipif("small saves" not in TAKEN, reason="another soak was drawn")
def test_two_hundred_small_saves_leave_nothing_behind(tmp_path: Path) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 64)).sum().backward()
    state = {"model": model, "optimizer": optimizer}
    settings: Any = {"staging": {"block_bytes": 1 << 16}, "lock": {"max_step_wait_seconds": 60}}
    with SettlingPipeline(tmp_path, guard=optimizer, keep_last=2, **settings) as pipeline:
        steps = itertools.count()

        def saves(count: int) -> None:
            for step in itertools.islice(steps, count):
                handle = pipeline.save(state, step=step, until="captured")
                optimizer.step()
                handle.wait()
            settle(pipeline)

        saves(20)
        check_that_nothing_grows(lambda: saves(200), threads=MOST_WORKERS)
