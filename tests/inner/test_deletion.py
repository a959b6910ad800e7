"""Deletion by name: what somebody leans on is refused, and one word forces it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

import ckpipe
from ckpipe import errors
from ckpipe.backend import Children
from ckpipe.catalog.catalog import Catalog
from ckpipe.catalog.leases import Lease
from ckpipe.catalog.summaries import Summaries
from ckpipe.format.names import launch_id
from ckpipe.format.summary import Summary
from ckpipe.retention import KeepLast
from ckpipe.testing import MemoryBackend
from ckpipe.types import CheckpointId, CheckpointInfo
from tests.support.pipelines import Stores

STATE: dict[str, Any] = {"a": torch.ones(1000)}


def saved(url: object, *steps: int) -> list[CheckpointInfo]:
    with ckpipe.SyncPipeline(str(url)) as pipeline:
        return [pipeline.save(STATE, step=step).wait() for step in steps]


def steps(pipeline: ckpipe.SyncPipeline) -> list[int]:
    return [info.step for info in pipeline.steps()]


def test_what_is_protected_says_why_and_goes_by_force(tmp_path: Path) -> None:
    _, pinned, resumed, newest = saved(tmp_path, 0, 1, 2, 3)
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        pipeline.pin(1)
        pipeline.load(step=2)
        reasons = {
            pinned: r"pinned.*Unpin it; --force",
            resumed: r"this run resumed from it.*--force or force=True",
            newest: r"the newest complete.*--force or force=True",
        }
        for info, reason in reasons.items():
            for which in (info, info.id, info.step):
                with pytest.raises(errors.UsageError, match=reason):
                    pipeline.delete(which)
        pipeline.delete(0)
        assert steps(pipeline) == [1, 2, 3]
        pipeline.unpin(1)
        pipeline.delete(1)
        pipeline.delete(3, force=True)
        pipeline.delete(2, force=True)
        assert steps(pipeline) == []
        for gone in (3, newest, newest.id):
            with pytest.raises(errors.CheckpointNotFound):
                pipeline.delete(gone, force=True)


def test_what_the_newest_was_resumed_from_is_refused_to_all(tmp_path: Path) -> None:
    saved(tmp_path, 0, 1)
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        pipeline.load(step=0)
        pipeline.save(STATE, step=2).wait()
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        with pytest.raises(errors.UsageError, match="the newest checkpoint's run resumed from it"):
            pipeline.delete(0)
        pipeline.delete(1)
        assert steps(pipeline) == [0, 2]


async def test_what_is_being_written_is_refused_even_by_force(store: Stores) -> None:
    async with ckpipe.Pipeline(store.url) as pipeline:
        store.slow.hold("write")
        handle = await pipeline.save(STATE, step=1)
        with pytest.raises(errors.UsageError, match=r"being written.*Cancel the save"):
            await pipeline.delete(handle.id, force=True)
        store.slow.release()
        assert (await handle).complete
        await pipeline.delete(handle.id, force=True)
        assert await pipeline.steps() == []


def test_what_a_running_launch_has_not_finished_is_refused(store: Stores) -> None:
    one, two = saved(store.url, 1, 2)
    del store.memory._store.objects[f"{one.id}.json"]
    lease = Lease(store.memory, launch_id(one.attempt))
    anyio.run(lease.renew)
    with ckpipe.SyncPipeline(store.url) as pipeline:
        with pytest.raises(errors.CheckpointIncomplete):
            pipeline.delete(1)
        with pytest.raises(errors.UsageError, match="its launch is running"):
            pipeline.delete(one.id)
        anyio.run(lease.release)
        pipeline.delete(one.id)
        assert steps(pipeline) == [two.step]


DAY = timedelta(days=1)
NOW, LATER = datetime.now(UTC), datetime.now(UTC) + 30 * DAY


@pytest.mark.parametrize("by_another", [False, True])
async def test_deletions_are_remembered_for_as_long_as_their_marks_stay(
    store: Stores, by_another: bool
) -> None:
    *gone, _ = await anyio.to_thread.run_sync(saved, store.url, 0, 1, 2, 3)
    backend, rule = store.memory, KeepLast(1)
    finished: set[CheckpointId] = set()
    another: set[CheckpointId] = set()
    for _ in range(2):
        await Catalog(backend, rule, summaries=Summaries(deleted=finished)).prune(now=NOW)
        assert finished == {each.key for each in gone}
    who = another if by_another else finished
    await Catalog(backend, rule, summaries=Summaries(deleted=who)).prune(now=LATER)
    await Catalog(backend, rule, summaries=Summaries(deleted=finished)).prune(now=LATER)
    assert finished == set()


@pytest.mark.parametrize("how", ["prune", "decide", "best"])
async def test_what_others_have_removed_is_forgotten(store: Stores, how: str) -> None:
    *gone, newest = await anyio.to_thread.run_sync(saved, store.url, 0, 1, 2, 3)
    backend, summaries = store.memory, Summaries()
    await Catalog(backend, KeepLast(1), summaries=summaries).prune(now=NOW, dry_run=True)
    assert summaries.names() == {newest.id, *(each.id for each in gone)}
    await Catalog(backend, KeepLast(1)).prune(now=NOW)
    if how == "prune":
        await Catalog(backend, KeepLast(1), summaries=summaries).prune(now=NOW)
    elif how == "decide":
        await Catalog(backend, KeepLast(1), summaries=summaries).prune(now=NOW, dry_run=True)
    else:
        with pytest.raises(errors.CheckpointNotFound):  # it was saved without metrics
            await Catalog(backend, summaries=summaries).best("loss", "min")
    assert summaries.names() == {newest.id}


async def test_what_is_learned_while_a_root_is_listed_is_not_forgotten() -> None:
    summaries, name = Summaries(), "step-000000000001.20250101T000000000Z-x.0"

    class Committing(MemoryBackend):
        async def children(self, prefix: str = "") -> Children:
            found = await super().children(prefix)
            summaries.learn(name, Summary(0, 1, final=False, metrics={}))
            return found

    await Catalog(Committing(), summaries=summaries).prune(now=NOW, dry_run=True)
    assert summaries.names() == {name}
