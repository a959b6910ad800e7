"""A store without room: what is to make room must not need any."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpipe
from ckpipe import errors
from ckpipe.backend import Backend, PutMode
from ckpipe.testing.wrappers import Operation, Result, WrappedBackend
from ckpipe.types import CheckpointId
from tests.failure.mounts import mounted
from tests.support.command_line import Commands
from tests.support.pipelines import Stores, loaded_state, same
from tests.support.rank_pipelines import ranks
from tests.support.settling import SettlingPipeline, settle
from tests.support.stored_files import DELETED, LEASES, index_key

STATE: dict[str, Any] = {"a": torch.ones(1000)}
ONCE: dict[str, Any] = {"upload": {"retries": 0}, "on_error": "warn"}


class Crammed(WrappedBackend):
    """A store with room for as many more objects as have been deleted.

    Args:
        inner: The store.
    """

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.url, self.full = "", False
        self.room = 0
        self.crash_after_deletions: int | None = None
        self.comes_late: str | None = None
        """The key of a lease that another writes while a checkpoint is about to be deleted."""

    async def around(self, operation: Operation, call: Callable[[], Awaitable[Result]]) -> Result:
        if not self.full:
            return await call()
        if operation.verb in ("put", "open_upload"):
            if self.comes_late is not None and operation.key.startswith(DELETED):
                lease, self.comes_late = self.comes_late, None
                await self.inner.put(lease, b"{}", PutMode.CREATE)
            if not self.room:
                raise errors.StoreFull("no room", key=operation.key)
            self.room -= 1
        if operation.verb == "delete":
            if self.crash_after_deletions == 0:
                raise errors.StoreError("the machine has lost its power")
            if self.crash_after_deletions:
                self.crash_after_deletions -= 1
            for key in operation.key.split():
                self.room += await self._is_there(key)
        return await call()

    async def _is_there(self, key: str) -> bool:
        try:
            await self.inner.stat(key)
        except errors.ObjectNotFound:
            return False
        return True


@pytest.fixture
def crammed(store: Stores) -> Crammed:
    made = Crammed(store.slow)
    scheme = f"{store.scheme}crammed"
    ckpipe.register_backend(scheme, lambda url: made)
    made.url = f"{scheme}://store"
    return made


def saved(url: str, count: int) -> list[CheckpointId]:
    with ckpipe.SyncPipeline(url) as pipeline:
        return [pipeline.save(STATE, step=step).wait().key for step in range(count)]


def fill(path: Path) -> None:
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as ballast:
        while ballast.write(bytes(4096)):
            pass


def free(path: Path) -> int:
    found = os.statvfs(path)
    return found.f_bavail * found.f_bsize


def files_of(store: Stores, id: CheckpointId) -> list[str]:
    return [key for key in store.memory._store.objects if key.startswith(str(id))]


def kept(store: Stores) -> list[CheckpointId]:
    keys = [key for key in store.memory._store.objects if key.startswith("step-")]
    found = [CheckpointId.parse(key.removesuffix(".json")) for key in keys if ".json" in key]
    return [id for id in found if id is not None]


def steps(pipeline: ckpipe.SyncPipeline) -> list[int]:
    return [info.step for info in pipeline.steps() if info.complete]


def test_a_full_store_is_pruned_and_takes_the_next_save(store: Stores, crammed: Crammed) -> None:
    ids = saved(crammed.url, 5)
    with ckpipe.SyncPipeline(crammed.url, retention={"keep_last": 2}, **ONCE) as pipeline:
        pipeline.load()
        crammed.full = True
        with pytest.raises(errors.StoreFull):
            pipeline.save(STATE, step=9).wait()
        planned = pipeline.prune(dry_run=True).remove
        assert pipeline.prune().remove == planned == tuple(map(str, ids[:3]))
        for id in ids[:3]:
            assert files_of(store, id) == []
            assert f"{DELETED}{id}" in store.memory._store.objects, "its mark found room"
        assert steps(pipeline) == [3, 4]
        assert pipeline.save(STATE, step=10).wait().complete
    assert {id.step for id in kept(store)} == {4, 10}, "and its own retention comes through"


@pytest.mark.parametrize("force", [False, True])
def test_one_is_deleted_from_a_full_store(store: Stores, crammed: Crammed, force: bool) -> None:
    ids = saved(crammed.url, 3)
    with ckpipe.SyncPipeline(crammed.url, **ONCE) as pipeline:
        crammed.full = True
        pipeline.delete(1, force=force)
        assert steps(pipeline) == [0, 2]
        assert files_of(store, ids[1]) == []
        assert pipeline.sweep().remove == {}


def test_a_reader_is_waited_for_on_a_full_store_too(store: Stores, crammed: Crammed) -> None:
    ids = saved(crammed.url, 2)
    lease = f"{LEASES}{ids[0]}/reader.0"
    with ckpipe.SyncPipeline(crammed.url, keep_last=1, **ONCE) as pipeline:
        crammed.full = True
        # Deciding leaves alone what is leased; here the lease comes after the decision.
        crammed.comes_late = lease
        pipeline.prune()
        assert crammed.comes_late is None
        assert index_key(ids[0]) in store.memory._store.objects
        del store.memory._store.objects[lease]
        assert pipeline.prune().remove == (str(ids[0]),)
        assert files_of(store, ids[0]) == []


@pytest.mark.parametrize("deletions", range(4))
def test_a_crash_while_room_is_made_leaves_it_whole_or_gone(
    store: Stores, crammed: Crammed, deletions: int
) -> None:
    ids = saved(crammed.url, 3)
    with ckpipe.SyncPipeline(crammed.url, **ONCE) as pipeline:
        crammed.full, crammed.crash_after_deletions = True, deletions
        with pytest.raises(errors.StoreError):
            pipeline.delete(0)
    crammed.full = False
    with ckpipe.SyncPipeline(crammed.url, retention={"sweep_after_seconds": 0}) as pipeline:
        for step in steps(pipeline):
            pipeline.verify(step)
        assert steps(pipeline)[-2:] == [1, 2]
        if 0 in steps(pipeline):
            pipeline.delete(0)
        elif files_of(store, ids[0]):
            pipeline.delete(str(ids[0]))
        assert files_of(store, ids[0]) == []


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_a_save_has_stored_goes_where_its_commit_found_no_room(
    store: Stores, crammed: Crammed, world_size: int
) -> None:
    with ranks(crammed.url, world_size, **ONCE) as pipelines:
        for pipeline in pipelines:
            pipeline.save(STATE, step=0).wait()
            settle(pipeline)
        crammed.full = True
        crammed.room = 2 * world_size - 1  # for all but the last one's commit
        for rank, pipeline in enumerate(pipelines[:-1]):
            pipeline.save(STATE | {"rank": rank}, step=1).wait()
        before = {key for key in store.memory._store.objects if key.startswith("step-")}
        with pytest.raises(errors.StoreFull):
            pipelines[-1].save(STATE, step=1).wait()
        after = {key for key in store.memory._store.objects if key.startswith("step-")}
        assert after == before, "and nothing of another rank"
        crammed.full = False
        for pipeline in pipelines:
            pipeline.save(STATE, step=2, until="committed")
    assert [id.step for id in kept(store)] == [0, 2]


def test_nothing_goes_where_the_commit_may_have_landed(store: Stores) -> None:
    def is_index(operation: Operation) -> bool:
        return operation.verb == "put" and operation.key.startswith("step-")

    # The first try is not answered, so that it may land yet; only then there is no room.
    store.faulty.fail(errors.StoreUnavailable("no answer"), is_index)
    store.faulty.fail(errors.StoreFull("no room"), is_index, nth=2)
    retries = {"retries": 3, "backoff_seconds": 0}
    with ckpipe.SyncPipeline(store.url, upload=retries, on_error="warn") as pipeline:
        handle = pipeline.save(STATE, step=1)
        with pytest.raises(errors.StoreFull):
            handle.wait()
    assert len([key for key in store.memory._store.objects if key.startswith(handle.id)]) == 1


@pytest.mark.parametrize("worker", ["thread", "process"])
def test_a_save_without_room_leaves_the_disk_as_it_was(tmp_path: Path, worker: Any) -> None:
    with (
        mounted(["-t", "tmpfs", "-o", "size=8M", "tmpfs"], tmp_path / "disk") as disk,
        SettlingPipeline(disk / "run", worker=worker, **ONCE) as pipeline,
    ):
        pipeline.save(STATE, step=1).wait()
        settle(pipeline)
        whole = sorted(disk.rglob("*"))
        for pages in (100, 489, 490):  # not enough for the data, and enough for it alone
            (disk / "ballast").write_bytes(bytes(free(disk) - 4096 * pages))
            before = free(disk)
            with pytest.raises(errors.StoreFull):
                pipeline.save({"w": torch.ones(500_000)}, step=2).wait()
            assert free(disk) == before
            (disk / "ballast").unlink()
            assert sorted(disk.rglob("*")) == whole


@pytest.mark.parametrize("on_error", ["raise", "warn"])
@pytest.mark.parametrize("worker", ["thread", "process"])
def test_a_full_disk_says_once_what_is_needed_and_what_is_free(
    tmp_path: Path, worker: Any, on_error: Any, caplog: pytest.LogCaptureFixture
) -> None:
    settings: dict[str, Any] = {"worker": worker, "on_error": on_error, "upload": {"lanes": 4}}
    settings["staging"] = {"block_bytes": 1 << 20}
    with (
        mounted(["-t", "tmpfs", "-o", "size=8M", "tmpfs"], tmp_path / "disk") as disk,
        SettlingPipeline(disk / "run", **settings) as pipeline,
    ):
        pipeline.save(STATE, step=1).wait()
        settle(pipeline)
        room = free(disk)
        with pytest.raises(errors.StoreFull) as caught:
            pipeline.save({"w": torch.ones(5_000_000)}, step=2).wait()
        assert f"{room} are free" in str(caught.value)
        found = re.findall(r"(\d+) bytes are needed", str(caught.value))
        assert len(found) == 1
        assert 20_000_000 <= int(found[0]) < 20_100_000
        pipeline.save(STATE, step=3).wait()
        pipeline.verify(3)
    told = [each.getMessage() for each in caplog.records if "StoreFull" in each.getMessage()]
    assert len(told) <= 1, "the lanes and the worker do not repeat it"


def test_a_disk_without_inodes_says_so(tmp_path: Path) -> None:
    options = ["-t", "tmpfs", "-o", "size=2M,nr_inodes=40", "tmpfs"]
    with (
        mounted(options, tmp_path / "disk") as disk,
        SettlingPipeline(disk / "run") as pipeline,
    ):
        pipeline.save(STATE, step=1).wait()
        settle(pipeline)
        with contextlib.suppress(OSError):
            for number in range(40):
                (disk / str(number)).touch()
        with pytest.raises(errors.StoreFull, match="no inode is free"):
            pipeline.save(STATE, step=2).wait()


def test_a_store_without_room_is_loaded_from(tmp_path: Path) -> None:
    with mounted(["-t", "tmpfs", "-o", "size=2M,nr_inodes=40", "tmpfs"], tmp_path / "disk") as disk:
        saved(str(disk / "run"), 1)
        fill(disk / "ballast")
        _load(disk / "run", read_only=False)
        with contextlib.suppress(OSError):
            for number in range(40):  # no file can be made at all
                (disk / str(number)).touch()
        told = pytest.raises(errors.StoreFull, match="read_only=True")
        with told, ckpipe.SyncPipeline(disk / "run"):
            pass
        _load(disk / "run", read_only=True)


def _load(root: Path, *, read_only: bool) -> None:
    with ckpipe.SyncPipeline(root, read_only=read_only) as pipeline:
        assert same(loaded_state(pipeline), STATE)


def test_commands_make_room(call: Commands, tmp_path: Path) -> None:
    """On a real file system that is full, where there are the rights to make one."""
    with mounted(["-t", "tmpfs", "-o", "size=2M", "tmpfs"], tmp_path / "disk") as root:
        saved(str(root), 4)
        fill(root / "ballast")
        assert call("rm", str(root), "1").code == 0
        assert call("prune", str(root), "--keep-last", "1").code == 0
        with ckpipe.SyncPipeline(root, read_only=True) as pipeline:
            assert steps(pipeline) == [3]
