"""Planners plug in: which one a pipeline uses, and what a plan that is not valid does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pipelines import loaded_state
from planning_ranks import written
from ranks import ranks
from stored_files import document_of, index_key
from torch._C._distributed_c10d import HashStore

import ckpipe
from ckpipe import GlobalPlanner
from ckpipe.errors import SettingsError, UnsupportedTopology, UsageError
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
    newest = pipeline.latest()
    assert newest is not None
    index = document_of((root / index_key(newest.id)).read_bytes())
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
    return replace(plan, files=(replace(file, name="../other.safetensors"),))


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
        newest = opened[0].latest()
        assert newest is not None
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
