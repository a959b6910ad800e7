"""Ranks that save and load by ``torch.distributed.checkpoint`` with the storage of ckpipe."""

from __future__ import annotations

import io
import threading
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

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
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
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
from ckpipe.errors import CheckpointNotFound, CorruptCheckpoint
from ckpipe.integrations.dcp import CkpipeStorageReader, CkpipeStorageWriter
from tests.foreign.dcp_runs import facts, made
from tests.foreign.rank_runs import whole
from tests.support.fork_server import Case
from tests.support.rank_processes import URL, matrix, mortal, tell
from tests.support.s3_servers import set_up_process
from tests.support.wrapped_models import trained

dcp: Any = torch.distributed.checkpoint  # it does not export what it has
SMALL: Any = {"staging": {"block_bytes": 65536}}


def state_of(model: torch.nn.Module, optimizer: Any, form: str = "nested") -> dict[str, Any]:
    """Return the state of model and optimizer in one of DCP's two forms."""
    options = StateDictOptions(flatten_optimizer_state_dict=form == "flat")
    model_state, optim_state = get_state_dict(model, optimizer, options=options)
    return {"model": model_state, "optim": optim_state}


def check_facts(model: torch.nn.Module, optimizer: Any, file: str) -> None:
    """Check that all values are those of a file, to the bit."""
    found, expected = facts(model, optimizer), torch.load(file)
    assert found.keys() == expected.keys()
    for name, each in expected.items():
        assert torch.equal(found[name], each), name


def loaded_into(kind: str, form: str, name: str, root: str, file: str) -> None:
    """Load a checkpoint into a fresh model and optimizer, and check all values."""
    model, optimizer = made(kind, steps=1)
    state = state_of(model, optimizer, form) | {"step": 0, "table": {"x": [0, torch.zeros(3)]}}
    state["row"] = matrix(1, -1)  # all ranks but the first hold nothing of it
    dcp.load(state, checkpoint_id=name, storage_reader=CkpipeStorageReader(root, **SMALL))
    options = StateDictOptions(flatten_optimizer_state_dict=form == "flat")
    set_state_dict(
        model, optimizer,
        model_state_dict=state["model"], optim_state_dict=state["optim"], options=options,
    )  # fmt: skip
    assert state["step"] == 3
    assert state["table"]["x"][0] == "a value"
    assert torch.equal(state["table"]["x"][1], torch.ones(3))
    assert torch.equal(whole(state["row"]), whole(matrix(1, 3)))
    check_facts(model, optimizer, file)


def save_kinds(case: Case) -> None:
    """Save a trained model in some wrappers and forms, under a name each."""
    warnings.simplefilter("ignore")
    writer = CkpipeStorageWriter(case["root"], **SMALL)
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
    warnings.simplefilter("ignore")
    for saved, form, kind in case["loads"]:
        file = f"{case['root']}.{saved}.pt"
        loaded_into(kind, form, f"{saved}-{form}", case["root"], file)


def train(case: Case) -> None:
    """Resume from the newest checkpoint, if there is one, and save after each step."""
    warnings.simplefilter("ignore")
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
        dcp.load(state, storage_reader=CkpipeStorageReader(root, **SMALL))
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
        )
        torch.set_rng_state(state["rng"])
        first = state["step"]
        tell(case, resumed=first)
    writer = CkpipeStorageWriter(root, keep_last=case.get("keep_last"), **SMALL)
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


def fail(case: Case) -> None:
    """Let saves fail in each step on each rank; each is told to all, and the next is complete."""
    warnings.simplefilter("ignore")
    writer = CkpipeStorageWriter(case["root"], **SMALL)
    reader = CkpipeStorageReader(case["root"], **SMALL)
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
    _fail_to_load(case, reader, state)


def _fail_to_load(case: Case, reader: CkpipeStorageReader, state: Any) -> None:
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


def follow_recipes(case: Case) -> None:
    """Save and load as PyTorch's recipes and helpers do."""
    warnings.simplefilter("ignore")
    app, reader = App(3), CkpipeStorageReader(case["root"], **SMALL)
    dcp.save({"app": app}, storage_writer=CkpipeStorageWriter(case["root"], **SMALL))
    expected = facts(app.model, app.optimizer)
    other = App(1)
    dcp.load({"app": other}, storage_reader=reader)
    for name, each in facts(other.model, other.optimizer).items():
        assert torch.equal(each, expected[name]), name
    _name_each_save(case)
    keys = state_dict_loader._load_state_dict_from_keys("app.model", storage_reader=reader)
    everything: Any = {}  # as torch's dcp_to_torch_save reads it
    planner = _EmptyStateDictLoadPlanner()  # type: ignore[no-untyped-call]
    state_dict_loader._load_state_dict(everything, reader, planner=planner, no_dist=True)
    assert keys["app"].keys() == {"model"}
    assert everything["app"].keys() == {"model", "optim"}
    for found in (keys, everything):
        for name, each in found["app"]["model"].items():
            assert torch.equal(each, expected[name]), name


class Odd(torch.Tensor):
    """A tensor of another class."""


def _name_each_save(case: Case) -> None:
    """Save and load by one writer and one reader; a name is that of its own call only."""
    root = Path(f"{case['root']}.names")
    writer, reader = CkpipeStorageWriter(root, **SMALL), CkpipeStorageReader(root, **SMALL)
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


class RemakingPlanner(DefaultLoadPlanner):
    """Makes the plan anew in one step."""

    def __init__(self, step: str) -> None:
        super().__init__()
        self._step = step

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return [LoadPlan(each.items, {"own": 1}) for each in global_plan]

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        if self._step == "replaced":
            return replace(central_plan, storage_data="own")
        return LoadPlan(central_plan.items) if self._step == "finish" else central_plan


def remake_plans(case: Case) -> None:
    """Load with planners that make plans anew: what they may drop, and what ranks must agree on."""
    warnings.simplefilter("ignore")
    state: Any = {"model": made("fsdp", steps=2)[0].state_dict()}
    dcp.save(state, storage_writer=CkpipeStorageWriter(case["root"], **SMALL))
    for step in ("global", "replaced", "finish"):
        found: Any = {"model": made("fsdp", steps=0)[0].state_dict()}
        told = pytest.raises(CheckpointException, match="cannot tell whether all ranks read")
        with told if step == "finish" else nullcontext():
            reader = CkpipeStorageReader(case["root"], **SMALL)
            dcp.load(found, storage_reader=reader, planner=RemakingPlanner(step))
            for name, each in state["model"].items():
                assert torch.equal(whole(found["model"][name]), whole(each)), name
    other = f"{case['root']}-{dist.get_rank()}"  # as if a save were completed meanwhile
    dcp.save({"w": torch.ones(1)}, no_dist=True, storage_writer=CkpipeStorageWriter(other))
    with pytest.raises(CheckpointException, match="have chosen different checkpoints"):
        dcp.load(
            {"w": torch.zeros(1)},
            storage_reader=CkpipeStorageReader(other), planner=RemakingPlanner("global"),
        )  # fmt: skip


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


def cut(case: Case) -> None:
    """Save matrices row by row, and load them whole, cut otherwise and from one process."""
    warnings.simplefilter("ignore")
    model, _ = made("fsdp", steps=2)
    plain = torch.randn(3, 4, dtype=torch.float64)
    state: Any = {"model": model.state_dict(), "plain": plain}
    dist.broadcast(plain, 0)
    writer = CkpipeStorageWriter(case["root"], **SMALL)
    dcp.save(state, storage_writer=writer, planner=CuttingPlanner())
    other, _ = made("fsdp", steps=0)
    found: Any = {"model": other.state_dict(), "plain": torch.zeros(3, 4)}  # it takes another dtype
    dcp.load(found, storage_reader=CkpipeStorageReader(case["root"], **SMALL))
    for name, each in state["model"].items():
        assert torch.equal(whole(found["model"][name]), whole(each)), name
    assert torch.equal(found["plain"], plain.float())


def cache_plans(case: Case) -> None:
    """Save with cached plans, by a new writer each time, and change the state between."""
    warnings.simplefilter("ignore")
    for number in range(4):
        model, optimizer = made("fsdp", steps=number)
        state = state_of(model, optimizer)["model"]
        if number == 3:
            state["new"] = torch.full((5,), 3.0)
        writer = CkpipeStorageWriter(case["root"], **SMALL)
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(state, checkpoint_id=f"n{number}", storage_writer=writer, planner=planner)
        other, _ = made("fsdp", steps=0)
        found = other.state_dict() | ({"new": torch.zeros(5)} if number == 3 else {})
        dcp.load(found, storage_reader=CkpipeStorageReader(case["root"], **SMALL))
        for name, each in state.items():
            assert torch.equal(whole(found[name]), whole(each)), name


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


def save_at_once(case: Case) -> None:
    """Save two states at once, which each rank writes in another order; then with one writer."""
    warnings.simplefilter("ignore")
    rank, root = dist.get_rank(), case["root"]
    groups: Any = [dist.new_group(backend="gloo") for _ in range(2)]
    one = CkpipeStorageWriter(root, **SMALL)
    for writers in ([CkpipeStorageWriter(root, **SMALL) for _ in range(2)], [one, one]):
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
            reader = CkpipeStorageReader(root, **SMALL)
            dcp.load(found, checkpoint_id=f"n{number}", storage_reader=reader)
            assert found[f"w{rank}"] == number


def on_s3(case: Case) -> None:
    """Save on S3, and load the newest of a name."""
    warnings.simplefilter("ignore")
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
    for name, each in state["model"].items():
        assert torch.equal(whole(other["model"][name]), whole(each)), name


def damage(case: Case) -> None:
    """Flip bits of what one process has saved; a load of them is refused, on all ranks."""
    warnings.simplefilter("ignore")
    state: dict[str, Any] = {"w": torch.arange(1000.0), "text": "a"}
    rank, root = dist.get_rank(), Path(case["root"])
    if rank == 0:  # it saves alone, although there is another rank
        writer = CkpipeStorageWriter(root, **SMALL)
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
            dcp.load(found, storage_reader=CkpipeStorageReader(root, **SMALL))
        for error, _ in caught.value.failures.values():
            assert isinstance(error, CorruptCheckpoint)
        assert found["text"] == ""
        dist.barrier()
        if rank == 0:
            file.write_bytes(whole)
        dist.barrier()
    dcp.load(found, storage_reader=CkpipeStorageReader(root, **SMALL))
    assert torch.equal(found["w"], state["w"])
    assert found["text"] == "a"
