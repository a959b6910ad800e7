"""Retention prunes after saves, once for several, and keeps up with them."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

import ckpipe
from ckpipe.errors import StoreFull
from ckpipe.events import Completed, Event
from ckpipe.testing import Operation, SlowBackend
from ckpipe.testing.wrappers import Result
from tests.support.pipelines import stores
from tests.support.settling import SettlingPipeline, settle

HUNG = 60.0
STATE = {"w": torch.ones(3)}


def test_a_save_that_finds_no_room_tries_again_once_old_checkpoints_are_removed() -> None:
    with stores() as store, SettlingPipeline(store.url, keep_last=1) as pipeline:
        pipeline.save(STATE, step=1, until="committed")
        settle(pipeline)
        store.slow.hold("delete")
        pipeline.save(STATE, step=2, until="committed")
        store.slow.gate.wait_until_held()
        refused = threading.Event()
        store.faulty.call(lambda _: refused.set(), "open_upload")
        store.faulty.fail(StoreFull("no room"), "open_upload")
        third = pipeline.save(STATE, step=3)
        assert refused.wait(HUNG)
        pipeline.steps()  # asked on the same event loop, on which the save waits by then
        store.slow.release()
        third.wait(timeout=HUNG)
        settle(pipeline)
        store.faulty.fail(StoreFull("no room"), "open_upload")
        with pytest.raises(StoreFull):
            pipeline.save(STATE, step=4, until="committed")


def test_saves_that_come_faster_than_old_ones_go_do_not_pile_up() -> None:
    with stores() as store, SettlingPipeline(store.url, keep_last=1) as pipeline:
        for step in (1, 2):
            pipeline.save(STATE, step=step, until="committed")
        store.slow.hold("delete")
        for step in range(3, 17):
            pipeline.save(STATE, step=step, until="committed")
        until = time.monotonic() + HUNG
        while (under_way := len(pipeline.under_way)) >= 10 and time.monotonic() < until:
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
        with SettlingPipeline(store.url, keep_last=1) as pipeline:
            pipeline.events.add(count)
            for step in range(36):
                pipeline.save(STATE, step=step, until="committed")
            settle(pipeline)
            assert max(counts) <= 24
            assert [each.step for each in pipeline.steps()] == [35]


def test_nothing_is_kept_of_checkpoints_that_are_removed(tmp_path: Path) -> None:
    with SettlingPipeline(tmp_path, keep_last=2) as pipeline:
        names = [pipeline.save(STATE, step=step).wait().id for step in range(6)]
        settle(pipeline)
        left = [each.id for each in pipeline.steps()]
        assert sorted(left) == names[-2:]
        known = {name for name in names if any(name in each for each in dicts_and_sets())}
        assert known == set(left)


def dicts_and_sets() -> list[Any]:
    """All dicts and sets of this process."""
    return [each for each in gc.get_objects() if type(each) in (dict, set)]


def test_tombstones_of_complete_checkpoints_do_not_pile_up_for_a_day(tmp_path: Path) -> None:
    marks = tmp_path / ".ckpipe" / "deleted"

    def age(hours: float) -> None:
        for each in marks.iterdir():
            when = time.time() - hours * 3600
            os.utime(each, (when, when))

    with SettlingPipeline(tmp_path, keep_last=1) as pipeline:
        for step in range(33):
            pipeline.save(STATE, step=step, until="committed")
        settle(pipeline)
        there = len(list(marks.glob("*")))
        assert there == 32
        age(0.9)
        pipeline.prune()
        assert len(list(marks.glob("*"))) == there
        age(1.1)
        pipeline.prune()
        assert not list(marks.glob("*"))
        for step in range(33, 65):
            pipeline.save(STATE, step=step, until="committed")
    age(1.1)
    with SettlingPipeline(tmp_path, keep_last=1) as pipeline:
        pipeline.prune()
        # Nothing tells another process that they were complete.
        assert len(list(marks.glob("*"))) == 32
    age(24.1)
    with SettlingPipeline(tmp_path, keep_last=1) as pipeline:
        pipeline.prune()
        assert not list(marks.glob("*"))


def test_keep_last_zero_saves_only_what_is_final(tmp_path: Path) -> None:
    with ckpipe.SyncPipeline(tmp_path, keep_last=0) as pipeline:
        assert pipeline.save({"a": 1}, step=0).status == "skipped"
        pipeline.save({"a": 2}, step=1, final=True, until="committed")
        assert [each.step for each in pipeline.steps()] == [1]
    with pytest.warns(RuntimeWarning, match="final"):  # noqa: SIM117
        with ckpipe.SyncPipeline(tmp_path, keep_last=0) as pipeline:
            pipeline.save({"a": 1}, step=0)


def test_retention_keeps_the_newest_and_what_was_resumed_and_pinned(tmp_path: Path) -> None:
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        for step in range(4):
            pipeline.save({"step": step}, step=step, until="committed")
    with ckpipe.SyncPipeline(tmp_path, keep_last=2) as pipeline:
        pipeline.load(step=0)
        pipeline.pin(1)
        for step in range(10, 14):
            pipeline.save({"step": step}, step=step, until="committed")
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        assert [each.step for each in pipeline.steps()] == [0, 1, 12, 13]
        for info in pipeline.steps():
            pipeline.verify(info)
    assert not [path for path in tmp_path.glob("step-*") if "000000000011" in path.name]
