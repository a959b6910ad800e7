"""The staged tensors, lent while a save runs and after it: what they are, and for how long."""

from __future__ import annotations

import asyncio
import concurrent.futures
from typing import Any

import anyio.lowlevel
import pytest
import torch
from torch import nn

import ckpipe
from ckpipe import errors
from tests.support.actors import PATIENCE
from tests.support.pipelines import Stores

BLOCK = 1 << 16
UNRELATED = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
"""Guarded where a save is to have all its memory at once, as ``until="captured"`` does."""


def test_staged_tensors_are_lent_with_their_structure(store: Stores) -> None:
    base = torch.arange(24.0).view(4, 6)
    state: dict[str, Any] = {
        "weight": nn.Parameter(base),
        "rows": base[1:3],
        "turned": torch.randn(3, 5).t(),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "array": torch.arange(5).numpy(),
        "nested": [1, (torch.empty(0), "text"), {1: torch.tensor(3)}],
    }
    with ckpipe.SyncPipeline(store.url) as pipeline:
        pipeline.save({"warm": torch.zeros(3)}, step=0).wait()
        handle = pipeline.save(state, step=1)
        with handle.staged_state() as lent:
            assert type(lent["weight"]) is nn.Parameter
            assert lent["rows"].data_ptr() == lent["weight"].data_ptr() + 24
            assert torch.equal(lent["rows"], base[1:3])
            assert torch.equal(lent["turned"], state["turned"])
            assert torch.equal(lent["conjugate"], state["conjugate"])
            assert lent["array"].tolist() == [0, 1, 2, 3, 4]
            assert lent["nested"][1][1] == "text"
            assert lent["nested"][2][1].item() == 3
            block = next(iter(handle._save._in_use))
            begin = lent["turned"].data_ptr()
            assert block.address <= begin < block.address + len(block.view)
        handle.wait()


def test_lent_memory_is_not_used_again_until_it_is_given_back(store: Stores) -> None:
    tensor = torch.zeros(3 * BLOCK // 4)
    staging = {"block_bytes": BLOCK, "bytes": 16 * BLOCK}
    with ckpipe.SyncPipeline(store.url, guard=UNRELATED, staging=staging) as pipeline:
        first = pipeline.save({"tensor": tensor}, step=1, until="captured")
        first.wait_staged()
        with first.staged_state() as lent, first.staged_state() as again:
            for step in range(2, 8):
                tensor.add_(1)
                pipeline.save({"tensor": tensor}, step=step).wait()
            assert lent["tensor"].eq(0).all()
            assert again["tensor"].eq(0).all()
            assert pipeline.statistics().budget_used > 0
        pipeline.save({"tensor": tensor}, step=9).wait()
        with pytest.raises(errors.UsageError, match="later save"):
            first.staged_state().__enter__()
        assert pipeline.statistics().budget_used == 0
        assert first.status == "committed"


@pytest.mark.parametrize("until", ["staged", "captured"])
def test_memory_is_lent_besides_what_later_saves_need(until: Any, store: Stores) -> None:
    tensor = torch.zeros(4 * BLOCK)
    with ckpipe.SyncPipeline(
        store.url, guard=UNRELATED, staging={"block_bytes": BLOCK}
    ) as pipeline:
        first = pipeline.save({"tensor": tensor}, step=1, until="captured")
        first.wait()
        with first.staged_state() as lent:
            for step in range(2, 5):
                tensor.add_(1)
                pipeline.save({"tensor": tensor}, step=step, until=until).wait(PATIENCE)
            assert lent["tensor"].eq(0).all()


@pytest.mark.parametrize("until", ["staged", "captured"])
def test_a_save_does_not_wait_for_what_its_own_thread_was_lent(until: Any, store: Stores) -> None:
    state = {"tensor": torch.zeros(4 * BLOCK)}
    staging = {"block_bytes": BLOCK, "bytes": 20 * BLOCK}
    with ckpipe.SyncPipeline(store.url, guard=UNRELATED, staging=staging) as pipeline:
        first = pipeline.save(state, step=1, until="captured")
        first.wait()
        with (
            first.staged_state(),
            pytest.raises(errors.UsageError, match=r"staged_state\(\) before saving"),
        ):
            pipeline.save(state, step=2, until=until)
        pipeline.save(state, step=3, until=until).wait()


async def test_a_reader_that_is_cancelled_as_it_is_lent_memory_keeps_none(store: Stores) -> None:
    state = {"tensor": torch.zeros(4 * BLOCK)}
    staging = {"block_bytes": BLOCK, "bytes": 20 * BLOCK}
    async with ckpipe.Pipeline(
        store.url, guard=UNRELATED, staging=staging, on_busy="fail"
    ) as pipeline:
        first = await pipeline.save(state, step=1, until="captured")
        await first
        reader = asyncio.create_task(first.staged_state().__aenter__())
        await anyio.lowlevel.checkpoint()  # it has asked for the memory
        # While this blocks, the memory is lent, and the reader cannot hear of it.
        with concurrent.futures.ThreadPoolExecutor(1) as threads:
            assert threads.submit(lambda: asyncio.run(pipeline.trim())).result() == 0
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        await pipeline.save(state, step=2, until="committed")


def test_lent_memory_outlives_a_save_that_fails(store: Stores) -> None:
    tensor = torch.ones(BLOCK)
    staging = {"block_bytes": BLOCK}
    with ckpipe.SyncPipeline(store.url, guard=UNRELATED, staging=staging) as pipeline:
        store.slow.hold("write")
        handle = pipeline.save({"tensor": tensor}, step=1, until="captured")
        handle.wait_staged()
        with handle.staged_state() as lent:
            handle.cancel()
            assert lent["tensor"].eq(1).all()
        store.slow.release()
        assert pipeline.statistics().budget_used == 0
        pipeline.save({"tensor": tensor}, step=2).wait()


def test_memory_that_a_save_streamed_through_is_not_lent(store: Stores) -> None:
    staging = {"bytes": 2 * BLOCK, "block_bytes": BLOCK}
    with ckpipe.SyncPipeline(store.url, staging=staging) as pipeline:
        handle = pipeline.save({"tensor": torch.zeros(4 * BLOCK)}, step=0)
        with pytest.raises(errors.UsageError, match="less memory"):
            handle.staged_state().__enter__()


def test_what_was_lent_stays_readable_when_the_pipeline_closes(store: Stores) -> None:
    pipeline = ckpipe.SyncPipeline(store.url)
    with pipeline:
        handle = pipeline.save({"tensor": torch.ones(100)}, step=0)
        lending = handle.staged_state()
        lent = lending.__enter__()
    assert lent["tensor"].eq(1).all()
    lending.__exit__(None, None, None)
    with pytest.raises(errors.PipelineClosed):
        handle.staged_state().__enter__()


def test_ranks_of_one_machine_share_what_it_has(
    store: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(1 << 30))
    state = {"tensor": torch.zeros(3 * BLOCK // 4)}
    with ckpipe.SyncPipeline(
        store.url, guard=UNRELATED, staging={"block_bytes": BLOCK}
    ) as pipeline:
        with pytest.raises(errors.UsageError, match="Raise staging_bytes"):
            pipeline.save(state, step=1, until="captured")
        monkeypatch.delenv("LOCAL_WORLD_SIZE")
        pipeline.save(state, step=2, until="captured").wait()
