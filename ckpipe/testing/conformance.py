"""The contract of :mod:`ckpipe.backend` as tests that any backend can be put through."""

from __future__ import annotations

import sys
from contextlib import suppress

import anyio
import pytest

from ckpipe.backend import Backend, PutMode
from ckpipe.errors import InvalidKey, ObjectExists, StoreError, StoreUnavailable
from ckpipe.testing._conformance_base import CREATE, OVERWRITE, pattern
from ckpipe.testing._conformance_large import LargeObjectConformance

ODD_KEYS = (
    "a key with  spaces ",
    "ünïcödé/\u65e5\u672c\u8a9e/\U0001f600",
    "at@tilde~percent%25plus+hash#question?",
    "quotes'\"/colon:semi;comma,equals=/back\\slash",
    "..hidden/...dots/.dot",
    "-dash/_under",
    "x" * 200 + "/" + "y" * 200,
    "a/b/c/d/e/f/g/h/i/j",
)
INVALID_KEYS = ("", "/", "/a", "a/", "a//b", ".", "..", "a/../b", "./a", "a/.", "a\0b")


@pytest.mark.asyncio
class BackendConformance(LargeObjectConformance):
    """Tests a backend against the contract.

    Subclass it in a test file with a name that pytest collects, and give it an asynchronous
    fixture ``backend`` that yields an opened backend with nothing in it::

        class TestMyBackend(BackendConformance):
            @pytest_asyncio.fixture
            async def backend(self):
                async with MyBackend("my://bucket/empty") as backend:
                    yield backend
    """

    many_objects = 300
    """How many objects are listed at a time; better more than a page of the store's lists."""

    # Small objects

    @pytest.mark.parametrize("size", [0, 1, 4095, 4096, 100_001])
    @pytest.mark.parametrize("mode", PutMode)
    async def test_put_then_get(self, backend: Backend, mode: PutMode, size: int) -> None:
        await backend.put("a/b", pattern(size), mode)
        assert await backend.get("a/b", max_bytes=size) == pattern(size)
        assert (await backend.stat("a/b")).size == size

    async def test_get_refuses_more_than_expected(self, backend: Backend) -> None:
        await backend.put("a", bytes(11), CREATE)
        with pytest.raises(StoreError, match="11"):
            await backend.get("a", max_bytes=10)

    async def test_overwrite_replaces(self, backend: Backend) -> None:
        await backend.put("a", b"a long first version", OVERWRITE)
        await backend.put("a", b"second", OVERWRITE)
        assert await backend.get("a", max_bytes=100) == b"second"

    async def test_create_keeps_what_is_there(self, backend: Backend) -> None:
        await backend.put("a", b"first", CREATE)
        with pytest.raises(ObjectExists) as caught:
            await backend.put("a", b"second", CREATE)
        assert caught.value.key == "a"
        assert await backend.get("a", max_bytes=100) == b"first"

    async def test_volatile_objects(self, backend: Backend) -> None:
        await backend.put_volatile("a/b/c", b"first")
        with pytest.raises(ObjectExists) as caught:
            await backend.put_volatile("a/b/c", b"second")
        assert caught.value.key == "a/b/c"
        assert await backend.get("a/b/c", max_bytes=100) == b"first"
        assert [info async for info in backend.list("a/")] == [await backend.stat("a/b/c")]
        await backend.put("a/b/d", b"lasts", CREATE)
        await backend.delete(["a/b/c"])
        assert await self.keys(backend) == ["a/b/d"]

    async def test_one_of_many_creators_wins(self, backend: Backend) -> None:
        winners: list[int] = []

        async def race(number: int) -> None:
            try:
                await backend.put("race/here", f"{number:04}".encode(), CREATE)
            except ObjectExists:
                return
            winners.append(number)

        async with anyio.create_task_group() as tasks:
            for number in range(32):
                tasks.start_soon(race, number)
        assert len(winners) == 1
        assert await backend.get("race/here", max_bytes=4) == f"{winners[0]:04}".encode()

    async def test_readers_see_whole_versions(self, backend: Backend) -> None:
        versions = [bytes([number]) * 50_000 for number in range(8)]
        await backend.put("a", versions[0], OVERWRITE)

        async def overwrite() -> None:
            for version in versions:
                await backend.put("a", version, OVERWRITE)

        seen: list[bytes] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(overwrite)
            for _ in range(20):
                with suppress(StoreUnavailable):  # a server may stumble over the race, and say so
                    seen.append(await backend.get("a", max_bytes=50_000))
        assert set(seen) <= set(versions)
        assert seen

    @pytest.mark.parametrize("key", ODD_KEYS, ids=range(len(ODD_KEYS)))
    async def test_odd_keys(self, backend: Backend, key: str) -> None:
        await backend.put(key, b"value", CREATE)
        assert await backend.get(key, max_bytes=5) == b"value"
        assert await self.keys(backend) == [key]
        assert (await backend.stat(key)).key == key
        await backend.delete([key])
        assert await self.keys(backend) == []

    @pytest.mark.parametrize("key", INVALID_KEYS, ids=ascii)
    async def test_invalid_keys(self, backend: Backend, key: str) -> None:
        with pytest.raises(InvalidKey):
            await backend.put(key, b"value", CREATE)
        with pytest.raises(InvalidKey):
            await backend.open_upload(key, size=1, block_bytes=self.block_bytes(backend))
        assert await self.keys(backend) == []

    # Lists and deletion

    async def test_list_and_children(self, backend: Backend) -> None:
        for key in ("top", "a/one", "a/two", "a/b/three", "ab/four", "c/d/e/five"):
            await backend.put(key, key.encode(), CREATE)
        assert await self.keys(backend, "a/") == ["a/b/three", "a/one", "a/two"]
        assert await self.keys(backend, "a/b/") == ["a/b/three"]
        assert len(await self.keys(backend)) == 6
        root, below = await backend.children(), await backend.children("a/")
        assert [info.key for info in root.objects] == ["top"]
        assert sorted(root.prefixes) == ["a/", "ab/", "c/"]
        assert sorted(info.key for info in below.objects) == ["a/one", "a/two"]
        assert below.prefixes == ("a/b/",)

    async def test_lists_say_what_stat_says(self, backend: Backend) -> None:
        await backend.put("a/one", pattern(123), CREATE)
        listed = [info async for info in backend.list("a/")]
        assert listed == [await backend.stat("a/one")]
        assert (await backend.children("a/")).objects == tuple(listed)

    async def test_empty_lists(self, backend: Backend) -> None:
        await backend.put("a/one", b"x", CREATE)
        assert await self.keys(backend, "none/") == []
        assert await self.keys(backend, "a/one/") == []
        children = await backend.children("none/")
        assert (children.objects, children.prefixes) == ((), ())

    async def test_many_objects(self, backend: Backend) -> None:
        names = [f"many/{number:04}" for number in range(self.many_objects)]
        async with anyio.create_task_group() as tasks:
            for name in names:
                tasks.start_soon(backend.put, name, name.encode(), CREATE)
        assert await self.keys(backend, "many/") == names
        await backend.delete(names)
        assert await self.keys(backend) == []

    async def test_delete_is_idempotent(self, backend: Backend) -> None:
        await backend.put("a/one", b"x", CREATE)
        await backend.put("a/two", b"x", CREATE)
        await backend.delete(["a/one", "a/none", "no/where", "a/one/below"])
        await backend.delete(["a/one"])
        await backend.delete([])
        assert await self.keys(backend) == ["a/two"]
        assert (await backend.children()).prefixes == ("a/",)

    async def test_deleted_key_is_free_again(self, backend: Backend) -> None:
        await backend.put("a/one", b"x", CREATE)
        await backend.delete(["a/one"])
        assert (await backend.children()).prefixes == ()
        await backend.put("a/one", b"y", CREATE)
        assert await backend.get("a/one", max_bytes=1) == b"y"

    async def test_writes_beside_deletions(self, backend: Backend) -> None:
        async def come_and_go(number: int) -> None:
            for turn in range(10):
                key = f"shared/below/{number}-{turn}"
                await backend.put(key, b"x", CREATE)
                await backend.delete([key])

        async with anyio.create_task_group() as tasks:
            for number in range(8):
                tasks.start_soon(come_and_go, number)
        assert await self.keys(backend) == []

    async def test_cancelled_put_is_there_or_not(self, backend: Backend) -> None:
        for number in range(10):
            with anyio.move_on_after(number / 5000):
                await backend.put(f"a/{number}", pattern(10_000), CREATE)
        for info in [info async for info in backend.list()]:
            assert await backend.get(info.key, max_bytes=sys.maxsize) == pattern(10_000)


__all__ = ["INVALID_KEYS", "ODD_KEYS", "BackendConformance", "pattern"]
