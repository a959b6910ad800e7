"""Open descriptors and processes of a trainer with workers: as many after its work as before."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import psutil
import torch

import ckpipe
from tests.support.sampling import EVERY
from tests.support.settling import SettlingPipeline, settle
from tests.support.worker_runs import SETTINGS, state_of, worker_of

CYCLES = 100 if EVERY else 4
PROCESS: dict[str, Any] = {"worker": "process"} | SETTINGS


def test_opening_and_closing_leaves_nothing_behind(tmp_path: Path) -> None:
    here = psutil.Process()
    children = set(here.children())

    def cycle(step: int) -> None:
        with ckpipe.SyncPipeline(tmp_path, keep_last=1, **PROCESS) as opened:
            if step % 4 == 0:
                opened.save(state_of(step), step=step)

    cycle(0)
    gc.collect()
    before = here.num_fds()
    for step in range(1, CYCLES + 1):
        cycle(step)
    gc.collect()
    assert here.num_fds() <= before
    assert set(here.children()) <= children


def test_each_pipeline_has_its_own_and_descriptors_do_not_grow(
    tmp_path: Path,
) -> None:
    tensors = {str(number): torch.full((200,), float(number)) for number in range(2000)}
    logging = {"mode": "process", "log_dir": str(tmp_path / "logs")}
    with (
        SettlingPipeline(tmp_path / "one", **PROCESS) as pipeline,
        SettlingPipeline(tmp_path / "other", worker=logging, **SETTINGS) as other,
    ):
        for each in (pipeline, other):
            each.save(tensors).wait()
            settle(each)  # what a save leaves for later opens files too
        assert worker_of(pipeline) != worker_of(other)
        here = psutil.Process()
        before = here.num_fds(), psutil.Process(worker_of(other)).num_fds()
        for _ in range(3):
            other.save(tensors).wait()
            settle(other)
        after = here.num_fds(), psutil.Process(worker_of(other)).num_fds()
        assert after[0] <= before[0]
        assert after[1] <= before[1]
