"""``dcp.save``, ``dcp.async_save`` and ``dcp.load`` with the storage of ckpipe."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch.distributed.checkpoint import _async_process_executor, state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

import ckpipe
from ckpipe.errors import CheckpointNotFound, CorruptCheckpoint, UsageError
from ckpipe.integrations.dcp import CkpipeStorageReader, CkpipeStorageWriter
from tests.foreign.dcp_runs import facts, made
from tests.integrations.trainer_ranks import Runs, forked, new_case, serve_runs, whole
from tests.support.fork_server import Case
from tests.support.rank_processes import URL, matrix, mortal, tell, told
from tests.support.s3_servers import S3Server, set_up_process
from tests.support.sampling import EVERY, sample
from tests.support.wrapped_models import trained

dcp: Any = torch.distributed.checkpoint  # it does not export what it has


def writer_to(root: Any, **settings: Any) -> CkpipeStorageWriter:
    return CkpipeStorageWriter(root, staging={"block_bytes": 65536}, **settings)


def reader_of(root: Any) -> CkpipeStorageReader:
    return CkpipeStorageReader(root, staging={"block_bytes": 65536})


def check_equal(found: Any, expected: Any) -> None:
    """Check that the tensors of a state are those of another one, to the bit."""
    for name, each in expected.items():
        assert torch.equal(whole(found[name]), whole(each)), name


def state_of(model: torch.nn.Module, optimizer: Any, form: str = "nested") -> dict[str, Any]:
    """Return the state of model and optimizer in one of DCP's two forms."""
    options = StateDictOptions(flatten_optimizer_state_dict=form == "flat")
    model_state, optim_state = get_state_dict(model, optimizer, options=options)
    return {"model": model_state, "optim": optim_state}


def loaded_into(kind: str, form: str, name: str, root: str, file: str) -> None:
    """Load a checkpoint into a fresh model and optimizer, and check all values."""
    model, optimizer = made(kind, steps=1)
    state = state_of(model, optimizer, form) | {"step": 0, "table": {"x": [0, torch.zeros(3)]}}
    state["row"] = matrix(1, -1)  # all ranks but the first hold nothing of it
    dcp.load(state, checkpoint_id=name, storage_reader=reader_of(root))
    options = StateDictOptions(flatten_optimizer_state_dict=form == "flat")
    set_state_dict(
        model, optimizer,
        model_state_dict=state["model"], optim_state_dict=state["optim"], options=options,
    )  # fmt: skip
    assert state["step"] == 3
    assert state["table"]["x"][0] == "a value"
    assert torch.equal(state["table"]["x"][1], torch.ones(3))
    assert torch.equal(whole(state["row"]), whole(matrix(1, 3)))
    found, expected = facts(model, optimizer), torch.load(file)
    assert found.keys() == expected.keys()
    check_equal(found, expected)


def save_kinds(case: Case) -> None:
    """Save a trained model in some wrappers and forms, under a name each."""
    writer = writer_to(case["root"])
    for kind, form in case["saves"]:
        model, optimizer = made(kind, steps=3)
        state = state_of(model, optimizer, form)
        state |= {"step": 3, "table": {"x": ["a value", torch.ones(3)]}, "row": matrix(1, 3)}
        dcp.save(state, checkpoint_id=f"{kind}-{form}", storage_writer=writer)
        expected = facts(model, optimizer)
        if dist.get_rank() == 0:
            torch.save(expected, f"{case['root']}.{kind}.pt")
        dist.barrier()
        loaded_into(kind, form, f"{kind}-{form}", case["root"], f"{case['root']}.{kind}.pt")


def load_kinds(case: Case) -> None:
    """Load what other ranks have saved."""
    for saved, form, kind in case["loads"]:
        file = f"{case['root']}.{saved}.pt"
        loaded_into(kind, form, f"{saved}-{form}", case["root"], file)


def test_saves_load_into_other_ranks_and_wrappers(run: Runs, tmp_path: Path) -> None:
    case, saves = new_case(tmp_path), [("fsdp", "nested"), ("fsdp", "flat"), ("ddp", "nested")]
    assert run(save_kinds, case, 2, saves=saves) == [0, 0]
    for ranks, kind in ((1, "fsdp"), (4, "hsdp")):
        loads = sample([(*saved, kind) for saved in saves], 2)
        assert run(load_kinds, case, ranks, loads=loads) == [0] * ranks
    plain, expected = ckpipe.load(case["root"]), torch.load(f"{case['root']}.ddp.pt")
    assert plain.metadata["name"] == "ddp-nested"
    assert plain.state["model"].keys() <= expected.keys()
    check_equal(expected, plain.state["model"])


@pytest.mark.skipif(not EVERY, reason="the long form tries it")
def test_meshes_of_two_dimensions(run: Runs, tmp_path: Path) -> None:
    case, saves = new_case(tmp_path), [(kind, "nested") for kind in ("2d", "tp", "hsdp")]
    assert run(save_kinds, case, 4, saves=saves) == [0] * 4
    loads = [("2d", "nested", "tp"), ("tp", "nested", "plain"), ("hsdp", "nested", "ddp")]
    assert run(load_kinds, case, 2, loads=loads) == [0, 0]


class FailingPlanner(DefaultSavePlanner):
    """Fails on one rank in one step of a save."""

    def __init__(self, rank: int, where: str, **options: Any) -> None:
        super().__init__(**options)
        self.fails, self.where = dist.get_rank() == rank, where

    def create_local_plan(self) -> Any:
        if self.fails and self.where == "plan":
            raise OSError("the plan fails")
        return super().create_local_plan()

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if self.fails and self.where == "write":
            raise OSError("the write fails")
        return super().resolve_data(write_item)

    def create_global_plan(self, all_plans: Any) -> Any:
        plans, metadata = super().create_global_plan(all_plans)
        if self.where == "finish":
            metadata.planner_data = {"odd": FailingPlanner}
        return plans, metadata


def fail_to_load(case: Case, reader: CkpipeStorageReader, state: Any) -> None:
    """Ask for what is not there: DCP's errors, on all ranks, and nothing is changed."""
    found = state(-2)
    odd = [
        ({"model": found["model"], "more": torch.zeros(2)}, "it", "more", RuntimeError),
        ({"number": 0}, "that", "of DCP named 'that'", CheckpointNotFound),
    ]
    for into, name, text, kind in odd:
        with pytest.raises(CheckpointException, match=text) as caught:
            dcp.load(into, checkpoint_id=name, storage_reader=reader)
        assert len(caught.value.failures) == dist.get_world_size()
        assert {type(error) for error, _ in caught.value.failures.values()} == {kind}
    other = f"{case['root']}-{dist.get_rank()}"  # as if a save were completed meanwhile
    dcp.save({"w": torch.ones(1)}, no_dist=True, storage_writer=CkpipeStorageWriter(other))
    with pytest.raises(CheckpointException, match="have chosen different checkpoints"):
        dcp.load(unseen := {"w": torch.zeros(1)}, storage_reader=CkpipeStorageReader(other))
    assert not unseen["w"]
    part: Any = {
        "model": {"second.weight": found["model"]["second.weight"]},
        "more": torch.zeros(2),
    }
    partial = DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(part, checkpoint_id="it", storage_reader=reader, planner=partial)
    assert (whole(part["model"]["second.weight"]) > 0).all()
    assert (part["more"] == 0).all()
    assert (whole(found["model"]["first.weight"]) == -2).all()


@forked(2)
def test_failures_reach_all_ranks_and_leave_nothing(case: Case) -> None:
    """Let saves fail in each step on each rank; each is told to all, and the next is complete."""
    writer = writer_to(case["root"])
    reader = reader_of(case["root"])
    size = dist.get_world_size()

    def state(number: int) -> dict[str, Any]:
        model, _ = made("fsdp", steps=0)
        with torch.no_grad():
            for each in model.state_dict().values():
                each.fill_(number)
        return {"model": model.state_dict(), "number": number}

    dcp.save(state(0), checkpoint_id="it", storage_writer=writer)
    for number, (victim, where) in enumerate(
        [(v, w) for v in range(size) for w in ("plan", "write")] + [(0, "finish")], 1
    ):
        planner = FailingPlanner(victim, where)
        text = "FailingPlanner" if where == "finish" else f"the {where} fails"
        with pytest.raises(CheckpointException, match=text) as caught:
            dcp.save(state(-1), checkpoint_id="it", storage_writer=writer, planner=planner)
        assert list(caught.value.failures) == [victim]
        found = state(-2)
        dcp.load(found, checkpoint_id="it", storage_reader=reader)
        assert found["number"] == number - 1
        dcp.save(state(number), checkpoint_id="it", storage_writer=writer)
        dcp.load(found, checkpoint_id="it", storage_reader=reader)
        assert found["number"] == number
        assert all((whole(each) == number).all() for each in found["model"].values())
    fail_to_load(case, reader, state)


class App(Stateful):
    """What PyTorch's recipe of DCP saves: model and optimizer in one object."""

    def __init__(self, steps: int) -> None:
        self.model, self.optimizer = made("fsdp", steps=steps)

    def state_dict(self) -> dict[str, Any]:
        return state_of(self.model, self.optimizer)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model, self.optimizer,
            model_state_dict=state["model"], optim_state_dict=state["optim"],
        )  # fmt: skip


class Odd(torch.Tensor):
    """A tensor of another class."""


@forked(2)
def test_recipes_of_pytorch(case: Case) -> None:
    """Save and load as PyTorch's recipes and helpers do."""
    app, reader = App(3), reader_of(case["root"])
    dcp.save({"app": app}, storage_writer=writer_to(case["root"]))
    expected = facts(app.model, app.optimizer)
    other = App(1)
    dcp.load({"app": other}, storage_reader=reader)
    check_equal(expected, facts(other.model, other.optimizer))
    keys = state_dict_loader._load_state_dict_from_keys("app.model", storage_reader=reader)
    everything: Any = {}  # as torch's dcp_to_torch_save reads it
    planner = _EmptyStateDictLoadPlanner()  # type: ignore[no-untyped-call]
    state_dict_loader._load_state_dict(everything, reader, planner=planner, no_dist=True)
    assert keys["app"].keys() == {"model"}
    assert everything["app"].keys() == {"model", "optim"}
    for found in (keys, everything):
        check_equal(expected, found["app"]["model"])


@forked(2)
def test_a_name_is_that_of_its_own_call_only(case: Case) -> None:
    """Save and load by one writer and one reader; a name is that of its own call only."""
    root = case["root"]
    writer, reader = writer_to(root), reader_of(root)
    for number, name in enumerate((None, "a", None, "b", "a", None)):
        dcp.save({"n": torch.tensor(number)}, checkpoint_id=name, storage_writer=writer)
    for name, expected in (("a", 4), (None, 5), ("b", 3), ("absent", -1), (None, 5)):
        found = {"n": torch.tensor(-1)}
        with nullcontext() if expected >= 0 else pytest.raises(CheckpointException):
            dcp.load(found, checkpoint_id=name, storage_reader=reader)
        assert found["n"] == expected, name
    odd = {"odd": torch.zeros(2).as_subclass(Odd)}
    with pytest.raises(CheckpointException, match="DCP would save an object of type Odd"):
        dcp.save(odd, checkpoint_id="odd", storage_writer=writer)
    with ckpipe.SyncPipeline(root, read_only=True, solo=True) as pipeline:
        infos = [info for info in pipeline.steps(metadata=True) if info.complete]
    names = [(info.metadata or {})["name"] for info in infos]
    assert names == ["", "a", "", "b", "a", ""]


class CuttingPlanner(DefaultSavePlanner):
    """Cuts each matrix of the first rank into its rows, so that a name has several items."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        return replace(plan, items=[row for item in plan.items for row in self._rows(item)])

    def _rows(self, item: WriteItem) -> list[WriteItem]:
        about = item.tensor_data
        if about is None or len(about.size) != 2:
            return [item]
        (top, left), (rows, columns) = about.chunk.offsets, about.chunk.sizes
        return [
            replace(
                item,
                index=MetadataIndex(item.index.fqn, (top + n, left)),
                type=WriteItemType.SHARD,
                tensor_data=replace(
                    about,
                    chunk=ChunkStorageMetadata(
                        torch.Size((top + n, left)), torch.Size((1, columns))
                    ),
                ),
            )
            for n in range(rows)
        ]

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = self.state_dict[index.fqn]
        if not isinstance(found, torch.Tensor) or found.dim() != 2:
            return super().lookup_object(index)
        local = found.to_local() if isinstance(found, DTensor) else found
        first = local.shape[0] * dist.get_rank() if isinstance(found, DTensor) else 0
        assert index.offset is not None
        return local[index.offset[0] - first :][:1]


@forked(2)
def test_planners_that_cut_tensors(case: Case) -> None:
    """Save matrices row by row, and load them whole, cut otherwise and from one process."""
    model, _ = made("fsdp", steps=2)
    plain = torch.randn(3, 4, dtype=torch.float64)
    state: Any = {"model": model.state_dict(), "plain": plain}
    dist.broadcast(plain, 0)
    writer = writer_to(case["root"])
    dcp.save(state, storage_writer=writer, planner=CuttingPlanner())
    other, _ = made("fsdp", steps=0)
    found: Any = {"model": other.state_dict(), "plain": torch.zeros(3, 4)}  # it takes another dtype
    dcp.load(found, storage_reader=reader_of(case["root"]))
    check_equal(found["model"], state["model"])
    assert torch.equal(found["plain"], plain.float())


@forked(2)
def test_cached_plans(case: Case) -> None:
    """Save with cached plans, by a new writer each time, and change the state between."""
    for number in range(4):
        model, optimizer = made("fsdp", steps=number)
        state = state_of(model, optimizer)["model"]
        if number == 3:
            state["new"] = torch.full((5,), 3.0)
        writer = writer_to(case["root"])
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(state, checkpoint_id=f"n{number}", storage_writer=writer, planner=planner)
        other, _ = made("fsdp", steps=0)
        found = other.state_dict() | ({"new": torch.zeros(5)} if number == 3 else {})
        dcp.load(found, storage_reader=reader_of(case["root"]))
        check_equal(found, state)


class MeetingPlanner(DefaultSavePlanner):
    """Lets two saves of a rank write in an order, once both have their plans."""

    def __init__(self, planned: threading.Event, writes: threading.Event, *, first: bool) -> None:
        super().__init__()
        self._planned, self._writes, self._first = planned, writes, first

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        if not self._first:
            self._planned.set()
        assert (self._planned if self._first else self._writes).wait(60)
        return super().finish_plan(new_plan)

    def resolve_data(self, write_item: WriteItem) -> Any:
        self._writes.set()
        return super().resolve_data(write_item)


@forked(2)
def test_two_saves_at_once_do_not_mix(case: Case) -> None:
    """Save two states at once, which each rank writes in another order; then with one writer."""
    rank, root = dist.get_rank(), case["root"]
    groups: Any = [dist.new_group(backend="gloo") for _ in range(2)]
    one = writer_to(root)
    for writers in ([writer_to(root) for _ in range(2)], [one, one]):
        events = threading.Event(), threading.Event()
        if writers[0] is one:
            events[1].set()  # one of the saves fails before it writes

        def save(number: int, writers: Any = writers, events: Any = events) -> None:
            dcp.save(
                {f"w{rank}": torch.tensor(number)}, checkpoint_id=f"n{number}",
                storage_writer=writers[number], process_group=groups[number],
                planner=MeetingPlanner(*events, first=number == rank),
            )  # fmt: skip

        with ThreadPoolExecutor(2) as pool:
            saves = [pool.submit(save, number) for number in range(2)]
            failures = [each.exception() for each in saves]
        if writers[0] is one:
            assert any("use one CkpipeStorageWriter at" in str(each) for each in failures)
            return
        assert failures == [None, None]
        for number in range(2):
            found = {f"w{rank}": torch.tensor(-1)}
            reader = reader_of(root)
            dcp.load(found, checkpoint_id=f"n{number}", storage_reader=reader)
            assert found[f"w{rank}"] == number


def save_two(root: Path) -> None:
    for number, name in enumerate("ab"):
        state, writer = {"n": torch.tensor(number)}, CkpipeStorageWriter(root)
        dcp.save(state, checkpoint_id=name, storage_writer=writer, no_dist=True)


def load(name: str, reader: CkpipeStorageReader, planner: Any = None) -> int:
    state = {"n": torch.tensor(-1)}
    dcp.load(state, checkpoint_id=name, storage_reader=reader, planner=planner, no_dist=True)
    return int(state["n"])


class RemakingPlanner(DefaultLoadPlanner):
    """Makes the plan anew in some steps, with fields of its own; others see them in the next.

    Args:
        remade: Make a plan anew, by the name of the step: local, global or finish.
    """

    def __init__(self, **remade: Callable[[LoadPlan], LoadPlan]) -> None:
        super().__init__()
        self._remade, self.seen = remade, None

    def _made(self, step: str, plan: LoadPlan) -> LoadPlan:
        return self._remade[step](plan) if step in self._remade else plan

    def create_local_plan(self) -> LoadPlan:
        return self._made("local", super().create_local_plan())

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return [self._made("global", each) for each in global_plan]

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        self.seen = central_plan.storage_data
        return self._made("finish", central_plan)


class PlanOfOnesOwn(LoadPlan):
    """A plan of another class."""


REMADE: dict[str, Any] = {
    "without data": lambda plan: LoadPlan(plan.items),
    "with data": lambda plan: LoadPlan(plan.items, {"own": 1}, {"of": "it"}),
    "with text": lambda plan: LoadPlan(plan.items, "own"),
    "another class": lambda plan: PlanOfOnesOwn(plan.items),
    "replaced": lambda plan: replace(plan, items=plan.items, storage_data=("own",)),
}


@pytest.mark.filterwarnings("ignore")
def test_a_load_planner_may_make_plans_anew(tmp_path: Path) -> None:
    save_two(tmp_path)
    for (kind, remade), step in product(REMADE.items(), ("local", "global", "finish")):
        planner = RemakingPlanner(**{step: remade})
        assert load("a", CkpipeStorageReader(tmp_path), planner) == 0, (kind, step)
        own = remade(LoadPlan([])).storage_data
        assert planner.seen == (None if step == "finish" else own), (kind, step)


@forked(2)
def test_load_planners_of_several_ranks(case: Case) -> None:
    """Load with planners that make plans anew: what they may drop, and what ranks must agree on."""
    state: Any = {"model": made("fsdp", steps=2)[0].state_dict()}
    dcp.save(state, storage_writer=writer_to(case["root"]))
    own: dict[str, Any] = {"global": lambda plan: LoadPlan(plan.items, {"own": 1})}
    replaced = {"finish": lambda plan: replace(plan, storage_data="own")}
    forgotten = {"finish": lambda plan: LoadPlan(plan.items)}
    for remade in ({}, replaced, forgotten):
        found: Any = {"model": made("fsdp", steps=0)[0].state_dict()}
        refused = pytest.raises(CheckpointException, match="cannot tell whether all ranks read")
        with refused if remade is forgotten else nullcontext():
            planner = RemakingPlanner(**own, **remade)
            dcp.load(found, storage_reader=reader_of(case["root"]), planner=planner)
            check_equal(found["model"], state["model"])
    other = f"{case['root']}-{dist.get_rank()}"  # as if a save were completed meanwhile
    dcp.save({"w": torch.ones(1)}, no_dist=True, storage_writer=CkpipeStorageWriter(other))
    with pytest.raises(CheckpointException, match="have chosen different checkpoints"):
        dcp.load(
            {"w": torch.zeros(1)},
            storage_reader=CkpipeStorageReader(other), planner=RemakingPlanner(**own),
        )  # fmt: skip


class ForgetfulPlanner(DefaultSavePlanner):
    """Makes plans anew in one step of a save."""

    def __init__(self, step: str) -> None:
        super().__init__()
        self._step = step

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        if self._step == "global":
            plans = [SavePlan(plan.items, storage_data={"own": 1}) for plan in plans]
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        plan = super().finish_plan(new_plan)
        return SavePlan(plan.items) if self._step == "finish" else plan


@pytest.mark.filterwarnings("ignore")
def test_a_save_planner_may_make_plans_anew_until_the_last_step(tmp_path: Path) -> None:
    for step in ("global", "finish"):
        planner, writer = ForgetfulPlanner(step), CkpipeStorageWriter(tmp_path)
        refused = pytest.raises(
            CheckpointException, match="finish_plan of a planner has made it anew"
        )
        with nullcontext() if step == "global" else refused:
            state = {"n": torch.tensor(3)}
            dcp.save(state, storage_writer=writer, planner=planner, no_dist=True)
    assert load("", CkpipeStorageReader(tmp_path)) == 3


KEYS: list[Any] = [
    *({key: 1.0, "x": 2.0} for key in ("", ".", "~", "~0", "a.b", "a@b", "__metadata__")),
    {7: 1.0, 8: {"": 2.0}},  # dcp.load sorts the first keys
    {None: 1.0},
    {"": {"": 1.0}, "x": 2.0},
    {"": {"a": 1.0}, "a": 2.0},
    {"": "text", "a": {"": "more", "~": 1.0}},
    {"": 1.0, "~": 2.0, "~0": 3.0, "~~": 4.0, "~~0": 5.0},
    {"": [1.0, {"": 2.0}], "__metadata__": {"": 3.0}, "~__metadata__": {"": 4.0}},
    {"a": {"": {"": 1.0, "b": 2.0}, ".b.": 3.0}, "~": {"a": 4.0}, "\ud800": 5.0},
    {("a", 1): 1.0, ("b",): {2: 2.0, "3": 3.0, "": 4.0}},
]
"""States with keys that are unusual; a number stands for a tensor."""


def with_tensors(state: Any, scale: float) -> Any:
    """Return a state with tensors in the place of its numbers."""
    if isinstance(state, dict):
        return {key: with_tensors(value, scale) for key, value in state.items()}
    if isinstance(state, list):
        return [with_tensors(value, scale) for value in state]
    return torch.full((2,), state * scale) if isinstance(state, float) else state


@pytest.mark.filterwarnings("ignore")
def test_every_key_that_dcp_saves_loads(tmp_path: Path) -> None:
    for number, state in enumerate(KEYS):
        root, filled, found = tmp_path / f"{number}", with_tensors(state, 1), with_tensors(state, 0)
        dcp.save(filled, storage_writer=CkpipeStorageWriter(root), no_dist=True)
        dcp.load(found, storage_reader=CkpipeStorageReader(root), no_dist=True)
        assert repr(found) == repr(filled)


class ListeningPlanner(DefaultSavePlanner):
    """Notes the meta of the storage."""

    ids: ClassVar[list[str | None]] = []

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        self.ids.append(storage_meta.save_id)
        super().set_up_planner(state_dict, storage_meta, is_coordinator)


@pytest.mark.filterwarnings("ignore")
def test_metadata_have_what_torch_gives_them(tmp_path: Path) -> None:
    ours, reader = CkpipeStorageWriter(tmp_path / "ours"), CkpipeStorageReader(tmp_path / "ours")
    assert ours.storage_meta().save_id
    loads = set()
    for number in range(2):
        saved = [
            dcp.save({"w": torch.ones(2)}, storage_writer=writer, planner=planner, no_dist=True)
            for writer, planner in (
                (ours, ListeningPlanner()),
                (dcp.FileSystemWriter(tmp_path / f"{number}"), None),
            )
        ]
        assert saved[0].storage_meta.save_id == ours.save_id
        read: Any = reader.read_metadata()
        for each in (saved[0], read):
            assert each.version == saved[1].version
            assert each.storage_meta.save_id == ListeningPlanner.ids[number]
            assert each.storage_data.keys() == saved[1].storage_data.keys()
        assert read.storage_meta.load_id == reader.load_id
        loads.add(reader.load_id)
    assert len(set(ListeningPlanner.ids)) == len(loads) == 2
    before = ours.storage_meta().save_id
    ours.reset("another")
    assert ours.storage_meta().save_id not in {before, *ListeningPlanner.ids}


class PlannerWithAnotherLoad(DefaultLoadPlanner):
    """Loads the checkpoint b in another thread, while a load has begun."""

    def __init__(self, reader: CkpipeStorageReader) -> None:
        super().__init__()
        self._reader = reader

    def create_local_plan(self) -> LoadPlan:
        with ThreadPoolExecutor() as pool:
            pool.submit(load, "b", self._reader).result()
        return super().create_local_plan()


@pytest.mark.filterwarnings("ignore")
def test_two_loads_at_once_do_not_mix(tmp_path: Path) -> None:
    save_two(tmp_path)
    reader, other = CkpipeStorageReader(tmp_path), CkpipeStorageReader(tmp_path)
    with pytest.raises(CheckpointException, match="use one CkpipeStorageReader at once"):
        load("a", reader, PlannerWithAnotherLoad(reader))
    assert load("a", reader, PlannerWithAnotherLoad(other)) == 0
    assert load("b", reader) == 1


def on_s3(case: Case) -> None:
    """Save on S3, and load the newest of a name."""
    set_up_process()
    settings: Any = {"backends": {"s3": {"endpoint_url": case["endpoint"]}}}
    writer = CkpipeStorageWriter(case["bucket"], **settings)
    for number in range(2):
        model, optimizer = made("fsdp", steps=number)
        state = state_of(model, optimizer) | {"number": number}
        dcp.save(state, checkpoint_id="it", storage_writer=writer)
    reader = CkpipeStorageReader(case["bucket"], **settings)
    other = state_of(*made("fsdp", steps=3)) | {"number": -1}
    dcp.load(other, checkpoint_id="it", storage_reader=reader)
    assert other["number"] == 1
    check_equal(other["model"], state["model"])


def test_s3(run: Runs, tmp_path: Path, moto_server: S3Server) -> None:
    moto_server.make_bucket("dcp")
    case = new_case(tmp_path, endpoint=moto_server.url, bucket="s3://dcp/run")
    assert run(on_s3, case, 2) == [0, 0]


def train(case: Case) -> None:
    """Resume from the newest checkpoint, if there is one, and save after each step."""
    mortal(case)
    mode, group = case["mode"], None
    if mode == "thread":
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=60))
    root = case["root"] if mode == "process" else URL
    model, optimizer = made("fsdp", steps=0)
    first = 0
    if case["resume"]:
        state = state_of(model, optimizer) | {"step": 0, "rng": torch.empty(0)}
        state["rng"] = torch.get_rng_state()
        dcp.load(state, storage_reader=reader_of(root))
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
        )
        torch.set_rng_state(state["rng"])
        first = state["step"]
        tell(case, resumed=first)
    writer = writer_to(root, keep_last=case.get("keep_last"))
    pending: Future[Any] | None = None
    for step in range(first, case["steps"]):
        noise = torch.nn.functional.dropout(torch.ones(4)).sum().item()
        loss = trained(model, optimizer, range(step, step + 1))
        tell(case, loss=[step, loss, noise])
        state = state_of(model, optimizer) | {"step": step + 1, "rng": torch.get_rng_state()}
        if mode == "sync":
            dcp.save(state, checkpoint_id=f"step {step + 1}", storage_writer=writer)
            continue
        if pending is not None:
            pending.result()
        kind = AsyncCheckpointerType(mode)
        pending = dcp.async_save(
            state, checkpoint_id=f"step {step + 1}", storage_writer=writer, process_group=group,
            async_checkpointer_type=kind,
        )  # fmt: skip
    if pending is not None:
        pending.result()
    values = facts(model, optimizer)
    tell(case, sums={name: each.double().sum().item() for name, each in values.items()})
    dist.barrier()
    _async_process_executor._CHECKPOINT_PROCESS = None  # so that its process ends in order


DEATHS: list[dict[str, Any]] = [
    {"verb": verb, "key": key, "nth": nth, "landing": landing, "victim": victim}
    for victim in (0, 1)
    for verb, key in (("put", "m/0/"), ("open_upload", "rank-"))
    for nth in (3, 4)
    for landing in ("before", "after")
] + [{"verb": "put", "key": ".0.json", "nth": 3, "landing": "before", "victim": 0}]
"""Operations of the saves that a rank dies at: of its manifests, data files and the index."""


Told = dict[str, dict[int, list[Any]]]


def training(folder: Path, **more: Any) -> Case:
    return new_case(folder, **{"steps": 6, "resume": False, **more})


@pytest.fixture(scope="module")
def undisturbed(run: Runs, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Told]:
    """What a run without a fault tells, by the number of its ranks."""
    found = {}
    for ranks in (1, 2):
        case = training(tmp_path_factory.mktemp("undisturbed"), mode="sync")
        assert run(train, case, ranks) == [0] * ranks
        found[ranks] = {each: told(Path(case["root"]), each) for each in ("loss", "sums")}
    return found


def check_resumed(case: Case, undisturbed: Told, at_least: int) -> None:
    """Compare a run that resumed after so many steps with the undisturbed one to the bit."""
    root = Path(case["root"])
    ((first,),) = {tuple(each) for each in told(root, "resumed").values()}
    assert at_least <= first < 6
    for rank, losses in undisturbed["loss"].items():
        assert told(root, "loss")[rank][first - 6 :] == losses[first:]
    sums = {rank: [each[-1]] for rank, each in told(root, "sums").items()}
    assert sums == undisturbed["sums"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", ["sync", "thread"])
def test_killed_in_a_save_it_resumes_to_the_bit(
    run: Runs, tmp_path: Path, undisturbed: dict[int, Told], mode: str
) -> None:
    for number, death in enumerate(sample(DEATHS, 1)):
        case = training(tmp_path / f"{number}", mode=mode)
        assert run(train, case, 2, **death)[death["victim"]] is None, death
        assert run(train, case, 2, resume=True) == [0, 0]
        check_resumed(case, undisturbed[2], at_least=1)


def test_process_mode_resumes_to_the_bit(
    run: Runs, tmp_path: Path, undisturbed: dict[int, Told]
) -> None:
    case, ranks = training(tmp_path), 2 if EVERY else 1
    assert run(train, case, ranks, mode="process", steps=3, keep_last=2) == [0] * ranks
    with ckpipe.SyncPipeline(case["root"], read_only=True) as pipeline:
        pipeline.verify(2)
    assert run(train, case, ranks, mode="sync", resume=True) == [0] * ranks
    check_resumed(case, undisturbed[ranks], at_least=3)


@pytest.mark.parametrize(
    ("given", "variable"),
    [({"solo": True}, None), ({"plan": "global"}, None), ({"preemption": True}, None)]
    + [({}, name) for name in ("SOLO=1", "READ_ONLY=1", "ATTEMPT_ID=a", "SAVE_EVERY_STEPS=3")],
)
def test_settings_without_effect_are_refused(
    monkeypatch: pytest.MonkeyPatch, given: Any, variable: str | None
) -> None:
    name, _, value = (variable or "").partition("=")
    if variable is not None:
        monkeypatch.setenv(f"CKPIPE_{name}", value)
    name = name or next(iter(given))
    where = f" \\(from CKPIPE_{name}\\)" if variable else ""
    with pytest.raises(UsageError, match=f"setting {name.lower()}{where} has no effect with DCP"):
        CkpipeStorageWriter("root", **given)


@forked(2)
def test_damage_is_found(case: Case) -> None:
    """Flip bits of what one process has saved; a load of them is refused, on all ranks."""
    state: dict[str, Any] = {"w": torch.arange(1000.0), "text": "a"}
    rank, root = dist.get_rank(), Path(case["root"])
    if rank == 0:  # it saves alone, although there is another rank
        writer = writer_to(root)
        dcp.save(state, checkpoint_id="it", storage_writer=writer, no_dist=True)
    dist.barrier()
    for part, place in ((0, 4096 + 8), (0, -1), (1, 4096 + 100)):
        (file,) = root.glob(f"*/rank-{part:05}.safetensors")
        whole = file.read_bytes()
        dist.barrier()
        if rank == 0:
            damaged = bytearray(whole)
            damaged[place] ^= 1
            file.write_bytes(damaged)
        dist.barrier()
        found: dict[str, Any] = {"w": torch.zeros(1000), "text": ""}
        with pytest.raises(CheckpointException) as caught:
            dcp.load(found, storage_reader=reader_of(root))
        for error, _ in caught.value.failures.values():
            assert isinstance(error, CorruptCheckpoint)
        assert found["text"] == ""
        dist.barrier()
        if rank == 0:
            file.write_bytes(whole)
        dist.barrier()
    dcp.load(found, storage_reader=reader_of(root))
    assert torch.equal(found["w"], state["w"])
    assert found["text"] == "a"


if __name__ == "__main__":
    serve_runs("", group=True)  # whatever torch warns of
