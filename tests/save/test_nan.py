"""NaN are counted in each save, and told: of each dtype, wherever they lie, and nothing else."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpipe
from ckpipe import events
from tests.support.wrapper_tensors import halves, scaled

MIB, BLOCK = 1 << 20, 64 << 10
NAN = math.nan
DTYPES = [
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn,
    torch.float8_e5m2,
]  # fmt: skip


def counts(root: Path, step: int) -> dict[str, int]:
    """The NaN of each tensor that has some."""
    return {each.label: each.nan for each in ckpipe.inspect(root, step).tensors if each.nan}


@pytest.mark.parametrize(
    ("worker", "room"), [("thread", None), ("thread", 8 * BLOCK), ("process", 8 * BLOCK)]
)
def test_an_element_of_each_dtype_at_each_place(
    tmp_path: Path, worker: Any, room: int | None
) -> None:
    """At the first and last place of blocks and mebibytes; device copies are joined here too."""
    size = MIB + 3 * BLOCK
    state = {str(each): torch.zeros(size // each.itemsize, dtype=each) for each in DTYPES}
    state["turned"] = torch.zeros(300, 200).t()
    staging = {"block_bytes": BLOCK, "bytes": room}
    settings: dict[str, Any] = {"staging": staging, "worker": worker}
    with ckpipe.SyncPipeline(tmp_path, **settings) as pipeline:
        pipeline.save(state, step=0).wait()
        # Blocks begin in the file, behind its header; mebibytes in each tensor.
        file = next(tmp_path.rglob("*.safetensors")).read_bytes()
        header = 8 + int.from_bytes(file[:8], "little")
        expected = {}
        for number, dtype in enumerate(DTYPES):
            start = header + number * size  # the widest lie first, and then in their order
            edges = {0, MIB, size} | {
                block * BLOCK - start
                for block in range(len(file) // BLOCK + 1)
                if 0 <= block * BLOCK - start <= size
            }
            item = dtype.itemsize
            places = {each // item for each in edges} | {each // item - 1 for each in edges}
            places = {each for each in places if 0 <= each < size // item}
            tensor = state[str(dtype)]
            tensor[list(places)] = torch.tensor(NAN, dtype=dtype)
            expected[str(dtype)] = len(places)
        state["turned"][7, 11] = NAN
        expected["turned"] = 1
        info = pipeline.save(state, step=1).wait()
        assert info.nan == ckpipe.inspect(tmp_path, 1).nan == sum(expected.values())
    assert counts(tmp_path, 0) == {}
    assert counts(tmp_path, 1) == expected


def test_nothing_else_counts(tmp_path: Path) -> None:
    mask = torch.full((64, 64), -math.inf).triu(1)
    memory = torch.full((40,), NAN)
    state = {
        "mask": mask,
        "large": torch.tensor([torch.finfo(torch.float32).max, math.inf]),
        "e4m3": torch.tensor([448.0, -448.0]).to(torch.float8_e4m3fn),
        "e5m2": torch.tensor([math.inf, -math.inf]).to(torch.float8_e5m2),
        "codes": torch.full((100,), -1, dtype=torch.int16),
        "complex": torch.full((5,), complex(NAN, NAN)),
        "value": NAN,
        "windows": [memory[:30], memory[20:]],
    }
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        assert pipeline.save(state, step=0, metrics={"loss": NAN}).wait().nan == 0
    assert b'"nan":[[' not in next(tmp_path.glob("*.json")).read_bytes()
    assert b'"nan":' not in next(tmp_path.glob(".ckpipe/digests/*")).read_bytes()


def test_wrapper_tensors_and_views_that_cover_their_memory(tmp_path: Path) -> None:
    wrapper, both = scaled(), halves()
    wrapper.scale[:2] = NAN
    both.second[1] = NAN
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        assert pipeline.save({"scaled": wrapper, "halves": both}, step=0).wait().nan == 3
    expected = {"scaled.scale": 2, "halves.whole": 1, "halves.second": 1}
    assert counts(tmp_path, 0) == expected


def test_ignored_labels_and_no_check(tmp_path: Path) -> None:
    state = {
        "model": {"mask": torch.tensor([NAN]), "w@1": torch.tensor([NAN, 1.0])},
        "steps": {str(n): torch.tensor(NAN) for n in range(9)},
    }
    settings: list[tuple[dict[str, Any], int]] = [
        ({}, 11),
        ({"ignore": ["*.mask"]}, 10),
        ({"ignore": ["model"]}, 9),
        ({"ignore": ["model.*", "steps"]}, 0),
        ({"check": False}, 0),
    ]
    for number, (setting, expected) in enumerate(settings):
        with ckpipe.SyncPipeline(tmp_path / str(number), nan=setting) as pipeline:
            assert pipeline.save(state, step=0).wait().nan == expected, setting
    with pytest.raises(ckpipe.errors.SettingsError, match=r"nan\.ignore"):
        ckpipe.Settings(nan={"ignore": "*.mask"})


def test_infos_and_events_tell_the_count(tmp_path: Path) -> None:
    seen: list[events.Event] = []
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        pipeline.events.add(seen.append)
        pipeline.save({"a": torch.tensor([NAN, 0.0, NAN])}, step=0).wait()
        pipeline.save({"a": torch.zeros(3)}, step=1).wait()
        found = [each.info.nan for each in seen if isinstance(each, events.Completed)]
        assert found == [2, 0]
        assert [each.nan for each in pipeline.steps()] == [2, 0]
    with ckpipe.SyncPipeline(tmp_path, read_only=True) as pipeline:
        assert [each.nan for each in pipeline.steps()] == [2, 0]
        assert [each.nan for each in pipeline.steps(metadata=True)] == [2, 0]


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]


@pytest.mark.parametrize("worker", ["thread", "process"])
def test_the_first_nan_of_a_launch_is_one_warning(
    tmp_path: Path, worker: Any, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"a": torch.zeros(3), "b": torch.tensor([0.0, NAN, NAN]), "c": torch.tensor([NAN])}
    for launch, sound in enumerate([True, False]):
        caplog.clear()
        with ckpipe.SyncPipeline(tmp_path / str(launch), worker=worker) as pipeline:
            if sound:
                name = pipeline.save({"a": torch.zeros(3)}, step=0).wait().id
            for step in (1, 2):
                last = pipeline.save(state, step=step)
                last.wait()
        (told,) = warnings_of(caplog)
        assert "has 3 NaN, 2 of them in b of rank 0, the first tensor with some" in told
        known = f"load(without_nan=True) loads {name}" if sound else "no complete checkpoint is"
        assert known in told


def test_files_that_are_linked_keep_their_counts(tmp_path: Path) -> None:
    state = {"a": torch.zeros(1 << 20), "b": torch.full((1 << 19,), NAN)}
    state["a"][5] = NAN
    with ckpipe.SyncPipeline(
        tmp_path, incremental=True, staging={"block_bytes": 1 << 20}
    ) as pipeline:
        for step in range(4):
            state["a"] += 1
            assert pipeline.save(state, step=step).wait().nan == (1 << 19) + 1
    assert ckpipe.inspect(tmp_path).linked_bytes
    assert counts(tmp_path, 3) == {"a": 1, "b": 1 << 19}
