"""Planners plug in, wrong plans are refused, and ranks that plan together come to one plan."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
import torch
from torch._C._distributed_c10d import FileStore, HashStore, TCPStore

import ckpipe
from ckpipe import GlobalPlanner
from ckpipe.errors import (
    PlanTimeout,
    SaveError,
    SettingsError,
    UnsupportedState,
    UnsupportedTopology,
    UsageError,
)
from ckpipe.planning import (
    Captured,
    LocalPlanner,
    RankPlan,
    ReplicatedMarks,
    Unit,
    assemble,
    fingerprint,
    shares,
)
from ckpipe.types import JointPlanner
from tests.inner.made_up_ranks import (
    Ranks,
    Tensor,
    captured_by,
    hurried,
    mesh,
    on,
    unwritten,
    written,
)
from tests.support.pipelines import loaded_state, newest_of
from tests.support.rank_pipelines import ranks
from tests.support.sampling import EVERY, SEED
from tests.support.stored_files import document_of, index_key


class LastWrites:
    """Leaves what is replicated to the last rank that has it."""

    def __init__(self) -> None:
        self._marked = ReplicatedMarks(["w*"])
        self.plans: list[RankPlan] = []

    def plan(self, captured: Captured, *, rank: int, world_size: int) -> RankPlan:
        marked = self._marked(captured)
        units = [
            Unit(share.members, share.holding.written_by(max(share.holding.replicas)))
            for share in shares(captured.tensors, marked, rank=rank, world_size=world_size)
        ]
        self.plans.append(assemble(captured, units, rank=rank, world_size=world_size))
        return self.plans[-1]


def state_of(rank: int) -> dict[str, Any]:
    return {"w0": torch.arange(9.0), "w1": torch.arange(5), "own": torch.full((4,), rank)}


def planners_of(pipeline: ckpipe.SyncPipeline, root: Path) -> set[str]:
    """The planners that the ranks of the newest checkpoint have used."""
    index = document_of((root / index_key(newest_of(pipeline).id)).read_bytes())
    return {writer["planner"] for writer in index["writer"]}


def test_planner_of_a_user_divides_as_it_likes(tmp_path: Path) -> None:
    planner = LastWrites()
    with ranks(str(tmp_path), 2, plan=planner) as opened:
        for rank, pipeline in enumerate(opened):
            pipeline.save(state_of(rank), step=1).wait()
        assert written(planner.plans) == [["own"], ["own", "w0", "w1"]]
        assert planners_of(opened[0], tmp_path) == {"LastWrites"}
    # What a checkpoint holds does not depend on who wrote what.
    with ranks(str(tmp_path), 2, attempt_id="later") as opened:
        for rank, pipeline in enumerate(opened):
            loaded = loaded_state(pipeline)
            for name, tensor in state_of(rank).items():
                assert torch.equal(loaded[name], tensor)


def test_planner_is_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = LastWrites()
    assert ckpipe.Settings(plan="global").plan.planner == "global"
    assert ckpipe.Settings(plan=planner).plan.planner is planner
    assert ckpipe.Settings(plan={"replicated": ["*"]}).plan.planner == "local"
    monkeypatch.setenv("CKPIPE_PLAN", "global")
    assert ckpipe.Settings().plan.planner == "global"
    monkeypatch.delenv("CKPIPE_PLAN")
    both = ckpipe.Settings(plan={"planner": "global", "timeout_seconds": 3})
    assert both.override(plan={"replicated": "none"}).plan.timeout_seconds == 3


@pytest.mark.parametrize("wrong", ["globl", 3, object(), LocalPlanner])
def test_what_is_no_planner_is_refused(wrong: Any) -> None:
    with pytest.raises(SettingsError, match="'local', 'global' or an object with a method plan"):
        ckpipe.Settings(plan=wrong)


Spoil = Callable[[RankPlan], Any]


def _with(plan: RankPlan, chunks: Iterable[Any]) -> RankPlan:
    layout = plan.layout
    return replace(plan, layout=type(layout)(layout.entries, chunks))


def _without_a_tensor(plan: RankPlan) -> RankPlan:
    return _with(plan, plan.layout.chunks[1:])


def _twice(plan: RankPlan) -> RankPlan:
    chunks = plan.layout.chunks
    return _with(plan, (*chunks, chunks[-1]))


def _swapped(plan: RankPlan) -> RankPlan:
    first, second, *others = plan.sources
    return replace(plan, sources=(second, first, *others))


def _other_bytes(plan: RankPlan) -> RankPlan:
    first, second, *others = plan.layout.chunks
    mixed = (first._replace(entry=second.entry), second._replace(entry=first.entry))
    return _with(plan, (*mixed, *others))


def _hole(plan: RankPlan) -> RankPlan:
    ((source,), *others) = plan.sources
    return replace(plan, sources=((replace(source, offset=8),), *others))


def _unfilled(plan: RankPlan) -> RankPlan:
    return replace(plan, sources=((), *plan.sources[1:]))


def _outside(plan: RankPlan) -> RankPlan:
    chunks = [row._replace(owner=7, entry=None) for row in plan.layout.chunks]
    return _with(plan, chunks)


def _header(plan: RankPlan) -> RankPlan:
    (file,) = plan.files
    return replace(plan, files=(replace(file, header=b" " * len(file.header)),))


def _file(plan: RankPlan) -> RankPlan:
    (file,) = plan.files
    return replace(plan, files=(replace(file, row=replace(file.row, name="../other.safetensors")),))


def _no_such_tensor(plan: RankPlan) -> RankPlan:
    ((source,), *others) = plan.sources
    return replace(plan, sources=((replace(source, tensor=99),), *others))


SPOILT: dict[str, tuple[Spoil, str]] = {
    "nothing": (lambda plan: None, "is no RankPlan but NoneType"),
    "another rank's": (lambda plan: replace(plan, rank=3), "is for rank 3 of 1, not 0 of 1"),
    "another state's": (lambda plan: replace(plan, fingerprint=()), "for another structure"),
    "without a tensor": (_without_a_tensor, "leaves a part of this tensor out"),
    "a tensor twice": (_twice, "has elements of this tensor twice"),
    "sources swapped": (_swapped, "fills"),
    "other bytes": (_other_bytes, r"fills this tensor's place|behind its entry"),
    "a hole": (_hole, "leaves a hole in the entry"),
    "nothing in an entry": (_unfilled, "fills 0 of the"),
    "an owner outside the world": (_outside, "outside the world"),
    "a header that lies": (_header, "header that does not match its entries"),
    "a file elsewhere": (_file, "instead of 'rank-00000.safetensors'"),
    "a tensor that is not there": (_no_such_tensor, "from tensor 99"),
}


@pytest.mark.parametrize("how", SPOILT)
def test_plan_that_is_not_valid_fails_before_a_byte_is_copied(how: str, tmp_path: Path) -> None:
    spoil, message = SPOILT[how]

    class Spoilt:
        spoils = True

        def plan(self, captured: Captured, *, rank: int, world_size: int) -> Any:
            plan = LocalPlanner().plan(captured, rank=rank, world_size=world_size)
            return spoil(plan) if self.spoils else plan

    planner = Spoilt()
    state = {"a": torch.arange(6.0), "b": torch.arange(6.0) + 9, "c": torch.zeros(2)}
    with ckpipe.SyncPipeline(tmp_path, plan=planner) as pipeline:
        with pytest.raises(UsageError, match=message) as caught:
            pipeline.save(state, step=1)
        assert "The plan of Spoilt" in str(caught.value)
        assert not list(tmp_path.rglob("*.safetensors"))
        planner.spoils = False
        pipeline.save(state, step=2).wait()


class Breaks:
    """Ends in another way than with a plan."""

    def __init__(self, how: BaseException | None) -> None:
        self._how = how

    def plan(self, captured: Captured, *, rank: int, world_size: int) -> RankPlan:
        if self._how is None:
            nothing: Any = None
            return RankPlan(rank, world_size, fingerprint(captured), nothing, nothing, nothing)
        raise self._how


@pytest.mark.parametrize(
    ("how", "error", "said"),
    [
        (SystemExit(3), UsageError, r"The planner Breaks raised SystemExit\(3\)"),
        (KeyboardInterrupt(), UsageError, "The planner Breaks raised KeyboardInterrupt"),
        (asyncio.CancelledError(), UsageError, "The planner Breaks raised CancelledError"),
        (ValueError("mine"), ValueError, "mine"),
        (None, UsageError, "has malformed fields: TypeError"),
    ],
)
def test_planner_that_breaks_fails_the_save_and_nothing_else(
    how: BaseException | None, error: type[Exception], said: str, tmp_path: Path
) -> None:
    with ranks(str(tmp_path), 2, plan=Breaks(how)) as opened:
        for pipeline in opened:
            with pytest.raises(error, match=said):
                pipeline.save(state_of(0), step=1).wait()
            assert pipeline.steps() == []


def test_planner_that_leaves_the_program_when_it_is_prepared_is_refused(tmp_path: Path) -> None:
    class Leaves(GlobalPlanner):
        def prepare(self, *, rank: int, world_size: int, max_file_bytes: int | None = None) -> None:
            raise SystemExit(3)

    with pytest.raises(UsageError, match=r"The planner Leaves raised SystemExit\(3\)"):
        ckpipe.SyncPipeline(tmp_path, plan=Leaves()).__enter__()


# plan="global" through pipelines


def together(opened: list[ckpipe.SyncPipeline], step: int) -> list[Any]:
    """Has all ranks save at the same time, as ranks do."""

    def save(rank: int) -> Any:
        try:
            return opened[rank].save(state_of(rank), step=step).wait()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(opened)) as pool:
        return list(pool.map(save, range(len(opened))))


def test_ranks_plan_together_and_later_alone(tmp_path: Path) -> None:
    store: Any = HashStore()
    planners = [
        ckpipe.GlobalPlanner(store, replicated=["w*"], timeout_seconds=30) for _ in range(2)
    ]
    each = iter(planners)
    with ranks(str(tmp_path), 2, plan=lambda: next(each)) as opened:
        assert [info.step for info in together(opened, 1)] == [1, 1]
        # The structure is the same, so that nobody is waited for.
        for rank in (1, 0):
            pipeline = opened[rank]
            handle = pipeline.save(state_of(rank), step=2)
            handle.wait()
            assert not handle.report.planned
        newest = newest_of(opened[0])
        assert newest.step == 2
        assert planners_of(opened[0], tmp_path) == {"GlobalPlanner"}
        opened[0].verify(newest)
        loaded = loaded_state(opened[1])
        for name, tensor in state_of(1).items():
            assert torch.equal(loaded[name], tensor)
    names = [path.stat().st_size for path in tmp_path.rglob("rank-*.safetensors")]
    assert len(names) == 4
    # Nothing but the counter and the last plan is left of a run.
    assert store.num_keys() <= 10


@pytest.mark.parametrize("fields", [{}, {"solo": True}])
def test_one_rank_alone_plans_globally_by_itself(tmp_path: Path, fields: dict[str, Any]) -> None:
    with ckpipe.SyncPipeline(tmp_path, plan="global", **fields) as pipeline:
        pipeline.save(state_of(0), step=1).wait()
        assert planners_of(pipeline, tmp_path) == {"GlobalPlanner"}
        assert pipeline.load() is not None


def test_several_ranks_without_a_store_are_told_at_open(tmp_path: Path) -> None:
    refused = pytest.raises(UnsupportedTopology, match="no store to plan together through")
    with refused, ranks(str(tmp_path), 2, plan="global"):
        pass


# ---- rounds of ranks that plan together ----


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
