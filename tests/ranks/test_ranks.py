"""Many ranks in one process: commits, completion, healing, agreements, retention and deletion."""

from __future__ import annotations

import concurrent.futures
import queue
import re
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

import ckpipe
from ckpipe import errors, events
from ckpipe.testing import Landing
from ckpipe.testing.wrappers import Operation
from tests.support.pipelines import Stores, load_existing, newest_of, same, stores
from tests.support.rank_pipelines import one_rank, open_rank, ranks
from tests.support.settling import settle
from tests.support.stored_files import document_of, manifest_key, sealed

FAST: dict[str, Any] = {
    "upload": {"backoff_seconds": 0, "retries": 2},
    "staging": {"block_bytes": 65536},
}


def state(rank: int) -> dict[str, Any]:
    return {"mine": torch.full((100,), rank), "rank": rank}


def save_by(world: list[ckpipe.SyncPipeline], rank: int, step: int) -> ckpipe.CheckpointInfo:
    """Save with one rank, and wait until it has looked who is through."""
    info = world[rank].save(state(rank), step=step).wait()
    settle(world[rank])
    return info


def save_all(world: list[ckpipe.SyncPipeline], step: int) -> list[ckpipe.CheckpointInfo]:
    """Save with one rank after the other, each when the one before has looked who is through."""
    return [save_by(world, rank, step) for rank in range(len(world))]


def test_checkpoint_is_complete_when_the_last_rank_has_committed(store: Stores) -> None:
    with ranks(store.url, 3) as world:
        handles = [pipe.save(state(n), step=1) for n, pipe in enumerate(world[:2])]
        infos = [handle.wait() for handle in handles]
        assert [info.complete for info in infos] == [False, False]
        assert world[0].latest() is None
        with pytest.raises(TimeoutError, match="without a commit: 2"):
            handles[0].wait_complete(timeout=0)
        last = world[2].save(state(2), step=1)
        assert last.wait_complete(timeout=60).complete
        assert handles[0].wait_complete(timeout=60) == last.wait_complete()
        (info,) = world[1].steps()
        assert info.complete


def test_completed_is_told_once_by_who_commits_last(store: Stores) -> None:
    with ranks(store.url, 3) as world:
        seen: list[events.Event] = []
        for pipeline in world:
            pipeline.events.add(seen.append)
        save_all(world, 1)
        kinds = (events.RankCommitted, events.Completed)
        told = [(type(each).__name__, each.rank) for each in seen if isinstance(each, kinds)]
        assert told == [*(("RankCommitted", rank) for rank in range(3)), ("Completed", 2)]


def test_saves_in_different_order_are_the_same_checkpoints(store: Stores) -> None:
    with ranks(store.url, 2) as world:
        for step in (1, 2, 1):
            world[0].save(state(0), step=step).wait()
        for step in (2, 1, 1):
            world[1].save(state(1), step=step).wait()
        for pipeline in world:
            settle(pipeline)
        found = [(info.step, info.count, info.complete) for info in world[0].steps()]
        assert found == [(1, 0, True), (1, 1, True), (2, 0, True)]


def test_rank_that_saves_twice_is_refused(store: Stores) -> None:
    with ranks(store.url, 2) as world, one_rank(store.url, 1, 2) as again:
        world[1].save(state(1), step=1)
        with pytest.raises(errors.AttemptReused, match=r"step 1.*rank 1"):
            again.save(state(1), step=1)


def test_no_way_to_agree_names_both_ways(store: Stores) -> None:
    with pytest.raises(errors.UnsupportedTopology) as said:
        open_rank(store.url, 1, 4, attempt_id=None)
    for way in ("4 ranks", "init_process_group", "attempt_id", "solo=True"):
        assert way in str(said.value)


def test_ranks_that_count_the_world_differently_complete_nothing(
    store: Stores, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        one_rank(store.url, 0, 2, on_error="warn", **FAST) as first,
        one_rank(store.url, 1, 3, on_error="warn", **FAST) as second,
    ):
        first.save(state(0), step=1).wait()
        handle = second.save(state(1), step=1)
        handle.wait()
        assert first.latest() is None
    assert re.search(r"cannot be completed: .*one of 3 ranks, .* there are 2", caplog.text)
    assert "Give attempt_id to the ranks of one launch only" in caplog.text


def test_solo_rank_saves_alone(store: Stores) -> None:
    with one_rank(store.url, 3, 4, attempt_id=None, solo=True) as alone:
        assert alone.save(state(0), step=1).wait().complete


def is_manifest(operation: Operation) -> bool:
    return operation.verb == "put" and "/m/0/" in operation.key


def is_last_manifest(operation: Operation) -> bool:
    return is_manifest(operation) and operation.key.endswith("rank-00001.json")


def is_agreement(operation: Operation) -> bool:
    return operation.verb == "put" and "/agreed/" in operation.key


def is_index(operation: Operation) -> bool:
    return operation.verb == "put" and operation.key.endswith(".0.json")


class Told:
    """Hears which checkpoints a pipeline has found incomplete."""

    def __init__(self, pipeline: ckpipe.SyncPipeline) -> None:
        self._pipeline = pipeline
        self._steps: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.heard: list[int] = []
        pipeline.events.add(self._hear)

    def _hear(self, event: events.Event) -> None:
        if isinstance(event, events.IncompleteCheckpoint):
            self.heard.append(event.step)
            self._steps.put(event.step)

    def wait_for(self, step: int) -> None:
        """Wait until a step was found incomplete, and what follows from it is done."""
        while self._steps.get(timeout=60) != step:
            pass
        self._pipeline.trim()  # comes after it on the pipeline's loop


class TestCommit:
    """What became of a rank's manifest is found out, never guessed."""

    def test_lost_answer_is_read_back_through_a_passing_error(self, store: Stores) -> None:
        with ranks(store.url, 2, **FAST) as world:
            store.faulty.fail(errors.StoreError("lost"), is_manifest, Landing.AFTER)
            store.faulty.fail(
                errors.StoreUnavailable("down"), lambda each: each.verb == "get", times=2
            )
            assert save_all(world, 1)[0].step == 1
            assert world[0].latest() is not None

    def test_manifest_of_another_writer_is_a_conflict(self, store: Stores) -> None:
        with ranks(store.url, 2, **FAST) as world:
            info, taken = world[0].save({"rank": 0}, step=1).wait(), dict[str, Any]()
            objects = store.memory._store.objects
            theirs = objects[manifest_key(info.id, 0)]

            def take(operation: Operation) -> None:
                # Two processes that believe to be the same rank of the same attempt.
                document = document_of(bytes(theirs.data)) | {"step": 2}
                taken[operation.key] = replace(theirs, data=sealed(document))
                objects.update(taken)

            store.faulty.call(take, is_manifest)
            with pytest.raises(errors.CommitConflict, match=r"step 2.*rank 0"):
                world[0].save({"rank": 0}, step=2).wait()
            ((key, object),) = taken.items()
            assert objects[key] is object

    def test_unreadable_manifest_is_unknown_and_nothing_is_deleted(self, store: Stores) -> None:
        with ranks(store.url, 2, **FAST) as world:
            store.faulty.fail(errors.StoreError("lost"), is_manifest, Landing.AFTER)
            store.faulty.fail(
                errors.StoreUnavailable("down"),
                lambda each: each.verb == "get" and "/m/0/" in each.key,
                times=None,
            )
            with pytest.raises(errors.CommitUnknown, match="rank 0"):
                world[0].save(state(0), step=1).wait()
            store.faulty.heal()
            world[1].save(state(1), step=1).wait_complete(timeout=60)


class TestHealing:
    """What a rank left undone that died is done by whoever comes next."""

    def test_death_before_the_index(self, store: Stores) -> None:
        with ranks(store.url, 2, on_error="warn", **FAST) as world:
            save_by(world, 0, step=1)  # else it may find that it is complete, and meet the fault
            store.faulty.fail(errors.StoreError("dead"), is_index, times=None)
            save_by(world, 1, step=1)
            with pytest.warns(RuntimeWarning, match="dead"):
                world[1].save(state(1), step=2)
            store.faulty.heal()
        with one_rank(store.url, 0, 2, attempt_id="restart") as pipeline:
            assert newest_of(pipeline).step == 1
            assert [info.complete for info in pipeline.steps()] == [True, False]

    def test_waiting_for_completion_heals(self, store: Stores) -> None:
        with ranks(store.url, 2, on_error="warn", **FAST) as world:
            first = world[0].save(state(0), step=1)
            first.wait()
            settle(world[0])
            store.faulty.fail(errors.StoreError("dead"), is_index)
            save_by(world, 1, step=1)
            assert first.wait_complete(timeout=60).complete
            with pytest.warns(RuntimeWarning, match="dead"):
                world[1].close()

    def test_next_save_tells_of_absent_ranks(self, store: Stores) -> None:
        with ranks(store.url, 3, incomplete_after_seconds=0, **FAST) as world:
            seen: list[events.Event] = []
            world[1].events.add(seen.append)
            first = save_by(world, 1, step=1)
            noticed = threading.Event()
            world[1].events.add(
                lambda each: (
                    noticed.set() if isinstance(each, events.IncompleteCheckpoint) else None
                )
            )
            world[1].save(state(1), step=2).wait()
            assert noticed.wait(60)
            (told,) = [each for each in seen if isinstance(each, events.IncompleteCheckpoint)]
            assert (told.id, told.rank, told.absent) == (first.id, 1, (0, 2))

    def test_several_incomplete_ones_in_a_row_are_an_error(self, store: Stores) -> None:
        soon = {"incomplete_after_seconds": 0, "incomplete_in_a_row": 2}
        with ranks(store.url, 3, **soon, **FAST) as world:
            lonely, told = world[1], Told(world[1])
            save_by(world, 1, 1)
            save_all(world, 2)  # looks at step 1
            told.wait_for(1)
            for step in (3, 4, 5):  # the last one would raise if step 2 did not count
                save_by(world, 1, step)
            told.wait_for(4)
            with pytest.raises(errors.SaveError, match=r"The last 2 .* ranks 0, 2"):
                lonely.save(state(1), step=6)

    def test_several_incomplete_ones_in_a_row_only_warn_if_asked(self, store: Stores) -> None:
        soon = {"incomplete_after_seconds": 0, "incomplete_in_a_row": 2}
        with ranks(store.url, 2, on_error="warn", **soon, **FAST) as world:
            lonely, told = world[1], Told(world[1])
            for step in (1, 2, 3):
                save_by(world, 1, step)
            told.wait_for(2)
            with pytest.warns(RuntimeWarning, match=r"The last 2 .* ranks 0"):
                handle = lonely.save(state(1), step=4)
            assert handle.wait().step == 4

    def test_saves_beside_each_other_look_at_each_once(self, store: Stores) -> None:
        soon = {"incomplete_after_seconds": 0, "incomplete_in_a_row": None}
        with ranks(store.url, 2, **soon, **FAST) as world:
            told = Told(world[1])
            save_by(world, 1, 1)
            stopped = store.faulty.pause("stat")
            save_by(world, 1, 2)
            stopped.wait_until_held()
            save_by(world, 1, 3)  # its look has begun too
            stopped.release()
            told.wait_for(3)
            assert told.heard == [1, 2, 3]

    def test_a_store_that_failed_is_asked_again_what_became_of_it(self, store: Stores) -> None:
        soon = {"incomplete_after_seconds": 0, "incomplete_in_a_row": 1}
        with ranks(store.url, 2, **soon, **FAST) as world:
            lonely, told = world[1], Told(world[1])
            save_by(world, 1, 1)
            gate = store.faulty.pause("stat")
            store.faulty.fail(errors.StoreError("down"), "stat")
            save_by(world, 1, 2)
            gate.wait_until_held()
            gate.release()
            save_by(world, 1, 3)
            told.wait_for(1)
            with pytest.raises(errors.SaveError, match=r"ranks 0"):
                lonely.save(state(1), step=4)

    def test_a_commit_that_could_not_be_published_is_followed(self, store: Stores) -> None:
        with ranks(store.url, 2, incomplete_after_seconds=0, on_error="warn", **FAST) as world:
            save_by(world, 0, step=1)
            store.faulty.fail(errors.StoreError("dead"), is_index)
            save_by(world, 1, step=1)
            assert not [key for key in store.memory._store.objects if key.endswith(".0.json")]
            completed: queue.SimpleQueue[int] = queue.SimpleQueue()
            world[1].on_complete(lambda event: completed.put(event.step))
            with pytest.warns(RuntimeWarning, match="dead"):
                world[1].save(state(1), step=2)
            assert completed.get(timeout=60) == 1
            assert [key for key in store.memory._store.objects if key.endswith(".0.json")]

    def test_read_only_root_is_listed_as_it_is(self, store: Stores) -> None:
        with ranks(store.url, 2, on_error="warn", **FAST) as world:
            save_by(world, 0, step=1)
            store.faulty.fail(errors.PermissionDenied("read only"), is_index, times=None)
            save_by(world, 1, step=1)
            (info,) = world[0].steps()
            assert info.reason.startswith("it has no index")
            with pytest.warns(RuntimeWarning, match="read only"):
                world[1].close()


def test_requests_of_a_save_do_not_grow_with_the_world() -> None:
    counts = {}
    for size in (2, 250, 16_384):
        with stores() as made, one_rank(made.url, 0, size, **FAST) as pipeline:
            for step in range(3):
                pipeline.save(state(0), step=step).wait()
                settle(pipeline)
            before = len(made.faulty.operations)
            pipeline.save(state(0), step=3).wait()
            settle(pipeline)
            # The look back at the save before may still be under way; it is one pair of looks.
            done = made.faulty.operations[before:]
            counts[size] = sorted(each.verb for each in done if each.verb != "stat")
    assert counts[2] == counts[250] == counts[16_384]
    assert counts[2].count("put") == 1


def test_a_rank_that_the_store_failed_loads_what_the_others_have_loaded(store: Stores) -> None:
    with ranks(store.url, 2, **FAST) as world:
        save_all(world, 1)
        assert loaded_step(world[0]) == 1
        store.faulty.fail(errors.StoreUnavailable("down"), "get", times=None)
        with pytest.raises(errors.StoreUnavailable):
            world[1].load()
        store.faulty.heal()
        with ranks(store.url, 2, attempt_id="other", **FAST) as others:
            save_all(others, 2)
        assert loaded_step(world[1]) == 1
        assert [loaded_step(pipeline) for pipeline in world] == [2, 2]


def test_a_load_that_failed_and_was_left_at_that_is_over_for_all(store: Stores) -> None:
    with ranks(store.url, 2, **FAST) as world:
        store.faulty.fail(errors.StoreUnavailable("down"), "get", times=None)
        with pytest.raises(errors.StoreUnavailable):
            world[1].load()
        store.faulty.heal()
        assert world[0].load() is None
        save_all(world, 1)
        assert [loaded_step(pipeline) for pipeline in world] == [1, 1]


def loaded_step(pipeline: ckpipe.SyncPipeline) -> int | None:
    """The step that a rank loads."""
    result = pipeline.load()
    return result.step if result else None


def test_a_save_that_never_began_takes_no_step(store: Stores) -> None:
    with ranks(store.url, 2, **FAST) as world:
        for step in (1, 9):
            save_all(world, step)
        for pipeline in world:
            pipeline.load(step=1)
        store.faulty.fail(errors.StoreUnavailable("down"), "put", times=None)
        with pytest.raises(errors.StoreUnavailable):
            world[0].save(state(0))
        store.faulty.heal()
        assert [pipeline.save(state(n)).step for n, pipeline in enumerate(world)] == [2, 2]


def test_nothing_to_load_is_agreed_on_too(store: Stores) -> None:
    with ranks(store.url, 2, **FAST) as world:
        assert world[0].load() is None
        save_all(world, 1)
        assert world[1].load() is None


@pytest.mark.parametrize("landing", list(Landing))
def test_an_agreement_whose_answer_was_lost_holds(store: Stores, landing: Landing) -> None:
    with ranks(store.url, 2, **FAST) as world:
        save_all(world, 1)
        store.faulty.fail(errors.StoreUnavailable("lost"), is_agreement, landing)
        assert [loaded_step(pipeline) for pipeline in world] == [1, 1]


def test_skipping_when_busy_is_decided_together(store: Stores) -> None:
    small = {"staging": {"bytes": 65536, "block_bytes": 65536}, "on_busy": "skip"}
    with ranks(store.url, 2, **small) as world:
        gate = store.faulty.pause(lambda each: each.verb == "write" and "rank-00000" in each.key)
        first = world[0].save(state(0), step=1)
        gate.wait_until_held()
        assert world[0].save(state(0), step=2).status == "skipped"
        gate.release()
        first.wait()
        settle(world[0])
        world[1].save(state(1), step=1).wait()
        # This one has room; but the first rank has decided.
        assert world[1].save(state(1), step=2).status == "skipped"
        assert [info.complete for info in world[1].steps()] == [True]


class TestRetention:
    """Whoever creates the index prunes; several at once do no harm."""

    def test_old_checkpoints_go_with_all_they_have(self, store: Stores) -> None:
        with ranks(store.url, 3, keep_last=1, **FAST) as world:
            for step in (1, 2, 3):
                save_all(world, step)
            assert [info.step for info in world[0].steps() if info.complete] == [3]
            left = [key for key in store.memory._store.objects if key.startswith("step-")]
            assert {key.split(".")[0] for key in left} == {"step-000000000003"}

    def test_a_checkpoint_that_a_waiter_completes_is_followed_by_pruning(
        self, store: Stores
    ) -> None:
        with ranks(store.url, 2, keep_last=1, **FAST) as world:
            save_all(world, 1)
            last = threading.Event()

            def wait_for_the_waiter(operation: Operation) -> None:
                last.set()
                with concurrent.futures.ThreadPoolExecutor(1) as threads:
                    threads.submit(wait_until_complete).result()

            def wait_until_complete() -> None:
                while (newest := world[0].latest()) is None or newest.step != 2:
                    pass

            store.faulty.call(wait_for_the_waiter, is_last_manifest, Landing.AFTER)
            save_all(world, 2)
            assert last.is_set()
            assert [info.step for info in world[0].steps()] == [2]

    def test_deletion_leaves_nothing_of_any_rank(self, store: Stores) -> None:
        with ranks(store.url, 3, **FAST) as world:
            save_all(world, 1)
            world[1].delete(1, force=True)
            left = [key for key in store.memory._store.objects if key.startswith("step-")]
            assert left == []


def test_each_rank_gets_its_own_back(store: Stores) -> None:
    with ranks(store.url, 3, **FAST) as world:
        save_all(world, 1)
        save_all(world, 2)
    with ranks(store.url, 3, attempt_id="restart", **FAST) as world:
        for rank, pipeline in enumerate(world):
            result = load_existing(pipeline)
            assert result.step == 2
            assert same(result.state, state(rank))
            pipeline.verify(2)


def test_straggler_of_an_old_attempt_does_not_become_the_newest(store: Stores) -> None:
    with ranks(store.url, 2, **FAST) as old:
        old[0].save(state(0), step=9).wait()
        with ranks(store.url, 2, attempt_id="restart", **FAST) as new:
            save_all(new, 5)
            old[1].save(state(1), step=9).wait_complete(timeout=60)
            assert newest_of(new[0]).step == 5
            assert [(info.step, info.complete) for info in new[1].steps()] == [(9, True), (5, True)]
