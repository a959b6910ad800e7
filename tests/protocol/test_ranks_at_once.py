"""Ranks that commit, die and claim at once: one index for each checkpoint, and one owner of all."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import ckpipe
from ckpipe import errors
from tests.protocol.processes import another, keys_of
from tests.support.pipelines import Stores, load_existing, stores
from tests.support.rank_pipelines import open_rank, ranks
from tests.support.sampling import sample
from tests.support.settling import settle
from tests.support.stored_files import index_key, manifest_key

FAST: dict[str, Any] = {"upload": {"retries": 0}, "on_error": "warn"}


def state(rank: int) -> dict[str, Any]:
    return {"mine": torch.full((100,), rank), "rank": rank}


def saved(pipeline: ckpipe.SyncPipeline, rank: int, step: int) -> str | None:
    """Save a step as a rank; return the id if this rank knows that it has committed."""
    with contextlib.suppress(errors.CkpipeError):
        return pipeline.save(state(rank), step=step).wait().id
    return None


def steps_of(pipeline: ckpipe.SyncPipeline) -> list[int]:
    return [info.step for info in pipeline.steps() if info.complete]


@pytest.mark.sample(1)
@pytest.mark.parametrize("dying", range(3))
@pytest.mark.filterwarnings("ignore:.*this rank is dead:RuntimeWarning")
def test_deaths_and_races_of_ranks_end_in_one_index(dying: int) -> None:
    """All save at once, and one dies at a request; those who come then find one checkpoint."""
    for number in sample(range(1, 16), 6):
        with stores() as store, ThreadPoolExecutor(3) as threads:
            places = [another(store) for _ in range(3)]
            with contextlib.ExitStack() as stack:
                world = [open_rank(each.url, n, 3, **FAST) for n, each in enumerate(places)]
                for each in world:
                    stack.push(each)
                assert all(threads.map(saved, world, range(3), [1] * 3))
                for each in world:
                    settle(each)
                death = errors.StoreUnavailable("this rank is dead")
                places[dying].faulty.fail(
                    death, lambda each: each.verb != "exit", nth=number, times=None
                )
                ids = {each for each in threads.map(saved, world, range(3), [2] * 3) if each}
            (id,) = ids
            lives = manifest_key(id, dying) in keys_of(store)
            with contextlib.ExitStack() as stack:
                finders = [
                    stack.enter_context(ckpipe.SyncPipeline(store.url, solo=True)) for _ in range(3)
                ]
                found = list(threads.map(steps_of, finders))
                assert found == [[1, 2] if lives else [1]] * 3, number
                assert (index_key(id) in keys_of(store)) == lives
                if lives:
                    finders[0].verify(2)
                    result = load_existing(finders[0], step=2, per_rank="rank0")
                    assert result.id == id


def test_exactly_one_of_several_processes_that_claim_a_rank_saves(store: Stores) -> None:
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(6) as pool:
        opened = [
            stack.enter_context(ckpipe.SyncPipeline(store.url, attempt_id="run")) for _ in range(6)
        ]
        racers = [pool.submit(pipeline.save, state(0), step=1) for pipeline in opened]
        errors_seen = [racer.exception() for racer in racers]
    assert sum(error is None for error in errors_seen) == 1
    assert all(error is None or isinstance(error, errors.AttemptReused) for error in errors_seen)


def test_a_straggler_after_a_deletion_revives_nothing(store: Stores) -> None:
    with ranks(store.url, 2, **FAST) as old:
        name = old[0].save(state(0), step=9).wait().id
        with ranks(store.url, 2, attempt_id="restart", **FAST) as new:
            new[0].delete(name)
            handle = old[1].save(state(1), step=9)
            handle.wait()
            settle(old[1])
            with pytest.raises(errors.CheckpointIncomplete, match="deleted"):
                handle.wait_complete(timeout=60)
            assert new[1].latest() is None
