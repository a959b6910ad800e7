"""Staging memory is given back to the system when it is asked for."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import torch

import ckpipe
from tests.support.pipelines import Stores, loaded_state
from tests.support.settling import SettlingPipeline, settle

SIZE = 32 << 20
STAGING: dict[str, Any] = {"block_bytes": 1 << 20}


def resident() -> int:
    """How many bytes of this process lie in memory."""
    gc.collect()
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS:"))


def state() -> dict[str, Any]:
    return {"w": torch.arange(SIZE // 4, dtype=torch.int32)}


def test_memory_of_a_save_is_kept_until_it_is_given_back(tmp_path: Path) -> None:
    with SettlingPipeline(tmp_path, staging=STAGING, worker="thread") as pipeline:
        pipeline.save(state(), step=0, until="committed")
        pipeline.save(state(), step=1, until="committed")
        settle(pipeline)
        kept = resident()
        given = pipeline.trim()
        assert given >= SIZE
        assert resident() <= kept - SIZE // 2
        assert pipeline.trim() == 0, "nothing is left"
        pipeline.save(state(), step=2, until="committed")
        assert torch.equal(loaded_state(pipeline, 2)["w"], state()["w"])


def test_memory_that_is_in_use_is_not_given_back(store: Stores) -> None:
    with ckpipe.SyncPipeline(store.url, staging=STAGING) as pipeline:
        store.slow.hold("write")
        handle = pipeline.save(state(), step=0)
        assert pipeline.trim() < SIZE // 2
        store.slow.release()
        handle.wait()
        assert torch.equal(loaded_state(pipeline, 0)["w"], state()["w"])
