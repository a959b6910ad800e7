"""Ranks come to one plan through a store, whoever changes, is late or is gone."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from planning_ranks import Ranks, Tensor, captured_by, hurried, mesh, on, unwritten, written
from sampling import EVERY, SEED
from torch._C._distributed_c10d import FileStore, HashStore, TCPStore

from ckpipe import GlobalPlanner
from ckpipe.errors import PlanTimeout, SaveError, UnsupportedState
from ckpipe.planning import RankPlan
from ckpipe.types import JointPlanner

Connect = Callable[[], Any]


@pytest.fixture(params=["hash", "file", "tcp"])
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Connect]:
    """Make connections to one store."""
    if request.param == "file":
        yield lambda: FileStore(str(tmp_path / "store"), -1)
        return
    if request.param == "hash":
        store: Any = HashStore()
    else:
        store = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=20))
    yield store.clone


@pytest.fixture
def store() -> Any:
    return HashStore()


def base(rank: int) -> list[Tensor]:
    """A replica, a shard and something of the rank's own."""
    return [Tensor("w", (6, 4)), Tensor("d", on(mesh(3), (6, 3), 0)), Tensor("own", (rank + 1,))]


def grown(rank: int) -> list[Tensor]:
    return [*base(rank), Tensor("more", (5,))]


MARKED = ("w", "more")


def number_of(ranks: Ranks) -> set[int]:
    """The number of the newest plan that each rank has."""
    found = set()
    for planner in ranks.planners:
        assert planner._rounds is not None
        found.add(max(planner._rounds[1]._plans))
    return found


def failures(found: Sequence[RankPlan | Exception]) -> list[type[Exception] | None]:
    return [type(each) if isinstance(each, Exception) else None for each in found]


def test_planner_is_a_joint_one() -> None:
    assert isinstance(GlobalPlanner(), JointPlanner)


def test_one_plan_serves_until_something_changes(connect: Connect) -> None:
    ranks = Ranks(connect, 3)
    first = ranks.plans("0", base, MARKED)
    assert sum("w" in names for names in written(first)) == 1
    again = ranks.plans("1", base, MARKED)
    # The same objects, so that nothing that was worked out for them is worked out again.
    assert all(one is other for one, other in zip(first, again, strict=True))
    assert number_of(ranks) == {1}
    second = ranks.plans("2", grown, MARKED)
    assert sum("more" in names for names in written(second)) == 1
    assert number_of(ranks) == {2}


def test_what_is_a_rank_s_own_may_change_without_anybody_being_asked(store: Any) -> None:
    ranks = Ranks(store.clone, 3)
    ranks.plans("0", base, MARKED)
    (plan,) = ranks.plan("1", lambda rank: [*base(rank), Tensor("mine", (9,))], MARKED, ranks=[2])
    assert isinstance(plan, RankPlan)
    assert "mine" in written([plan])[0]
    assert number_of(ranks) == {1}


def test_rank_that_changes_after_others_chose_the_old_plan_writes_by_itself(store: Any) -> None:
    ranks = Ranks(store.clone, 3)
    ranks.plans("0", base, MARKED)
    (one,) = ranks.plan("1", base, MARKED, ranks=[0])
    found = [one, *ranks.plan("1", grown, MARKED, ranks=[1, 2])]
    plans = [each for each in found if isinstance(each, RankPlan)]
    assert len(plans) == 3
    # Twice, which is right and a little more than needed.
    assert [("more" in names) for names in written(plans)] == [False, True, True]
    assert unwritten(plans, [captured_by(0, base(0), MARKED)] * 1 + [
        captured_by(rank, grown(rank), MARKED) for rank in (1, 2)
    ]) == []  # fmt: skip
    # It has asked for a new plan, which comes although the first to come has not changed.
    after = ranks.plans("2", lambda rank: grown(rank) if rank else base(rank), MARKED)
    assert sum("more" in names for names in written(after)) == 1
    assert number_of(ranks) == {2}


def test_rank_that_changes_before_others_choose_makes_them_plan(store: Any) -> None:
    ranks = Ranks(store.clone, 2)
    ranks.plans("0", lambda rank: [Tensor("w", (6, 4))], MARKED)

    def state(rank: int) -> list[Tensor]:
        if rank == 0:
            while not store.check(["ckpipe/plan/run/1/way"]):
                os.sched_yield()
        return [Tensor("w", (6, 4)), *([Tensor("more", (5,))] if rank else [])]

    ranks.plans("1", state, MARKED)
    assert number_of(ranks) == {2}


def test_rank_that_has_nothing_of_what_lies_elsewhere_now_makes_them_plan(store: Any) -> None:
    """Nothing that it could offer has changed, and a plan for all the same fits no more."""
    ranks = Ranks(store.clone, 3)
    there, back = ([Tensor("d", on(mesh(2, ranks=order), (6, 3), 0))] for order in ((1, 2), (2, 1)))
    ranks.plans("0", lambda rank: there, MARKED)

    def state(rank: int) -> list[Tensor]:
        while rank and not store.check(["ckpipe/plan/run/1/way"]):
            os.sched_yield()
        return back

    ranks.plans("1", state, MARKED)
    assert number_of(ranks) == {2}


def test_rank_that_loses_what_others_leave_to_it_fails_and_recovers(store: Any) -> None:
    ranks = Ranks(store.clone, 2)
    state = [Tensor(f"w{n}", (6, 4)) for n in range(4)]
    marked = [tensor.label for tensor in state]
    first = ranks.plans("0", lambda rank: state, marked)
    (lost, *_) = written(first)[1]
    less = [tensor for tensor in state if tensor.label != lost]
    (kept,) = ranks.plan("1", lambda rank: state, marked, ranks=[0])
    assert isinstance(kept, RankPlan)
    (failed,) = ranks.plan("1", lambda rank: less, marked, ranks=[1])
    assert isinstance(failed, SaveError)
    assert (failed.key, failed.rank) == (lost, 1)
    plans = ranks.plans("2", lambda rank: less if rank else state, marked)
    assert lost in written(plans)[0]


def test_missing_rank_is_named_and_the_next_save_works(connect: Connect) -> None:
    ranks = Ranks(connect, 3, seconds=60)
    with hurried(0.5, present=[0, 2]):
        found = ranks.plan("0", base, MARKED, ranks=[0, 2])
    for each in found:
        assert isinstance(each, PlanTimeout)
        assert "Rank 1 did not take part in planning within 0.5 s" in str(each)
    (late,) = ranks.plan("0", base, MARKED, ranks=[1])
    # It is told at once, and not after its own time.
    assert isinstance(late, PlanTimeout)
    assert "Rank 1 did not take part in planning within 0.5 s" in str(late)
    assert failures(ranks.plan("1", base, MARKED)) == [None] * 3


def test_missing_rank_0_is_named_too_and_catches_up(store: Any) -> None:
    ranks = Ranks(store.clone, 3, seconds=60)
    with hurried(0.2, present=[1, 2]):
        found = ranks.plan("0", base, MARKED, ranks=[1, 2])
    for each in found:
        assert isinstance(each, PlanTimeout)
        assert "Rank 0 did not" in str(each)
    # It finds what the others have left and plans, which commits nobody.
    (plan,) = ranks.plan("0", base, MARKED, ranks=[0])
    assert isinstance(plan, RankPlan)
    # The others get their part of that plan in the next save, which it serves.
    assert failures(ranks.plan("1", base, MARKED, ranks=[0])) == [None]
    assert failures(ranks.plan("1", base, MARKED, ranks=[1, 2])) == [None, None]
    assert number_of(ranks) == {1}


def test_rank_that_had_no_part_in_a_plan_fails_once(store: Any) -> None:
    ranks = Ranks(store.clone, 2, seconds=60)
    ranks.plans("0", base_of_two, MARKED)
    # As if it had been started again, which a pipeline would make another run of.
    ranks.planners[1] = GlobalPlanner(store.clone(), timeout_seconds=60)
    assert failures(ranks.plan("1", base_of_two, MARKED, ranks=[0])) == [None]
    (left_out,) = ranks.plan("1", base_of_two, MARKED, ranks=[1])
    assert isinstance(left_out, SaveError)
    assert "had no part in" in str(left_out)
    ranks.plans("2", base_of_two, MARKED)


def base_of_two(rank: int) -> list[Tensor]:
    return [Tensor("w", (6, 4)), Tensor("d", on(mesh(2), (6, 3), 0))]


def test_contradiction_fails_on_all_ranks_alike(connect: Connect) -> None:
    ranks = Ranks(connect, 3)
    found = ranks.plan("0", lambda rank: [Tensor("w", (3 + rank // 2, 2))], MARKED)
    texts = {str(each) for each in found}
    assert failures(found) == [UnsupportedState] * 3
    assert len(texts) == 1
    text = texts.pop()
    assert all(part in text for part in ("[3, 2]", "rank 0", "[4, 2]", "rank 2", "'w'"))
    assert failures(ranks.plan("1", base, MARKED)) == [None] * 3


def test_values_may_be_long(connect: Connect) -> None:
    ranks = Ranks(connect, 2)
    noise = random.Random(1)
    tensors = [Tensor(noise.randbytes(4000).hex(), (6, 4)) for _ in range(300)]
    # Rank 1 lacks one, so that their offers differ and rank 0 reads both.
    labels = [tensor.label for tensor in tensors]
    plans = ranks.plans("0", lambda rank: tensors[rank:], labels)
    names = written(plans)
    assert sorted(names[0] + names[1]) == sorted(labels)


def test_store_does_not_grow(store: Any) -> None:
    ranks = Ranks(store.clone, 3)
    sizes = set()
    for save in range(300 if EVERY else 160):
        shape = (save // 10 + 1,)  # of a tensor that makes them plan anew each time

        def state(rank: int, shape: tuple[int, ...] = shape) -> list[Tensor]:
            return [*base(rank), Tensor("more", shape)]

        # One after the other where nobody has to wait.
        if save % 10:
            for rank in range(3):
                assert failures(ranks.plan(f"{save}", state, MARKED, ranks=[rank])) == [None]
        else:
            ranks.plans(f"{save}", state, MARKED)
        if save >= 100:
            sizes.add(store.num_keys())
    # The counter of wishes, and three plans: a header for each rank, and a body in two values.
    assert sizes == {1 + 3 * (3 + 2)}


def test_store_does_not_grow_without_one_of_the_ranks(store: Any) -> None:
    ranks = Ranks(store.clone, 3)
    ranks.plans("0", base, MARKED)
    for save in range(1, 100):
        for rank in (0, 1):
            assert failures(ranks.plan(f"{save}", base, MARKED, ranks=[rank])) == [None]
    # One plan, and two keys for each save of the last ones that a rank never came to.
    assert store.num_keys() <= 45


@pytest.mark.parametrize("seed", [SEED])
def test_changes_at_any_time_on_any_rank_leave_nothing_out(store: Any, seed: int) -> None:
    chance = random.Random(seed)
    ranks = Ranks(store.clone, 3)
    held = [{0} for _ in range(3)]
    ranks.plans("0", lambda rank: _some(rank, held[rank]), SOME)
    outcomes = set()
    for save in range(1, 60):
        for rank in range(3):
            if chance.random() < 0.3:
                held[rank] ^= {chance.randrange(1, 4)}
        order = chance.sample(range(3), 3)
        tensors = [_some(rank, held[rank]) for rank in range(3)]
        by_rank = dict(
            zip(order, ranks.plan(f"{save}", tensors.__getitem__, SOME, ranks=order), strict=True)
        )
        found = [by_rank[rank] for rank in range(3)]
        plans = [each for each in found if isinstance(each, RankPlan)]
        outcomes.add(len(plans))
        if len(plans) == 3:
            states = [captured_by(rank, tensors[rank], SOME) for rank in range(3)]
            assert unwritten(plans, states) == []
        else:
            assert all(isinstance(each, RankPlan | SaveError) for each in found), found
    assert 3 in outcomes


SOME = [f"t{n}" for n in range(4)]


def _some(rank: int, numbers: set[int]) -> list[Tensor]:
    return [Tensor(f"t{n}", (n + 1, 4)) for n in sorted(numbers)]


def test_store_that_is_gone_is_an_error_of_the_save() -> None:
    server: Any = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=2))
    client: Any = TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=2))
    planner = GlobalPlanner(client, timeout_seconds=1)
    planner.prepare(rank=1, world_size=2)
    rounds = planner._rounds_of("run", 1, 2)
    assert rounds is not None
    del server
    captured = captured_by(1, [Tensor("w", (2,))], ["w"])
    with pytest.raises(SaveError, match="plan through failed"):
        planner.plan_save(captured, save="run/0", rank=1, world_size=2)


async def test_waiting_ends_when_the_save_is_cancelled(store: Any) -> None:
    planner = GlobalPlanner(store, timeout_seconds=60)
    captured = captured_by(0, [Tensor("w", (2,))], ["w"])

    def plan() -> RankPlan:
        return planner.plan_save(captured, save="run/0", rank=0, world_size=2)

    with anyio.move_on_after(20) as patience:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.to_thread.run_sync, plan)
            while not store.check(["ckpipe/plan/run/0/offer/0"]):
                await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
    assert not patience.cancelled_caught
