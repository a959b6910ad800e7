"""A sweep removes what dead runs have left, and nothing else."""

from __future__ import annotations

import contextlib
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

import ckpipe
from ckpipe.backend import PutMode
from ckpipe.errors import PermissionDenied, StoreError, StoreFull, StoreUnavailable
from tests.support.command_line import Commands, save_steps
from tests.support.dead_runs import age, crash
from tests.support.pipelines import Stores
from tests.support.rank_pipelines import ranks
from tests.support.stored_files import document_of, index_key, manifest_key, sealed


def test_sweep_removes_leftovers_of_dead_runs(call: Commands, tmp_path: Path) -> None:
    (whole,) = save_steps(tmp_path, 1)
    age(tmp_path, 9)
    dead, slow = crash(tmp_path, 2, days=2), crash(tmp_path, 3, days=0.5)
    foreign = [tmp_path / "step-5", tmp_path / "notes" / "a.json", tmp_path / "step-1.x.0.json"]
    for path in foreign:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    stale = tmp_path / slow / ".ckpipe-tmp-0123456789abcdef"
    stale.write_text("half")
    age(tmp_path, 2, "notes", "step-5", "step-1.x", stale.name)
    dry = call("sweep", tmp_path, "--dry-run", "--json").data
    assert [each["id"] for each in dry["remove"]] == [dead]
    assert [each["id"] for each in dry["keep"]] == [slow]
    assert (tmp_path / dead).exists()
    done = call("sweep", tmp_path, "--json").data
    assert [each["id"] for each in done["remove"]] == [dead]
    assert done["uploads"] == 1
    assert not (tmp_path / dead).exists()
    assert not stale.exists()
    assert (tmp_path / slow).exists()
    assert all(path.read_text() == "mine" for path in foreign)
    assert call("verify", tmp_path, whole).code == 0
    again = call("sweep", tmp_path, "--json").data
    assert (again["remove"], again["uploads"]) == ([], 0)


def test_a_lease_keeps_and_old_marks_go(call: Commands, tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    dead = crash(tmp_path, 3, days=3)
    launch = dead.rpartition("-")[2].partition(".")[0]
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
    assert re.search(rf"(?m)^goes +1 .* {one}$", call("sweep", tmp_path).out)
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


ALL: dict[str, Any] = {"retention": {"sweep_after_seconds": 0}}


def committed_by_all(url: str) -> str:
    """Leave a checkpoint of two ranks that lacks nothing but its index; return its id."""
    with ranks(url, 2) as opened:
        saves = [each.save({"a": torch.full((3,), n)}, step=7) for n, each in enumerate(opened)]
        return saves[-1].wait().id


def test_what_lacks_nothing_but_its_index_is_completed(call: Commands, tmp_path: Path) -> None:
    id = committed_by_all(str(tmp_path))
    (tmp_path / index_key(id)).unlink()
    age(tmp_path, 2)
    report = call("sweep", tmp_path, "--json").data
    assert report["remove"] == []
    assert "index" in report["keep"][0]["reason"]
    assert call("verify", tmp_path, id).code == 0
    data = call("info", tmp_path, "--json").data
    assert (data["world_size"], data["files"]) == (2, 2)
    assert data["tensors"][0]["ranks"] == [0, 1]
    assert data["tensors"][0]["differs"] is True
    assert call("cp", tmp_path, tmp_path / "copy").code == 0
    shutil.rmtree(tmp_path / id)
    assert call("verify", tmp_path / "copy", id).code == 0


def keys(store: Stores) -> set[str]:
    async def listed() -> set[str]:
        return {each.key async for each in store.memory.list()}

    return anyio.run(listed)


def without_index(store: Stores) -> str:
    """Leave such a checkpoint, without its summary and the claims of its launch."""
    id = committed_by_all(store.url)
    beside = [each for each in keys(store) if each.startswith(".ckpipe/")]
    anyio.run(store.memory.delete, [index_key(id), *beside])
    return id


def overwrite(store: Stores, key: str, data: bytes) -> None:
    anyio.run(store.memory.put, key, data, PutMode.OVERWRITE)


@pytest.mark.parametrize(
    ("kind", "verb"),
    [
        (StoreFull, "put"),
        (PermissionDenied, "put"),
        (StoreUnavailable, "get"),
        (StoreUnavailable, "list"),
    ],
)
def test_what_cannot_be_completed_now_stays_for_a_later_sweep(
    store: Stores, kind: type[StoreError], verb: str
) -> None:
    id = without_index(store)
    begin = index_key(id) if verb == "put" else manifest_key(id, 0).rpartition("/")[0]
    with ckpipe.SyncPipeline(store.url, **ALL, upload={"retries": 0}) as pipeline:
        before = keys(store)
        # The sweep itself lists all of the checkpoint first, which is another prefix.
        store.faulty.fail(
            kind("no"), lambda op: op.verb == verb and op.key.startswith(begin), times=None
        )
        report = pipeline.sweep()
        assert report.remove == {}
        (reason,) = report.keep.values()
        assert reason.startswith("it may lack nothing but its index: no")
        assert keys(store) == before
        store.faulty.heal()
        report = pipeline.sweep()
        assert report.keep == {id: "it lacked nothing but its index, which was written"}
        assert [info.complete for info in pipeline.steps()] == [True]


def test_what_a_newer_ckpipe_wrote_stays(store: Stores) -> None:
    id = without_index(store)
    for rank in range(2):
        key = manifest_key(id, rank)
        manifest = anyio.run(partial(store.memory.get, key, max_bytes=1 << 20))
        overwrite(store, key, sealed(document_of(manifest) | {"version": 99}))
    with ckpipe.SyncPipeline(store.url, **ALL) as pipeline:
        report = pipeline.sweep()
    assert report.remove == {}
    assert "newer format" in report.keep[id]


def test_what_is_damaged_goes(store: Stores) -> None:
    id = without_index(store)
    overwrite(store, manifest_key(id, 1), b"no manifest")
    with ckpipe.SyncPipeline(store.url, **ALL) as pipeline:
        assert list(pipeline.sweep().remove) == [id]
    assert not [each for each in keys(store) if each.startswith(f"{id}/")]
