"""Tensors of one element, such as the steps of an optimizer, share an entry and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import ckpipe
from ckpipe.errors import PerRankValue
from tests.support.pipelines import load_existing, loaded_state
from tests.support.rank_pipelines import ranks


def state(rank: int, *, differs: bool = False) -> dict[str, Any]:
    """Ten parameters with steps of odd shapes and layouts, and one step of another dtype."""
    shapes = [(), (1,), (1, 1), (1, 1, 1)]
    steps = [torch.full(shapes[n % 4], float(n)) for n in range(10)]
    if differs:
        steps[3] += rank
    steps[2] = torch.stack([steps[2], steps[2] + 9], dim=-1)[..., 0]  # with strides of its own
    params = {
        f"p{n}": {"step": each, "moment": torch.full((3,), n)} for n, each in enumerate(steps)
    }
    return {"params": params, "other": {"step": torch.tensor(5)}, "own": torch.full((2,), rank)}


def save(root: Path, *, differs: bool = False, **fields: Any) -> None:
    with ranks(str(root), 2, **fields) as world:
        for rank, pipeline in enumerate(world):
            pipeline.save(state(rank, differs=differs), step=1).wait()


def names(root: Path, rank: int) -> list[str]:
    (path,) = root.glob(f"step-*/rank-{rank:05d}.safetensors")
    with safe_open(path, "pt") as file:
        return [name for name in file.keys() if "step" in name]  # noqa: SIM118


@pytest.mark.parametrize("worker", ["thread", "process"])
def test_they_are_one_entry_and_load_as_they_were(tmp_path: Path, worker: str) -> None:
    save(tmp_path, worker=worker)
    for rank in range(2):
        assert sorted(names(tmp_path, rank)) == ["other.step", "params.p0.step~scalars"]
    with ranks(str(tmp_path), 2, attempt_id="later") as world:
        for rank, pipeline in enumerate(world):
            check(loaded_state(pipeline), rank)
            target = state(7)
            for each in target["params"].values():
                each["step"].fill_(-1)
            pipeline.load(target)
            check(target, rank)
    with ckpipe.SyncPipeline(tmp_path) as alone:
        alone.verify(1)
        check(load_existing(alone, exclude=["own"]).state, None)
        only = load_existing(alone, include=["params.p4.step"])
        assert only.state == {"params": {"p4": {"step": torch.tensor(4.0)}}}


def check(found: dict[str, Any], rank: int | None) -> None:
    expected = state(rank or 0)
    steps = [each["step"] for each in found["params"].values()]
    for step, wanted in zip(steps, expected["params"].values(), strict=True):
        assert torch.equal(step, wanted["step"])
        assert step.shape == wanted["step"].shape
    assert len({each.untyped_storage().data_ptr() for each in steps}) == len(steps)
    if rank is not None:
        assert torch.equal(found["own"], expected["own"])


def test_those_that_differ_belong_to_their_ranks(tmp_path: Path) -> None:
    save(tmp_path, differs=True)
    with ranks(str(tmp_path), 2, attempt_id="later") as world:
        for rank, pipeline in enumerate(world):
            found = loaded_state(pipeline)
            assert found["params"]["p3"]["step"].item() == 3 + rank
    with ckpipe.SyncPipeline(tmp_path) as alone, pytest.raises(PerRankValue) as caught:
        alone.load(exclude=["own"])
    assert str(caught.value.key).endswith("step")


def test_a_few_and_those_of_a_single_rank_keep_entries_of_their_own(tmp_path: Path) -> None:
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        pipeline.save(state(0), step=1)
    assert len(names(tmp_path, 0)) == 11


def test_those_of_all_ranks_load_beside_those_of_one(tmp_path: Path) -> None:
    def steps(*experts: int) -> dict[str, Any]:
        names = [f"layers.{n}.bias" for n in range(9)] + [f"experts.{n}.bias" for n in experts]
        return {name: {"step": torch.tensor(float(n))} for n, name in enumerate(names)}

    with ranks(str(tmp_path), 2) as world:
        for rank, pipeline in enumerate(world):
            own = {f"only{rank}": torch.zeros(1)}
            pipeline.save({"state": steps(*range(9 + rank)), "own": own}, step=1).wait()
    assert len(names(tmp_path, 0)) == 2
    with ckpipe.SyncPipeline(tmp_path) as alone:
        target = {"state": {f"layers.{n}.bias": {"step": torch.tensor(-1.0)} for n in range(9)}}
        alone.load(target, include=["state.layers*"])
    assert [each["step"].item() for each in target["state"].values()] == list(range(9))
