"""Random generators of several ranks: no two of them ever draw the same numbers by a load."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckpipe
from ckpipe import SyncPipeline
from ckpipe.errors import PerRankValue, SettingsError, UsageError
from tests.support.pipelines import load_existing
from tests.support.random_numbers import seed
from tests.support.rank_pipelines import ranks

pytestmark = pytest.mark.usefixtures("generators")


def drawn() -> list[float]:
    """A number of each generator, of those that keep one for the next call too."""
    random.gauss(0, 1)
    np.random.standard_normal()
    return [
        random.gauss(0, 1),
        random.random(),
        float(np.random.standard_normal()),
        float(np.random.rand()),
        float(torch.randn(1)),
        float(torch.rand(1)),
    ]


_launches = itertools.count()


def world(root: Path, world_size: int, **fields: Any) -> AbstractContextManager[list[SyncPipeline]]:
    """The ranks of a new launch."""
    return ranks(str(root), world_size, attempt_id=f"launch-{next(_launches)}", **fields)


def save_rank(pipeline: SyncPipeline, number: int, **more: Any) -> None:
    seed(number)
    random.gauss(0, 1)  # which makes two, and keeps one
    np.random.standard_normal()
    pipeline.save({"rng": ckpipe.RngState()} | more, step=1, until="committed")


def saved_by(root: Path, seeds: Sequence[int]) -> None:
    """Save the generators of some ranks."""
    with world(root, len(seeds)) as pipelines:
        for pipeline, number in zip(pipelines, seeds, strict=True):
            save_rank(pipeline, number)


def loaded_by(root: Path, world_size: int, **how: Any) -> list[list[float]]:
    """What each rank of a world draws after a load; each begins with a seed of its own."""
    found = []
    with world(root, world_size) as pipelines:
        for rank, pipeline in enumerate(pipelines):
            seed(1000 + rank)
            assert pipeline.load({"rng": ckpipe.RngState()}, **how) is not None
            found.append(drawn())
    return found


def assert_apart(streams: list[list[float]]) -> None:
    for numbers in zip(*streams, strict=True):
        assert len(set(numbers)) == len(numbers)


@pytest.mark.parametrize("seeds", [[1], [1, 1], [1, 2]])
@pytest.mark.parametrize("policy", ["raise", "rank0"])
def test_generators_of_another_number_of_ranks_are_refused(
    tmp_path: Path, seeds: list[int], policy: Any
) -> None:
    saved_by(tmp_path, seeds)
    with world(tmp_path, 3) as pipelines:
        seed(3)
        expected = drawn()
        for pipeline in pipelines:
            seed(3)
            with pytest.raises(PerRankValue, match=r'generators.*per_rank="derive"') as caught:
                pipeline.load({"rng": ckpipe.RngState()}, per_rank=policy)
            assert (caught.value.step, caught.value.rank) == (1, pipelines.index(pipeline))
            assert str(caught.value.key).startswith("rng.")
            with pytest.raises(PerRankValue):
                pipeline.load(per_rank=policy)
            assert drawn() == expected, "nothing was touched"


@pytest.mark.sample(2)
@pytest.mark.parametrize("seeds", [[1], [1, 1], [1, 2], [1, 2, 3, 4, 5]])
def test_derived_generators_are_different_on_each_rank(tmp_path: Path, seeds: list[int]) -> None:
    saved_by(tmp_path, seeds)
    own = loaded_by(tmp_path, len(seeds))
    if len(set(seeds)) == len(seeds):
        assert_apart(own)
    derived = loaded_by(tmp_path, 3, per_rank="derive")
    assert derived == loaded_by(tmp_path, 3, per_rank="derive"), "each time the same"
    assert_apart([*derived, own[0]])
    by_function = loaded_by(tmp_path, 3, per_rank=lambda label, values: values[0])
    assert by_function == derived
    kept = loaded_by(tmp_path, 3, per_rank="drop")
    assert_apart([*kept, *derived])


@pytest.mark.parametrize("place", ["object", "dict", "nothing", "root", "twice"])
def test_generators_are_derived_wherever_they_are_loaded_to(tmp_path: Path, place: str) -> None:
    rng = ckpipe.RngState()
    state: Any = {"a": {"b": [rng]}, "rng": rng} if place == "twice" else {"a": {"b": [rng]}}
    with SyncPipeline(tmp_path) as pipeline:
        seed(5)
        pipeline.save(rng if place == "root" else state, step=1, until="committed")
    streams = []
    with world(tmp_path, 2, per_rank="derive") as pipelines:
        for pipeline in pipelines:
            target = {
                "object": state,
                "twice": state,
                "dict": {"a": {"b": [rng.state_dict()]}},
                "nothing": None,
                "root": rng,
            }[place]
            result = load_existing(pipeline, target, exclude=["a"] if place == "twice" else None)
            if place in ("dict", "nothing"):
                rng.load_state_dict(result.state["a"]["b"][0])
            streams.append(drawn())
    assert_apart(streams)


def test_a_part_of_the_generators_is_not_derived(tmp_path: Path) -> None:
    saved_by(tmp_path, [1])
    state = {"rng": ckpipe.RngState()}
    with world(tmp_path, 2) as pipelines, pytest.raises(PerRankValue, match=r"rng\.torch"):
        pipelines[1].load(state, include=["rng.torch"], per_rank="derive")


def test_generators_that_only_one_rank_saved_are_not_given_to_the_other(tmp_path: Path) -> None:
    with world(tmp_path, 2) as pipelines:
        save_rank(pipelines[0], 1)
        pipelines[1].save({"other": 1}, step=1, until="committed")
    with world(tmp_path, 2) as pipelines:
        state = {"rng": ckpipe.RngState()}
        assert pipelines[0].load(state) is not None
        own = drawn()
        with pytest.raises(PerRankValue, match="saved by another rank"):
            pipelines[1].load({"rng": ckpipe.RngState(), "other": 0})
        assert pipelines[1].load({"rng": ckpipe.RngState(), "other": 0}, per_rank="derive")
        assert_apart([own, drawn()])


def test_values_that_a_derivation_does_not_know_are_refused_or_combined(tmp_path: Path) -> None:
    with world(tmp_path, 2) as pipelines:
        for rank, pipeline in enumerate(pipelines):
            save_rank(pipeline, rank, position=10 + rank)
    streams = []
    with world(tmp_path, 3) as pipelines:
        for pipeline in pipelines:
            state = {"rng": ckpipe.RngState(), "position": 0}
            with pytest.raises(PerRankValue, match="position"):
                pipeline.load(state, per_rank="derive")
            pipeline.load(state, per_rank=lambda label, values: min(values))
            assert state["position"] == 10
            streams.append(drawn())
    assert_apart(streams)


def test_one_rank_gets_the_generators_of_rank_0_if_it_asks_for_them(tmp_path: Path) -> None:
    saved_by(tmp_path, [1, 2])
    (own, _) = loaded_by(tmp_path, 2)
    assert loaded_by(tmp_path, 1, per_rank="rank0") == [own]


def test_what_becomes_of_values_of_ranks_is_a_setting(tmp_path: Path) -> None:
    saved_by(tmp_path, [1])
    with world(tmp_path, 2, per_rank="derive") as pipelines:
        state = {"rng": ckpipe.RngState()}
        assert pipelines[0].load(state) is not None
        with pytest.raises(PerRankValue):
            pipelines[0].load(state, per_rank="raise")
        with pytest.raises(UsageError, match="'derive' or a function"):
            pipelines[0].load(state, per_rank="rank1")  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="per_rank"):
        ckpipe.Settings(per_rank="rank1")  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_generators_of_devices_are_derived(tmp_path: Path) -> None:
    torch.cuda.manual_seed_all(9)
    saved_by(tmp_path, [1])
    streams = [torch.rand(3, device="cuda").tolist()]
    with world(tmp_path, 2, per_rank="derive") as pipelines:
        for pipeline in pipelines:
            assert pipeline.load({"rng": ckpipe.RngState()}) is not None
            streams.append(torch.rand(3, device="cuda").tolist())
    assert_apart(streams)
