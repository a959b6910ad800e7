"""Leases and deletions: what is in use stays, whatever is deleted beside it."""

from __future__ import annotations

import os
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

import ckpipe
from ckpipe import errors
from ckpipe.backend import Children, ObjectInfo, PutMode
from ckpipe.catalog import leases
from ckpipe.catalog.catalog import Catalog
from ckpipe.catalog.delete import Removal, delete, finish_deletions, pin
from ckpipe.catalog.leases import LEASE_LIFE, Lease, live_subjects, under_lease
from ckpipe.catalog.summaries import Summaries
from ckpipe.format.manifest import ManifestDocument
from ckpipe.format.names import LEASES, PINS, index_key, launch_id, lease_key, tombstone_key
from ckpipe.format.summary import Summary
from ckpipe.retention import KeepLast
from ckpipe.testing import FaultyBackend, Landing, MemoryBackend
from ckpipe.testing.wrappers import Operation
from ckpipe.types import CheckpointId, CheckpointInfo
from ckpipe_local import LocalBackend
from tests.support.pipelines import Stores

STATE: dict[str, Any] = {"a": torch.ones(1000)}
LONG_AGO = datetime.min.replace(tzinfo=UTC)


async def keys(backend: ckpipe.Backend, prefix: str = "") -> list[str]:
    return sorted([each.key async for each in backend.list(prefix)])


def test_what_a_crashed_reader_held_is_pruned_once_its_lease_is_old(tmp_path: Path) -> None:
    with ckpipe.SyncPipeline(tmp_path, keep_last=1) as pipeline:
        first = pipeline.save(STATE, step=0, until="committed").id

        async def crash() -> None:
            async with LocalBackend(str(tmp_path)) as backend:
                await Lease(backend, first).renew()

        anyio.run(crash)
        pipeline.save(STATE, step=1, until="committed")
        pipeline.prune()
        assert [each.step for each in pipeline.steps()] == [0, 1]
        (lease,) = [path for path in (tmp_path / LEASES / first).iterdir() if path.is_file()]
        old = lease.stat().st_mtime - LEASE_LIFE.total_seconds() - 1
        os.utime(lease, (old, old))
        pipeline.prune()
        assert [each.step for each in pipeline.steps()] == [1]


def found(subject: str, age: float, holder: str = "x", renewal: int = 0) -> ObjectInfo:
    modified = datetime(2025, 1, 1, tzinfo=UTC) - timedelta(seconds=age)
    return ObjectInfo(lease_key(subject, holder, renewal), 2, modified)


def test_a_lease_lives_as_long_as_its_newest_object_is_young() -> None:
    life = LEASE_LIFE.total_seconds()
    there = [
        found("a", life + 1), found("a", life - 1, renewal=1),
        found("b", life + 1), found("c", life),
    ]  # fmt: skip
    assert live_subjects(there, datetime(2025, 1, 1, tzinfo=UTC)) == {"a", "c"}


def saved(step: int) -> CheckpointId:
    return CheckpointId("20250101T000000000Z-x", step, 0)


async def with_checkpoints(*steps: int) -> FaultyBackend:
    backend = FaultyBackend(MemoryBackend())
    for step in steps:
        await backend.put(f"{saved(step)}/rank-00000.safetensors", b"data", PutMode.CREATE)
        await backend.put(index_key(saved(step)), b"{}", PutMode.CREATE)
    return backend


def lies_below(id: CheckpointId, found: list[str]) -> list[str]:
    return [key for key in found if key.startswith(str(id))]


async def test_a_lease_that_comes_before_the_tombstone_keeps_the_data() -> None:
    backend = await with_checkpoints(1)
    lease = Lease(backend.inner, str(saved(1)))
    await lease.renew()
    assert await delete(backend, saved(1)) is Removal.WAITS
    assert len(lies_below(saved(1), await keys(backend))) == 2
    finished: set[CheckpointId] = set()
    # However old the tombstone is, it is not forgotten while there is data.
    await finish_deletions(backend, finished, forget_before=datetime.max.replace(tzinfo=UTC))
    assert len(lies_below(saved(1), await keys(backend))) == 2
    assert tombstone_key(saved(1)) in await keys(backend)
    await lease.release()
    await finish_deletions(backend, finished, forget_before=LONG_AGO)
    assert lies_below(saved(1), await keys(backend)) == []
    assert finished == {saved(1)}


@pytest.mark.parametrize("landing", list(Landing))
async def test_a_lease_is_found_whenever_it_comes_before_a_reader_may_begin(
    landing: Landing,
) -> None:
    """At every operation of a deletion a reader comes: it reads whole data, or is turned away."""
    for number in range(1, 100):
        backend = await with_checkpoints(1)
        memory = backend.inner
        before = len(backend.operations)
        verdicts: list[bool] = []

        async def read(memory: Any = memory, verdicts: list[bool] = verdicts) -> None:
            lease = Lease(memory, str(saved(1)))
            await lease.renew()
            allowed = tombstone_key(saved(1)) not in await keys(memory)
            verdicts.append(allowed)

        def come(_: Operation, read: Any = read) -> None:
            thread = threading.Thread(target=anyio.run, args=(read,))
            thread.start()
            thread.join()

        backend.call(come, before + number, landing)
        gone = await delete(backend, saved(1)) is Removal.GONE
        if len(backend.operations) - before < number:
            assert number > 5
            return
        if not verdicts:  # nothing lands where it finds no pin
            continue
        whole = len(lies_below(saved(1), await keys(backend))) == 2
        assert not verdicts[0] or (whole and not gone)


def test_the_newest_that_is_deleted_under_a_reader_gives_way_to_the_next(store: Stores) -> None:
    with ckpipe.SyncPipeline(store.url) as pipeline:
        infos = [pipeline.save(STATE, step=step).wait() for step in range(3)]

        def is_lease(operation: Operation) -> bool:
            return operation.verb == "put" and operation.key.startswith(LEASES)

        store.faulty.call(lambda _: pipeline_delete(store, infos[2].id), is_lease)
        result = pipeline.load()
        assert result is not None
        assert result.id == infos[1].id
        store.faulty.call(lambda _: pipeline_delete(store, infos[1].id), is_lease, Landing.AFTER)
        with pytest.raises(errors.CheckpointIncomplete, match="deleted just now"):
            pipeline.load(step=1)


def pipeline_delete(store: Stores, name: str) -> None:
    id = CheckpointId.parse(name)
    assert id is not None
    thread = threading.Thread(target=anyio.run, args=(delete, store.memory, id))
    thread.start()
    thread.join()


async def test_a_lease_is_renewed_while_work_lasts_and_released_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leases, "RENEW_EVERY", timedelta(microseconds=1))
    backend = FaultyBackend(MemoryBackend())
    renewed = anyio.Event()

    def is_lease(operation: Operation) -> bool:
        return operation.verb == "put"

    backend.call(lambda _: renewed.set(), is_lease, nth=4)
    async with under_lease(backend, "x"):
        await renewed.wait()
        seen = await keys(backend.inner)
    assert 1 <= len(seen) <= 2, "the one before goes when the next is there"
    assert await keys(backend.inner) == []


async def test_what_work_raises_comes_without_a_group_and_ends_the_lease() -> None:
    backend = MemoryBackend()
    with pytest.raises(ZeroDivisionError):  # noqa: PT012
        async with under_lease(backend, "x"):
            assert len(await keys(backend)) == 1
            raise ZeroDivisionError
    assert await keys(backend) == []


async def test_cancelled_work_ends_its_lease() -> None:
    backend, begun = MemoryBackend(), anyio.Event()

    async def work() -> None:
        async with under_lease(backend, "x"):
            begun.set()
            await anyio.sleep_forever()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(work)
        await begun.wait()
        tasks.cancel_scope.cancel()
    assert await keys(backend) == []


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


async def test_an_index_waits_for_no_lease_and_its_failure_is_told() -> None:
    memory, id = MemoryBackend(), CheckpointId("20250101T000000000Z-a", 1, 0)
    backend = FaultyBackend(memory)
    lease = backend.pause("put")

    async def look() -> ManifestDocument:
        lease.release()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        async with Catalog(backend).reading(id, look):
            raise AssertionError
    assert await keys(memory) == []


async def test_a_pin_that_comes_after_the_tombstone_is_refused() -> None:
    backend, id = MemoryBackend(), CheckpointId("20250101T000000000Z-a", 1, 0)
    await backend.put(index_key(id), b"{}", PutMode.CREATE)
    await pin(backend, id)
    await Catalog(backend).unpin(str(id))
    await backend.put(tombstone_key(id), b"{}", PutMode.CREATE)  # by who has just chosen it
    with pytest.raises(errors.CheckpointIncomplete, match="deleted just now"):
        await pin(backend, id)
    assert not [key async for key in backend.list(PINS)]


def saved_steps(url: object, *steps: int) -> list[CheckpointInfo]:
    with ckpipe.SyncPipeline(str(url)) as pipeline:
        return [pipeline.save(STATE, step=step).wait() for step in steps]


def steps(pipeline: ckpipe.SyncPipeline) -> list[int]:
    return [info.step for info in pipeline.steps()]


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


def test_what_a_running_launch_has_not_finished_is_refused(store: Stores) -> None:
    one, two = saved_steps(store.url, 1, 2)
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
    *gone, _ = await anyio.to_thread.run_sync(saved_steps, store.url, 0, 1, 2, 3)
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
    *gone, newest = await anyio.to_thread.run_sync(saved_steps, store.url, 0, 1, 2, 3)
    backend, summaries = store.memory, Summaries()
    await Catalog(backend, KeepLast(1), summaries=summaries).prune(now=NOW, dry_run=True)
    assert summaries.names() == {newest.id, *(each.id for each in gone)}
    await Catalog(backend, KeepLast(1)).prune(now=NOW)
    if how == "prune":
        await Catalog(backend, KeepLast(1), summaries=summaries).prune(now=NOW)
    elif how == "decide":
        await Catalog(backend, KeepLast(1), summaries=summaries).prune(now=NOW, dry_run=True)
    else:
        with pytest.raises(errors.CheckpointNotFound):  # it was saved_steps without metrics
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
