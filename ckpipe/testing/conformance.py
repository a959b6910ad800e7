"""The contract of :mod:`ckpipe.backend` as tests for any backend."""

from __future__ import annotations

import random
import sys
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial

import anyio
import pytest
from anyio import to_thread

from ckpipe.backend import Backend, ObjectReader, PutMode, Upload
from ckpipe.errors import (
    InvalidKey,
    LinkUnavailable,
    ObjectExists,
    ObjectNotFound,
    StoreError,
    StoreUnavailable,
    TruncatedObject,
)
from ckpipe.format.checksum import crc32c

CREATE, OVERWRITE = PutMode.CREATE, PutMode.OVERWRITE
SKEW = timedelta(minutes=5)
"""The most that the store's clock may differ from ours."""
DATA_FILE = "step-000000000001.20261121T034205123Z-a.0/rank-00000.safetensors"
"""A key in ckpipe's form, since a store may need it to recognise ckpipe's uploads."""


def pattern(size: int, seed: int = 0) -> bytes:
    """Make bytes that look random and are the same in every run."""
    return random.Random(seed).randbytes(size)


async def _read(file: ObjectReader, offset: int, buffer: bytearray, *, cached: bool) -> None:
    await to_thread.run_sync(partial(file.read_into, offset, memoryview(buffer), cached=cached))


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
class BackendConformance:
    """Test a backend against the contract.

    Subclass it in a test file with a name that pytest collects, and give it an asynchronous
    fixture ``backend`` that yields an opened backend with nothing in it::

        class TestMyBackend(BackendConformance):
            @pytest_asyncio.fixture
            async def backend(self):
                async with MyBackend("my://bucket/empty") as backend:
                    yield backend
    """

    many_objects = 300
    """The number of objects in one list; better more than one page of the store's lists."""

    refused_reads: tuple[type[StoreError], ...] = ()
    """Errors of a read beside an overwrite, if the store refuses some of these reads."""

    async def upload(self, backend: Backend, key: str, data: bytes) -> None:
        """Upload data, with concurrent blocks and the last block first."""
        upload = await self.written(backend, key, data)
        await upload.complete()

    async def written(self, backend: Backend, key: str, data: bytes) -> Upload:
        """Begin an upload and write all its blocks."""
        block = self.block_bytes(backend)
        upload = await backend.open_upload(key, size=len(data), block_bytes=block)
        async with anyio.create_task_group() as tasks:
            for offset in reversed(range(0, len(data), block)):
                part = memoryview(data)[offset : offset + block]
                tasks.start_soon(upload.write, offset, part)
        return upload

    def block_bytes(self, backend: Backend) -> int:
        """Return the size of the blocks that the tests use, in bytes."""
        return max(backend.limits.min_block_bytes, 1 << 16)

    async def keys(self, backend: Backend, prefix: str = "") -> list[str]:
        """List the keys below a prefix, sorted."""
        return sorted([info.key async for info in backend.list(prefix)])

    async def read(self, backend: Backend, key: str) -> bytes:
        """Read a whole object."""
        info = await backend.stat(key)
        buffer = bytearray(info.size)
        await backend.read_into(key, 0, memoryview(buffer))
        return bytes(buffer)

    # Uploads

    @pytest.mark.parametrize("blocks", [1, 2, 3])
    @pytest.mark.parametrize("last", [1, 4096, 4097, None])
    async def test_upload_out_of_order(
        self, backend: Backend, blocks: int, last: int | None
    ) -> None:
        block = self.block_bytes(backend)
        data = pattern((blocks - 1) * block + (last or block), seed=blocks)
        await self.upload(backend, "data/file", data)
        assert await self.read(backend, "data/file") == data
        assert (await backend.stat("data/file")).size == len(data)

    async def test_many_blocks_in_any_order(self, backend: Backend) -> None:
        block = self.block_bytes(backend)
        data = pattern(9 * block + 5)  # ten blocks, so that a number may have two digits
        upload = await backend.open_upload("data/file", size=len(data), block_bytes=block)
        offsets = list(range(0, len(data), block))
        random.Random(1).shuffle(offsets)
        async with anyio.create_task_group() as tasks:
            for offset in offsets:
                part = memoryview(data)[offset : offset + block]
                tasks.start_soon(upload.write, offset, part)
        await upload.complete()
        assert await self.read(backend, "data/file") == data

    async def test_blocks_that_come_with_their_checksums(self, backend: Backend) -> None:
        block = self.block_bytes(backend)
        data = pattern(2 * block + 5)
        upload = await backend.open_upload("data/file", size=len(data), block_bytes=block)
        for offset in range(0, len(data), block):
            part = memoryview(data)[offset : offset + block]
            await upload.write_summed(offset, part, crc32c(part))
        await upload.complete()
        assert await self.read(backend, "data/file") == data

    async def test_blocks_that_are_written_together(self, backend: Backend) -> None:
        block = self.block_bytes(backend)
        data = pattern(4 * block + 5)
        upload = await backend.open_upload("data/file", size=len(data), block_bytes=block)
        parts = [(at, memoryview(data)[at : at + block]) for at in range(0, len(data), block)]
        await upload.write_all([parts[4], parts[0]])  # not in order, nor side by side
        await upload.write_all(parts[1:4])
        await upload.complete()
        assert await self.read(backend, "data/file") == data

    async def test_upload_is_invisible_until_complete(self, backend: Backend) -> None:
        upload = await self.written(backend, "data/file", pattern(1000))
        with pytest.raises(ObjectNotFound):
            await backend.stat("data/file")
        with pytest.raises(ObjectNotFound):
            await backend.get("data/file", max_bytes=1000)
        assert await self.keys(backend) == []
        assert await backend.children() == await backend.children("data/")
        await upload.complete()
        assert await self.keys(backend) == ["data/file"]

    async def test_aborted_upload_leaves_nothing(self, backend: Backend) -> None:
        upload = await self.written(backend, "data/file", pattern(1000))
        await upload.abort()
        assert await self.keys(backend) == []
        await self.upload(backend, "data/file", pattern(2000))
        assert await self.read(backend, "data/file") == pattern(2000)

    async def test_abort_of_an_upload_without_blocks(self, backend: Backend) -> None:
        block = self.block_bytes(backend)
        upload = await backend.open_upload("data/file", size=10 * block, block_bytes=block)
        await upload.abort()
        assert await self.keys(backend) == []

    async def test_abort_after_a_cancelled_write(self, backend: Backend) -> None:
        block = self.block_bytes(backend)
        upload = await backend.open_upload("data/file", size=block, block_bytes=block)
        with anyio.move_on_after(0):
            await upload.write(0, memoryview(pattern(block)))
        await upload.abort()
        assert await self.keys(backend) == []

    async def test_block_is_written_again(self, backend: Backend) -> None:
        block = self.block_bytes(backend)
        data = pattern(block + 1)
        upload = await self.written(backend, "data/file", data)
        await upload.write(block, memoryview(data)[block:])
        await upload.write(0, memoryview(data)[:block])
        await upload.complete()
        assert await self.read(backend, "data/file") == data

    async def test_upload_keeps_no_hold_of_the_data(self, backend: Backend) -> None:
        data = bytearray(pattern(5000))
        upload = await backend.open_upload("a", size=5000, block_bytes=self.block_bytes(backend))
        with memoryview(data) as view:
            await upload.write(0, view)
        data[:] = bytes(5000)
        await upload.complete()
        assert await self.read(backend, "a") == pattern(5000)

    async def test_upload_finds_its_key_taken(self, backend: Backend) -> None:
        upload = await self.written(backend, "data/file", pattern(1000, seed=1))
        await self.upload(backend, "data/file", pattern(1000, seed=2))
        with pytest.raises(ObjectExists):
            await upload.complete()
        await upload.abort()
        assert await self.read(backend, "data/file") == pattern(1000, seed=2)

    async def test_upload_knows_its_own_object(self, backend: Backend) -> None:
        ours = await self.written(backend, "data/file", pattern(1000))
        theirs = await self.written(backend, "data/file", pattern(1000))
        assert await ours.landed() in (False, None)
        await theirs.complete()
        with pytest.raises(ObjectExists):
            await ours.complete()
        assert await ours.landed() in (False, None)
        await ours.abort()

    async def test_uploads_side_by_side(self, backend: Backend) -> None:
        data = [pattern(self.block_bytes(backend) + number, seed=number) for number in range(1, 5)]
        async with anyio.create_task_group() as tasks:
            for number, one in enumerate(data):
                tasks.start_soon(self.upload, backend, f"side/{number}", one)
        for number, one in enumerate(data):
            assert await self.read(backend, f"side/{number}") == one

    async def test_stale_uploads_are_removed(self, backend: Backend) -> None:
        upload = await self.written(backend, DATA_FILE, pattern(1000, seed=1))
        await backend.remove_stale_uploads("", before=datetime.now(UTC) + SKEW)
        await upload.abort()
        assert await self.keys(backend) == []
        assert await backend.remove_stale_uploads("", before=datetime.now(UTC) + SKEW) == 0

    async def test_young_uploads_are_left_alone(self, backend: Backend) -> None:
        upload = await self.written(backend, DATA_FILE, pattern(1000))
        assert await backend.remove_stale_uploads("", before=datetime.now(UTC) - SKEW) == 0
        await upload.complete()
        assert await self.read(backend, DATA_FILE) == pattern(1000)

    async def test_cleaning_up_leaves_objects(self, backend: Backend) -> None:
        await self.upload(backend, DATA_FILE, pattern(1000))
        await backend.put("data/small", b"x", CREATE)
        assert await backend.remove_stale_uploads("", before=datetime.now(UTC) + SKEW) == 0
        assert await self.keys(backend) == ["data/small", DATA_FILE]

    # Reads

    @pytest.mark.parametrize(
        ("offset", "size"),
        [(0, 1), (0, 4096), (4096, 8192), (1, 4095), (4095, 4098), (12_345, 53_198), (65_530, 13)],
    )
    async def test_ranges(self, backend: Backend, offset: int, size: int) -> None:
        data = pattern((1 << 16) + 7)
        await self.upload(backend, "data/file", data)
        buffer = bytearray(size)
        await backend.read_into("data/file", offset, memoryview(buffer))
        assert buffer == data[offset : offset + size]

    async def test_reads_side_by_side(self, backend: Backend) -> None:
        data = pattern(1 << 17)
        await self.upload(backend, "data/file", data)
        buffer = memoryview(bytearray(len(data)))
        async with anyio.create_task_group() as tasks:
            for offset in range(0, len(data), 10_000):
                part = buffer[offset : offset + 10_000]
                tasks.start_soon(backend.read_into, "data/file", offset, part)
        assert buffer == data

    async def test_ranges_of_an_object_that_is_overwritten(self, backend: Backend) -> None:
        versions = [bytes([number]) * 50_000 for number in range(8)]
        await backend.put("a", versions[0], OVERWRITE)

        async def overwrite() -> None:
            for version in versions:
                await backend.put("a", version, OVERWRITE)

        refused = 0
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(overwrite)
            for _ in range(20):
                buffer = bytearray(40_000)
                try:
                    await backend.read_into("a", 5_000, memoryview(buffer))
                except self.refused_reads:
                    refused += 1
                    continue
                assert len(set(buffer)) == 1
        assert refused < 15

    @pytest.mark.parametrize(
        ("offset", "size"), [(0, 1001), (1, 1000), (999, 2), (1000, 1), (0, 8192), (100_000, 1)]
    )
    async def test_read_beyond_the_end(self, backend: Backend, offset: int, size: int) -> None:
        await self.upload(backend, "data/file", pattern(1000))
        with pytest.raises(TruncatedObject, match="1000") as caught:
            await backend.read_into("data/file", offset, memoryview(bytearray(size)))
        assert caught.value.key == "data/file"

    async def test_open_object_reads_the_same(self, backend: Backend) -> None:
        data = pattern(100_001)
        await self.upload(backend, "data/file", data)
        await backend.put("data/small", data, CREATE)
        for key in ("data/file", "data/small"):
            if (file := await to_thread.run_sync(backend.open_object, key)) is None:
                continue
            for offset, size in ((0, 100_001), (4096, 4096), (5, 77_777), (100_000, 1)):
                for cached in {False, await to_thread.run_sync(file.is_cached, offset, size)}:
                    buffer = bytearray(size)
                    await _read(file, offset, buffer, cached=cached)
                    assert buffer == data[offset : offset + size]
            with pytest.raises(TruncatedObject, match="100001") as caught:
                await _read(file, 99_999, bytearray(3), cached=False)
            assert caught.value.key == key

    async def test_open_object_outlives_its_key(self, backend: Backend) -> None:
        data = pattern(100_001)
        await backend.put("data/file", data, CREATE)
        file = await to_thread.run_sync(backend.open_object, "data/file")
        await backend.delete(["data/file"])
        if file is not None:
            buffer = bytearray(100_000)
            await _read(file, 1, buffer, cached=False)
            assert buffer == data[1:]

    @pytest.mark.parametrize("key", ["missing", "there/missing", "missing/there", "there/is/more"])
    async def test_missing_keys(self, backend: Backend, key: str) -> None:
        await backend.put("there/is", b"something", CREATE)
        with pytest.raises(ObjectNotFound):
            await backend.get(key, max_bytes=10)
        with pytest.raises(ObjectNotFound):
            await backend.stat(key)
        with pytest.raises(ObjectNotFound):
            await backend.read_into(key, 0, memoryview(bytearray(1)))
        with suppress(ObjectNotFound):
            assert await to_thread.run_sync(backend.open_object, key) is None

    async def test_a_prefix_is_no_object(self, backend: Backend) -> None:
        await backend.put("a/b/c", b"x", CREATE)
        with pytest.raises(ObjectNotFound):
            await backend.stat("a/b")
        with pytest.raises(ObjectNotFound):
            await backend.get("a/b", max_bytes=10)
        await backend.delete(["a/b", "a"])
        assert await self.keys(backend) == ["a/b/c"]

    async def test_stat_tells_the_time(self, backend: Backend) -> None:
        await backend.put("a", b"x", CREATE)
        modified = (await backend.stat("a")).modified
        assert modified.utcoffset() == timedelta(0)
        assert abs(modified - datetime.now(UTC)) < SKEW

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
                with suppress(StoreUnavailable):  # a server may fail in the race, and report it
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

    # Links

    async def linked(self, backend: Backend) -> bytes:
        """Link ``new/file`` to ``old/file``, and return the bytes of both.

        A test is skipped if the store has no links, or its file system has none.
        """
        if not backend.can_link:
            pytest.skip("The store has no links")
        data = pattern(2 * self.block_bytes(backend) + 5)
        await self.upload(backend, "old/file", data)
        try:
            await backend.link("old/file", "new/file")
        except LinkUnavailable as error:
            assert await self.keys(backend) == ["old/file"]
            pytest.skip(str(error))
        return data

    async def test_linked_objects_live_apart(self, backend: Backend) -> None:
        data = await self.linked(backend)
        await backend.link("new/file", "newer/file")
        assert await self.keys(backend) == ["new/file", "newer/file", "old/file"]
        new = await backend.stat("new/file")
        assert new.size == len(data)
        assert abs(new.modified - datetime.now(UTC)) < SKEW
        await backend.delete(["old/file", "newer/file"])
        assert await self.keys(backend) == ["new/file"]
        assert await self.read(backend, "new/file") == data
        await backend.link("new/file", "old/file")
        await backend.delete(["new/file"])
        await backend.put("new/file", b"other", CREATE)
        assert await self.read(backend, "old/file") == data

    async def test_link_is_create_only(self, backend: Backend) -> None:
        await self.linked(backend)
        await backend.put("old/other", b"other", CREATE)
        await backend.put("taken", b"theirs", CREATE)
        for source, target in (("old/file", "taken"), ("old/other", "new/file")):
            before = await self.read(backend, target)
            with pytest.raises(ObjectExists) as caught:
                await backend.link(source, target)
            assert caught.value.key == target
            assert await self.read(backend, target) == before

    async def test_link_finds_no_source(self, backend: Backend) -> None:
        await self.linked(backend)
        for source in ("old/none", "none/file", "old", "old/file/below"):
            with pytest.raises(ObjectNotFound) as caught:
                await backend.link(source, "target/file")
            assert caught.value.key == source
        for source, target in (("old/file", "a//b"), ("a//b", "target/file")):
            with pytest.raises(InvalidKey):
                await backend.link(source, target)
        assert await self.keys(backend) == ["new/file", "old/file"]
        assert (await backend.children()).prefixes == ("new/", "old/")

    async def test_a_repeated_link_finds_its_target(self, backend: Backend) -> None:
        # The answer to the first call may have been lost.
        data = await self.linked(backend)
        await backend.link("old/file", "new/file")
        assert await self.read(backend, "new/file") == data

    async def test_one_of_racing_links_wins(self, backend: Backend) -> None:
        await self.linked(backend)
        for number in range(8):
            await backend.put(f"race/{number}", pattern(1000, seed=number), CREATE)
        winners: list[int] = []

        async def race(number: int) -> None:
            with suppress(ObjectExists):
                await backend.link(f"race/{number}", "race/here")
                winners.append(number)

        async with anyio.create_task_group() as tasks:
            for number in range(8):
                tasks.start_soon(race, number)
        assert len(winners) == 1
        assert await self.read(backend, "race/here") == pattern(1000, seed=winners[0])

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
        few = anyio.CapacityLimiter(8)

        async def put(name: str) -> None:
            async with few:
                await backend.put(name, name.encode(), CREATE)

        async with anyio.create_task_group() as tasks:
            for name in names:
                tasks.start_soon(put, name)
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
