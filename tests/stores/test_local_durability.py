"""What the local backend makes of a disk that fails to make something durable."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from itertools import repeat
from pathlib import Path

import pytest
import torch

import ckpipe
from ckpipe import errors
from ckpipe.backend import PutMode
from ckpipe_local import LocalBackend

BROKEN = OSError(errno.EIO, "broken")


def break_syncs(
    monkeypatch: pytest.MonkeyPatch, kind: Callable[[int], bool], errors: Iterator[OSError]
) -> None:
    """Let ``fsync`` of each file of a kind raise the next error, while there is one."""
    sync = os.fsync

    def fsync(descriptor: int) -> None:
        if kind(os.fstat(descriptor).st_mode) and (error := next(errors, None)):
            raise error
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)


async def test_a_failed_sync_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The kernel reports lost pages once: a second fsync would succeed without them.
    failures = iter([OSError(errno.ENOSPC, "full"), OSError(errno.ETIMEDOUT, "slow")])
    async with LocalBackend(str(tmp_path)) as backend:
        uploads = [await backend.open_upload(f"x{n}", size=4, block_bytes=4096) for n in (0, 1)]
        break_syncs(monkeypatch, stat.S_ISREG, failures)
        for upload, kind in zip(uploads, (errors.StoreFull, errors.StoreError), strict=True):
            await upload.write(0, memoryview(b"data"))
            for expected in (kind, errors.StoreError):
                with pytest.raises(expected) as caught:
                    await upload.complete()
                assert not caught.value.transient
            await upload.abort()
        assert [info async for info in backend.list()] == []


async def test_a_volatile_object_asks_the_disk_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with LocalBackend(str(tmp_path)) as backend:
        await backend.put("a/lasts", b"x", PutMode.CREATE)
        break_syncs(monkeypatch, bool, repeat(BROKEN))
        with pytest.raises(errors.StoreError, match="Input/output"):
            await backend.put("a/b/lasts", b"x", PutMode.CREATE)
        await backend.put_volatile("a/b/c", b"x")
        assert await backend.get("a/b/c", max_bytes=10) == b"x"
    assert sorted(os.listdir(tmp_path / "a" / "b")) == ["c"]


async def test_a_name_that_cannot_be_made_durable_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with LocalBackend(str(tmp_path)) as backend:
        upload = await backend.open_upload("data", size=4, block_bytes=4096)
        await upload.write(0, memoryview(b"data"))
        break_syncs(monkeypatch, stat.S_ISDIR, repeat(BROKEN))
        with pytest.raises(errors.StoreError, match="Input/output"):
            await upload.complete()
        with pytest.raises(errors.StoreError, match="Input/output"):
            await backend.put("small", b"data", PutMode.CREATE)
        assert [info async for info in backend.list()] == []
        monkeypatch.undo()
        await upload.complete()
        assert await backend.get("data", max_bytes=10) == b"data"
    assert os.listdir(tmp_path) == ["data"]


async def test_a_key_that_is_taken_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whoever has taken it may have come no further than its link, and others go by what is there.
    async with LocalBackend(str(tmp_path)) as backend:
        upload = await backend.open_upload("data", size=4, block_bytes=4096)
        await upload.write(0, memoryview(b"mine"))
        await backend.put("data", b"theirs", PutMode.CREATE)
        break_syncs(monkeypatch, stat.S_ISDIR, repeat(BROKEN))
        for _ in range(2):
            with pytest.raises(errors.StoreError, match="Input/output"):
                await upload.complete()
            with pytest.raises(errors.StoreError, match="Input/output"):
                await backend.put("data", b"mine", PutMode.CREATE)
        with pytest.raises(errors.ObjectExists):
            await backend.put_volatile("data", b"mine")
        monkeypatch.undo()
        with pytest.raises(errors.ObjectExists):
            await upload.complete()
        with pytest.raises(errors.ObjectExists):
            await backend.put("data", b"mine", PutMode.CREATE)
        assert await backend.get("data", max_bytes=10) == b"theirs"


def test_a_data_file_that_landed_has_no_second_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlink, failures = os.unlink, [OSError(errno.ETIMEDOUT, "slow")]

    def slow(path: str, *, dir_fd: int | None = None) -> None:
        below = "" if dir_fd is None else os.readlink(f"/proc/self/fd/{dir_fd}")
        if failures and os.path.basename(below).startswith("step-"):
            raise failures.pop()
        unlink(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", slow)
    with ckpipe.SyncPipeline(tmp_path, worker="thread") as pipeline:
        info = pipeline.save({"a": torch.ones(1000)}, step=1).wait()
        assert not failures
        assert os.listdir(tmp_path / info.id) == ["rank-00000.safetensors"]
