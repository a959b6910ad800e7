"""Ages are told by the store's own clock, however wrong this machine's is."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import anyio
import pytest
import torch

import ckpipe
from ckpipe import errors
from ckpipe.backend import Backend, Children, ObjectInfo
from ckpipe.testing import Landing
from ckpipe.testing.wrappers import Operation, Result, WrappedBackend
from ckpipe.types import CheckpointId
from tests.support.pipelines import Stores
from tests.support.settling import SettlingPipeline, settle

STATE: dict[str, Any] = {"a": torch.ones(100)}
DAY = timedelta(days=1)


class Shifted(WrappedBackend):
    """A store whose clock is not that of this machine.

    Args:
        inner: The store.
        shift: How far its clock is ahead.
    """

    def __init__(self, inner: Backend, shift: timedelta) -> None:
        super().__init__(inner)
        self.shift = shift

    async def around(self, operation: Operation, call: Callable[[], Awaitable[Result]]) -> Result:
        return await call()

    def _seen(self, info: ObjectInfo) -> ObjectInfo:
        return replace(info, modified=info.modified + self.shift)

    async def stat(self, key: str) -> ObjectInfo:
        return self._seen(await super().stat(key))

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        async for each in super().list(prefix):
            yield self._seen(each)

    async def children(self, prefix: str = "") -> Children:
        found = await super().children(prefix)
        return replace(found, objects=tuple(map(self._seen, found.objects)))


@pytest.fixture(params=[-10, 10], ids=["behind", "ahead"])
def url(request: pytest.FixtureRequest, store: Stores) -> str:
    scheme = f"{store.scheme}{'ahead' if request.param > 0 else 'behind'}"
    shift = request.param * DAY
    ckpipe.register_backend(scheme, lambda url: Shifted(store.memory, shift))
    return f"{scheme}://store"


def age(store: Stores, id: str, by: timedelta) -> None:
    """Make all of a checkpoint, and the mark of its deletion, older."""
    objects = store.memory._store.objects
    for key, each in list(objects.items()):
        if id in key:
            objects[key] = replace(each, modified=each.modified - by)


def test_a_period_ends_now_by_the_clock_that_it_began_by(store: Stores, url: str) -> None:
    with ckpipe.SyncPipeline(url) as pipeline:
        ids = [pipeline.save(STATE, step=step).wait().id for step in range(4)]
    age(store, ids[0], 2 * DAY)
    age(store, ids[2], 0.5 * DAY)
    rules = {"rules": ckpipe.KeepWithin(DAY)}
    with ckpipe.SyncPipeline(url, retention=rules) as pipeline:
        planned = pipeline.prune(dry_run=True)
        assert planned.remove == (ids[0],)
        assert pipeline.prune() == planned
        assert [info.id for info in pipeline.steps()] == ids[1:]


def test_the_mark_of_a_deletion_stays_as_long_as_it_should(store: Stores, url: str) -> None:
    def marks() -> list[str]:
        return [key for key in store.memory._store.objects if key.startswith(".ckpipe/deleted/")]

    with SettlingPipeline(url, keep_last=1) as pipeline:
        id = pipeline.save(STATE, step=0).wait().id
        pipeline.save(STATE, step=1).wait()
        settle(pipeline)  # else its own pruning may leave the mark once more, after the last look
        for _ in range(2):
            pipeline.prune()
            assert marks() == [f".ckpipe/deleted/{id}"]
        age(store, id, 2 * DAY)
        pipeline.prune()
        assert marks() == []
    assert CheckpointId.parse(id) is not None


def _asks_the_time(operation: Operation) -> bool:
    return operation.verb == "put" and operation.key.startswith(".ckpipe/leases/clock/")


def _clocks(store: Stores) -> list[str]:
    return [key for key in store.memory._store.objects if "/clock/" in key]


RULES: dict[str, Any] = {"retention": {"rules": ckpipe.KeepWithin(DAY)}}


@pytest.mark.parametrize("landing", list(Landing))
def test_a_reading_of_the_clock_survives_a_lost_answer_and_leaves_nothing(
    store: Stores, landing: Landing
) -> None:
    with SettlingPipeline(store.url, upload={"backoff_seconds": 0}, **RULES) as pipeline:
        id = pipeline.save(STATE, step=0).wait().id
        settle(pipeline)
        age(store, id, 2 * DAY)
        lost = errors.StoreUnavailable("the answer was lost")
        store.faulty.fail(lost, _asks_the_time, landing)
        assert pipeline.prune().keep == (id,)
        assert _clocks(store) == []


async def test_a_reading_of_the_clock_that_is_cancelled_leaves_nothing(store: Stores) -> None:
    async with ckpipe.Pipeline(store.url, **RULES) as pipeline:
        await pipeline.save(STATE, step=0, until="committed")
        gate = store.faulty.pause(lambda each: each.verb == "stat" and "/clock/" in each.key)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pipeline.prune)
            await anyio.to_thread.run_sync(gate.wait_until_held)
            tasks.cancel_scope.cancel()
        gate.release()
    assert _clocks(store) == []


class Forgetful(WrappedBackend):
    """A store in which others delete each index before it is asked for its time."""

    async def around(self, operation: Operation, call: Callable[[], Awaitable[Result]]) -> Result:
        return await call()

    async def stat(self, key: str) -> ObjectInfo:
        if key.endswith(".json"):
            raise errors.ObjectNotFound("it is gone", key=key)
        return await super().stat(key)


async def test_retention_goes_on_if_the_index_it_would_ask_is_gone(store: Stores) -> None:
    ckpipe.register_backend(f"{store.scheme}gone", lambda url: Forgetful(store.memory))
    async with ckpipe.Pipeline(f"{store.scheme}gone://store", keep_last=1) as pipeline:
        for step in (1, 2, 3):
            await pipeline.save(STATE, step=step, until="committed")
    assert (await _last(store)).step == 3


async def _last(store: Stores) -> ckpipe.CheckpointInfo:
    """The only checkpoint that is left."""
    async with ckpipe.Pipeline(store.url, read_only=True) as pipeline:
        (info,) = await pipeline.steps()
        return info
