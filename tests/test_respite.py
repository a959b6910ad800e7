"""Retention waits a moment after a save, and not where somebody waits for it."""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import pytest
import torch
from pipelines import stores
from ranks import settle

import ckpipe
from ckpipe.errors import StoreFull
from ckpipe.events import Completed, Event, Pruned
from ckpipe.running import site_making
from ckpipe.saves.respite import Respite
from ckpipe.testing import Operation, SlowBackend
from ckpipe.testing.wrappers import Result

HUNG = 60.0
STATE = {"w": torch.ones(3)}


async def test_it_ends_when_somebody_ends_it_or_waits_for_what_comes_after_it() -> None:
    respite, passed = Respite(3600.0), list[str]()

    async def follow(name: str) -> None:
        async with respite.before() as needed:
            if needed:
                passed.append(f"{name} begins")
                await anyio.wait_all_tasks_blocked()
                passed.append(f"{name} ends")

    with anyio.fail_after(HUNG):
        for _ in range(2):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(follow, "a")
                await anyio.wait_all_tasks_blocked()
                assert passed == []
                respite.end()
            passed.clear()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(follow, "a")
            tasks.start_soon(follow, "b")
            await anyio.wait_all_tasks_blocked()
            assert await respite.passed()
            assert passed == ["a begins", "a ends", "b begins", "b ends"]
            assert not await respite.passed()
            with respite.skipped():
                await follow("c")
        async with Respite().before():
            pass
        with anyio.move_on_after(0) as scope:
            await follow("nobody")
    assert scope.cancelled_caught, "nobody waits for it any more"
    assert not await respite.passed()


async def test_who_comes_last_does_it_for_all_that_wait_for_their_turn() -> None:
    respite, done, go_on = Respite(), list[int](), anyio.Event()

    async def follow(number: int) -> None:
        async with respite.before() as needed:
            if needed:
                done.append(number)
                await go_on.wait()

    with anyio.fail_after(HUNG):
        async with anyio.create_task_group() as tasks:
            for number in range(5):
                tasks.start_soon(follow, number)
                await anyio.wait_all_tasks_blocked()
            assert done == [0]
            go_on.set()
    assert done == [0, 4]


@pytest.fixture
def long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A respite that ends by itself after all tests."""
    monkeypatch.setattr(site_making, "RESPITE_SECONDS", 3600.0)


def await_pause(pipeline: ckpipe.SyncPipeline) -> None:
    """Returns once retention pauses; who is told of the commit may be quicker than that."""
    until = time.monotonic() + HUNG
    while not pipeline._core.engine.site.respite._later:
        assert time.monotonic() < until
        time.sleep(0.001)


@pytest.mark.usefixtures("long")
def test_old_checkpoints_are_removed_when_the_next_save_begins_and_when_leaving(
    tmp_path: Path,
) -> None:
    removed: queue.Queue[str] = queue.Queue()

    def note(event: Event) -> None:
        if isinstance(event, Pruned):
            removed.put(event.removed)

    with ckpipe.SyncPipeline(tmp_path, keep_last=1, drain_timeout_seconds=HUNG / 2) as pipeline:
        pipeline.events.add(note)
        first = pipeline.save(STATE, step=1, until="committed").id
        settle(pipeline)  # else its own retention may remove it, once the second is complete
        second = pipeline.save(STATE, step=2, until="committed").id
        await_pause(pipeline)
        assert removed.empty()
        third = pipeline.save(STATE, step=3, until="committed").id
        assert removed.get(timeout=HUNG) == str(first)
    assert removed.get_nowait() == str(second)
    with ckpipe.SyncPipeline(tmp_path, read_only=True) as pipeline:
        assert [each.id for each in pipeline.steps()] == [third]


@pytest.mark.usefixtures("long")
async def test_a_load_does_not_wait_for_it(tmp_path: Path) -> None:
    async with ckpipe.Pipeline(tmp_path, keep_last=1) as pipeline:
        for step in (1, 2):
            await pipeline.save(STATE, step=step, until="committed")
        with anyio.fail_after(HUNG):
            assert await pipeline.load(step=2) is not None
        assert [each.step for each in await pipeline.steps()] == [2]


@pytest.mark.usefixtures("long")
def test_a_save_that_finds_no_room_tries_again_once_old_checkpoints_are_removed() -> None:
    with stores() as store, ckpipe.SyncPipeline(store.url, keep_last=1) as pipeline:
        for step in (1, 2):
            pipeline.save(STATE, step=step, until="committed")
        await_pause(pipeline)
        store.faulty.fail(StoreFull("no room"), "open_upload")
        pipeline.save(STATE, step=3, until="committed")
        settle(pipeline)
        store.faulty.fail(StoreFull("no room"), "open_upload")
        with pytest.raises(StoreFull):
            pipeline.save(STATE, step=4, until="committed")


def test_saves_that_come_faster_than_old_ones_go_do_not_pile_up() -> None:
    with stores() as store, ckpipe.SyncPipeline(store.url, keep_last=1) as pipeline:
        for step in (1, 2):
            pipeline.save(STATE, step=step, until="committed")
        store.slow.hold("delete")
        for step in range(3, 17):
            pipeline.save(STATE, step=step, until="committed")
        until, active = time.monotonic() + HUNG, pipeline._core.engine._active
        while (under_way := len(active)) >= 10 and time.monotonic() < until:
            time.sleep(0.001)  # who is told of a commit may be quicker than those that give way
        store.slow.release()
        settle(pipeline)
        assert under_way < 10
        assert [each.step for each in pipeline.steps()] == [16]


class SlowDeletions(SlowBackend):
    """A store on which a deletion takes longer than a save."""

    async def around(self, operation: Operation, call: Callable[[], Awaitable[Result]]) -> Result:
        if operation.verb == "delete":
            await anyio.sleep(0.02)
        return await call()


def test_saves_wait_for_a_prune_that_falls_behind() -> None:
    counts: list[int] = []

    def count(event: Event) -> None:
        if isinstance(event, Completed):
            keys = list(store.memory._store.objects)
            counts.append(sum(key.endswith(".json") and "/" not in key for key in keys))

    with stores() as store:
        store.slow = SlowDeletions(store.faulty)
        with ckpipe.SyncPipeline(store.url, keep_last=1) as pipeline:
            pipeline.events.add(count)
            for step in range(60):
                pipeline.save(STATE, step=step, until="committed")
            settle(pipeline)
            assert max(counts) <= 24
            assert [each.step for each in pipeline.steps()] == [59]


def test_nothing_is_kept_of_checkpoints_that_are_removed(tmp_path: Path) -> None:
    with ckpipe.SyncPipeline(tmp_path, keep_last=2) as pipeline:
        for step in range(6):
            pipeline.save(STATE, step=step, until="committed")
        settle(pipeline)
        left = {str(each.id) for each in pipeline.steps()}
        assert len(left) == 2
        assert set(pipeline._core.engine.site.facts.known) == left


def test_tombstones_of_complete_checkpoints_do_not_pile_up_for_a_day(tmp_path: Path) -> None:
    marks = tmp_path / ".ckpipe" / "deleted"

    def age(hours: float) -> None:
        for each in marks.iterdir():
            when = time.time() - hours * 3600
            os.utime(each, (when, when))

    with ckpipe.SyncPipeline(tmp_path, keep_last=1) as pipeline:
        for step in range(41):
            pipeline.save(STATE, step=step, until="committed")
        settle(pipeline)
        there = len(list(marks.glob("*")))
        assert there == 40
        age(0.9)
        pipeline.prune()
        assert len(list(marks.glob("*"))) == there
        age(1.1)
        pipeline.prune()
        assert not list(marks.glob("*"))
        for step in range(41, 81):
            pipeline.save(STATE, step=step, until="committed")
    age(1.1)
    with ckpipe.SyncPipeline(tmp_path, keep_last=1) as pipeline:
        pipeline.prune()
        # Nothing tells another process that they were complete.
        assert len(list(marks.glob("*"))) == 40
    age(24.1)
    with ckpipe.SyncPipeline(tmp_path, keep_last=1) as pipeline:
        pipeline.prune()
        assert not list(marks.glob("*"))


@pytest.mark.usefixtures("long")
def test_it_does_not_count_as_time_that_a_save_takes(tmp_path: Path) -> None:
    with ckpipe.SyncPipeline(tmp_path, keep_last=1) as pipeline:
        pipeline.save(STATE, step=1, until="committed")
        await_pause(pipeline)
        first, second = pipeline.statistics(), pipeline.statistics()
        assert 0 < first.active_seconds == second.active_seconds
