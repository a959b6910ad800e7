"""What may be deleted, by rules and by name: what is in use or protected stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckpipe
from ckpipe import errors
from tests.support.dead_runs import age
from tests.support.pipelines import Stores
from tests.support.stored_files import LEASES, index_key

STATE: dict[str, Any] = {"a": torch.ones(1000)}


def saved_steps(root: Path, *steps: int) -> list[ckpipe.CheckpointInfo]:
    with ckpipe.SyncPipeline(root) as pipeline:
        return [pipeline.save(STATE, step=step).wait() for step in steps]


def steps(pipeline: ckpipe.SyncPipeline) -> list[int]:
    return [info.step for info in pipeline.steps()]


def test_a_store_that_takes_no_lease_can_still_be_read(
    store: Stores, caplog: pytest.LogCaptureFixture
) -> None:
    with ckpipe.SyncPipeline(store.url) as pipeline:
        pipeline.save(STATE, step=0, until="committed")
        full = errors.StoreFull("no room")
        store.faulty.fail(full, lambda o: o.key.startswith(LEASES), times=None)
        assert pipeline.load() is not None
        assert "could not be renewed" in caplog.text


def test_a_pipeline_of_its_own_prunes_nothing_that_the_newest_run_resumed_from(
    store: Stores,
) -> None:
    with ckpipe.SyncPipeline(store.url) as first:
        ids = [first.save(STATE, step=step).wait().id for step in range(4)]
    with ckpipe.SyncPipeline(store.url) as resumed, ckpipe.SyncPipeline(store.url) as other:
        resumed.load(step=1)
        ids.append(resumed.save(STATE, step=4).wait().id)
        with ckpipe.SyncPipeline(store.url, keep_last=1) as third:
            for decision in (third.prune(dry_run=True), third.prune()):
                assert set(decision.keep) == {ids[1], ids[4]}
                assert "resumed from it" in decision.reasons[ids[1]]
        assert [info.id for info in other.steps() if info.complete] == [ids[1], ids[4]]
        resumed.load(step=4)
        resumed.save(STATE, step=5).wait()
        with ckpipe.SyncPipeline(store.url, keep_last=1) as third:
            assert ids[1] in third.prune().remove, "nobody leans on it any more"


def test_what_is_protected_says_why_and_goes_by_force(tmp_path: Path) -> None:
    _, pinned, resumed, newest = saved_steps(tmp_path, 0, 1, 2, 3)
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
    saved_steps(tmp_path, 0, 1)
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


def test_what_a_crashed_reader_held_is_pruned_once_its_lease_is_old(tmp_path: Path) -> None:
    with ckpipe.SyncPipeline(tmp_path, keep_last=1) as pipeline:
        first = pipeline.save(STATE, step=0, until="committed").id
        lease = tmp_path / LEASES / first / "crashed.0"
        lease.parent.mkdir(parents=True)
        lease.write_text("{}")
        pipeline.save(STATE, step=1, until="committed")
        pipeline.prune()
        assert steps(pipeline) == [0, 1]
        age(tmp_path, 1 / 24, "crashed")
        pipeline.prune()
        assert steps(pipeline) == [1]


def test_what_a_running_launch_has_not_finished_is_refused(tmp_path: Path) -> None:
    one, two = saved_steps(tmp_path, 1, 2)
    (tmp_path / index_key(one.id)).unlink()
    lease = tmp_path / LEASES / one.attempt.rpartition("-")[2] / "running.0"
    lease.parent.mkdir(parents=True)
    lease.write_text("{}")
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        with pytest.raises(errors.CheckpointIncomplete):
            pipeline.delete(1)
        with pytest.raises(errors.UsageError, match="its launch is running"):
            pipeline.delete(one.id)
        lease.unlink()
        pipeline.delete(one.id)
        assert steps(pipeline) == [two.step]
