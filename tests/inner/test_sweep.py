"""What crashed runs left is removed, and nothing that anybody may still need."""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckpipe
from ckpipe.backend import Backend, ObjectInfo, PutMode
from ckpipe.catalog.catalog import Catalog
from ckpipe.catalog.find import NO_INDEX, discover
from ckpipe.catalog.leases import LEASE_LIFE
from ckpipe.catalog.sweep import Leftovers, plan_sweep, uploads_before
from ckpipe.errors import PermissionDenied, StoreError, StoreFull, StoreUnavailable
from ckpipe.format import names
from ckpipe.format.codec import encode_bundle
from ckpipe.format.names import LEASES, index_key, launch_id, manifest_key
from ckpipe.testing import FaultyBackend, MemoryBackend
from ckpipe.types import CheckpointId, CheckpointInfo
from tests.inner.stored_ranks import ID, manifest_of
from tests.support.command_line import Commands, save_steps
from tests.support.dead_runs import age, crash
from tests.support.pipelines import Stores
from tests.support.rank_pipelines import ranks

NOW = datetime(2026, 11, 21, tzinfo=UTC)
DAY = timedelta(days=1)
LONG_AGO = NOW - 1000 * DAY
ATTEMPTS = [f"2026112{n}T000000000Z-{name}" for n, name in enumerate("ab")]


def incomplete(attempt: str, step: int) -> CheckpointInfo:
    id = CheckpointId(attempt, step, 0)
    return CheckpointInfo(str(id), step, attempt, 0, complete=False, reason=NO_INDEX)


times = st.integers(0, 72).map(lambda hours: NOW - timedelta(hours=hours))


@st.composite
def leftovers(draw: st.DrawFn) -> Leftovers:
    found = draw(
        st.lists(
            st.builds(incomplete, st.sampled_from(ATTEMPTS), st.integers(1, 4)),
            unique_by=lambda each: each.id,
        )
    )
    subjects = [*ATTEMPTS, *map(launch_id, ATTEMPTS), *(each.id for each in found), "x"]
    leases = draw(st.lists(st.tuples(st.sampled_from(subjects), times), max_size=3))
    return Leftovers(
        tuple(found),
        draw(st.dictionaries(st.sampled_from(["a", "b"]), times)),
        tuple(ObjectInfo(f"{LEASES}{name}/holder.{n}", 2, t) for n, (name, t) in enumerate(leases)),
        tuple(ObjectInfo(f".ckpipe/deleted/{each.id}", 2, draw(times)) for each in found[:1]),
        (),
        claims=draw(st.dictionaries(st.sampled_from(["a", "b"]), times.map(lambda t: (t, t)))),
    )


@given(leftovers(), st.sets(st.sampled_from(ATTEMPTS)), st.integers(0, 1))
def test_only_what_is_old_and_nobodys_goes(found: Leftovers, running: set[str], days: int) -> None:
    threshold = DAY * days
    report = plan_sweep(found, NOW, threshold, running)
    assert {*report.remove} | {*report.keep} == {each.id for each in found.incomplete}
    assert not {*report.remove} & {*report.keep}
    leased = {each.key.split("/")[2] for each in found.leases if NOW - each.modified <= DAY / 96}
    for info in found.incomplete:
        launch = launch_id(info.attempt)
        young = launch not in found.active or NOW - found.active[launch] < threshold
        began = found.claims.get(launch, (LONG_AGO, LONG_AGO))[1]
        in_use = (
            leased & {info.id, info.attempt, launch}
            or info.attempt in running
            or NOW - began <= LEASE_LIFE
        )
        assert (info.id in report.keep) == bool(young or in_use)
    for objects, gone in ((found.tombstones, report.tombstones), (found.leases, report.leases)):
        assert set(gone) == {each.key for each in objects if NOW - each.modified > threshold}


def test_a_lease_keeps_and_old_marks_go(call: Commands, tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    dead = crash(tmp_path, 3, days=3)
    launch = launch_id(dead.partition(".")[2].rpartition(".")[0])
    lease = tmp_path / ".ckpipe" / "leases" / launch / "holder.4"
    lease.parent.mkdir(parents=True)
    lease.write_text("{}")
    report = call("sweep", tmp_path, "--json").data
    assert report["remove"] == []
    assert "lease" in report["keep"][0]["reason"]
    call("rm", tmp_path, 1)
    (mark,) = (tmp_path / ".ckpipe" / "deleted").iterdir()
    age(tmp_path, 3, "leases", "deleted")
    report = call("sweep", tmp_path, "--json").data
    assert [each["id"] for each in report["remove"]] == [dead]
    assert (report["leases"], report["tombstones"]) == (
        [f".ckpipe/leases/{launch}/holder.4"],
        [f".ckpipe/deleted/{mark.name}"],
    )
    assert not mark.exists()
    assert not lease.exists()
    assert list((tmp_path / ".ckpipe" / "deleted").iterdir()) == [mark.parent / dead]


def test_a_deletion_that_was_cut_short_is_finished(call: Commands, tmp_path: Path) -> None:
    one, _ = save_steps(tmp_path, 1, 2)
    mark = tmp_path / ".ckpipe" / "deleted" / one
    mark.parent.mkdir()
    mark.write_text("{}")
    assert call("sweep", tmp_path, "--dry-run", "--json").data["unfinished"] == [one]
    assert f"goes  {one}" in call("sweep", tmp_path).out
    assert not (tmp_path / one).exists()
    assert not (tmp_path / f"{one}.json").exists()
    assert call("sweep", tmp_path, "--older-than", 0.5).out == "nothing to sweep\n"


def test_what_dead_launches_agreed_on_goes_and_their_claims_stay(tmp_path: Path) -> None:
    attempts = tmp_path / ".ckpipe" / "attempts"
    with contextlib.ExitStack() as stack:
        # Those that are dead have not closed, which would remove it all.
        worlds = [
            stack.enter_context(ranks(str(tmp_path), 2, attempt_id=launch))
            for launch in ("old", "young", "run")
        ]
        for world in worlds:
            assert [pipeline.load() for pipeline in world] == [None, None]
        age(attempts / "old", 2)
        age(attempts / "run", 2)
        gone = (".ckpipe/attempts/old/agreed/load-0",)
        assert world[0].sweep(dry_run=True).agreements == gone
        assert world[0].sweep().agreements == gone
        assert world[0].sweep().agreements == ()
        left = [str(each.relative_to(attempts)) for each in attempts.rglob("*") if each.is_file()]
    assert sorted(each for each in left if "agreed" in each) == [
        "run/agreed/load-0",
        "young/agreed/load-0",
    ]
    assert {"old/claim-00000", "old/claim-00001", "old/start"} <= set(left)
    assert not tmp_path.exists() or list(tmp_path.iterdir()) == []


def test_a_run_sweeps_others_and_not_itself(tmp_path: Path) -> None:
    dead = crash(tmp_path, 1, days=2)
    with ckpipe.SyncPipeline(tmp_path, retention={"sweep_after_seconds": 0}) as pipeline:
        handle = pipeline.save({"a": torch.zeros(2)}, step=2)
        own = handle.wait().id
        (tmp_path / f"{own}.json").unlink()
        assert list(pipeline.sweep(dry_run=True).remove) == [dead]
        assert list(pipeline.sweep().keep.values()) == ["its launch is running"]
        assert {each.id for each in pipeline.steps()} == {own}


def test_uploads_of_a_launch_are_left_alone_before_it_has_taken_a_lease(store: Stores) -> None:
    """Its claim is all that tells of it, be leftovers of any age swept."""
    settings = {"sweep_after_seconds": 0}
    with ckpipe.SyncPipeline(store.url) as pipeline:
        store.slow.hold("write")
        handle = pipeline.save({"a": torch.zeros(1000)}, step=1)
        store.slow.gate.wait_until_held()
        with ckpipe.SyncPipeline(store.url, retention=settings) as other:
            assert other.sweep().uploads == 0
        store.slow.release()
        assert handle.wait().complete
        pipeline.verify(1)


@given(leftovers(), st.dictionaries(st.sampled_from(["a", "b"]), times), st.sampled_from([0, 1, 2]))
def test_no_upload_goes_that_a_running_launch_may_have_begun(
    found: Leftovers, opened: dict[str, datetime], days: int
) -> None:
    claims = {name: (time, time) for name, time in opened.items()}
    before = uploads_before(replace(found, claims=claims), NOW, days * DAY, [ATTEMPTS[1]])
    assert before <= NOW - days * DAY
    for launch, opened_at in opened.items():
        young = NOW - opened_at <= LEASE_LIFE
        leased = any(
            NOW - each.modified <= LEASE_LIFE
            and each.key.split("/")[2]
            in {launch, *(i.id for i in found.incomplete if launch_id(i.attempt) == launch)}
            for each in found.leases
        )
        if young or leased or launch == "b":
            assert before <= opened_at
    if not opened:
        assert before == NOW - days * DAY


def test_what_lacks_nothing_but_its_index_is_completed(call: Commands, tmp_path: Path) -> None:
    for rank in range(2):
        bundle, images = manifest_of({"a": torch.full((3,), rank)}, rank, 2)
        for key, data in {**images, manifest_key(ID, rank): encode_bundle(bundle)}.items():
            (tmp_path / key).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / key).write_bytes(data)
    age(tmp_path, 2)
    report = call("sweep", tmp_path, "--json").data
    assert report["remove"] == []
    assert "index" in report["keep"][0]["reason"]
    assert call("verify", tmp_path, ID).code == 0
    data = call("info", tmp_path, "--json").data
    assert (data["world_size"], data["files"]) == (2, 2)
    assert data["tensors"][0]["ranks"] == [0, 1]
    assert data["tensors"][0]["differs"] is True
    assert call("cp", tmp_path, tmp_path / "copy").code == 0
    shutil.rmtree(tmp_path / str(ID))
    assert call("verify", tmp_path / "copy", ID).code == 0


async def committed_by_all(backend: Backend) -> None:
    """Store a checkpoint of two ranks that lacks nothing but its index."""
    for rank in range(2):
        bundle, images = manifest_of({"a": torch.full((3,), rank)}, rank, 2)
        for key, data in {**images, manifest_key(ID, rank): encode_bundle(bundle)}.items():
            await backend.put(key, data, PutMode.CREATE)


LONG_ENOUGH = timedelta(microseconds=-1)


@pytest.mark.parametrize(
    ("kind", "verb"),
    [
        (StoreFull, "put"),
        (PermissionDenied, "put"),
        (StoreUnavailable, "get"),
        (StoreUnavailable, "list"),
    ],
)
async def test_what_cannot_be_completed_now_stays_for_a_later_sweep(
    kind: type[StoreError], verb: str
) -> None:
    backend = FaultyBackend(MemoryBackend())
    await committed_by_all(backend)
    first, last = names.directory(ID, 0, 0), index_key(ID)
    begin = last if verb == "put" else first
    # The sweep itself lists all of the checkpoint first, which is another prefix.
    backend.fail(kind("no"), lambda op: op.verb == verb and op.key.startswith(begin), times=None)
    before = {each.key async for each in backend.inner.list()}
    report = await Catalog(backend, sweep_after=LONG_ENOUGH).sweep()
    assert report.remove == {}
    assert report.keep == {str(ID): f"it may lack nothing but its index: {kind('no')}"}
    assert {each.key async for each in backend.inner.list()} == before
    backend.heal()
    report = await Catalog(backend, sweep_after=LONG_ENOUGH).sweep()
    assert report.keep == {str(ID): "it lacked nothing but its index, which was written"}
    assert [info.complete for info in await discover(backend)] == [True]


async def test_what_a_newer_ckpipe_wrote_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = MemoryBackend()
    await committed_by_all(backend)
    monkeypatch.setattr("ckpipe.format.codec.FORMAT_VERSION", 0)  # so all is of a newer format
    report = await Catalog(backend, sweep_after=LONG_ENOUGH).sweep()
    assert report.remove == {}
    assert "newer format" in report.keep[str(ID)]


async def test_what_is_damaged_goes() -> None:
    backend = MemoryBackend()
    await committed_by_all(backend)
    await backend.put(manifest_key(ID, 1), b"no manifest", PutMode.OVERWRITE)
    assert list((await Catalog(backend, sweep_after=LONG_ENOUGH).sweep()).remove) == [str(ID)]
    assert not [each async for each in backend.list(names.prefix(ID))]
