"""Many saves in a row: neither memory nor descriptors nor threads grow."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
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


def test_many_pipelines_leave_nothing_behind(tmp_path: Path) -> None:
    training = state()
    begun = usage()
    for step in range(SAVES):
        with ckpipe.SyncPipeline(tmp_path, keep_last=2) as pipeline:
            pipeline.save(training, step=step)
        if step + 1 == WARM_UP:
            begun = usage()
    ended = usage()
    assert ended.descriptors <= begun.descriptors
    assert ended.threads <= begun.threads
    assert ended.bytes < begun.bytes * (1 + DRIFT)
