"""A launch writes nothing before its first save, which claims it before it looks at the state."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

import ckpipe
from ckpipe import errors
from ckpipe.testing import Landing
from ckpipe.testing.wrappers import Operation
from tests.support.pipelines import Stores, newest_of
from tests.support.rank_pipelines import one_rank, ranks
from tests.support.settling import settle
from tests.support.stored_files import ATTEMPTS

FAST: dict[str, Any] = {"upload": {"backoff_seconds": 0, "retries": 1}}
STATE: dict[str, Any] = {"a": torch.ones(10)}


class Watched:
    """An object that counts how often its state is looked at."""

    looks = 0

    def state_dict(self) -> dict[str, Any]:
        self.looks += 1
        return {"a": 1}


def is_claim(operation: Operation) -> bool:
    return operation.verb == "put" and "/claim-" in operation.key


def keys(store: Stores) -> list[str]:
    return sorted(store.memory._store.objects)


def launches(store: Stores) -> set[str]:
    return {key.split("/")[2] for key in keys(store) if key.startswith(ATTEMPTS)}


def test_a_reused_attempt_is_refused_before_the_state_is_looked_at(tmp_path: Path) -> None:
    with ckpipe.SyncPipeline(tmp_path, attempt_id="job") as pipeline:
        pipeline.save(STATE, step=1)
    part = Watched()
    with ckpipe.SyncPipeline(tmp_path, attempt_id="job") as pipeline:
        assert pipeline.load() is not None
        before = sorted(tmp_path.rglob("*"))
        for _ in range(2):
            with pytest.raises(errors.AttemptReused, match=r"'job'.*step 2, rank 0.*id of its own"):
                pipeline.save({"part": part}, step=2)
        assert sorted(tmp_path.rglob("*")) == before
    assert part.looks == 0


async def test_a_reused_attempt_is_refused_where_the_caller_awaits(tmp_path: Path) -> None:
    part = Watched()
    for refused in (False, True):
        async with ckpipe.Pipeline(tmp_path, attempt_id="job") as pipeline:
            if refused:
                with pytest.raises(errors.AttemptReused):
                    await pipeline.save({"part": part}, step=2)
            else:
                await pipeline.save(STATE, step=1)
    assert part.looks == 0


def test_each_rank_claims_with_its_own_first_save(store: Stores) -> None:
    with ranks(store.url, 3) as world:
        assert keys(store) == []
        world[1].save(STATE, step=1).wait()
        assert [key.split("/")[-1] for key in keys(store) if "/run/" in key] == [
            "claim-00001",
            "start",
        ]
        for rank in (2, 0):
            world[rank].save(STATE, step=1).wait()
        for pipeline in world:
            settle(pipeline)
        assert [info.complete for info in world[0].steps()] == [True]


def test_a_save_is_named_by_the_time_of_opening(store: Stores) -> None:
    """A launch that was late to save does not come before one that began after it."""
    with ckpipe.SyncPipeline(store.url) as slow, ckpipe.SyncPipeline(store.url) as quick:
        for step in (5, 6):
            quick.save(STATE, step=step).wait()
        slow.save(STATE, step=9).wait()
        assert newest_of(slow).step == 6


def test_a_claim_whose_answer_was_lost_is_known_again(store: Stores) -> None:
    with ckpipe.SyncPipeline(store.url, **FAST) as pipeline:
        store.faulty.fail(errors.StoreUnavailable("lost"), is_claim, Landing.AFTER)
        pipeline.save(STATE, step=1).wait()


def test_a_save_after_one_that_could_not_claim_is_the_first(store: Stores) -> None:
    with ckpipe.SyncPipeline(store.url, attempt_id="job", **FAST) as pipeline:
        # The claim lands, and nothing says so.
        store.faulty.fail(errors.StoreUnavailable("away"), is_claim, Landing.AFTER, times=None)
        store.faulty.fail(errors.StoreUnavailable("away"), "get", times=None)
        part = Watched()
        with pytest.raises(errors.StoreUnavailable, match="step 1, rank 0"):
            pipeline.save({"part": part}, step=1)
        assert part.looks == 0
        store.faulty.heal()
        assert pipeline.save(STATE, step=2).wait().complete


def test_a_first_save_that_cannot_claim_only_warns_if_asked(store: Stores) -> None:
    with ckpipe.SyncPipeline(store.url, on_error="warn", **FAST) as pipeline:
        store.faulty.fail(errors.StoreUnavailable("away"), is_claim, times=2)
        handle = pipeline.save(STATE, step=1)
        assert (handle.status, handle.step) == ("failed", 1)
        with pytest.warns(RuntimeWarning, match=r"away \[step 1, rank 0\]"):
            second = pipeline.save(STATE)
        assert second.wait().step == 2
        with pytest.raises(errors.StoreUnavailable):
            handle.wait()


async def test_a_first_save_that_is_cancelled_leaves_the_next_one_whole(store: Stores) -> None:
    async with ckpipe.Pipeline(store.url, attempt_id="job") as pipeline:
        gate = store.faulty.pause(is_claim, Landing.AFTER)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pipeline.save, STATE, 1)
            await anyio.to_thread.run_sync(gate.wait_until_held)
            tasks.cancel_scope.cancel()
            gate.release()
        assert (await (await pipeline.save(STATE, step=2))).complete
        assert [info.step for info in await pipeline.steps()] == [2]


def test_programs_that_open_together_save_apart(tmp_path: Path) -> None:
    with ckpipe.SyncPipeline(tmp_path / "run") as looker:
        with (
            ckpipe.SyncPipeline(tmp_path / "run") as one,
            ckpipe.SyncPipeline(tmp_path / "run") as other,
            ThreadPoolExecutor(2) as pool,
        ):
            assert [each.load() for each in (one, other)] == [None, None]
            assert list(tmp_path.iterdir()) == []
            list(pool.map(lambda each: each.save(STATE, step=1).wait(), (one, other)))
        assert [info.complete for info in looker.steps()] == [True, True]


def test_housekeeping_writes_no_claim(store: Stores) -> None:
    with ckpipe.SyncPipeline(store.url) as pipeline:
        for step in range(4):
            pipeline.save(STATE, step=step)
    before = launches(store)
    with ckpipe.SyncPipeline(store.url, keep_last=1) as pipeline:
        pipeline.pin(0)
        pipeline.delete(1)
        pipeline.prune()
        pipeline.unpin(0)
        assert pipeline.sweep().remove == {}
        assert [info.step for info in pipeline.steps()] == [0, 3]
    assert launches(store) == before


class TestObjects:
    """Ranks without a process group agree on a load by objects, behind their claims."""

    def test_the_last_rank_that_closes_removes_them(self, store: Stores) -> None:
        with ranks(store.url, 3, attempt_id="before") as world:
            for pipeline in world:
                pipeline.save(STATE, step=1).wait()
        before = keys(store)
        for _ in range(2):  # the id may be used again
            with ranks(store.url, 3) as world:
                assert [getattr(each.load(), "step", None) for each in world] == [1] * 3
                assert keys(store) != before
            assert keys(store) == before

    def test_a_rank_that_comes_when_others_have_closed_loads_the_same(self, store: Stores) -> None:
        with ckpipe.SyncPipeline(store.url) as writer:
            writer.save(STATE, step=1).wait()
            with one_rank(store.url, 0, 2) as first:
                loaded = first.load(per_rank="rank0")
            writer.save(STATE, step=2).wait()
            with one_rank(store.url, 1, 2) as second:
                late = second.load(per_rank="rank0")
        assert loaded is not None
        assert late is not None
        assert (loaded.step, late.id) == (1, loaded.id)
        assert "run" not in launches(store)

    def test_an_agreement_of_an_earlier_launch_is_not_taken(self, store: Stores) -> None:
        with ckpipe.SyncPipeline(store.url) as writer, one_rank(store.url, 0, 2) as first:
            writer.save(STATE, step=1).wait()
            assert first.load(per_rank="rank0") is not None
            # As if it were killed here; its job is started again under the same id.
            writer.save(STATE, step=2).wait()
            with one_rank(store.url, 0, 2) as again:
                with pytest.raises(errors.AttemptReused, match="rank 0"):
                    again.load(per_rank="rank0")
                with pytest.raises(errors.AttemptReused, match="rank 0"):
                    again.save(STATE, step=3)

    def test_one_rank_that_saves_keeps_the_claims_of_all(self, store: Stores) -> None:
        with ranks(store.url, 2) as world:
            assert [each.load() for each in world] == [None, None]
            world[1].save(STATE, step=1)
        assert [key for key in keys(store) if key.endswith(("claim-00000", "claim-00001"))]
        with (
            one_rank(store.url, 1, 2) as again,
            pytest.raises(errors.AttemptReused, match="rank 1"),
        ):
            again.save(STATE, step=2)


def test_a_call_of_another_launch_ends_the_pipeline(store: Stores) -> None:
    told: dict[str, Any] = {"preemption": {"enabled": True, "signals": []}}
    look: dict[str, Any] = {"look_every_seconds": 0.02}
    with ranks(store.url, 2, **told, **look) as world:
        for pipeline in world:
            pipeline.save(STATE, step=1).wait()
        world[0].preempt()
        # The call is heard at any step, and makes a save due, which says that it was not meant.
        with one_rank(store.url, 1, 2, **told, **look) as again:
            step = next(step for step in range(10**9) if again.should_save(step))
            with pytest.raises(errors.AttemptReused):
                again.save(STATE, step=step)
