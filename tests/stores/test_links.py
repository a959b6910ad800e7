"""Nothing is written, listed for deletion or deleted through a link below the root."""

from __future__ import annotations

import logging
import os
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpipe
from ckpipe import errors
from ckpipe.backend import PutMode
from ckpipe_local import LocalBackend
from tests.support.pipelines import loaded_state

STATE: dict[str, Any] = {"a": torch.arange(1000.0)}
SWEEPING: Any = {"keep_last": 1, "lines": "all", "sweep_after_seconds": 0}


def files_below(directory: Path) -> dict[str, bytes]:
    found = (each for each in directory.rglob("*") if each.is_file())
    return {str(each.relative_to(directory)): each.read_bytes() for each in found}


def moved(root: Path, name: str, place: Path) -> dict[str, bytes]:
    """Move a directory of the root elsewhere, beside files of a user, and links to it."""
    shutil.move(root / name, place)
    (place / "notes.txt").write_text("mine")
    (place / "deeper").mkdir()
    (place / "deeper" / "plot.png").write_text("mine too")
    (root / name).symlink_to(place)
    return files_below(place)


def told(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    return [
        each.getMessage()
        for each in caplog.records
        if each.levelno >= logging.WARNING and text in each.getMessage()
    ]


@pytest.mark.parametrize("worker", ["thread", "process"])
def test_retention_deletes_nothing_through_a_link_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, worker: Any
) -> None:
    root, place = tmp_path / "root", tmp_path / "place"
    with ckpipe.SyncPipeline(root) as pipeline:
        first = pipeline.save(STATE, step=1).wait()
    before = moved(root, first.id, place)
    retention: Any = {"keep_last": 1, "lines": "all"}
    with ckpipe.SyncPipeline(root, retention=retention, worker=worker) as pipeline:
        for step in range(2, 6):
            pipeline.save(STATE, step=step).wait()
        decision = pipeline.prune()
        assert f"{root / first.id} is a link to {place}" in decision.reasons[first.id]
        assert [info.step for info in pipeline.steps() if info.complete] == [1, 5]
        assert torch.equal(loaded_state(pipeline, 1)["a"], STATE["a"])
        pipeline.sweep()
    assert files_below(place) == before
    if worker == "thread":
        assert len(told(caplog, "is a link to")) == 1


@pytest.mark.parametrize("force", [False, True])
def test_a_checkpoint_behind_a_link_is_not_deleted_by_name(tmp_path: Path, force: bool) -> None:
    root, place = tmp_path / "root", tmp_path / "place"
    with ckpipe.SyncPipeline(root) as pipeline:
        first, _ = [pipeline.save(STATE, step=step).wait() for step in (1, 2)]
    before = moved(root, first.id, place)
    with ckpipe.SyncPipeline(root) as pipeline:
        with pytest.raises(errors.LinkRefused, match=rf"/{first.id} is a link to {place}"):
            pipeline.delete(1, force=force)
        assert pipeline.verify(1).files == 1
        (root / first.id).unlink()
        shutil.move(place, root / first.id)
        pipeline.delete(1, force=force)
        assert [info.step for info in pipeline.steps() if info.complete] == [2]
    assert sorted(files_below(root / first.id)) == ["deeper/plot.png", "notes.txt"]
    assert {*files_below(root / first.id)} < {*before}


def test_a_link_that_comes_after_the_tombstone_ends_the_deletion(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root, place = tmp_path / "root", tmp_path / "place"
    with ckpipe.SyncPipeline(root) as pipeline:
        first, _ = [pipeline.save(STATE, step=step).wait() for step in (1, 2)]
    before = moved(root, first.id, place)
    tombstone = root / ".ckpipe" / "deleted" / first.id
    tombstone.parent.mkdir(exist_ok=True)
    tombstone.write_text("{}")
    os.utime(tombstone, (0, 0))
    with ckpipe.SyncPipeline(root, retention=SWEEPING) as pipeline:
        pipeline.prune()
        assert not tombstone.exists()
        assert [info.step for info in pipeline.steps()] == [2]
    assert files_below(place) == before
    assert len(told(caplog, f"{root / first.id} is a link to {place}")) == 1


def test_what_others_put_into_a_checkpoint_stays_and_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("mine")
    root = tmp_path / "root"
    with ckpipe.SyncPipeline(root) as pipeline:
        first = pipeline.save(STATE, step=1).wait()
    below = root / first.id
    theirs = ["notes.txt", "rank-00000.safetensors.bak", "m/0/000/rank-0.json", "m/x/plot.png"]
    for name in theirs:
        (below / name).parent.mkdir(parents=True, exist_ok=True)
        (below / name).write_text("mine")
    (below / "folder").symlink_to(elsewhere)
    for step in (2, 3):
        with ckpipe.SyncPipeline(root, retention=SWEEPING) as pipeline:
            pipeline.save(STATE, step=step).wait()
            pipeline.prune()
            report = pipeline.sweep()
            assert not report.unfinished
            assert not report.remove
    assert sorted(files_below(below)) == sorted([*theirs])
    assert os.readlink(below / "folder") == str(elsewhere)
    assert files_below(elsewhere) == {"precious": b"mine"}
    (said,) = told(caplog, "ckpipe did not write these")
    assert all(f"{first.id}/{name}" in said for name in [*theirs, "folder"])
    assert not list((root / ".ckpipe" / "deleted").glob("*1.*"))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with a user's file, to which a link below the root leads."""
    place = tmp_path / "place"
    (place / "inner").mkdir(parents=True)
    (place / "inner" / "theirs").write_bytes(b"theirs")
    (tmp_path / "root" / "real").mkdir(parents=True)
    (tmp_path / "root" / "link").symlink_to(place)
    (tmp_path / "root" / "real" / "link").symlink_to(place)
    return place


@pytest.mark.parametrize("key", ["link/inner/theirs", "real/link/inner/theirs"])
async def test_the_local_backend_reads_through_links_and_changes_nothing(
    tmp_path: Path, place: Path, key: str
) -> None:
    stale = place / ".ckpipe-tmp-0123"
    stale.write_bytes(b"")
    os.utime(stale, (0, 0))
    prefix = key.removesuffix("inner/theirs")
    before = files_below(place)
    async with LocalBackend(str(tmp_path / "root")) as backend:
        assert await backend.get(key, max_bytes=10) == b"theirs"
        assert (await backend.stat(key)).size == 6
        assert [each.key for each in (await backend.children(f"{prefix}inner/")).objects] == [key]
        for change in (
            lambda: backend.delete([key]),
            lambda: backend.put(f"{prefix}new", b"x", PutMode.CREATE),
            lambda: backend.put(f"{prefix}below/new", b"x", PutMode.CREATE),
            lambda: backend.put(key, b"x", PutMode.OVERWRITE),
            lambda: backend.put_volatile(f"{prefix}new", b"x"),
            lambda: backend.open_upload(f"{prefix}new", size=1, block_bytes=1),
            lambda: backend.remove_stale_uploads(prefix, before=datetime.now(UTC)),
        ):
            with pytest.raises(errors.LinkRefused, match=rf"link is a link to {place}"):
                await change()
        with pytest.raises(errors.LinkRefused, match=rf"link is a link to {place}"):
            _ = [each async for each in backend.list(prefix)]
        await backend.remove_stale_uploads("", before=datetime.now(UTC) + timedelta(days=1))
    assert files_below(place) == before


async def test_a_directory_that_becomes_a_link_during_an_upload_is_not_written(
    tmp_path: Path,
) -> None:
    root, place = tmp_path / "root", tmp_path / "place"
    async with LocalBackend(str(root)) as backend:
        upload = await backend.open_upload("a/f", size=1, block_bytes=1)
        await upload.write(0, memoryview(b"x"))
        shutil.move(root / "a", place)
        (root / "a").symlink_to(place)
        with pytest.raises(errors.LinkRefused, match=rf"/a is a link to {place}"):
            await upload.complete()
        await upload.abort()
        assert not (place / "f").exists()
        await backend.put("b", b"x", PutMode.CREATE)
        await backend.delete(["b"])


def test_a_linked_internal_directory_is_not_written_through(tmp_path: Path) -> None:
    root, place = tmp_path / "root", tmp_path / "place"
    with ckpipe.SyncPipeline(root) as pipeline:
        pipeline.save(STATE, step=1).wait()
    shutil.move(root / ".ckpipe", place)
    (root / ".ckpipe").symlink_to(place)
    before = files_below(place)
    with (
        pytest.raises(errors.LinkRefused, match=rf"/\.ckpipe is a link to {place}"),
        ckpipe.SyncPipeline(root) as pipeline,
    ):
        pipeline.save(STATE, step=2).wait()
    with ckpipe.SyncPipeline(root, read_only=True) as pipeline:
        assert torch.equal(loaded_state(pipeline, 1)["a"], STATE["a"])
        assert [info.step for info in pipeline.steps()] == [1]
    assert files_below(place) == before
