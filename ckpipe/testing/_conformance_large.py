"""The contract of :mod:`ckpipe.backend` as tests: large objects, and reads of their ranges."""

from __future__ import annotations

import contextlib
import random
from datetime import UTC, datetime, timedelta

import anyio
import pytest
from anyio import to_thread

from ckpipe.backend import Backend
from ckpipe.errors import ObjectExists, ObjectNotFound, TruncatedObject
from ckpipe.format.checksum import crc32c
from ckpipe.testing._conformance_base import CREATE, OVERWRITE, SKEW, ConformanceBase, pattern


class LargeObjectConformance(ConformanceBase):
    """Tests uploads and reads."""

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
        data = pattern(9 * block + 5)  # so many that the number of one has two digits
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
        upload = await self.written(backend, "data/file", pattern(1000, seed=1))
        await backend.remove_stale_uploads("", before=datetime.now(UTC) + SKEW)
        await upload.abort()
        assert await self.keys(backend) == []
        assert await backend.remove_stale_uploads("", before=datetime.now(UTC) + SKEW) == 0

    async def test_young_uploads_are_left_alone(self, backend: Backend) -> None:
        upload = await self.written(backend, "data/file", pattern(1000))
        assert await backend.remove_stale_uploads("", before=datetime.now(UTC) - SKEW) == 0
        await upload.complete()
        assert await self.read(backend, "data/file") == pattern(1000)

    async def test_cleaning_up_leaves_objects(self, backend: Backend) -> None:
        await self.upload(backend, "data/file", pattern(1000))
        await backend.put("data/small", b"x", CREATE)
        assert await backend.remove_stale_uploads("", before=datetime.now(UTC) + SKEW) == 0
        assert await self.keys(backend) == ["data/file", "data/small"]

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

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(overwrite)
            for _ in range(20):
                buffer = bytearray(40_000)
                await backend.read_into("a", 5_000, memoryview(buffer))
                assert len(set(buffer)) == 1

    @pytest.mark.parametrize(
        ("offset", "size"), [(0, 1001), (1, 1000), (999, 2), (1000, 1), (0, 8192), (100_000, 1)]
    )
    async def test_read_beyond_the_end(self, backend: Backend, offset: int, size: int) -> None:
        await self.upload(backend, "data/file", pattern(1000))
        with pytest.raises(TruncatedObject, match="1000") as caught:
            await backend.read_into("data/file", offset, memoryview(bytearray(size)))
        assert caught.value.key == "data/file"

    async def test_threads_read_the_same(self, backend: Backend) -> None:
        data = pattern(100_001)
        await self.upload(backend, "data/file", data)

        async def read(key: str, offset: int, size: int) -> bytes | None:
            buffer = bytearray(size)
            done = await to_thread.run_sync(backend.read_here, key, offset, memoryview(buffer))
            return bytes(buffer) if done else None

        for offset, size in ((0, 100_001), (4096, 4096), (5, 77_777), (100_000, 1)):
            assert await read("data/file", offset, size) in (None, data[offset : offset + size])
        with contextlib.suppress(TruncatedObject):
            assert await read("data/file", 99_999, 3) is None
        with contextlib.suppress(ObjectNotFound):
            assert await read("data/missing", 0, 1) is None

    async def test_cached_range_agrees_with_read(self, backend: Backend) -> None:
        data = pattern(100_001)
        await backend.put("data/file", data, CREATE)
        for offset, size in ((0, 100_001), (4096, 4096), (5, 77_777), (100_000, 1)):
            found = await backend.cached("data/file", offset, size)
            if found is not None:
                for at in (0, size // 2, size - 1):
                    buffer = bytearray(size - at)
                    await to_thread.run_sync(found.read_into, at, memoryview(buffer))
                    assert buffer == data[offset + at : offset + size]

    async def test_cached_range_outlives_the_object(self, backend: Backend) -> None:
        data = pattern(100_001)
        await backend.put("data/file", data, CREATE)
        found = await backend.cached("data/file", 1, 100_000)
        await backend.delete(["data/file"])
        if found is not None:
            buffer = bytearray(100_000)
            await to_thread.run_sync(found.read_into, 0, memoryview(buffer))
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
        with contextlib.suppress(ObjectNotFound):
            assert await backend.cached(key, 0, 1) is None

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
