"""The public fakes do what tests rely on, and the conformance suite finds what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import anyio
import anyio.to_thread
import pytest
from blockbuster import BlockingError

from ckpipe.backend import Backend, ObjectInfo, PutMode, Upload
from ckpipe.errors import ObjectNotFound, StoreUnavailable, UsageError
from ckpipe.testing import (
    BackendConformance,
    FaultyBackend,
    Gate,
    Landing,
    MemoryBackend,
    Operation,
    SlowBackend,
)
from ckpipe_local import LocalBackend

CREATE, OVERWRITE = PutMode.CREATE, PutMode.OVERWRITE


def lost() -> StoreUnavailable:
    return StoreUnavailable("The connection broke")


# MemoryBackend


async def test_named_memory_is_shared() -> None:
    await MemoryBackend("memory://shared-by-name").put("a", b"x", CREATE)
    assert await MemoryBackend("memory://shared-by-name").get("a", max_bytes=1) == b"x"
    for other in ("memory://", "memory://another-name"):
        with pytest.raises(ObjectNotFound):
            await MemoryBackend(other).get("a", max_bytes=1)


@pytest.mark.parametrize(("offset", "size"), [(1, 4), (0, 3), (0, 5), (8, 4), (12, 1)])
async def test_memory_refuses_what_is_no_block(offset: int, size: int) -> None:
    upload = await MemoryBackend().open_upload("a", size=10, block_bytes=4)
    with pytest.raises(UsageError, match="no block"):
        await upload.write(offset, memoryview(bytes(size)))


async def test_memory_refuses_incomplete_uploads() -> None:
    upload = await MemoryBackend().open_upload("a", size=10, block_bytes=4)
    await upload.write(0, memoryview(bytes(4)))
    await upload.write(0, memoryview(bytes(4)))
    with pytest.raises(UsageError, match="lacks 2 blocks"):
        await upload.complete()


# FaultyBackend


async def test_operations_are_logged() -> None:
    async with FaultyBackend(MemoryBackend()) as backend:
        await backend.put("a/b", b"xyz", CREATE)
        upload = await backend.open_upload("c", size=2, block_bytes=2)
        await upload.write(0, memoryview(b"12"))
        await upload.complete()
        assert [info.key async for info in backend.list("a/")] == ["a/b"]
        await backend.delete(["a/b", "c"])
    assert backend.operations == (
        Operation("enter", ""),
        Operation("put", "a/b", 3),
        Operation("open_upload", "c"),
        Operation("write", "c", 2),
        Operation("complete", "c"),
        Operation("list", "a/"),
        Operation("delete", "a/b c"),
        Operation("exit", ""),
    )


@pytest.mark.parametrize(("landing", "lands"), [(Landing.BEFORE, False), (Landing.AFTER, True)])
async def test_faults_strike_before_or_after_landing(landing: Landing, lands: bool) -> None:
    backend = FaultyBackend(MemoryBackend())
    backend.fail(lost(), "put", landing)
    with pytest.raises(StoreUnavailable, match="broke"):
        await backend.put("a", b"x", CREATE)
    assert [info.key async for info in backend.list()] == (["a"] if lands else [])


async def failing_puts(backend: FaultyBackend, count: int) -> list[int]:
    """Put ``count`` objects, and return the numbers from 1 of those that failed."""
    failed: list[int] = []
    for number in range(1, count + 1):
        try:
            await backend.put(str(number), b"x", CREATE)
        except StoreUnavailable:
            failed.append(number)
    return failed


async def test_faults_choose_their_operations() -> None:
    backend = FaultyBackend(MemoryBackend())
    backend.fail(lost(), 2)
    backend.fail(lost(), "put", nth=4)
    backend.fail(lost(), lambda operation: operation.key == "6")
    backend.fail(lost(), "get")
    assert await failing_puts(backend, 8) == [2, 4, 6]


async def test_faults_last_as_long_as_asked() -> None:
    backend = FaultyBackend(MemoryBackend())
    backend.fail(lost(), "put", nth=2, times=2)
    backend.fail(lost(), "put", nth=5, times=None)
    assert await failing_puts(backend, 7) == [2, 3, 5, 6, 7]
    backend.heal()
    await backend.put("healed", b"x", CREATE)


@pytest.mark.parametrize(("landing", "lands"), [(Landing.BEFORE, False), (Landing.AFTER, True)])
async def test_cancelling_at_an_operation(landing: Landing, lands: bool) -> None:
    backend = FaultyBackend(MemoryBackend())
    with anyio.CancelScope() as scope:
        backend.call(lambda operation: scope.cancel(), "put", landing)
        await backend.put("a", b"x", CREATE)
        pytest.fail("The operation was not cancelled")
    assert [info.key async for info in backend.list()] == (["a"] if lands else [])


# SlowBackend and its gate


async def test_cancelled_waiter_leaves_the_gate() -> None:
    gate = Gate()
    gate.hold()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(gate.passed)
        await anyio.to_thread.run_sync(gate.wait_until_held)
        tasks.cancel_scope.cancel()
    assert gate.waiting == 0
    gate.release()
    await gate.passed()


def test_a_gate_says_that_no_task_came() -> None:
    gate = Gate()
    gate.hold()
    with pytest.raises(TimeoutError, match="0 of 2"):
        gate.wait_until_held(2, timeout=0.01)


def test_bytes_share_one_link() -> None:
    clock = pytest.importorskip("trio.testing").MockClock(autojump_threshold=0)

    async def put_both() -> float:
        backend = SlowBackend(MemoryBackend(), bytes_per_second=1_000_000, latency=0.05)
        began = anyio.current_time()
        async with anyio.create_task_group() as tasks:
            for key in "ab":
                tasks.start_soon(backend.put, key, bytes(100_000), CREATE)
        return anyio.current_time() - began

    took = anyio.run(put_both, backend="trio", backend_options={"clock": clock})
    assert took == pytest.approx(0.25)


# BackendConformance finds faults


class OverwritesOnCreate(MemoryBackend):
    async def put(self, key: str, data: bytes, mode: PutMode) -> None:
        await super().put(key, data, OVERWRITE)


class ShowsUploadsEarly(MemoryBackend):
    async def open_upload(self, key: str, *, size: int, block_bytes: int) -> Upload:
        await self.put(key, b"", OVERWRITE)
        return await super().open_upload(key, size=size, block_bytes=block_bytes)


class ReadsShort(MemoryBackend):
    async def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        data = await self.get(key, max_bytes=1 << 30)
        part = data[offset : offset + len(buffer)]
        buffer[: len(part)] = part


class LocalTimes(MemoryBackend):
    async def stat(self, key: str) -> ObjectInfo:
        info = await super().stat(key)
        return ObjectInfo(info.key, info.size, info.modified.replace(tzinfo=None))


class KeepsAborted(MemoryBackend):
    async def open_upload(self, key: str, *, size: int, block_bytes: int) -> Upload:
        upload = await super().open_upload(key, size=size, block_bytes=block_bytes)
        upload.abort = upload.complete  # type: ignore[method-assign]
        return upload


class ComplainsOfMissing(MemoryBackend):
    async def delete(self, keys: Any) -> None:
        for key in keys:
            await self.stat(key)
            await super().delete([key])


SUITE = BackendConformance()


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        (OverwritesOnCreate, SUITE.test_create_keeps_what_is_there),
        (OverwritesOnCreate, SUITE.test_one_of_many_creators_wins),
        (ShowsUploadsEarly, SUITE.test_upload_is_invisible_until_complete),
        (ReadsShort, lambda backend: SUITE.test_read_beyond_the_end(backend, 0, 1001)),
        (LocalTimes, SUITE.test_stat_tells_the_time),
        (KeepsAborted, SUITE.test_aborted_upload_leaves_nothing),
        (ComplainsOfMissing, SUITE.test_delete_is_idempotent),
    ],
)
async def test_suite_finds_broken_backends(
    broken: type[Backend], test: Callable[[Backend], Coroutine[Any, Any, None]]
) -> None:
    await test(MemoryBackend())
    with pytest.raises(
        (AssertionError, pytest.fail.Exception, TypeError, UsageError, ObjectNotFound)
    ):
        await test(broken())


# The guard of conftest.py


async def test_blocking_library_code_is_caught(tmp_path: Any) -> None:
    with pytest.raises(BlockingError, match=r"os\.stat"):
        LocalBackend(str(tmp_path)).open_object("f")
