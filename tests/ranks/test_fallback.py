"""Falling back from damaged checkpoints on several ranks: all take the same, and say why."""

from __future__ import annotations

import concurrent.futures
import itertools
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpipe
from ckpipe import errors, events
from ckpipe.testing import Landing
from ckpipe.testing.wrappers import Operation
from tests.support.pipelines import Stores, same, values
from tests.support.rank_pipelines import ranks
from tests.support.settling import settle

FAST: dict[str, Any] = {
    "upload": {"backoff_seconds": 0, "retries": 2},
    "staging": {"block_bytes": 65536},
}
Result = ckpipe.types.LoadResult | BaseException | None


def state(rank: int, step: int) -> dict[str, Any]:
    return {"mine": torch.full((100,), rank * 100 + step), "rank": rank}


def save_steps(store: Stores, size: int, steps: list[int]) -> list[str]:
    """Save some steps with all ranks; the ids of the checkpoints."""
    with ranks(store.url, size, attempt_id="before", **FAST) as world:
        found = []
        for step in steps:
            for rank, pipeline in enumerate(world):
                found.append(pipeline.save(state(rank, step), step=step).wait().id)
                settle(pipeline)
    return found[::size]


def damage(store: Stores, name: str, rank: int, at: int = -5) -> None:
    """Flip a bit of what a rank wrote."""
    (key,) = [
        key
        for key in store.memory._store.objects
        if key.startswith(f"{name}/rank-{rank:05d}") and key.endswith(".safetensors")
    ]
    found = store.memory._store.objects[key]
    flipped = bytearray(found.data)
    flipped[at] ^= 4
    store.memory._store.objects[key] = type(found)(bytes(flipped), found.modified)


def load_all(
    world: list[ckpipe.SyncPipeline], *targets: Any, fallback: bool = True
) -> list[Result]:
    """Load on all ranks at once; what each got, or what it raised."""

    def load(pipeline: ckpipe.SyncPipeline, target: Any) -> Result:
        try:
            return pipeline.load(target, fallback=fallback)
        except errors.CkpipeError as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(len(world)) as pool:
        return list(pool.map(load, world, targets or [None] * len(world)))


def test_damage_on_one_rank_sends_all_to_the_next_older_one(store: Stores) -> None:
    names = save_steps(store, 3, [1, 2, 3])
    damage(store, names[2], 1)
    damage(store, names[1], 2)
    seen: list[events.Event] = []
    with ranks(store.url, 3, **FAST) as world:
        for pipeline in world:
            pipeline.events.add(seen.append)
        with pytest.warns(RuntimeWarning, match="is damaged"):
            results = load_all(world)
        for rank, result in enumerate(results):
            assert isinstance(result, ckpipe.types.LoadResult)
            assert result.step == 1
            assert same(result.state, state(rank, 1))
            assert result.report is not None
            assert list(result.report.damaged) == [names[2], names[1]]
            assert result.report.damaged[names[2]].startswith("rank 1 found ChecksumMismatch")
            assert "rank-00002" in result.report.damaged[names[1]]
        told = {(each.rank, each.id) for each in seen if type(each) is events.CheckpointDamaged}
        assert told == set(itertools.product(range(3), names[1:]))
        for each in world:
            assert each.prune(dry_run=True).reasons[names[0]] == "this run resumed from it"


def test_what_is_whole_is_taken_and_leaves_no_votes(store: Stores) -> None:
    save_steps(store, 2, [1, 2])
    with ranks(store.url, 2, **FAST) as world:
        for number in range(2):
            steps = [getattr(each, "step", each) for each in load_all(world)]
            assert steps == [2, 2], number
    assert not [key for key in store.memory._store.objects if ".votes/" in key]


def test_objects_get_their_state_only_from_what_is_whole_everywhere(store: Stores) -> None:
    class Part:
        def __init__(self) -> None:
            self.loaded: list[int] = []

        def state_dict(self) -> dict[str, Any]:
            return {"step": self.step}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.loaded.append(state["step"])

        step = 0

    with ranks(store.url, 2, attempt_id="before", **FAST) as world:
        for step in (1, 2):
            for rank, pipeline in enumerate(world):
                part = Part()
                part.step = step
                name = pipeline.save({"part": part, **state(rank, step)}, step=step).wait().id
                settle(pipeline)
    damage(store, name, 0)
    parts = [Part(), Part()]
    targets = [{"part": part, **state(9, 9)} for part in parts]
    with ranks(store.url, 2, **FAST) as world:
        with pytest.warns(RuntimeWarning, match="is damaged"):
            results = load_all(world, *targets)
        assert [getattr(each, "step", each) for each in results] == [1, 1]
    assert [part.loaded for part in parts] == [[1], [1]]


def test_all_damaged_raises_on_all_ranks(store: Stores) -> None:
    names = save_steps(store, 2, [1, 2])
    damage(store, names[0], 0)
    damage(store, names[1], 0)
    with ranks(store.url, 2, **FAST) as world:
        with pytest.warns(RuntimeWarning, match="is damaged"):
            results = load_all(world)
        for result in results:
            assert isinstance(result, errors.CorruptCheckpoint)
            assert "None of the 2" in result.__notes__[0]


def load_with_b(pipeline: ckpipe.SyncPipeline, target: Any) -> Result:
    try:
        return pipeline.load(target, fallback=True, strict=False)
    except errors.CkpipeError as error:
        return error


@pytest.mark.parametrize("old_has_b", [False, True])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_no_rank_keeps_values_of_a_damaged_one(
    store: Stores, rank: int, late: bool, old_has_b: bool
) -> None:
    """The older one lacks ``b``, of which the damaged one has filled a part on some ranks."""
    with ranks(store.url, 2, attempt_id="before", **FAST) as world:
        for step in (1, 2):
            for number, pipeline in enumerate(world):
                mine: dict[str, Any] = {"a": torch.full((100,), 10.0 * number + step)}
                if step == 2 or old_has_b:
                    mine["b"] = torch.full((100,), 10.0 * number + step, dtype=torch.float64)
                name = pipeline.save(mine, step=step).wait().id
                settle(pipeline)
    damage(store, name, rank, -5 if late else -1200)  # the end of a, or of b, which is before it
    targets = [{"a": torch.zeros(100), "b": torch.zeros(100).double()} for _ in range(2)]
    with (
        ranks(store.url, 2, **FAST) as world,
        pytest.warns(RuntimeWarning, match="is damaged"),
        concurrent.futures.ThreadPoolExecutor(2) as pool,
    ):
        results = list(pool.map(load_with_b, world, targets))
    for number, (result, target) in enumerate(zip(results, targets, strict=True)):
        if old_has_b:
            assert getattr(result, "step", result) == 1
            for tensor in target.values():
                assert values(tensor) == [10 * number + 1]
        else:
            assert isinstance(result, errors.CorruptCheckpoint)
            assert result.target_touched
            assert "does not fill 'b'" in result.__notes__[0]


@pytest.mark.parametrize("fallback", [False, True])
def test_one_that_is_deleted_meanwhile_is_not_damaged(store: Stores, fallback: bool) -> None:
    """All ranks that may fall back take the newest; the others say that it was deleted."""
    names = save_steps(store, 2, [1, 2, 3])
    objects = store.memory._store.objects
    newest = {key: objects.pop(key) for key in list(objects) if key.startswith(names[2])}
    both = threading.Barrier(2)

    def delete(_: Operation) -> None:
        if both.wait(60) == 0:
            objects.update(newest)
            for key in [key for key in objects if key.startswith(names[1])]:
                del objects[key]
        both.wait(60)

    def reads(operation: Operation) -> bool:
        return operation.verb == "read_into" and operation.key.startswith(names[1])

    store.faulty.call(delete, reads, times=2)
    with ranks(store.url, 2, **FAST) as world, warnings.catch_warnings():
        warnings.simplefilter("error")
        results = load_all(world, fallback=fallback)
    for rank, result in enumerate(results):
        if fallback:
            assert isinstance(result, ckpipe.types.LoadResult)
            assert result.report is not None
            assert (result.step, result.report.damaged) == (3, {})
            assert same(result.state, state(rank, 3))
        else:
            assert isinstance(result, errors.CheckpointIncomplete)
            assert "deleted just now" in str(result)
            assert "on all ranks alike" in str(result)


def is_vote(operation: Operation) -> bool:
    return operation.verb == "put" and "/load-0" in operation.key and ".votes/" in operation.key


def test_a_rank_that_is_dead_is_named_after_a_while(store: Stores) -> None:
    save_steps(store, 3, [1])
    soon = {"load": {"agreement_timeout_seconds": 0.5}}
    with ranks(store.url, 3, **FAST, **soon) as world:
        # The time is short: both that live have voted before either waits for the third.
        both = threading.Barrier(2)
        store.faulty.call(lambda _: both.wait(60), is_vote, Landing.AFTER, times=None)
        results = load_all(world[:2])
    for result in results:
        assert isinstance(result, errors.UnsupportedTopology)
        assert "Ranks 2 did not say" in str(result)


def test_a_target_that_does_not_fit_one_rank_is_its_own_affair(store: Stores) -> None:
    save_steps(store, 2, [1])
    with ranks(store.url, 2, **FAST) as world:
        wrong, right = load_all(world, {"other": torch.zeros(1)}, state(1, 0))
    assert isinstance(wrong, errors.StructureMismatch)
    assert getattr(right, "step", right) == 1


def test_damage_that_is_found_first_in_the_index_says_what_to_do(tmp_path: Path) -> None:
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        info = pipeline.save({"w": torch.zeros(2)}, step=1).wait()
    index = tmp_path / f"{info.id}.json"
    index.write_bytes(index.read_bytes()[:-10])
    with (
        ckpipe.SyncPipeline(tmp_path) as pipeline,
        pytest.raises(errors.TruncatedObject, match="or let fallback=True do so"),
    ):
        pipeline.load()
