"""What backends of both kinds of buckets share: probes, limits, lost and silent servers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator

import anyio
import pytest

from ckpipe import errors
from ckpipe.backend import PutMode
from tests.support.bucket_stores import BLOCK, Seen, behind_proxy, written
from tests.support.fault_proxy import Fault


@pytest.fixture(params=["moto_server", "gcs_server"])
def seen(request: pytest.FixtureRequest) -> Iterator[Seen]:
    server = request.getfixturevalue(request.param)
    with behind_proxy(server, "backend") as proxy:
        yield Seen(server, proxy, "backend")


async def test_a_store_is_probed_once_and_only_by_who_saves(seen: Seen) -> None:
    async with seen.backend() as backend:
        assert [info async for info in backend.list()] == []
        await backend.put_volatile("lease", b"{}")
        await backend.delete(["lease"])
    for number in range(2):
        async with seen.backend() as backend:
            await backend.put(f"{number}", b"x", PutMode.CREATE)
    found = [each.operation for each in seen.requests]
    assert found == ["List", "Put", "Delete", "Put", "Put", "List", "Put", "Put"]


async def test_a_missing_bucket_is_told(seen: Seen) -> None:
    seen.url = f"{seen.scheme}://no-such-bucket/root"
    async with seen.backend() as backend:
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: backend.put("a", b"x", PutMode.CREATE),
            lambda: backend.children(),
        ]
        for call in calls:
            with pytest.raises(errors.StoreError, match=r"ucket.*Create the bucket"):
                await call()


async def test_a_large_upload_finds_its_key_taken(seen: Seen) -> None:
    async with seen.backend() as backend:
        await backend.put("data", b"first", PutMode.CREATE)
        upload = await written(backend)
        with pytest.raises(errors.ObjectExists):
            await upload.complete()
        assert not await upload.landed()
        assert await seen.left() != []  # until the upload is aborted, or the backend closed
        assert await backend.get("data", max_bytes=5) == b"first"
    assert await seen.left() == []


async def test_blocks_that_are_none(seen: Seen) -> None:
    async with seen.backend() as backend:
        with pytest.raises(errors.UsageError, match=r"staging.block_bytes to \"\d+ MiB\""):
            await backend.open_upload("data", size=32_769 * BLOCK, block_bytes=BLOCK)
        upload = await backend.open_upload("data", size=2 * BLOCK, block_bytes=BLOCK)
        with pytest.raises(errors.UsageError):
            await upload.write(1, memoryview(bytes(BLOCK)))
        with pytest.raises(errors.UsageError, match="0 of its 2 parts"):
            await upload.complete()


async def test_a_server_that_goes_silent_is_given_up(seen: Seen) -> None:
    async with seen.backend() as patient, seen.backend(request_timeout=0.2) as backend:
        await patient.put("b", b"x", PutMode.CREATE)
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "Put": lambda: backend.put("a", b"x", PutMode.CREATE),
            "Get": lambda: backend.get("b", max_bytes=1),
            "List": lambda: backend.children(),
            "Head" if seen.scheme == "s3" else "Look": lambda: backend.stat("b"),
            "Delete": lambda: backend.delete(["b"]),
        }
        for operation, call in calls.items():
            seen.fault[operation] = Fault.HANG
            with anyio.fail_after(20), pytest.raises(errors.StoreUnavailable):
                await call()


async def test_leaving_ends_each_upload_in_a_time_of_its_own(seen: Seen) -> None:
    async with seen.backend(request_timeout=5.0) as backend:
        for number in range(3):
            upload = await backend.open_upload(f"{number}", size=2 * BLOCK, block_bytes=BLOCK)
            await upload.write(0, memoryview(bytes(BLOCK)))
        assert len(await seen.left()) == 3
        seen.fault["Abort" if seen.scheme == "s3" else "Delete"] = Fault.HANG
    assert len(await seen.left()) == 1
