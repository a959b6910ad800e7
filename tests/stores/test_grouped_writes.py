"""Blocks that wait for a lane are written together, by stores that like that."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import ckpipe
from ckpipe.backend import Upload
from ckpipe.errors import StoreUnavailable
from ckpipe.testing import Gate, MemoryBackend
from tests.support.pipelines import loaded_state, same

BLOCK = 1 << 16
STATE = {f"{number}": torch.rand(10_000) for number in range(40)}


class _Grouped(Upload):
    """An upload that takes three blocks at a time, and fails once in the middle of three."""

    most_blocks = 3

    def __init__(self, inner: Upload, store: _Grouping) -> None:
        self._inner, self._store = inner, store

    async def write(self, offset: int, data: memoryview) -> None:
        await self.write_all([(offset, data)])

    async def write_all(self, blocks: Sequence[tuple[int, memoryview]]) -> None:
        await self._store.gate.passed()
        group = [offset for offset, _ in blocks]
        self._store.groups.append(group)
        fails = len(group) == 3 and self._store.failed is None
        if fails:
            self._store.failed = group
        for offset, data in blocks[: 1 if fails else None]:
            await self._inner.write(offset, data)
        if fails:
            raise StoreUnavailable("not now")

    async def complete(self) -> None:
        await self._inner.complete()

    async def abort(self) -> None:
        await self._inner.abort()


class _Grouping(MemoryBackend):
    """A store in memory of such uploads, whose writes wait at a gate."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.gate, self.groups = Gate(), list[list[int]]()
        self.failed: list[int] | None = None

    async def open_upload(self, key: str, *, size: int, block_bytes: int) -> Upload:
        upload = await super().open_upload(key, size=size, block_bytes=block_bytes)
        return _Grouped(upload, self)


def test_blocks_that_wait_are_written_together_and_again_if_that_fails() -> None:
    made: list[_Grouping] = []

    def make(url: str) -> _Grouping:
        made.append(_Grouping(url))
        return made[-1]

    ckpipe.register_backend("grouping", make)
    staging = {"block_bytes": BLOCK}
    with ckpipe.SyncPipeline("grouping://lanes", worker="thread", staging=staging) as pipeline:
        made[-1].gate.hold()
        handle = pipeline.save(STATE, step=1, until="staged")
        made[-1].gate.release()
        handle.wait()
        pipeline.verify(1)
        loaded = loaded_state(pipeline)
    assert same(loaded, STATE)
    groups = made[-1].groups
    offsets = [offset for group in groups for offset in group]
    assert max(map(len, groups)) == 3
    assert set(offsets) == set(range(0, max(offsets) + 1, BLOCK))
    assert groups.count(made[-1].failed or []) == 2
    # The last blocks are shared out among the lanes.
    assert len([group for group in groups if group != made[-1].failed][-1]) == 1


@pytest.mark.parametrize("direct", [True, False])
def test_local_files_are_the_same_however_their_blocks_are_written(
    tmp_path: Path, direct: bool
) -> None:
    images = []
    for overlap, lanes in ((True, 1), (False, 1), (False, 3)):
        root = tmp_path / f"{overlap}-{lanes}"
        staging = {"block_bytes": BLOCK, "overlap": overlap}
        backends = {"file": {"direct": direct}}
        with ckpipe.SyncPipeline(
            root, staging=staging, upload={"lanes": lanes}, backends=backends
        ) as pipeline:
            pipeline.save(STATE, step=1).wait()
            pipeline.verify(1)
        (path,) = root.glob("step-*/*.safetensors")
        images.append(path.read_bytes())
    assert images[0] == images[1] == images[2]
