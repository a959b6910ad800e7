"""The local backend beyond the contract: direct I/O, temporary files, crashes, full disks."""

# Tests look at the disk on their own loop, where nothing else waits.
# ruff: noqa: ASYNC230, ASYNC240

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpipe.backend import ObjectReader, PutMode, run_in_thread
from ckpipe.errors import (
    InvalidKey,
    ObjectExists,
    ObjectNotFound,
    PermissionDenied,
    StoreError,
    StoreFull,
    StoreUnavailable,
    TruncatedObject,
    UsageError,
)
from ckpipe.testing.conformance import pattern
from ckpipe.testing.wrappers import Operation, Result, WrappedBackend
from ckpipe_local import LocalBackend
from tests.stores.racing_creators import check_race
from tests.support.fork_server import FRESH

PAGE = LocalBackend.limits.alignment
TEMPORARY = ".ckpipe-tmp-"


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[LocalBackend]:
    async with LocalBackend(str(tmp_path)) as backend:
        yield backend


def files_below(directory: str | Path) -> list[str]:
    """All files, temporary ones included, relative to the directory."""
    found = [
        os.path.relpath(os.path.join(at, name), directory)
        for at, _, names in os.walk(directory)
        for name in names
    ]
    return sorted(found)


def skewed(make: Callable[[int], memoryview], data: bytes, skew: int) -> memoryview:
    """A copy of the data that begins ``skew`` bytes after a page boundary."""
    buffer = make(len(data) + skew)[skew:]
    buffer[:] = data
    return buffer


async def upload(backend: LocalBackend, key: str, data: memoryview, block_bytes: int) -> None:
    """Upload all blocks of the data at the same time."""
    begun = await backend.open_upload(key, size=len(data), block_bytes=block_bytes)
    async with anyio.create_task_group() as tasks:
        for offset in range(0, len(data), block_bytes):
            tasks.start_soon(begun.write, offset, data[offset : offset + block_bytes])
    await begun.complete()


# Paths and the root


def path_of(url: str) -> str:
    """The path of the root that a URL means."""
    return (
        repr(LocalBackend(url)).removeprefix("<LocalBackend ").removesuffix(" [direct, 0 uploads]>")
    )


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("/a/b", "/a/b"),
        ("relative/path", "relative/path"),
        ("a%20b", "a%20b"),
        ("file:///a/b", "/a/b"),
        ("FILE://localhost/a", "/a"),
        ("file:///with%20space/%C3%BC", "/with space/ü"),
        ("file:///run#1?x", "/run#1?x"),
        ("dir/odd://name", "dir/odd://name"),
    ],
)
def test_paths_of_urls(url: str, path: str) -> None:
    assert path_of(url) == os.path.abspath(path)


def test_a_leading_tilde_is_the_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert path_of("~/runs/1") == "/home/me/runs/1"
    assert path_of("runs/~") == os.path.abspath("runs/~")
    assert path_of("file:///~/runs") == "/~/runs"


@pytest.mark.parametrize(
    "url", ["", "file://", "file://host/a", "file://host", "file:/a", "s3://a/b", "/a\0b"]
)
def test_urls_that_name_no_directory(url: str) -> None:
    with pytest.raises(UsageError):
        path_of(url)


async def test_a_root_whose_path_is_too_long_makes_no_directory(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"too long.*shorter path"):
        await LocalBackend(f"{tmp_path}/{'x/' * 2100}").__aenter__()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("below", ["", "/deeper"])
@pytest.mark.parametrize("access", ["read", "write"])
async def test_a_root_that_is_a_link_to_nothing_says_so(
    tmp_path: Path, below: str, access: Any
) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(StoreError, match=r"/link is a link to .*/nowhere, which is not there"):
        await LocalBackend(f"{tmp_path}/link{below}", access=access).__aenter__()


async def test_a_root_is_made_by_the_first_write_and_stays(tmp_path: Path) -> None:
    async with LocalBackend(str(tmp_path / "a/b")) as first:
        assert list(tmp_path.iterdir()) == []
        assert [info async for info in first.list()] == []
        async with LocalBackend(str(tmp_path / "a/b")) as second:
            await second.put("x/y", b"", PutMode.CREATE)
            await second.delete(["x/y"])
        await first.put("x/y", b"", PutMode.CREATE)
    assert files_below(tmp_path) == ["a/b/x/y"]


async def test_a_directory_that_may_not_be_read_disturbs_no_other(
    tmp_path: Path, backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    scandir = os.scandir

    def forbidding(path: str) -> Any:
        if str(path).endswith("lost+found"):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        return scandir(path)

    (tmp_path / "lost+found").mkdir()
    await backend.put("run/file", b"x", PutMode.CREATE)
    monkeypatch.setattr(os, "scandir", forbidding)
    assert sorted((await backend.children()).prefixes) == ["lost+found/", "run/"]


async def test_root_that_vanished_is_not_made_again(tmp_path: Path) -> None:
    async with LocalBackend(str(tmp_path / "root")) as backend:
        await backend.put("a/b", b"x", PutMode.CREATE)
        shutil.rmtree(tmp_path / "root")
        with pytest.raises(StoreError, match="No such file"):
            await backend.put("a/b", b"x", PutMode.CREATE)
        with pytest.raises(StoreError, match="No such file"):
            await backend.open_upload("a/b", size=1, block_bytes=1)
        with pytest.raises(StoreError):
            await backend.put_volatile(".ckpipe/leases/a/b", b"{}")
    assert not (tmp_path / "root").exists()


# Direct I/O


def write_and_read(
    size: int, block_bytes: int, skew: int, offset: int, *, direct: bool
) -> tuple[bytes, bytes]:
    """What a file holds after an upload, and what reading it from an offset on gives."""
    make = memoryview_maker()

    async def main(root: str) -> tuple[bytes, bytes]:
        async with LocalBackend(root, direct=direct) as backend:
            await upload(backend, "d/f", skewed(make, pattern(size), skew), block_bytes)
            buffer = make(size - offset + skew)[skew:]
            await backend.read_into("d/f", offset, buffer)
        return Path(root, "d/f").read_bytes(), bytes(buffer)

    with tempfile.TemporaryDirectory() as root:
        return anyio.run(main, root)


def memoryview_maker() -> Callable[[int], memoryview]:
    import mmap

    return lambda size: memoryview(mmap.mmap(-1, max(size, 1)))[:size]


NEAR_PAGES = st.builds(
    lambda pages, rest: max(1, pages * PAGE + rest),
    st.integers(0, 12),
    st.one_of(st.integers(-3, 3), st.integers(-PAGE, PAGE)),
)


@settings(max_examples=60)
@given(
    size=NEAR_PAGES,
    block_bytes=NEAR_PAGES,
    skew=st.sampled_from([0, 0, 1, 512, PAGE - 1]),
    share=st.one_of(st.just(0.0), st.floats(0, 1, exclude_max=True)),
    direct=st.booleans(),
)
def test_every_path_gives_the_same_bytes(
    size: int, block_bytes: int, skew: int, share: float, direct: bool
) -> None:
    offset = int(size * share)
    block_bytes = max(block_bytes, size // 50)
    written, read = write_and_read(size, block_bytes, skew, offset, direct=direct)
    assert written == pattern(size)
    assert read == pattern(size)[offset:]


@pytest.fixture
def passes_cache(tmp_path: Path) -> None:
    """Skip where the file system cannot pass the page cache by, or keep nothing else."""
    try:
        os.close(os.open(tmp_path / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError:
        pytest.skip("The file system of the temporary directory has no direct I/O")
    finally:
        (tmp_path / "probe").unlink(missing_ok=True)
    if shutil.disk_usage(tmp_path) == shutil.disk_usage("/dev/shm"):
        pytest.skip("The temporary directory lies in memory")


async def opened(backend: LocalBackend) -> ObjectReader:
    file = await run_in_thread(backend.open_object, "f")
    assert file is not None
    return file


async def is_cached(backend: LocalBackend, offset: int, size: int) -> bool:
    return await run_in_thread((await opened(backend)).is_cached, offset, size)


@pytest.mark.usefixtures("passes_cache")
async def test_bulk_data_stays_out_of_the_page_cache(
    backend: LocalBackend, aligned_buffer: Callable[[int], memoryview]
) -> None:
    size = 1 << 20
    await upload(backend, "f", skewed(aligned_buffer, pattern(size), 0), size // 4)
    assert not await is_cached(backend, 0, size)
    await backend.read_into("f", 0, aligned_buffer(size))
    assert not await is_cached(backend, 0, size)


@pytest.mark.usefixtures("passes_cache")
async def test_older_kernels_tell_what_is_cached_too(
    tmp_path: Path, backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpipe_local.reads._CACHESTAT", -1)  # no system call has this number
    (tmp_path / "f").write_bytes(pattern(100_000))
    for offset, size in ((0, 100_000), (5000, 90_000), (4095, 2), (99_999, 1)):
        assert await is_cached(backend, offset, size)
    with open(tmp_path / "f", "rb", buffering=0) as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        file.read(2 * PAGE)
    for offset, size in ((0, 2 * PAGE), (PAGE, 1)):
        assert await is_cached(backend, offset, size)
    for offset, size in ((0, 100_000), (2 * PAGE, 1), (PAGE, PAGE + 1)):
        assert not await is_cached(backend, offset, size)


@pytest.mark.parametrize("cached", [True, False])
async def test_open_object_that_is_cut_off_says_so(
    tmp_path: Path, backend: LocalBackend, *, cached: bool
) -> None:
    (tmp_path / "f").write_bytes(pattern(100_000))
    read = partial((await opened(backend)).read_into, cached=cached)
    os.truncate(tmp_path / "f", 50_000)
    buffer = memoryview(bytearray(1000))
    await run_in_thread(read, 49_000, buffer)
    assert buffer == pattern(100_000)[49_000:50_000]
    with pytest.raises(TruncatedObject, match="50000") as caught:
        await run_in_thread(read, 49_001, buffer)
    assert caught.value.key == "f"


async def test_file_of_an_open_object_is_closed_with_it(
    tmp_path: Path, backend: LocalBackend
) -> None:
    file = tmp_path / "f"
    file.write_bytes(pattern(100))

    def is_open() -> bool:
        links = [f"/proc/self/fd/{each}" for each in os.listdir("/proc/self/fd")]
        return str(file) in map(os.path.realpath, links)

    found = await opened(backend)
    assert await anyio.to_thread.run_sync(is_open)
    del found
    assert not await anyio.to_thread.run_sync(is_open)


class Inverted(LocalBackend):
    """Inverts what it reads."""

    async def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        await super().read_into(key, offset, buffer)
        buffer[:] = bytes(255 - byte for byte in buffer)


class Unnoticed(WrappedBackend):
    """Wraps another backend and does nothing."""

    async def around(self, operation: Operation, call: Callable[[], Awaitable[Result]]) -> Result:
        return await call()


async def test_a_class_that_reads_in_its_own_way_is_not_read_past_it(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes([0, 1, 2]))
    buffer = memoryview(bytearray(3))
    async with Inverted(str(tmp_path)) as backend:
        assert await run_in_thread(backend.open_object, "f") is None
        assert await run_in_thread(Unnoticed(backend).open_object, "f") is None
        await backend.read_into("f", 0, buffer)
    assert bytes(buffer) == bytes([255, 254, 253])
    assert await run_in_thread(LocalBackend(str(tmp_path)).open_object, "f") is not None


class Noting(LocalBackend):
    """Notes what it writes."""

    noted = ""

    async def put(self, key: str, data: bytes, mode: PutMode) -> None:
        self.noted = key
        await super().put(key, data, mode)


async def test_a_class_that_puts_in_its_own_way_puts_all_so(tmp_path: Path) -> None:
    async with Noting(str(tmp_path)) as backend:
        await backend.put_volatile("f", b"x")
        assert backend.noted == "f"


@pytest.mark.usefixtures("passes_cache")
async def test_half_cached_data_is_read_whole(
    tmp_path: Path, backend: LocalBackend, aligned_buffer: Callable[[int], memoryview]
) -> None:
    size = 1 << 20
    await upload(backend, "f", skewed(aligned_buffer, pattern(size), 0), size)
    with open(tmp_path / "f", "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        file.read(40 * PAGE)
    buffer = aligned_buffer(size)
    await backend.read_into("f", 0, buffer)
    assert buffer == pattern(size)


@pytest.mark.parametrize("direct", [True, False])
async def test_a_pipe_is_no_object(tmp_path: Path, direct: bool) -> None:
    os.mkfifo(tmp_path / "f")
    async with LocalBackend(str(tmp_path), direct=direct) as backend:
        for call in (
            partial(backend.get, "f", max_bytes=10),
            partial(backend.read_into, "f", 0, memoryview(bytearray(1))),
            partial(run_in_thread, backend.open_object, "f"),
            partial(backend.stat, "f"),
        ):
            with pytest.raises(ObjectNotFound, match=r"/f is not a file but a pipe \[key 'f'\]"):
                await call()
        assert [info.key async for info in backend.list()] == []


@pytest.mark.parametrize("size", [1, 4096, 100_001])
async def test_open_object_beyond_the_end(backend: LocalBackend, size: int) -> None:
    await backend.put("f", pattern(size), PutMode.CREATE)
    file = await opened(backend)
    for offset, length in ((0, size + 1), (10 * size, 1)):
        cached = await run_in_thread(file.is_cached, offset, length)
        for each in {cached, False}:
            read = partial(file.read_into, cached=each)
            with pytest.raises(TruncatedObject, match=str(size)):
                await run_in_thread(read, offset, memoryview(bytearray(length)))


@pytest.mark.usefixtures("passes_cache")
async def test_refused_direct_io_falls_back(
    tmp_path: Path,
    backend: LocalBackend,
    monkeypatch: pytest.MonkeyPatch,
    aligned_buffer: Callable[[int], memoryview],
) -> None:
    preadv = os.preadv

    def refuse(descriptor: int, buffers: Any, offset: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "refused")
        return preadv(descriptor, buffers, offset)

    data = skewed(aligned_buffer, pattern(100_000), 0)
    await upload(backend, "f", data, 20_480)
    with open(tmp_path / "f", "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    buffer = aligned_buffer(100_000)
    monkeypatch.setattr(os, "preadv", refuse)
    await backend.read_into("f", 0, buffer)
    assert buffer == data


async def test_block_outside_of_the_object(backend: LocalBackend) -> None:
    begun = await backend.open_upload("f", size=10, block_bytes=8)
    with pytest.raises(UsageError, match="10 bytes"):
        await begun.write(8, memoryview(bytes(3)))
    await begun.abort()


# Temporary files and directories


async def test_temporary_files_are_hidden(tmp_path: Path, backend: LocalBackend) -> None:
    begun = await backend.open_upload("a/f", size=10, block_bytes=10)
    (name,) = files_below(tmp_path)
    assert os.path.basename(name).startswith(TEMPORARY)
    assert [info async for info in backend.list()] == []
    assert (await backend.children()).prefixes == ()
    assert (await backend.children("a/")).objects == ()
    for refused in (backend.stat(name), backend.delete([name]), backend.get(name, max_bytes=10)):
        with pytest.raises(InvalidKey):
            await refused
    await begun.abort()


async def test_abort_twice_and_after_complete(tmp_path: Path, backend: LocalBackend) -> None:
    begun = await backend.open_upload("a/f", size=1, block_bytes=1)
    await begun.write(0, memoryview(b"x"))
    await begun.complete()
    await begun.abort()
    await begun.abort()
    assert files_below(tmp_path) == ["a/f"]


async def test_closing_gives_up_open_uploads(tmp_path: Path) -> None:
    async with LocalBackend(str(tmp_path)) as backend:
        await backend.open_upload("a/f", size=1, block_bytes=1)
        await backend.open_upload("a/g", size=PAGE, block_bytes=PAGE)
        assert open_below(tmp_path)
    assert files_below(tmp_path) == []
    assert open_below(tmp_path) == []


def open_below(root: Path) -> list[str]:
    """The files and folders below a root that this process has open."""
    found = []
    for each in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # other threads close theirs
            found.append(os.readlink(f"/proc/self/fd/{each}"))
    return [each for each in found if each.startswith(f"{root}/")]


async def test_delete_removes_empty_directories(tmp_path: Path, backend: LocalBackend) -> None:
    for key in ("a/b/c/one", "a/b/two"):
        await backend.put(key, b"x", PutMode.CREATE)
    await backend.delete(["a/b/c/one"])
    assert not (tmp_path / "a/b/c").exists()
    await backend.delete(["a/b/two"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("age", "left"), [(60, True), (2 * 3600, False)])
async def test_delete_clears_abandoned_uploads(
    tmp_path: Path, backend: LocalBackend, age: int, left: bool
) -> None:
    await backend.put("a/one", b"x", PutMode.CREATE)
    abandoned = tmp_path / "a" / f"{TEMPORARY}1234"
    abandoned.write_bytes(b"")
    when = datetime.now(UTC).timestamp() - age
    os.utime(abandoned, (when, when))
    await backend.delete(["a/one"])
    assert abandoned.exists() is left
    assert (tmp_path / "a").exists() is left


async def test_stale_uploads_go_by_their_time(tmp_path: Path, backend: LocalBackend) -> None:
    now = datetime.now(UTC)
    for name, age in (("a/old", 3000), ("a/new", 10), ("b/old", 3000)):
        path = tmp_path / os.path.dirname(name) / (TEMPORARY + os.path.basename(name))
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"")
        os.utime(path, (now.timestamp() - age, now.timestamp() - age))
    before = now - timedelta(seconds=1000)
    assert await backend.remove_stale_uploads("a/", before=before) == 1
    assert await backend.remove_stale_uploads("", before=before) == 1
    assert files_below(tmp_path) == [f"a/{TEMPORARY}new"]
    assert not (tmp_path / "b").exists()


async def test_upload_whose_directory_was_removed(tmp_path: Path, backend: LocalBackend) -> None:
    begun = await backend.open_upload("a/f", size=1, block_bytes=1)
    await begun.write(0, memoryview(b"x"))
    shutil.rmtree(tmp_path / "a")
    with pytest.raises(StoreError, match="No such file"):
        await begun.complete()
    await begun.abort()
    await backend.put("a/f", b"y", PutMode.CREATE)
    assert await backend.get("a/f", max_bytes=1) == b"y"


async def test_keys_that_clash_with_directories(backend: LocalBackend) -> None:
    await backend.put("object", b"x", PutMode.CREATE)
    await backend.put("directory/object", b"x", PutMode.CREATE)
    for mode in PutMode:
        with pytest.raises(InvalidKey, match="is a file"):
            await backend.put("object/below", b"x", mode)
        with pytest.raises(InvalidKey, match="names a directory"):
            await backend.put("directory", b"x", mode)
    with pytest.raises(InvalidKey, match="too long"):
        await backend.put("x" * 256, b"x", PutMode.CREATE)
    with pytest.raises(InvalidKey):
        _ = [info async for info in backend.list("../")]


@pytest.mark.parametrize(
    ("code", "read", "write"),
    [
        (errno.ENOSPC, StoreFull, StoreFull),
        (errno.EDQUOT, StoreFull, StoreFull),
        (errno.EACCES, PermissionDenied, PermissionDenied),
        (errno.EROFS, PermissionDenied, PermissionDenied),
        (errno.ENOENT, ObjectNotFound, StoreError),
        (errno.EEXIST, ObjectExists, ObjectExists),
        (errno.ENAMETOOLONG, InvalidKey, InvalidKey),
        (errno.EIO, StoreError, StoreError),
        (errno.ESTALE, StoreUnavailable, StoreUnavailable),
        (errno.EAGAIN, StoreUnavailable, StoreUnavailable),
        (errno.EINVAL, StoreError, InvalidKey),
    ],
)
async def test_errors_are_translated(
    tmp_path: Path,
    backend: LocalBackend,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    read: type[StoreError],
    write: type[StoreError],
) -> None:
    await backend.put("a", b"x", PutMode.CREATE)
    system_open = os.open

    def failing(path: Any, *args: Any, **options: Any) -> int:
        if str(path).startswith(str(tmp_path)):
            raise OSError(code, os.strerror(code))
        return system_open(path, *args, **options)

    monkeypatch.setattr(os, "open", failing)
    for kind, call in (
        (read, backend.get("a", max_bytes=1)),
        (write, backend.put("a", b"y", PutMode.OVERWRITE)),
    ):
        with pytest.raises(kind, match=os.strerror(code)) as caught:
            await call
        assert type(caught.value) is kind
        assert caught.value.key == "a"
        assert isinstance(caught.value.__cause__, OSError)


# Full disks, cancellation, crashes, races


class Stuck:
    """A disk that does not answer a call until it is released."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self.begun, self.release = threading.Event(), threading.Event()

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.begun.set()
        assert self.release.wait(30)
        return self._call(*args, **options)

    async def cancelled_in(self, method: Callable[[], Awaitable[object]]) -> asyncio.Task[object]:
        """Call a method, and cancel it once it is stuck."""

        async def call() -> object:
            return await method()

        task = asyncio.create_task(call())
        await anyio.to_thread.run_sync(self.begun.wait)
        task.cancel()
        await anyio.wait_all_tasks_blocked()
        return task


@pytest.mark.parametrize("operation", ["get", "list", "children"])
async def test_a_cancelled_small_read_does_not_wait_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    async with LocalBackend(str(tmp_path)) as backend:
        await backend.put("a/f", b"x", PutMode.CREATE)

        async def all_objects() -> list[str]:
            return [info.key async for info in backend.list("a/")]

        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "get": partial(backend.get, "a/f", max_bytes=1),
            "list": all_objects,
            "children": partial(backend.children, "a/"),
        }
        stuck = Stuck(os.fstat if operation == "get" else os.scandir)
        monkeypatch.setattr(os, "fstat" if operation == "get" else "scandir", stuck)
        task = await stuck.cancelled_in(calls[operation])
        assert task.cancelled()
        stuck.release.set()
        monkeypatch.undo()
        assert await backend.get("a/f", max_bytes=1) == b"x"


@pytest.mark.parametrize("call", ["open", "fsync", "link"])
async def test_a_cancelled_write_is_whole_when_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    async with LocalBackend(str(tmp_path)) as backend:
        stuck = Stuck(getattr(os, call))
        monkeypatch.setattr(os, call, stuck)
        task = await stuck.cancelled_in(partial(backend.put, "a/f", b"whole", PutMode.CREATE))
        assert not task.done()
        stuck.release.set()
        await asyncio.wait([task])
        assert task.cancelled()
        monkeypatch.undo()
        assert files_below(tmp_path) == ["a/f"]
        assert await backend.get("a/f", max_bytes=5) == b"whole"


async def test_a_cancelled_deletion_is_whole_when_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with LocalBackend(str(tmp_path)) as backend:
        for key in ("a/b/one", "a/b/two", "a/three"):
            await backend.put(key, b"x", PutMode.CREATE)
        stuck = Stuck(os.unlink)
        monkeypatch.setattr(os, "unlink", stuck)
        task = await stuck.cancelled_in(partial(backend.delete, ["a/b/one", "a/b/two", "a/three"]))
        assert not task.done()
        stuck.release.set()
        await asyncio.wait([task])
        assert task.cancelled()
        assert list(tmp_path.iterdir()) == []


async def test_call_cancelled_before_it_begins_never_runs() -> None:
    ran = threading.Event()
    task = asyncio.create_task(run_in_thread(ran.set))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await run_in_thread(lambda: 7) == 7
    assert not ran.is_set()


async def test_descriptors_outlive_their_writers(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = await backend.open_upload("f", size=3, block_bytes=3)
    stuck = Stuck(os.pwritev)
    monkeypatch.setattr(os, "pwritev", stuck)
    writing = asyncio.create_task(begun.write(0, memoryview(b"abc")))
    await anyio.to_thread.run_sync(stuck.begun.wait)
    aborting = asyncio.create_task(begun.abort())
    await anyio.wait_all_tasks_blocked()
    assert not aborting.done()
    stuck.release.set()
    await asyncio.gather(writing, aborting)
    with pytest.raises(StoreError, match="Bad file descriptor"):
        await begun.write(0, memoryview(b"abc"))


def test_create_only_between_processes(tmp_path: Path) -> None:
    check_race(FRESH, tmp_path)
