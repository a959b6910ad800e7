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


class StagingMemory:
    """The staging memory of pipelines that are opened from now on, by the mappings of the system.

    No other mapping that comes meanwhile is kept from children.
    """

    def __init__(self) -> None:
        self._earlier = set(self._mappings())

    @staticmethod
    def _mappings() -> dict[str, int]:
        """The resident bytes of each mapping that children do not get, by its addresses."""
        found, addresses, nbytes = dict[str, int](), "", 0
        for line in Path("/proc/self/smaps").read_text().splitlines():
            name, *values = line.split()
            if not name.endswith(":"):
                addresses = name
            elif name == "Rss:":
                nbytes = int(values[0]) << 10
            elif name == "VmFlags:" and "dc" in values:  # MADV_DONTFORK
                found[addresses] = nbytes
        return found

    def resident(self) -> int:
        """How many bytes of it lie in memory."""
        mappings = self._mappings()
        return sum(mappings[each] for each in mappings.keys() - self._earlier)

    def wait_until_gone(self) -> None:
        """Wait until none of it lies in memory: a thread may be touching its last block."""
        deadline = time.monotonic() + 60
        while found := self.resident():
            assert time.monotonic() < deadline, f"{found} bytes still lie in memory"


def state() -> dict[str, Any]:
    return {"w": torch.arange(SIZE // 4, dtype=torch.int32)}


def test_memory_of_a_save_is_kept_until_it_is_given_back(tmp_path: Path) -> None:
    memory = StagingMemory()
    with SettlingPipeline(tmp_path, staging=STAGING, worker="thread") as pipeline:
        pipeline.save(state(), step=0, until="committed")
        pipeline.save(state(), step=1, until="committed")
        settle(pipeline)
        kept = pipeline.statistics().pool_bytes
        assert kept >= SIZE
        assert 0 < memory.resident() <= kept
        assert pipeline.trim() == kept
        gc.collect()
        memory.wait_until_gone()
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
