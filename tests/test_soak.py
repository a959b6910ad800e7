"""Many saves in a row: neither memory nor descriptors nor threads grow."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from sampling import EVERY

import ckpipe

SAVES = 200 if EVERY else 40
WARM_UP = 20
DRIFT = 0.01
WORKERS = 8
"""Worker threads that may come later: as many stay as have ever been at work at once."""


@dataclass(frozen=True)
class Usage:
    """What this process holds."""

    bytes: int
    descriptors: int
    threads: int


def usage() -> Usage:
    gc.collect()
    process = psutil.Process()
    return Usage(process.memory_info().rss, process.num_fds(), process.num_threads())


def state() -> dict[str, Any]:
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 256)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "rng": ckpipe.RngState()}


def test_many_saves_leave_nothing_behind(tmp_path: Path) -> None:
    training = state()
    with ckpipe.SyncPipeline(tmp_path, keep_last=2, staging={"block_bytes": 1 << 20}) as pipeline:
        begun = usage()
        for step in range(SAVES):
            pipeline.save(training, step=step).wait()
            if step + 1 == WARM_UP:
                begun = usage()
        pipeline._core.submit(pipeline._core.engine.drain, staged_only=False).result()
        ended = usage()
        assert ended.descriptors <= begun.descriptors
        assert ended.threads <= begun.threads + WORKERS
        assert ended.bytes < begun.bytes * (1 + DRIFT)
        assert len([info for info in pipeline.steps() if info.complete]) == 2


def one_pipeline(root: Path, training: dict[str, Any], step: int) -> list[weakref.ref[Any]]:
    """Opens, saves, loads, meets an error and closes; what must be gone after that."""
    with ckpipe.SyncPipeline(root, keep_last=2, guard=training["optimizer"]) as pipeline:
        pipeline.on_complete(lambda event: repr(pipeline))
        handle = pipeline.save(training, step=step)
        pipeline.load(training, step=step)
        with pytest.raises(ckpipe.CkpipeError):
            pipeline.load({"model": torch.nn.Linear(1, 1)}, step=step)
    core = pipeline._core
    assert core._engine is not None
    held = [pipeline, core, core._engine, core._engine.site.arena, handle._save]
    return [weakref.ref(each) for each in held]


def test_many_pipelines_leave_nothing_behind(tmp_path: Path) -> None:
    training = state()
    begun = usage()
    held: list[weakref.ref[Any]] = []
    for step in range(SAVES):
        held += one_pipeline(tmp_path, training, step)
        if step + 1 == WARM_UP:
            begun = usage()
    ended = usage()
    assert [each() for each in held if each() is not None] == []
    assert ended.descriptors <= begun.descriptors
    assert ended.threads <= begun.threads
    assert ended.bytes < begun.bytes * (1 + DRIFT)
