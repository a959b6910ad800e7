"""The checksum of each block, which is told to stores that verify requests."""

from __future__ import annotations

import pytest
import torch
from awscrt.checksums import crc32c

import ckpipe
from ckpipe.backend import Upload
from ckpipe.testing import MemoryBackend


class _Told(Upload):
    """An upload that wants to be told checksums, and looks whether they are right."""

    takes_checksums = True

    def __init__(self, inner: Upload, right: list[bool]) -> None:
        self._inner, self._right = inner, right

    async def write(self, offset: int, data: memoryview) -> None:
        raise AssertionError("the checksum is known")

    async def write_summed(self, offset: int, data: memoryview, checksum: int) -> None:
        self._right.append(checksum == crc32c(data))
        await self._inner.write(offset, data)

    async def complete(self) -> None:
        await self._inner.complete()

    async def abort(self) -> None:
        await self._inner.abort()


class _Telling(MemoryBackend):
    """A store in memory that wants to be told the checksums of blocks."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.right: list[bool] = []

    async def open_upload(self, key: str, *, size: int, block_bytes: int) -> Upload:
        upload = await super().open_upload(key, size=size, block_bytes=block_bytes)
        return _Told(upload, self.right)


def _gaps() -> dict[str, torch.Tensor]:
    """Tensors that share memory, with bytes between them that are of none."""
    memory = torch.arange(3 << 20, dtype=torch.uint8)
    return {"bytes": memory[1:-6], "floats": memory.view(torch.float32)[3:-1]}


STATES = {
    "large": {f"{number}": torch.rand(200_000) for number in range(7)} | {"few": torch.ones(3)},
    "small": {f"{number}": torch.full((number % 7,), number) for number in range(5_000)},
    "copied by torch": {f"{n}": torch.rand(1000 + n, 300).t() for n in range(3)},
    "of both kinds": {"a": torch.rand(700, 300).t(), "b": torch.rand(99_999), "c": torch.ones(1)},
    "shared": _gaps(),
}


@pytest.mark.parametrize("kind", STATES)
async def test_a_save_tells_the_store_the_checksum_of_each_block(kind: str) -> None:
    telling: list[_Telling] = []

    def make(url: str) -> _Telling:
        telling.append(_Telling(url))
        return telling[-1]

    scheme = f"telling{list(STATES).index(kind)}"
    ckpipe.register_backend(scheme, make)
    staging = {"block_bytes": 1 << 18}
    async with ckpipe.Pipeline(f"{scheme}://sums", staging=staging) as pipeline:
        handle = await pipeline.save(STATES[kind], step=1, until="committed")
        await pipeline.verify(1)
    assert telling[-1].right == [True] * len(handle.report.blocks)
    assert len(telling[-1].right) >= 2
