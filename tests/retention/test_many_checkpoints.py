"""What a root with very many checkpoints costs to look at: requests, not seconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import anyio
import pytest
import torch

import ckpipe
from ckpipe import errors
from ckpipe.backend import PutMode
from ckpipe.retention import KeepBest, KeepEvery
from ckpipe.testing.wrappers import Operation
from ckpipe.types import CheckpointId
from tests.support.pipelines import Stores, stores
from tests.support.stored_files import (
    SUMMARIES,
    Document,
    document_of,
    index_key,
    pin_key,
    sealed,
    summary_data,
    summary_key,
    tombstone_key,
)

MANY, FEWER = 10_000, 1_000
ATTEMPT = "20250101T000000000Z-x"


@pytest.fixture(scope="module")
def template() -> Document:
    """The index of a small checkpoint."""
    with stores() as made, ckpipe.SyncPipeline(made.url, keep_reports=False) as pipeline:
        id = pipeline.save({"t": torch.tensor([1])}, step=1).wait().id
        return document_of(bytes(made.memory._store.objects[index_key(id)].data))


def kinds(operations: Sequence[Operation]) -> Counter[str]:
    return Counter(each.verb for each in operations)


async def put(store: Stores, key: str, data: bytes = b"{}") -> None:
    await store.memory.put(key, data, PutMode.CREATE)


async def put_index(store: Stores, template: Document, id: CheckpointId, loss: float) -> None:
    """Put what a save with a metric leaves, but for its data."""
    metrics = {"loss": loss}
    name = {"step": id.step, "attempt": id.attempt, "count": id.count}
    await put(store, index_key(id), sealed(template | name | {"metrics": [metrics]}))
    (size,) = template["parts"]["files"][0]["size"]
    await put(store, summary_key(id), summary_data(id, size, metrics))


async def fill(store: Stores, count: int, data: bytes) -> None:
    for step in range(count):
        await put(store, index_key(CheckpointId(ATTEMPT, step, 0)), data)


async def test_ten_thousand_checkpoints_cost_four_lists(store: Stores) -> None:
    await fill(store, MANY, b"{}")
    async with ckpipe.Pipeline(store.url) as pipeline:
        before = len(store.faulty.operations)
        infos = await pipeline.steps()
        assert len(infos) == MANY
        assert all(info.complete for info in infos)
        assert kinds(store.faulty.operations[before:]) == {"children": 4}


async def test_the_newest_costs_one_list_however_many_were_deleted_or_pinned(
    store: Stores,
) -> None:
    await fill(store, FEWER, b"{}")
    for step in range(FEWER):
        id = CheckpointId("20240101T000000000Z-x", step, 0)
        await put(store, tombstone_key(id))
        await put(store, pin_key(id))
    async with ckpipe.Pipeline(store.url) as pipeline:
        before = len(store.faulty.operations)
        newest = await pipeline.latest()
        assert newest is not None
        assert newest.step == FEWER - 1
        done = store.faulty.operations[before:]
        # What is made up for an index looks damaged, so that it is read twice.
        assert kinds(done) == {"children": 1, "stat": 2, "get": 2}
        assert [each.key for each in done if each.verb == "children"] == [""]


async def save_losses(url: str, losses: Sequence[float]) -> None:
    async with ckpipe.Pipeline(url) as pipeline:
        for step, loss in enumerate(losses):
            await (await pipeline.save({"w": step}, step=step, metrics={"loss": loss}))


async def best_step(pipeline: ckpipe.Pipeline) -> int:
    best = await pipeline.best("loss")
    assert best is not None
    return best.step


async def summaries(store: Stores) -> list[str]:
    return [each.key async for each in store.memory.list(SUMMARIES)]


async def test_metrics_without_summaries_are_read_once_for_each_index(store: Stores) -> None:
    await save_losses(store.url, [3.0, 1.0, float("nan"), 2.0])
    await store.memory.delete(await summaries(store))
    async with ckpipe.Pipeline(store.url) as pipeline:
        for reads in (4, 0):
            before = len(store.faulty.operations)
            assert await best_step(pipeline) == 1
            assert kinds(store.faulty.operations[before:])["get"] == reads


@pytest.mark.parametrize("count", [2, 1000])
async def test_the_best_costs_a_summary_of_each_and_the_index_of_the_winner(
    store: Stores, template: Document, count: int
) -> None:
    for step in range(count):
        await put_index(store, template, CheckpointId(ATTEMPT, step, 0), float(count - step))
    async with ckpipe.Pipeline(store.url, read_only=True) as pipeline:
        for lists, gets in ((4, count + 1), (3, 0)):
            before = len(store.faulty.operations)
            assert await best_step(pipeline) == count - 1
            done = kinds(store.faulty.operations[before:])
            assert (done["children"], done["get"]) == (lists, gets)


async def test_summaries_are_read_thirty_two_at_a_time(store: Stores, template: Document) -> None:
    for step in range(50):
        await put_index(store, template, CheckpointId(ATTEMPT, step, 0), 1.0)
    async with (
        ckpipe.Pipeline(store.url, read_only=True) as pipeline,
        anyio.create_task_group() as tasks,
    ):
        store.slow.hold("get")
        tasks.start_soon(best_step, pipeline)
        await anyio.to_thread.run_sync(store.slow.gate.wait_until_held, 32)
        assert store.slow.gate.waiting == 32
        store.slow.release()


@pytest.mark.parametrize("saved_again", [0, 3])
async def test_pruning_reads_what_decides_and_no_more(
    store: Stores, template: Document, saved_again: int
) -> None:
    ids = [CheckpointId(ATTEMPT, step, 0) for step in range(300)]
    ids += [replace(each, count=1) for each in ids[:saved_again]]
    for id in ids:
        await put_index(store, template, id, 1.0 + id.step)
    rule = KeepEvery(steps=1) | KeepBest("loss", n=2)
    async with ckpipe.Pipeline(store.url, retention=rule, worker="thread") as pipeline:
        before = len(store.faulty.operations)
        decision = await pipeline.prune()
        reads = kinds(store.faulty.operations[before:])["get"] - len(ids)
    # One of each step goes, unless it is one of the two best; what stays of its step is read too.
    assert len(decision.remove) == max(0, saved_again - 1)
    assert reads <= 1 + 2 * saved_again + 2
    assert len(await summaries(store)) == len(decision.keep)


async def test_a_metric_that_no_checkpoint_has_removes_nothing_and_is_told(
    store: Stores, caplog: pytest.LogCaptureFixture
) -> None:
    async with ckpipe.Pipeline(store.url, retention=KeepBest("lss")) as pipeline:
        for step in range(4):
            await pipeline.save({"w": step}, step=step, metrics={"loss": 1.0})
    assert caplog.text.count("No checkpoint has a number for the metric 'lss'") == 1
    assert "other metrics there are: loss." in caplog.text
    async with ckpipe.Pipeline(store.url) as pipeline:
        assert len(await pipeline.steps()) == 4
        with pytest.raises(errors.CheckpointNotFound, match=r"'lss'.* there are: loss"):
            await pipeline.best("lss")


async def test_the_best_by_a_mistyped_metric_raises_and_names_those_there_are(
    store: Stores,
) -> None:
    async with ckpipe.Pipeline(store.url) as pipeline:
        assert await pipeline.best("loss") is None, "there is no checkpoint at all"
        await (await pipeline.save({"w": 0}, step=0))
        with pytest.raises(errors.CheckpointNotFound, match=r"there are: none\. Give save\(\)"):
            await pipeline.best("loss")
        given = {"loss": float("nan"), "accuracy": 0.5}
        await (await pipeline.save({"w": 1}, step=1, metrics=given))
        with pytest.raises(errors.CheckpointNotFound, match=r"'acuracy'.*: accuracy, loss"):
            await pipeline.best("acuracy")
        with pytest.raises(errors.CheckpointNotFound, match="'loss' is NaN in every checkpoint"):
            await pipeline.best("loss")
        with pytest.raises(errors.SettingsError, match="mode"):
            await pipeline.best("loss", mode="least")  # type: ignore[arg-type]
        best = await pipeline.best("accuracy", mode="max")
        assert best is not None
        assert best.step == 1


async def test_the_best_of_indexes_that_cannot_be_read_raises(store: Stores) -> None:
    await save_losses(store.url, [1.0])
    async with ckpipe.Pipeline(store.url, read_only=True) as pipeline:
        (info,) = await pipeline.steps()
    await store.memory.delete([index_key(info.id)])
    await put(store, index_key(info.id), b"{}")
    async with ckpipe.Pipeline(store.url, read_only=True) as pipeline:
        with pytest.raises(errors.CorruptCheckpoint, match="delete it with `ckpipe rm`"):
            await pipeline.best("loss")


def puts_summary(operation: Operation) -> bool:
    return operation.verb == "put" and operation.key.startswith(SUMMARIES)


async def test_no_save_waits_for_a_summary(store: Stores) -> None:
    gates = [store.faulty.pause(puts_summary, nth=nth) for nth in (1, 2)]
    async with ckpipe.Pipeline(store.url, worker="thread") as pipeline:
        handle = await pipeline.save({"w": 2}, step=2)
        assert (await handle).complete
        assert (await handle.complete()).complete
        assert (await (await pipeline.save({"w": 3}, step=3))).complete
        for gate in gates:
            gate.wait_until_held()
        assert await summaries(store) == []
        for gate in gates:
            gate.release()
    assert len(await summaries(store)) == 2


async def test_no_save_waits_for_a_deletion(store: Stores) -> None:
    async with ckpipe.Pipeline(store.url, worker="thread", keep_last=1) as pipeline:
        await (await pipeline.save({"w": torch.zeros(1 << 18)}, step=1)).complete()
        gate = store.faulty.pause(lambda each: each.verb == "delete" and "step-" in each.key)
        try:
            for step in range(2, 6):
                state = {"w": torch.full((1 << 18,), float(step))}
                with anyio.fail_after(20):
                    handle = await pipeline.save(state, step=step)
                    assert (await handle.complete()).complete
            gate.wait_until_held()
        finally:
            gate.release()
    async with ckpipe.Pipeline(store.url) as pipeline:
        assert [info.step for info in await pipeline.steps()] == [5]


async def test_a_store_that_takes_no_summary_takes_saves(store: Stores) -> None:
    store.faulty.fail(
        errors.StoreError("not today"), lambda each: SUMMARIES in each.key, times=None
    )
    await save_losses(store.url, [2.0, 1.0])
    store.faulty.heal()
    assert await summaries(store) == []
    async with ckpipe.Pipeline(store.url) as pipeline:
        assert await best_step(pipeline) == 1


async def test_a_read_only_root_and_a_dry_run_get_no_summaries(store: Stores) -> None:
    await save_losses(store.url, [2.0, 1.0])
    await store.memory.delete(await summaries(store))
    async with ckpipe.Pipeline(store.url, read_only=True, keep_last=1) as pipeline:
        before = set(store.memory._store.objects)
        assert await best_step(pipeline) == 1
        await pipeline.steps()
        assert set(store.memory._store.objects) == before


async def test_an_index_of_a_newer_format_keeps_its_checkpoint(store: Stores) -> None:
    newer = b'{"format": "ckpipe", "version": 99, "kind": "index"}'
    await fill(store, 1, newer)
    async with ckpipe.Pipeline(store.url, keep_last=1) as pipeline:
        for step in range(5, 7):
            await (await pipeline.save({"w": step}, step=step))
        decision = await pipeline.prune()
        (kept,) = [name for name in decision.keep if "000000000000." in name]
        assert "cannot be read" in decision.reasons[kept]
