"""Stores that limit the blocks of an upload: their number and their size are kept to."""

from __future__ import annotations

import itertools
from pathlib import Path

import anyio
import pytest
import torch

import ckpipe
from ckpipe.backend import Upload, UploadLimits
from ckpipe.errors import StoreError, UnsupportedState
from ckpipe.testing import MemoryBackend
from tests.support.command_line import Commands
from tests.support.pipelines import loaded_state, same

KIB = 1 << 10
_numbers = itertools.count()
_opened = dict[str, MemoryBackend]()


class NarrowBackend(MemoryBackend):
    """A store that takes at most three blocks in one upload, and no small ones."""

    limits = UploadLimits(min_block_bytes=100 * KIB, max_blocks=3)

    async def open_upload(self, key: str, *, size: int, block_bytes: int) -> Upload:
        if block_bytes < 100 * KIB or size > 3 * block_bytes:
            raise StoreError(f"{size} bytes in blocks of {block_bytes} are too much", key=key)
        return await super().open_upload(key, size=size, block_bytes=block_bytes)


@pytest.fixture
def url() -> str:
    scheme = f"narrow{next(_numbers)}"
    url = f"{scheme}://"
    backend = _opened[url] = NarrowBackend()
    ckpipe.register_backend(scheme, lambda url: backend)
    return url


def files_of(url: str) -> dict[str, int]:
    """The sizes of the data files on the store."""

    async def listed() -> dict[str, int]:
        return {
            info.key.rpartition("/")[2]: info.size
            async for info in _opened[url].list()
            if info.key.endswith(".safetensors")
        }

    return anyio.run(listed)


@pytest.mark.parametrize("block_kib", [64, 128])
def test_a_rank_writes_as_many_files_as_its_store_needs(url: str, block_kib: int) -> None:
    state = {f"{number}": torch.randn(100, 128) for number in range(20)}
    staging = {"block_bytes": block_kib * KIB}
    with ckpipe.SyncPipeline(url, staging=staging, keep_last=1) as pipeline:
        for step in (1, 2):
            pipeline.save(state, step=step).wait()
        files = files_of(url)
        assert len(files) == (4 if block_kib == 64 else 3)
        assert all(size <= 3 * 128 * KIB for size in files.values())
        pipeline.verify(2)
        loaded = loaded_state(pipeline)
    assert same(loaded, state)


def test_a_tensor_that_no_upload_holds_is_refused_before_anything_is_written(url: str) -> None:
    state = {"small": torch.zeros(8), "embedding": torch.zeros(200, 1024)}
    with ckpipe.SyncPipeline(url, staging={"block_bytes": 128 * KIB}) as pipeline:
        with pytest.raises(UnsupportedState, match=r"embedding.*staging\.block_bytes"):
            pipeline.save(state, step=1, until="committed")
        assert files_of(url) == {}
        pipeline.save({"small": torch.zeros(8)}, step=2, until="committed")


@pytest.mark.parametrize("count", [40_000, 1_000_000])
def test_blocks_of_a_copy_keep_to_them_too(
    call: Commands, tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        pipeline.save({"weight": torch.zeros(count)}, step=1).wait()
    monkeypatch.setenv("CKPIPE_STAGING__BLOCK_BYTES", "65536")
    assert call("cp", tmp_path, url).code == 0
    assert call("verify", url).code == 0
