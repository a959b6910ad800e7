"""What a root with very many checkpoints costs to look at: requests, not seconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
from pipelines import Stores, stores

import ckpipe
from ckpipe.backend import PutMode
from ckpipe.format.object_names import index_key
from ckpipe.testing.wrapping import Operation
from ckpipe.types import CheckpointId

MANY = 10_000


@pytest.fixture
def store() -> Iterator[Stores]:
    with stores() as made:
        yield made


def kinds(operations: Sequence[Operation]) -> Counter[str]:
    return Counter(each.verb for each in operations)


async def fill(store: Stores, count: int, data: bytes) -> None:
    for step in range(count):
        id = CheckpointId("20250101T000000000Z-x", step, 0)
        await store.memory.put(index_key(id), data, PutMode.CREATE)


async def test_ten_thousand_checkpoints_cost_three_lists(store: Stores) -> None:
    await fill(store, MANY, b"{}")
    async with ckpipe.Pipeline(store.url) as pipeline:
        before = len(store.faulty.operations)
        infos = await pipeline.steps()
        assert len(infos) == MANY
        assert all(info.complete for info in infos)
        assert kinds(store.faulty.operations[before:]) == {"children": 3}
        before = len(store.faulty.operations)
        newest = await pipeline.latest()
        assert newest is not None
        assert newest.step == MANY - 1
        assert kinds(store.faulty.operations[before:]) == {"children": 3}


async def test_metrics_are_read_once_for_each_index_and_beside_each_other(store: Stores) -> None:
    async with ckpipe.Pipeline(store.url) as pipeline:
        for step, loss in enumerate([3.0, 1.0, float("nan"), 2.0]):
            await (await pipeline.save({"w": step}, step=step, metrics={"loss": loss}))
    async with ckpipe.Pipeline(store.url) as pipeline:
        for reads in (4, 0):
            before = len(store.faulty.operations)
            best = await pipeline.best("loss")
            assert best is not None
            assert best.step == 1
            assert kinds(store.faulty.operations[before:])["get"] == reads


async def test_an_index_of_a_newer_format_keeps_its_checkpoint(store: Stores) -> None:
    newer = b'{"format": "ckpipe", "version": 99, "kind": "index"}'
    await fill(store, 1, newer)
    async with ckpipe.Pipeline(store.url, keep_last=1) as pipeline:
        for step in range(5, 7):
            await (await pipeline.save({"w": step}, step=step))
        decision = await pipeline.prune()
        (kept,) = [name for name in decision.keep if "000000000000." in name]
        assert "cannot be read" in decision.reasons[kept]
