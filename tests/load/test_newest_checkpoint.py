"""A load of the newest checkpoint sees what the same pipeline has just saved."""

from __future__ import annotations

import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpipe
from ckpipe import errors
from ckpipe.events import Completed, RankCommitted, Staged
from tests.support.pipelines import Stateful, Stores, load_existing, loaded_state, newest_of
from tests.support.rank_pipelines import one_rank, ranks
from tests.support.settling import SettlingPipeline, settle

SECONDS = 0.03
"""The latency of a store that is slow enough: a save needs several requests in a row, and a load
finds an older checkpoint with the first."""


def state(step: int) -> dict[str, Any]:
    return {"w": torch.full((100_000,), float(step))}


def trained(step: int) -> tuple[dict[str, Any], torch.optim.Optimizer]:
    """A state that an optimizer owns, so that it may be captured, with the step in each value."""
    model = torch.nn.Linear(300, 300, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with torch.no_grad():
        model.weight.fill_(step)
    return {"model": model, "optimizer": optimizer}, optimizer


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("until", "fallback", "fresh", "worker"),
    list(
        itertools.product(
            ["captured", "staged", "committed"], [False, True], [False, True], ["thread", "process"]
        )
    ),
)
def test_what_was_just_saved_is_the_newest(
    store: Stores, tmp_path: Path, until: Any, fallback: bool, fresh: bool, worker: Any
) -> None:
    training, optimizer = trained(0)
    store.slow.latency = SECONDS
    # A backend of this process cannot cross to a worker; its start makes the first save slow.
    url = store.url if worker == "thread" else str(tmp_path)
    with ckpipe.SyncPipeline(url, guard=optimizer, worker=worker) as pipeline:
        for step in range(1, 4):
            with torch.no_grad(), pipeline.lock.mutating():
                training["model"].weight.fill_(step)
            pipeline.save(training, step=step, until=until)
            target = None if fresh else trained(-1)[0]
            result = load_existing(pipeline, target, fallback=fallback)
            assert result.step == step
            found = result.state["model"]["weight"] if target is None else target["model"].weight
            assert found.unique().tolist() == [step]


async def test_what_was_just_saved_is_the_newest_for_coroutines(store: Stores) -> None:
    store.slow.latency = SECONDS
    async with ckpipe.Pipeline(store.url) as pipeline:
        for step in range(1, 4):
            await pipeline.save(state(step), step=step)
            target = state(-1)
            result = await pipeline.load(target)
            assert result is not None
            assert result.step == step
            assert torch.equal(target["w"], state(step)["w"])


@pytest.mark.parametrize("how", ["failed", "cancelled", "skipped", "the store is down"])
def test_a_save_that_makes_no_checkpoint_does_not_count(store: Stores, how: str) -> None:
    upload = {"retries": 1, "backoff_seconds": 0.0, "backoff_max_seconds": 0.0}
    staging = {"block_bytes": 65536, "bytes": 1 << 19}
    pipeline = SettlingPipeline(store.url, upload=upload, staging=staging, on_busy="skip").open()
    pipeline.save(state(1), step=1, until="committed")
    settle(pipeline)
    down = errors.StoreUnavailable("the network is down")
    if how == "failed":
        store.faulty.fail(errors.StoreFull("no room"), "complete")
        handle = pipeline.save(state(2), step=2)
    elif how == "the store is down":
        store.slow.hold("write")  # else the call itself may raise
        handle = pipeline.save(state(2), step=2)
        store.faulty.fail(down, lambda _: True, times=None)
        store.slow.release()
    else:
        store.slow.hold("write")
        handle = pipeline.save(state(2), step=2)
        if how == "skipped":
            handle, held = pipeline.save(state(3), step=3), handle
            held.cancel()
        else:
            handle.cancel()
        store.slow.release()
    if how == "the store is down":
        with pytest.raises(errors.StoreUnavailable):
            pipeline.load()
        store.faulty.heal()
    assert torch.equal(loaded_state(pipeline)["w"], state(1)["w"])
    assert handle.status == how.replace("the store is down", "failed")
    if handle.status == "failed":  # also the load has not hidden it
        with pytest.raises(errors.StoreError):
            pipeline.close()
    pipeline.close()


@pytest.mark.parametrize("kind", [Staged, RankCommitted, Completed])
def test_a_hook_loads_the_very_save_that_calls_it(store: Stores, kind: Any) -> None:
    store.slow.latency = SECONDS
    found: list[int] = []
    with ckpipe.SyncPipeline(store.url) as pipeline:

        def hear(event: Any) -> None:
            found.append(load_existing(pipeline).step)

        {Staged: pipeline.on_staged, RankCommitted: pipeline.on_committed}.get(
            kind, pipeline.on_complete
        )(hear)
        pipeline.save(state(1), step=1)
    assert found == [1]


@pytest.mark.parametrize("kind", [Staged, RankCommitted, Completed])
async def test_a_coroutine_hook_loads_the_very_save_that_calls_it(store: Stores, kind: Any) -> None:
    store.slow.latency = SECONDS
    found: list[int] = []
    async with ckpipe.Pipeline(store.url) as pipeline:

        async def load(event: Any) -> None:
            result = await pipeline.load()
            assert result is not None
            found.append(result.step)

        {Staged: pipeline.on_staged, RankCommitted: pipeline.on_committed}.get(
            kind, pipeline.on_complete
        )(load)
        await pipeline.save(state(1), step=1)
    assert found == [1]


def test_a_load_does_not_wait_for_the_save_that_calls_it(store: Stores) -> None:
    store.slow.latency = SECONDS
    found: list[int] = []
    with ckpipe.SyncPipeline(store.url) as pipeline:

        def look() -> dict[str, int]:
            found.append(load_existing(pipeline).step)
            return {"found": found[-1]}

        pipeline.save(state(1), step=1)
        pipeline.save({"object": Stateful(look)}, step=2)
    assert found == [1]


def test_latest_and_steps_tell_what_is_complete_now(store: Stores) -> None:
    with ckpipe.SyncPipeline(store.url) as pipeline:
        pipeline.save(state(1), step=1, metrics={"loss": 1.0}, until="committed")
        store.slow.hold("write")
        pipeline.save(state(2), step=2, metrics={"loss": 0.5})
        store.slow.gate.wait_until_held()
        best = pipeline.best("loss")
        assert best is not None
        assert newest_of(pipeline).step == best.step == 1
        assert [info.step for info in pipeline.steps() if info.complete] == [1]
        store.slow.release()


def test_ranks_load_what_they_have_just_saved(store: Stores) -> None:
    store.slow.latency = SECONDS
    with ranks(store.url, 2) as pipelines, ThreadPoolExecutor(2) as threads:

        def saved_and_loaded(rank: int) -> list[int]:
            found = []
            for step in range(1, 4):
                pipelines[rank].save(state(step), step=step)
                found.append(load_existing(pipelines[rank]).step)
            return found

        assert list(threads.map(saved_and_loaded, range(2))) == [[1, 2, 3], [1, 2, 3]]


def test_a_rank_that_comes_first_waits_for_the_save_of_the_others(store: Stores) -> None:
    with ranks(store.url, 2) as pipelines, ThreadPoolExecutor(1) as thread:
        for pipeline in pipelines:
            pipeline.save(state(1), step=1, until="committed")
        pipelines[0].save(state(2), step=2, until="committed")
        before = len(store.faulty.operations)
        first = thread.submit(loaded_state, pipelines[0])
        # It asks the store again and again, and has not decided for both.
        while len(store.faulty.operations) < before + 20:
            assert not first.done()
            os.sched_yield()
        pipelines[1].save(state(2), step=2)
        assert torch.equal(loaded_state(pipelines[1])["w"], state(2)["w"])
        assert torch.equal(first.result()["w"], state(2)["w"])


def test_ranks_load_an_older_one_if_the_save_of_one_of_them_failed(store: Stores) -> None:
    with ranks(store.url, 2, on_error="warn") as pipelines, ThreadPoolExecutor(1) as thread:
        for pipeline in pipelines:
            pipeline.save(state(1), step=1).wait()
        pipelines[0].save(state(2), step=2, until="committed")
        first = thread.submit(loaded_state, pipelines[0])
        store.faulty.fail(errors.StoreFull("no room"), "complete")
        with pytest.raises(errors.StoreFull):
            pipelines[1].save(state(2), step=2, until="committed")
        assert torch.equal(loaded_state(pipelines[1])["w"], state(1)["w"])
        assert torch.equal(first.result()["w"], state(1)["w"])


def test_a_load_waits_for_a_rank_that_is_gone_no_longer_than_agreed(
    store: Stores, caplog: pytest.LogCaptureFixture
) -> None:
    with ranks(store.url, 2) as pipelines:
        for pipeline in pipelines:
            pipeline.save(state(1), step=1, until="committed")
    limit = {"agreement_timeout_seconds": 0.2}
    with one_rank(store.url, 0, 2, attempt_id="later", load=limit) as alone:
        alone.save(state(2), step=2)
        assert torch.equal(loaded_state(alone)["w"], state(1)["w"])
    (told,) = [each.getMessage() for each in caplog.records if "no longer" in each.getMessage()]
    assert "waits for step-000000000002" in told
    assert "without a commit: 1" in told


async def test_empty_root_loads_nothing_and_named_step_raises(tmp_path: Path) -> None:
    async with ckpipe.Pipeline(tmp_path) as pipeline:
        assert await pipeline.load({"a": 1}) is None
        assert await pipeline.latest() is None
        with pytest.raises(errors.CheckpointNotFound, match="none"):
            await pipeline.load(step=3)
