"""A name without index, manifest and data is no checkpoint, whatever folders a store keeps."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpipe
from ckpipe import errors
from ckpipe.backend import Backend, Children
from ckpipe.retention import KeepLast
from ckpipe.testing import FaultyBackend, MemoryBackend
from tests.support.command_line import Commands
from tests.support.rank_pipelines import ranks
from tests.support.s3_servers import S3Server
from tests.support.stored_files import DELETED, flip, manifest_key

_numbers = itertools.count()


class KeepsFolders(MemoryBackend):
    """A store whose folders stay when their last object is deleted, as those of some servers do."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.folders: set[str] = set()

    async def children(self, prefix: str = "") -> Children:
        async for each in self.list():
            parts = each.key.split("/")
            self.folders.update("/".join(parts[:end]) + "/" for end in range(1, len(parts)))
        below = {each for each in self.folders if each.startswith(prefix) and each != prefix}
        level = {prefix + each[len(prefix) :].partition("/")[0] + "/" for each in below}
        return Children((await super().children(prefix)).objects, tuple(sorted(level)))


class Kept:
    """A root on such a store."""

    def __init__(self) -> None:
        scheme = f"folders{next(_numbers)}"
        self.url = f"{scheme}://root"
        self.store = KeepsFolders(f"memory://{scheme}")
        self.faulty = FaultyBackend(self.store)
        ckpipe.register_backend(scheme, self.backend)

    def backend(self, url: str) -> Backend:
        return self.faulty


@pytest.fixture
def kept() -> Kept:
    return Kept()


def save(url: str, *steps: int, **fields: Any) -> list[str]:
    with ckpipe.SyncPipeline(url, **fields) as pipeline:
        return [pipeline.save({"w": torch.ones(3)}, step=n).wait().id for n in steps]


def pruned(kept: Kept, *, swept: bool) -> list[str]:
    """Save some checkpoints, and delete all but the last; return the ids, the oldest first."""
    ids = save(kept.url, 1, 2, 3, 4)
    with ckpipe.SyncPipeline(kept.url, retention=KeepLast(1)) as pipeline:
        pipeline.steps()  # the store sees its folders
        assert pipeline.prune().remove == tuple(ids[:3])
        assert [each.step for each in pipeline.steps()] == [4]
    if swept:
        for key in [each for each in kept.store._store.objects if each.startswith(DELETED)]:
            del kept.store._store.objects[key]
    return ids


@pytest.mark.parametrize("swept", [False, True], ids=["tombstones", "swept"])
def test_a_pruned_checkpoint_is_gone_though_its_folder_stays(
    kept: Kept, call: Commands, swept: bool
) -> None:
    ids = pruned(kept, swept=swept)
    with ckpipe.SyncPipeline(kept.url) as pipeline:
        before = len(kept.faulty.operations)
        assert [each.id for each in pipeline.steps()] == ids[3:]
        lists = [each for each in kept.faulty.operations[before:] if each.verb == "list"]
        assert swept or lists == [], "tombstones are enough to know it"
        for which in (2, ids[1]):
            for verb in (pipeline.choose, pipeline.pin, pipeline.verify):
                expected = errors.CheckpointNotFound if swept else errors.CheckpointIncomplete
                with pytest.raises(errors.CheckpointNotFound) as caught:
                    verb(which)
                assert type(caught.value) is expected
    listed = call("ls", kept.url)
    assert len(listed.out.splitlines()) == 2
    if swept:
        assert call("rm", kept.url, ids[1]).code == 2
        found = call("ls", kept.url, "--json").data["checkpoints"]
        assert [each["id"] for each in found] == ids[3:]
    else:
        assert "3 being deleted, the newest is step 3" in listed.err


def test_sweeps_write_no_tombstone_for_an_empty_folder(kept: Kept, call: Commands) -> None:
    pruned(kept, swept=True)
    for _ in range(2):
        assert call("sweep", kept.url, "--older-than", 0).code == 0
        assert not [each for each in kept.store._store.objects if each.startswith(DELETED)]


def test_a_run_over_empty_folders_begins_without_alarm(
    kept: Kept, caplog: pytest.LogCaptureFixture
) -> None:
    (id,) = save(kept.url, 7)
    with ckpipe.SyncPipeline(kept.url) as pipeline:
        pipeline.steps()
        pipeline.delete(id, force=True)
    for key in list(kept.store._store.objects):
        del kept.store._store.objects[key]
    caplog.set_level(logging.INFO, "ckpipe")
    with ckpipe.SyncPipeline(kept.url) as pipeline:
        assert pipeline.load({"w": torch.ones(3)}) is None
    assert "no complete checkpoint: training starts fresh" in caplog.text
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


def folder_only(root: Path, id: str) -> None:
    (root / id / "m/0/000").mkdir(parents=True)


def foreign_only(root: Path, id: str) -> None:
    folder_only(root, id)
    (root / id / "notes.txt").write_text("not ckpipe's")


def data_only(root: Path, id: str) -> None:
    (root / id).mkdir()
    (root / id / "rank-00000.safetensors").write_bytes(b"")


def manifest_only(root: Path, id: str) -> None:
    path = root / manifest_key(id, 3)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"")


@pytest.mark.parametrize(
    ("make", "is_one"),
    [(folder_only, False), (foreign_only, False), (data_only, True), (manifest_only, True)],
)
def test_a_local_folder_is_a_checkpoint_only_with_an_object_of_one(
    tmp_path: Path, call: Commands, make: Callable[[Path, str], None], is_one: bool
) -> None:
    save(str(tmp_path), 1)
    id = "step-000000000002.20260101T000000000Z-x.0"
    make(tmp_path, id)
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        assert (id in [each.id for each in pipeline.steps()]) == is_one
        expected = errors.CheckpointIncomplete if is_one else errors.CheckpointNotFound
        with pytest.raises(errors.CheckpointNotFound) as caught:
            pipeline.load(step=2)
        assert type(caught.value) is expected
    assert (id in call("ls", tmp_path).out) == is_one
    assert (call("rm", tmp_path, id).code == 0) == is_one


def test_a_damaged_manifest_is_the_reason_of_a_checkpoint_without_an_index(tmp_path: Path) -> None:
    with ranks(str(tmp_path), 2) as world:
        saves = [each.save({"w": 1}, step=1) for each in world]
        for each in saves:
            each.wait_complete(timeout=60)
    id = saves[0].id
    (tmp_path / f"{id}.json").unlink()
    for rank in (0, 1):
        flip(tmp_path / manifest_key(id, rank), 20)
        with ckpipe.SyncPipeline(tmp_path, read_only=rank == 1) as pipeline:
            (info,) = pipeline.steps()
            assert not info.complete
            assert "a manifest is damaged" in info.reason
            assert f"rank-0000{rank}.json" in info.reason
        flip(tmp_path / manifest_key(id, rank), 20)
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        assert [each.complete for each in pipeline.steps()] == [True]


@pytest.fixture
def seaweed(weed_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """A real server that keeps folders."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", weed_server.url)
    weed_server.make_bucket("folders")
    return weed_server


def folders(server: S3Server) -> list[str]:
    async def listed(client: Any) -> list[str]:
        page = await client.list_objects_v2(Bucket="folders", Prefix="run/", Delimiter="/")
        return [
            each["Prefix"] for each in page.get("CommonPrefixes", ()) if "step-" in each["Prefix"]
        ]

    return server._ask(listed)


def test_seaweedfs_keeps_no_folder_of_a_deleted_checkpoint(
    seaweed: S3Server, call: Commands
) -> None:
    url = "s3://folders/run"
    save(url, 1, 2, retention=KeepLast(1), worker="thread")
    retention = {"rules": KeepLast(1), "lines": "all"}
    with ranks(url, 2, retention=retention, worker="thread") as world:
        for step in (10, 11):
            saves = [each.save({"w": torch.ones(3) * step}, step=step) for each in world]
            for each in saves:
                each.wait_complete(timeout=60)
        world[0].prune()
        assert [each.step for each in world[0].steps()] == [11]
    assert len(folders(seaweed)) == 1

    # What earlier versions left goes with a sweep, and gets no tombstone.
    ghost = "step-000000000002.20260101T000000000Z-x.0"

    async def leave(client: Any) -> None:
        for key in (manifest_key(ghost, 0), f"{ghost}/rank-00000.safetensors"):
            await client.put_object(Bucket="folders", Key=f"run/{key}", Body=b"x")
            await client.delete_object(Bucket="folders", Key=f"run/{key}")

    seaweed._ask(leave)
    assert len(folders(seaweed)) == 2
    with ckpipe.SyncPipeline(url, read_only=True) as pipeline:
        assert [each.step for each in pipeline.steps()] == [11]
    assert ghost not in call("ls", url).out
    assert call("sweep", url, "--older-than", 0).code == 0
    assert len(folders(seaweed)) == 1
    assert not any(ghost in name for name in seaweed.names("folders", f"run/{DELETED}"))
