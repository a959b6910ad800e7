"""Devices that cannot read an object, for ever: damage if others can be read, else the store's."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpipe
from ckpipe import errors
from ckpipe.testing.wrappers import Operation
from tests.support.pipelines import Stores, load_existing, same
from tests.support.rank_pipelines import ranks

FAST: dict[str, Any] = {"upload": {"backoff_seconds": 0, "retries": 2}, "load": {"lanes": 1}}
BAD_BLOCKS = [errno.EIO, errno.ENODATA, errno.EBADMSG, errno.EILSEQ, errno.EUCLEAN]


def state(step: int) -> dict[str, torch.Tensor]:
    return {"a": torch.full((1_200_000,), float(step)), "b": torch.full((9,), float(step)).double()}


def blank() -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(each) for name, each in state(0).items()}


def save_two(url: str | Path) -> tuple[str, str]:
    with ckpipe.SyncPipeline(url, **FAST) as pipeline:
        first, second = (pipeline.save(state(step), step=step).wait().id for step in (1, 2))
    return first, second


def unreadable(key: str) -> errors.StoreError:
    error = errors.StoreError("The device fails", key=key)
    error.unreadable = error.transient = True
    return error


def reads(begin: str, end: str = "") -> Callable[[Operation], bool]:
    return lambda operation: (
        operation.verb in ("get", "read_into")
        and operation.key.startswith(begin)
        and operation.key.endswith(end)
    )


@pytest.mark.parametrize("end", [".safetensors", ".json"])
@pytest.mark.parametrize("into", [False, True])
def test_one_object_is_damage(store: Stores, end: str, into: bool) -> None:
    _, second = save_two(store.url)
    key = second + ("/rank-00000.safetensors" if end == ".safetensors" else ".json")
    store.faulty.fail(unreadable(key), reads(second, end), times=None)
    with ckpipe.SyncPipeline(store.url, read_only=True, **FAST) as pipeline:
        for call in (lambda: pipeline.load(blank() if into else None), lambda: pipeline.verify(2)):
            with pytest.raises(errors.CorruptCheckpoint, match="cannot be read") as caught:
                call()
            assert (caught.value.step, caught.value.key) == (2, key)
        assert pipeline.verify(1).files == 1
        with pytest.warns(RuntimeWarning, match="cannot be read"):
            result = load_existing(pipeline, blank() if into else None, fallback=True)
    assert result.report is not None
    assert (result.step, list(result.report.damaged)) == (1, [second])
    assert same(result.state, state(1))


@pytest.mark.parametrize("fallback", [False, True])
@pytest.mark.parametrize("nth", [1, 2])
def test_a_store_that_reads_nothing_any_more_is_no_damage(
    store: Stores, fallback: bool, nth: int
) -> None:
    _, second = save_two(store.url)
    target, key = blank(), f"{second}/rank-00000.safetensors"

    seen: list[Operation] = []

    def fails(operation: Operation) -> bool:
        seen.extend([operation] if reads(key)(operation) else [])
        return len(seen) >= nth and reads("")(operation)

    store.faulty.fail(unreadable(key), fails, times=None)
    fields = FAST | {"staging": {"block_bytes": 2 << 20}}
    with (
        ckpipe.SyncPipeline(store.url, read_only=True, **fields) as pipeline,
        pytest.raises(errors.StoreError, match="The device fails") as caught,
    ):
        pipeline.load(target, fallback=fallback)
    assert caught.value.key == key
    assert caught.value.target_touched is bool(target["b"].any()) is (nth == 2)


def test_an_error_that_passes_is_none(store: Stores) -> None:
    _, second = save_two(store.url)
    store.faulty.fail(unreadable("x"), reads(second, ".safetensors"), times=2)
    with ckpipe.SyncPipeline(store.url, read_only=True, **FAST) as pipeline:
        result = load_existing(pipeline, fallback=True)
    assert result.step == 2


def test_verify_names_all_files(store: Stores) -> None:
    with ranks(store.url, 3, attempt_id="three", **FAST) as world:
        for rank, pipeline in enumerate(world):
            pipeline.save({"mine": torch.full((9,), rank)}, step=1)
    data = reads("step-000000000001", "0.safetensors")
    store.faulty.fail(unreadable("step-1/rank-00000.safetensors"), data, times=None)
    objects = store.memory._store.objects
    (key,) = [key for key in objects if key.endswith("2.safetensors")]
    objects[key] = type(objects[key])(objects[key].data[:-1] + b"x", objects[key].modified)
    with (
        ckpipe.SyncPipeline(store.url, read_only=True, **FAST) as pipeline,
        pytest.raises(errors.CorruptCheckpoint, match=f"damaged are also {key}") as caught,
    ):
        pipeline.verify(1)
    assert caught.value.key == "step-1/rank-00000.safetensors"


@pytest.mark.parametrize("code", BAD_BLOCKS, ids=map(errno.errorcode.get, BAD_BLOCKS))
def test_bad_blocks_of_a_local_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    _, second = save_two(tmp_path)
    system, tries = os.preadv, []

    def preadv(descriptor: int, buffers: Any, offset: int, flags: int = 0) -> int:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if second in path and offset + sum(map(len, buffers)) > 4_000_000:
            tries.append(path)
            raise OSError(code, os.strerror(code))
        return system(descriptor, buffers, offset, flags)

    monkeypatch.setattr(os, "preadv", preadv)
    fields = FAST | {"staging": {"block_bytes": 2 << 20}}
    with ckpipe.SyncPipeline(tmp_path, read_only=True, **fields) as pipeline:
        target = blank()
        with pytest.raises(errors.CorruptCheckpoint, match=os.strerror(code)) as caught:
            pipeline.load(target)
        assert caught.value.target_touched is bool(target["b"].any()) is True
        assert len(tries) == 4  # one by a thread, and three requests
        with pytest.warns(RuntimeWarning, match="cannot be read"):
            load_existing(pipeline, target, fallback=True)
        assert same(target, state(1))
