"""A run that goes back to an older step and on from there: what it saves then is the newest."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpipe
from ckpipe import errors
from ckpipe.testing.wrappers import Landing, Operation
from ckpipe.types import CheckpointId
from tests.support.pipelines import Stores, load_existing, loaded_state, newest_of
from tests.support.rank_pipelines import open_rank, ranks
from tests.support.settling import SettlingPipeline, settle

STATE: dict[str, Any] = {"a": torch.ones(100)}


def saved(pipeline: ckpipe.SyncPipeline, *steps: int) -> list[CheckpointId]:
    """The checkpoints of some saves, one after the other."""
    return [pipeline.save(STATE, step=step).wait().key for step in steps]


def complete(pipeline: ckpipe.SyncPipeline) -> list[int]:
    """The steps of all complete checkpoints, the oldest first."""
    return [info.step for info in pipeline.steps() if info.complete]


def test_a_restart_finds_what_was_saved_after_going_back(tmp_path: Path) -> None:
    with ckpipe.SyncPipeline(tmp_path, keep_last=1) as pipeline:
        (_, good, abandoned) = saved(pipeline, 0, 5, 10)
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        pipeline.load()
        saved(pipeline, 3, 5, 10)
        loaded_state(pipeline, 5)
        (six,) = saved(pipeline, 6)
        latest = newest_of(pipeline)
        assert latest.key == six > abandoned > good
        kept = pipeline.prune(dry_run=True).keep
        assert kept[0] == latest.id
    with ckpipe.SyncPipeline(tmp_path, keep_last=1) as pipeline:
        assert load_existing(pipeline).step == 6
        pipeline.prune()
        assert complete(pipeline) == [5, 6], "the newest, and what its run went back to"
        (seven,) = saved(pipeline, 7)
        assert seven > six


def test_retention_takes_what_was_abandoned_and_not_what_was_just_saved(tmp_path: Path) -> None:
    with SettlingPipeline(tmp_path, keep_last=2) as pipeline:
        saved(pipeline, 8, 9, 10)
        pipeline.load(step=9)
        assert pipeline.save(STATE).wait().step == 10, "the step after the one that was loaded"
        pipeline.load(step=9)
        saved(pipeline, 5, 6)
        settle(pipeline)
        assert complete(pipeline) == [9, 5, 6]
        pipeline.load()
        saved(pipeline, 7)
        settle(pipeline)
        assert complete(pipeline) == [6, 7]


def test_steps_in_another_order_and_looks_at_old_ones_change_no_names(tmp_path: Path) -> None:
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        names = saved(pipeline, 1, 5, 3)
        pipeline.load(step=1)
        names += saved(pipeline, 5, 6, 4)
        assert len({each.attempt for each in names}) == 1
        assert [each.count for each in names] == [0, 0, 0, 1, 0, 0]


def is_question(operation: Operation) -> bool:
    """Whether ranks look up, or decide, whether they went back."""
    return "agreed/back-" in operation.key


@pytest.mark.parametrize("loading", [[0, 1, 2], [0], [2]])
def test_ranks_go_back_together_if_any_has_loaded(store: Stores, loading: list[int]) -> None:
    with ranks(store.url, 3, keep_last=2) as world:
        for step in (4, 8):
            for pipeline in world:
                pipeline.save(STATE, step=step).wait()
        for rank in loading:
            world[rank].load(step=4)
        order = [*loading, *(rank for rank in range(3) if rank not in loading)]
        for step in (5, 6):
            for rank in order:
                world[rank].save(STATE, step=step).wait()
        for pipeline in world:
            settle(pipeline)
        assert newest_of(world[1]).step == 6
        assert set(complete(world[1])) - {4} == {5, 6}, "4 stays if rank 0 has resumed from it"
        asked = [each for each in store.faulty.operations if is_question(each)]
    assert 1 <= len(asked) <= 6, "once for each rank that goes back, and never in a straight run"


def test_ranks_that_save_in_another_order_stay_together(store: Stores) -> None:
    with ranks(store.url, 2) as world:
        for pipeline, steps in zip(world, ((1, 2, 3), (3, 1, 2)), strict=True):
            for step in steps:
                pipeline.save(STATE, step=step).wait()
        assert complete(world[0]) == [1, 2, 3]


def test_a_store_that_fails_at_going_back_costs_that_save(store: Stores) -> None:
    with ranks(store.url, 2, upload={"retries": 0}) as world:
        for step in (4, 8):
            for pipeline in world:
                pipeline.save(STATE, step=step).wait()
        for pipeline in world:
            pipeline.load(step=4)
        store.faulty.fail(errors.StoreUnavailable("away"), is_question)
        with pytest.raises(errors.StoreUnavailable):
            world[0].save(STATE, step=5)
        for pipeline in world:
            pipeline.save(STATE, step=6).wait()
        assert newest_of(world[0]).step == 6


def failed(pipeline: ckpipe.SyncPipeline, step: int) -> None:
    """Let a rank's save of a step fail, and be told of it."""
    with pytest.raises(errors.CkpipeError):
        pipeline.save(STATE | {"b": lambda: 0}, step=step).wait()


def saved_again(world: list[ckpipe.SyncPipeline]) -> set[str]:
    """The ids of step 1, which all ranks save."""
    return {handle.wait().id for handle in [each.save(STATE, step=1) for each in world]}


def saved_earlier(url: str) -> str:
    """The id of step 1 of an earlier launch of two ranks."""
    with ranks(url, 2, attempt_id="earlier") as world:
        (id,) = saved_again(world)
    return id


def loaded(world: list[ckpipe.SyncPipeline], **fields: Any) -> set[str | None]:
    """The ids that ranks load, one after the other."""
    return {load_existing(each, step=1, **fields).id for each in world}


HURRY: dict[str, Any] = {"load": {"agreement_timeout_seconds": 0.1}}


def test_a_step_that_was_saved_again_is_not_loaded_before_all_have_it(store: Stores) -> None:
    saved_earlier(store.url)
    with ranks(store.url, 2, **HURRY) as world:
        id = world[0].save(STATE, step=1).wait().id
        # Rank 1 may be through with the same step before rank 0 looks, and must not get another.
        for each in world:
            with pytest.raises(errors.CheckpointIncomplete, match=r"commit: 1, within 0.1 s"):
                each.load(step=1)
        world[1].save(STATE, step=1).wait()
        assert loaded(world) == {id}


def test_no_rank_goes_back_to_an_older_step_because_its_save_failed(store: Stores) -> None:
    saved_earlier(store.url)
    with ranks(store.url, 2, **HURRY) as world:
        for each in world:
            each.save(STATE, step=1)
        settle(world[0])
        world[0].save(STATE, step=1).wait()
        failed(world[1], 1)
        for each in world:
            with pytest.raises(errors.CheckpointIncomplete, match=r"commit: 1, within 0.1 s"):
                each.load(step=1)


def test_a_commit_of_which_its_rank_does_not_know_counts_for_all(store: Stores) -> None:
    saved_earlier(store.url)
    with ranks(store.url, 2, upload={"retries": 0}, **HURRY) as world:
        id = world[0].save(STATE, step=1).wait().id

        def is_manifest(operation: Operation) -> bool:
            return operation.verb in ("put", "get") and "rank-00001" in operation.key

        lost = errors.StoreUnavailable("the answer was lost")
        store.faulty.fail(lost, is_manifest, Landing.AFTER, times=None)
        with pytest.raises(errors.CommitUnknown):
            world[1].save(STATE, step=1).wait()
        store.faulty.heal()
        assert loaded(list(reversed(world))) == {id}


def test_a_restart_completes_the_newest_of_a_step_before_it_loads_that(store: Stores) -> None:
    saved_earlier(store.url)
    away = pytest.warns(RuntimeWarning, match="away")
    with away, ranks(store.url, 2, on_error="warn", upload={"retries": 0}) as world:

        def is_index(operation: Operation) -> bool:
            return (
                operation.verb == "put"
                and operation.key.startswith("step-")
                and ("/" not in operation.key)
            )

        store.faulty.fail(errors.StoreUnavailable("away"), is_index, times=None)
        ids = saved_again(world)
    store.faulty.heal()
    with ranks(store.url, 2, attempt_id="later") as world:
        assert loaded(world) == ids


def test_a_damaged_commit_has_all_ranks_load_what_is_older(tmp_path: Path) -> None:
    earlier = saved_earlier(str(tmp_path))
    damaged = pytest.warns(RuntimeWarning, match="is not what was written")
    with damaged, ranks(str(tmp_path), 2, on_error="warn", **HURRY) as world:
        id = world[1].save(STATE, step=1).wait().id
        settle(world[1])
        (manifest,) = (tmp_path / id / "m").rglob("rank-00001*")
        manifest.write_bytes(b"x" * 50)
        world[0].save(STATE, step=1).wait()
        assert loaded(world) == {earlier}


def test_only_what_would_hide_an_older_checkpoint_is_waited_for(store: Stores) -> None:
    with ranks(store.url, 2) as world:
        id = world[0].save(STATE, step=1).wait().id
        failed(world[1], 1)
        # The limit is ten minutes, and there is no other checkpoint that could be meant.
        for which in (1, id):
            with pytest.raises(errors.CheckpointIncomplete, match="has no index"):
                world[0].load(step=which)
        again = saved_again(world)
        for each in world:
            settle(each)
            assert {load_existing(each, step=1).id} == again != {id}


def test_a_fallback_agrees_at_once_after_a_failed_save(store: Stores) -> None:
    earlier = saved_earlier(store.url)
    with ranks(store.url, 2) as world, ThreadPoolExecutor(2) as threads:
        world[0].save(STATE, step=1).wait()
        failed(world[1], 1)
        loads = [threads.submit(each.load, step=1, fallback=True) for each in world]
        found = [each.result() for each in loads]
        assert [result and result.id for result in found] == [earlier] * 2


@pytest.mark.parametrize("fallback", [False, True])
def test_leaving_ends_a_load_that_waits_for_other_ranks(store: Stores, fallback: bool) -> None:
    saved_earlier(store.url)
    pipeline, looks = open_rank(store.url, 0, 2), threading.Semaphore(0)
    id = pipeline.save(STATE, step=1).wait().id
    settle(pipeline)

    def is_look(operation: Operation) -> bool:
        if operation.key.startswith(".ckpipe/attempts/" if fallback else f"{id}/"):
            looks.release()
        return False

    store.faulty.fail(errors.StoreUnavailable("never"), is_look, times=None)
    with ThreadPoolExecutor(1) as thread:
        loading = thread.submit(pipeline.load, step=1, fallback=fallback)
        for _ in range(5):  # it looks again and again, with growing pauses
            assert looks.acquire(timeout=60)
        pipeline.close()
        with pytest.raises(errors.PipelineClosed, match="other ranks"):
            loading.result(timeout=60)


def is_claim_of_the_second(operation: Operation) -> bool:
    """Whether rank 1 claims the launch."""
    return operation.verb == "put" and operation.key.endswith("claim-00001")


@pytest.mark.parametrize("goes_back", [False, True])
def test_a_first_save_that_fails_on_one_rank_counts_on_it_too(
    store: Stores, *, goes_back: bool
) -> None:
    """Else its next save of the step, or after going back, has the name of another's first one."""
    earlier = saved_earlier(store.url)
    with ranks(store.url, 2, on_error="warn", upload={"retries": 0}) as world:
        store.faulty.fail(errors.StoreUnavailable("away"), is_claim_of_the_second)
        first, failed_one = [each.save(STATE, step=8) for each in world]
        first.wait()
        with pytest.raises(errors.StoreUnavailable):
            failed_one.wait()
        for pipeline in world if goes_back else ():
            pipeline.load(step=1)
        later = {"a": torch.zeros(100)}
        for handle in [each.save(later, step=5 if goes_back else 8) for each in world]:
            handle.wait()
        later_id = newest_of(world[0]).id
        assert later_id != earlier
        for pipeline in world:
            assert not loaded_state(pipeline, later_id)["a"].any()
