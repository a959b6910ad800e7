"""Staging memory is given back to the system when it is asked for."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

import torch

import ckpipe
from tests.support.pipelines import Stores, loaded_state
from tests.support.settling import SettlingPipeline, settle

SIZE = 32 << 20
STAGING: dict[str, Any] = {"block_bytes": 1 << 20}


def resident() -> int:
    """How many bytes of staging memory lie in memory: no other mapping is kept from children."""
    found = nbytes = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.startswith("Rss:"):
            nbytes = int(line.split()[1]) << 10
        elif line.startswith("VmFlags:") and "dc" in line.split():  # MADV_DONTFORK
            found += nbytes
    return found


def until_resident(nbytes: int) -> None:
    """Wait until so much staging memory lies in memory: a thread may be touching its last block."""
    deadline = time.monotonic() + 60
    while (found := resident()) != nbytes:
        assert time.monotonic() < deadline, f"{found} bytes lie in memory, not {nbytes}"


def state() -> dict[str, Any]:
    return {"w": torch.arange(SIZE // 4, dtype=torch.int32)}


def test_memory_of_a_save_is_kept_until_it_is_given_back(tmp_path: Path) -> None:
    with SettlingPipeline(tmp_path, staging=STAGING, worker="thread") as pipeline:
        pipeline.save(state(), step=0, until="committed")
        pipeline.save(state(), step=1, until="committed")
        settle(pipeline)
        kept = pipeline.statistics().pool_bytes
        assert kept >= SIZE
        assert resident() > 0
        assert pipeline.trim() == kept
        gc.collect()
        until_resident(0)
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
