"""Links of the local backend: what a file system refuses, symbolic links, and what is durable."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from ckpipe import errors
from ckpipe.backend import Backend, PutMode
from ckpipe.store.retry import RetryingBackend, RetryPolicy
from ckpipe.testing import FaultyBackend, Landing, MemoryBackend
from ckpipe_local import LocalBackend

ENOTSUPP = 524
POLICY = RetryPolicy(3, 0.0, 0.0, 30.0)


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[LocalBackend]:
    async with LocalBackend(str(tmp_path / "root")) as backend:
        await backend.put("old/file", b"bytes", PutMode.CREATE)
        yield backend


def files(tmp_path: Path) -> list[str]:
    root = tmp_path / "root"
    return sorted(str(each.relative_to(root)) for each in root.rglob("*"))


def break_links(monkeypatch: pytest.MonkeyPatch, code: int, landing: Landing) -> None:
    link = os.link

    def broken(*names: str, **options: Any) -> None:
        if landing is Landing.AFTER:
            link(*names, **options)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", broken)


def break_syncs_of_directories(monkeypatch: pytest.MonkeyPatch) -> None:
    sync = os.fsync

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EIO, "broken")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)


UNAVAILABLE = (
    errno.EMLINK, errno.EPERM, errno.EACCES, errno.EXDEV, errno.EOPNOTSUPP, errno.ENOSYS, ENOTSUPP,
)  # fmt: skip
FAILURES: dict[int, type[errors.StoreError]] = {
    **dict.fromkeys(UNAVAILABLE, errors.LinkUnavailable),
    errno.ENOSPC: errors.StoreFull,
    errno.EROFS: errors.PermissionDenied,
    errno.ESTALE: errors.StoreUnavailable,
    errno.EIO: errors.StoreError,
}


async def test_what_a_file_system_refuses_is_told_apart_from_its_failures(
    backend: LocalBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for code, kind in FAILURES.items():
        with monkeypatch.context() as patch:
            break_links(patch, code, Landing.BEFORE)
            with pytest.raises(kind) as caught:
                await backend.link("old/file", "new/deep/file")
        assert type(caught.value) is kind
        assert caught.value.key == "new/deep/file"
        assert files(tmp_path) == ["old", "old/file"]


async def test_a_link_that_took_effect_and_says_otherwise_is_one(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    for code in (errno.EEXIST, errno.EIO):
        with monkeypatch.context() as patch:
            break_links(patch, code, Landing.AFTER)
            await backend.link("old/file", f"new/{code}")
        assert await backend.get(f"new/{code}", max_bytes=5) == b"bytes"


async def test_a_link_that_is_not_durable_is_taken_back_unless_it_was_there(
    backend: LocalBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await backend.link("old/file", "new/there")
    await backend.put("new/other", b"other", PutMode.CREATE)
    break_syncs_of_directories(monkeypatch)
    for target in ("new/there", "new/other", "new/file"):
        with pytest.raises(errors.StoreError, match="Input/output"):
            await backend.link("old/file", target)
    assert files(tmp_path) == ["new", "new/other", "new/there", "old", "old/file"]
    monkeypatch.undo()
    await backend.link("old/file", "new/file")
    assert await backend.get("new/other", max_bytes=5) == b"other"


async def test_no_symbolic_link_is_followed(backend: LocalBackend, tmp_path: Path) -> None:
    root = tmp_path / "root"
    (tmp_path / "place").mkdir()
    (tmp_path / "place" / "file").write_text("elsewhere")
    (root / "moved").symlink_to(tmp_path / "place")
    (root / "old" / "alias").symlink_to("file")
    for source in ("moved/file", "old/alias"):
        with pytest.raises(errors.LinkUnavailable, match="link"):
            await backend.link(source, "new/file")
    with pytest.raises(errors.LinkRefused):
        await backend.link("old/file", "moved/new")
    assert os.listdir(tmp_path / "place") == ["file"]
    assert files(tmp_path) == ["moved", "old", "old/alias", "old/file"]


async def test_a_link_to_an_old_file_is_listed_as_new(
    backend: LocalBackend, tmp_path: Path
) -> None:
    # A sweep takes a launch whose newest object is old for dead.
    os.utime(tmp_path / "root" / "old" / "file", (0, 0))
    await backend.link("old/file", "step-2/file")
    (found,) = [each async for each in backend.list("step-2/")]
    assert abs((found.modified - datetime.now(UTC)).total_seconds()) < 300
    (source,) = [each async for each in backend.list("old/")]
    assert source.modified.timestamp() == 0


async def test_a_directory_that_a_deletion_removes_meanwhile_is_made_again(
    backend: LocalBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, empty = os.link, [tmp_path / "root" / "new"]

    def late(*names: str, **options: Any) -> None:
        if empty:
            empty.pop().rmdir()
        link(*names, **options)

    monkeypatch.setattr(os, "link", late)
    await backend.link("old/file", "new/file")
    assert files(tmp_path) == ["new", "new/file", "old", "old/file"]


async def test_a_lost_answer_to_a_link_is_settled(backend: LocalBackend) -> None:
    memory = MemoryBackend()
    await memory.put("old/file", b"bytes", PutMode.CREATE)
    for each in (backend, memory):
        faulty = FaultyBackend(each)
        retrying = RetryingBackend(faulty, POLICY)
        assert retrying.can_link
        for landing in Landing:
            faulty.fail(errors.StoreUnavailable("lost"), "link", landing)
            await retrying.link("old/file", f"new/{landing.value}")
        assert [each.key for each in faulty.operations] == ["new/before"] * 2 + ["new/after"] * 2
        with pytest.raises(errors.PermissionDenied):
            await RetryingBackend(each, POLICY, read_only=True).link("old/file", "new/more")


async def test_a_store_without_links_refuses_each() -> None:
    class Plain(MemoryBackend):
        can_link = False
        link = Backend.link

    with pytest.raises(errors.LinkUnavailable, match=r"no links.*Write the object"):
        await Plain().link("a", "b")
