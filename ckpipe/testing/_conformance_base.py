"""What the tests of the contract share."""

from __future__ import annotations

import random
from datetime import timedelta

import anyio

from ckpipe.backend import Backend, PutMode, Upload

CREATE, OVERWRITE = PutMode.CREATE, PutMode.OVERWRITE
SKEW = timedelta(minutes=5)
"""How far the store's clock may be from ours."""


def pattern(size: int, seed: int = 0) -> bytes:
    """Bytes that look random and are the same in every run."""
    return random.Random(seed).randbytes(size)


class ConformanceBase:
    """How the tests write and read."""

    async def upload(self, backend: Backend, key: str, data: bytes) -> None:
        """Uploads data whole, its blocks at the same time and the last first."""
        upload = await self.written(backend, key, data)
        await upload.complete()

    async def written(self, backend: Backend, key: str, data: bytes) -> Upload:
        """Begins an upload and writes all its blocks."""
        block = self.block_bytes(backend)
        upload = await backend.open_upload(key, size=len(data), block_bytes=block)
        async with anyio.create_task_group() as tasks:
            for offset in reversed(range(0, len(data), block)):
                part = memoryview(data)[offset : offset + block]
                tasks.start_soon(upload.write, offset, part)
        return upload

    def block_bytes(self, backend: Backend) -> int:
        """The size of the blocks that the tests use, in bytes."""
        return max(backend.limits.min_block_bytes, 1 << 16)

    async def keys(self, backend: Backend, prefix: str = "") -> list[str]:
        """The keys below a prefix, sorted."""
        return sorted([info.key async for info in backend.list(prefix)])

    async def read(self, backend: Backend, key: str) -> bytes:
        """A whole object, by its own size."""
        info = await backend.stat(key)
        buffer = bytearray(info.size)
        await backend.read_into(key, 0, memoryview(buffer))
        return bytes(buffer)
