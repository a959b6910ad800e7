"""Several ranks save the same step when one of them says that it is time."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

import ckpipe
from ckpipe import errors
from ckpipe.testing import Landing
from ckpipe.testing.wrappers import Operation
from tests.support.pipelines import Stores
from tests.support.rank_pipelines import ranks

LOOK: dict[str, Any] = {"look_every_seconds": 0.02, "staging": {"block_bytes": 65536}}
TOLD: dict[str, Any] = {"preemption": {"enabled": True, "signals": []}}


def agreeing(verb: str) -> Callable[[Operation], bool]:
    """Select operations of one kind on what ranks agree on."""
    return lambda operation: operation.verb == verb and "/agreed/" in operation.key


def is_vote(operation: Operation) -> bool:
    return operation.verb == "put" and ".votes/" in operation.key


class Training:
    """Ranks that go through their steps in threads, loosely together, until one says to stop.

    Args:
        pipelines: The pipeline of each rank.
        most: The step to stop at in any case.
    """

    def __init__(self, pipelines: list[ckpipe.SyncPipeline], most: int = 10**6) -> None:
        self.pipelines, self.most = pipelines, most
        self.moved = threading.Condition()
        self.places: list[float] = [0 for _ in pipelines]
        self.saved: list[list[int]] = [[] for _ in pipelines]
        self.ended = [0 for _ in pipelines]

    def run(self, until: Any = None, at: Any = None) -> None:
        """Run all ranks to their end.

        Args:
            until: Says of a list of saved steps whether that is enough.
            at: Called with rank and step.
        """

        def one(rank: int) -> None:
            try:
                self._run(rank, until or (lambda saved: False), at or (lambda rank, step: None))
            finally:
                self._move(rank, math.inf)

        with ThreadPoolExecutor(len(self.pipelines)) as pool:
            for each in [pool.submit(one, rank) for rank in range(len(self.pipelines))]:
                each.result()

    def _run(self, rank: int, until: Any, at: Any) -> None:
        pipeline = self.pipelines[rank]
        for step in range(self.most):
            at(rank, step)
            torch.randn(50 * (rank + 1)).sort()
            self._move(rank, step)
            if pipeline.should_save(step):
                pipeline.save({"rank": rank}, step=step)
                self.saved[rank].append(step)
            self.ended[rank] = step
            if pipeline.preempted or until(self.saved[rank]):
                return

    def _move(self, rank: int, place: float) -> None:
        """Go on to a step, no further than five before the last of all ranks."""
        with self.moved:
            self.places[rank] = place
            self.moved.notify_all()
            if place < math.inf:
                assert self.moved.wait_for(lambda: min(self.places) > place - 5, 30)


def test_preemption_of_one_rank_makes_all_save_the_same_step(store: Stores) -> None:
    def preempt(rank: int, step: int) -> None:
        if (rank, step) == (2, 30):
            opened[2].preempt()
            assert not opened[2].preempted, "not before all are there"

    with ranks(store.url, 4, **LOOK, **TOLD) as opened:
        training = Training(opened)
        training.run(at=preempt)
        (step,) = training.saved[0]
        assert training.saved == [[step]] * 4
        assert training.ended == [step] * 4, "all leave after the same step"
        assert not any(pipeline.should_save(step + 1) for pipeline in opened)
        assert opened[0].save({"rank": 0}, step=step + 5).wait().step == step + 5
    assert step > 30
    with ranks(store.url, 4, attempt_id="restart", **LOOK, **TOLD) as world:
        assert [getattr(each.latest(), "step", None) for each in world] == [step] * 4
        assert not any(pipeline.preempted for pipeline in world), "a new launch begins anew"
    left = [key for key in store.memory._store.objects if ".votes/" in key]
    assert left == []


def test_clocks_are_agreed_on_again_and_again_and_after_a_resume(store: Stores) -> None:
    every = {"save_every_seconds": 0.05, **LOOK}
    for launch, first, saves in (("one", 0, 2), ("two", 3, 1)):
        with ranks(store.url, 3, attempt_id=launch, **every) as world:
            assert [getattr(each.load(), "step", None) is None for each in world] == [not first] * 3
            training = Training(world)
            training.run(until=lambda saved, most=saves: len(saved) == most)
            assert training.saved[0] == training.saved[1] == training.saved[2]
            assert len(set(training.saved[0])) == saves
    with ranks(store.url, 3, attempt_id="look", **LOOK) as world:
        assert sum(info.complete for info in world[0].steps()) == 3


def test_steps_and_seconds_together_part_no_ranks(store: Stores) -> None:
    both = {"save_every_seconds": 0.1, "save_every_steps": 200, **LOOK}
    with ranks(store.url, 2, **both) as world:
        training = Training(world)
        training.run(until=lambda saved: len(saved) == 6)
        assert training.saved[0] == training.saved[1]


def test_a_silent_rank_holds_the_others_up_for_a_limited_time(store: Stores) -> None:
    grace = {"preemption": {"enabled": True, "signals": [], "grace_seconds": 0.4}}
    with ranks(store.url, 3, **LOOK, **grace) as world:
        # The third one's store has gone away: it hears nothing and says nothing.
        world[2].close()
        # The grace is short: both have voted before either waits for the third.
        both = threading.Barrier(2)
        store.faulty.call(lambda _: both.wait(30), is_vote, Landing.AFTER, times=None)
        training = Training(world[:2])
        training.run(at=lambda rank, step: world[0].preempt() if step == 20 else None)
        assert len(training.saved[0]) == 1
        assert training.saved[0] == training.saved[1]


def test_answers_of_the_store_that_are_lost_part_no_ranks(store: Stores) -> None:
    error = errors.StoreUnavailable("lost")
    patient = {"upload": {"backoff_seconds": 0, "retries": 1}}
    with ranks(store.url, 3, **LOOK, **TOLD, **patient) as world:
        for verb in ("put", "list", "get", "stat"):
            for landing in Landing:
                store.faulty.fail(error, agreeing(verb), landing, times=3)
        training = Training(world)
        training.run(at=lambda rank, step: world[1].preempt() if step == 20 else None)
        (step,) = training.saved[0]
        assert training.saved == [[step]] * 3


def test_no_rank_asks_the_store_while_no_save_is_near(store: Stores) -> None:
    with ranks(store.url, 2, save_every_seconds=1000, **LOOK) as world:
        before = len(store.faulty.operations)
        Training(world, most=2000).run()
        assert len(store.faulty.operations) == before
