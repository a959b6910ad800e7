"""What a CheckpointInfo says of what was saved, wherever it comes from."""

from __future__ import annotations

import gc
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpipe
from tests.support.rank_pipelines import ranks

SHORT: dict[str, Any] = {"metrics": {"loss": 0.5}, "metadata": {"tokens": [1, 2]}}
LONG: dict[str, Any] = {**SHORT, "metadata": {"log": "x" * 5_000}}


def said(info: ckpipe.CheckpointInfo | None) -> tuple[Any, ...]:
    assert info is not None
    return info.metrics, info.metadata, info.bytes, info.world_size


def data_bytes(root: Path, step: int) -> int:
    files = root.glob(f"step-{step:012d}.*/*.safetensors")
    return sum(file.stat().st_size for file in files)


@pytest.mark.parametrize(
    ("worker", "given"), [("thread", SHORT), ("thread", LONG), ("process", LONG)]
)
def test_infos_say_what_was_saved(tmp_path: Path, worker: Any, given: Any) -> None:
    with ckpipe.SyncPipeline(tmp_path, worker=worker) as pipeline:
        told: list[Any] = []
        pipeline.on_complete(lambda event: told.append(said(event.info)))
        handle = pipeline.save({"w": torch.zeros(7)}, 1, **given)
        first, whole = handle.wait(), handle.wait_complete()
        assert first == whole
        assert len({first, whole}) == 1
        expected = (given["metrics"], given["metadata"], data_bytes(tmp_path, 1), 1)
        assert said(first) == said(whole) == said(pipeline.latest()) == expected
        plain = pipeline.save({"w": torch.zeros(7)}, 2).wait()
        assert first != plain
        assert said(plain) == ({}, {}, data_bytes(tmp_path, 2), 1)
    assert told == [expected, said(plain)]
    with ckpipe.SyncPipeline(tmp_path, read_only=True) as pipeline:
        assert pipeline.steps() == [first, plain]
        assert said(pipeline.steps()[0]) == (expected[0], None, *expected[2:])
        assert said(pipeline.steps(metadata=True)[0]) == expected
        assert said(pipeline.latest()) == said(plain)
        assert said(pipeline.best("loss")) == said(pipeline.choose(1)) == expected
        assert said(pipeline.steps(metadata=True)[0]) == expected


@pytest.mark.parametrize("worker", ["thread", "process"])
def test_the_info_of_a_commit_needs_no_read_of_its_index(tmp_path: Path, worker: Any) -> None:
    with ckpipe.SyncPipeline(tmp_path, worker=worker) as pipeline:
        handle = pipeline.save({"w": torch.zeros(7)}, 1, **LONG)
        first = handle.wait()
        (index,) = tmp_path.glob("step-*.json")
        index.write_bytes(b"{}")
        whole = handle.wait_complete()
        assert not whole.reason
        assert said(whole) == said(first) == (*LONG.values(), data_bytes(tmp_path, 1), 1)
        assert whole.metadata is not first.metadata


def test_long_metadata_are_not_kept_in_memory(tmp_path: Path) -> None:
    """A trainer may put its whole log into the metadata of each checkpoint."""
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        for step in range(25):
            if step == 5:
                tracemalloc.start()
            pipeline.save({}, step, metadata={"log": f"{step:03}" * 50_000}).wait()
        assert len(pipeline.prune().keep) == 25
        gc.collect()
        held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert held < 1_500_000  # all of them have 3 MB


@pytest.mark.parametrize("given", [SHORT, LONG])
def test_what_is_not_known_is_not_made_up(tmp_path: Path, given: Any) -> None:
    with ranks(str(tmp_path), 2) as pipelines:
        handle = pipelines[0].save({"w": torch.zeros(7)}, 1, **given)
        first = handle.wait()
        assert said(first) == (None, None, None, None)
        assert said(pipelines[0].steps(metadata=True)[0]) == (None, None, None, None)
        pipelines[1].save({"w": torch.zeros(7)}, 1).wait()
        whole = handle.wait_complete(60)
        assert first == whole
        expected = (given["metrics"], given["metadata"], data_bytes(tmp_path, 1), 2)
        assert said(whole) == said(pipelines[1].latest()) == expected
    (index,) = tmp_path.glob("step-*.json")
    index.write_bytes(b"{}")
    with ckpipe.SyncPipeline(tmp_path, read_only=True) as pipeline:
        assert said(pipeline.latest()) == (None, None, None, None)
        assert said(pipeline.steps(metadata=True)[0]) == (None, None, None, None)


async def test_a_handle_gives_equal_infos_however_it_is_awaited(tmp_path: Path) -> None:
    async with ckpipe.Pipeline(tmp_path) as pipeline:
        handle = await pipeline.save({"w": torch.zeros(7)}, 3)
        assert await handle == await handle.complete()
        result = await pipeline.load(None, 3)
        assert result is not None
        assert result.step == 3


@pytest.mark.parametrize("length", [1, 5000])
def test_a_changed_info_changes_no_later_one(length: int, tmp_path: Path) -> None:
    kept = {"log": ["x" * length]}
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        pipeline.save({"w": torch.ones(1)}, metrics={"loss": 1.0}, metadata=kept).wait()
        for _ in range(2):
            for info in (
                pipeline.best("loss", mode="min"), pipeline.latest(),
                *pipeline.steps(metadata=True),
            ):  # fmt: skip
                assert info is not None
                assert (info.metadata, info.metrics) == (kept, {"loss": 1.0})
                assert isinstance(info.metrics, dict)
                assert info.metadata is not None
                info.metrics["loss"] = 2.0
                info.metadata["log"].clear()
