"""DTensors in a state: their local parts are taken and copied, and no rank waits for another."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bundles import capture
from forks import PRELOADED
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckpipe.errors import UnsupportedState
from ckpipe.format.boxes import Box, box_shape
from ckpipe.format.keys import LabelFilter
from ckpipe.memory.arena import Arena
from ckpipe.plan import division
from ckpipe.planning import LocalPlanner, RankPlan, fingerprint
from ckpipe.save.program import fill_blocks, plan_blocks
from ckpipe.state.capture_cache import capture_cache_of
from ckpipe.state.flatten import Captured, OpenedState, flatten

RANK, WORLD = 1, 4


def images(captured: Captured, plan: RankPlan, block_bytes: int) -> list[bytes]:
    """The data files, each filled block by block."""
    made = [bytearray(file.size) for file in plan.files]
    block = Arena(block_bytes).take()
    for step in plan_blocks(plan, captured.tensors, block_bytes):
        fill_blocks([(step, block)], captured)
        made[step.file][step.offset : step.offset + step.nbytes] = block.view[: step.nbytes]
    return [bytes(each) for each in made]


@pytest.fixture(scope="module", autouse=True)
def _world_of_one_process() -> Iterator[None]:
    """Rank 1 of 4; the others do not exist, so that a collective could bring nothing."""
    dist.init_process_group("fake", rank=RANK, world_size=WORLD, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.fixture
def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2))


def test_leaf_is_the_local_part_and_knows_the_whole(mesh: DeviceMesh) -> None:
    local = torch.arange(12.0).reshape(4, 3)
    tensor = DTensor.from_local(local, mesh, [Replicate(), Shard(0)], run_check=False)
    captured = capture({"w": tensor})
    (leaf,) = captured.tensors
    assert captured.tree == ["dict", ["w"], [["tensor", 0]]]
    assert (leaf.address, leaf.shape, leaf.full_shape) == (local.data_ptr(), (4, 3), (8, 3))
    assert (leaf.kind, leaf.requires_grad, leaf.attributes) == ("tensor", False, None)
    assert leaf.sharding is not None
    assert leaf.sharding.mesh.ranks == (0, 1, 2, 3)
    assert leaf.sharding.replicas(RANK) == (1, 3)
    assert [held.box for held in leaf.sharding.held(RANK)] == [((4, 0), (8, 3))]


def test_parameters_and_buffers_stay_what_they_are(mesh: DeviceMesh) -> None:
    made = DTensor.from_local(torch.ones(2), mesh, [Shard(0), Shard(0)], run_check=False)
    state = {
        "parameter": torch.nn.Parameter(made),
        "frozen": torch.nn.Parameter(made.detach().clone(), requires_grad=False),
        "buffer": torch.nn.Buffer(made.detach().clone(), persistent=False),
    }
    setattr(state["parameter"], "colour", "red")  # noqa: B010 - mypy knows no such attribute
    captured = capture(state)
    kinds = [(leaf.kind, leaf.detail, leaf.requires_grad) for leaf in captured.tensors]
    assert kinds == [
        ("parameter", None, True), ("parameter", None, False), ("buffer", "transient", False)
    ]  # fmt: skip
    attributes = [leaf.attributes for leaf in captured.tensors]
    assert attributes == [["dict", ["colour"], [["value", 0]]], None, None]


def test_tied_dtensors_share_memory(mesh: DeviceMesh) -> None:
    weight = torch.nn.Parameter(distribute_tensor(torch.ones(8, 2), mesh, [Shard(0), Replicate()]))
    state = {"wte": weight.detach(), "head": weight.detach(), "other": torch.ones(2)}
    plan = LocalPlanner().plan(capture(state), rank=RANK, world_size=WORLD)
    assert {(row.owner, row.box) for row in plan.layout.chunks if row.tensor < 2} == {
        (plan.layout.chunks[0].owner, ((0, 0), (4, 2)))
    }
    assert sum(entry.name.startswith(("wte", "head")) for entry in plan.layout.entries) <= 1


def test_scalar_is_copied(mesh: DeviceMesh) -> None:
    step = torch.tensor(3.0)
    tensor = DTensor.from_local(step, mesh, [Replicate(), Replicate()], run_check=False)
    found = {}
    for rank in range(WORLD):
        captured = capture({"step": tensor})
        plan = LocalPlanner().plan(captured, rank=rank, world_size=WORLD)
        for file, image in zip(plan.files, images(captured, plan, 4096), strict=True):
            found[rank] = image[len(file.header) :]
    assert list(found.values()) == [step.numpy().tobytes()]


@pytest.mark.parametrize("placement", [Partial(), Partial("max")])
def test_partial_is_refused_by_name(mesh: DeviceMesh, placement: Any) -> None:
    tensor = DTensor.from_local(torch.ones(2), mesh, [Replicate(), placement], run_check=False)
    with pytest.raises(UnsupportedState, match="Partial") as caught:
        capture({"model": {"w": tensor}})
    assert caught.value.key == "model.w"


@pytest.mark.parametrize(
    ("placements", "turned"),
    [
        ([Shard(0), Replicate()], False),
        ([Shard(1), Replicate()], True),
        ([Replicate(), Shard(1)], False),
        ([_StridedShard(0, split_factor=3), Replicate()], False),
        ([_StridedShard(1, split_factor=3), Shard(0)], True),
        ([Replicate(), Replicate()], True),
    ],
)
@pytest.mark.parametrize("block_bytes", [64, 4096])
def test_what_ranks_write_is_the_tensor(
    mesh: DeviceMesh,
    placements: list[Any],
    turned: bool,
    block_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(division, "MIN_PIECE_BYTES", 32)
    full = torch.arange(20 * 14, dtype=torch.int16).reshape(20, 14)
    found = torch.full_like(full, -1)
    for rank in range(WORLD):
        # Each rank in turn, with the local tensor that torch cuts for it.
        local = _cut(full, mesh, placements, rank)
        local = local.t().contiguous().t() if turned else local
        tensor = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
        )
        captured = capture({"w": tensor})
        plan = LocalPlanner().plan(captured, rank=rank, world_size=WORLD)
        files = images(captured, plan, block_bytes)
        for row in plan.layout.chunks:
            if row.entry is not None:
                entry = plan.layout.entries[row.entry]
                begin = len(plan.files[entry.file].header) + entry.offset
                raw = bytearray(files[entry.file][begin : begin + entry.nbytes])
                box: Box = row.box or ((0, 0), tuple(full.shape))
                place = found[tuple(map(slice, *box))]
                assert (place == -1).all()
                place.copy_(torch.frombuffer(raw, dtype=full.dtype).view(box_shape(box)))
    assert torch.equal(found, full)


def _cut(full: torch.Tensor, mesh: DeviceMesh, placements: list[Any], rank: int) -> torch.Tensor:
    for n, index, placement in zip(mesh.shape, divmod(rank, 2), placements, strict=True):
        if not isinstance(placement, Replicate):
            pieces, _ = placement._split_tensor(full, n, with_padding=False, contiguous=True)
            full = pieces[index]
    return full.clone()


def test_fully_sharded_module_is_taken_as_it_is() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5))
    fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    captured = capture({"model": model, "optimizer": optimizer})
    leaves = {leaf.label: leaf for leaf in captured.tensors}
    assert leaves["model.0.weight"].full_shape == (5, 6)
    assert leaves["model.0.weight"].shape == (2, 6)
    assert leaves["optimizer.state.0.exp_avg"].full_shape == (5, 6)
    assert leaves["model.1.running_mean"].sharding is None
    plan = LocalPlanner().plan(captured, rank=RANK, world_size=WORLD)
    names = {entry.name for entry in plan.layout.entries}
    assert {"model.0.weight@2,0:4,6", "model.0.bias@2:4", "model.1.running_mean"} <= names


class Vouching:
    """An object that says which of its tensors all ranks hold alike."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state

    def __ckpipe_replicated__(self, label: str) -> bool:
        return label.startswith("model.")


def test_object_vouches_for_its_tensors() -> None:
    shared = torch.ones(3)
    state = {
        "train": Vouching({"model": {"w": torch.ones(2), "tied": shared}, "rng": torch.ones(1)}),
        "model": {"w": torch.ones(4)},
        "again": shared,
    }
    captured = capture(state)
    labels = [captured.tensors[number].label for number in sorted(captured.replicated)]
    assert labels == ["train.model.w", "train.model.tied"]
    (top,) = capture(Vouching({"model": {"w": torch.ones(2)}})).replicated
    assert top == 0
    nested = capture({"a": {"b": Vouching({"own": 1, "model": {"w": torch.ones(2)}})}})
    assert nested.replicated == {0}


def test_tensor_that_stands_elsewhere_first_is_vouched_for_too() -> None:
    shared = torch.ones(3)
    state = {"first": shared, "train": Vouching({"model": {"w": shared}})}
    assert capture(state).replicated == {0}


def _run_ddp(rank: int, path: str) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{path}/store",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=300),
    )
    torch.manual_seed(rank)
    inner = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    model = torch.nn.parallel.DistributedDataParallel(inner)
    model(torch.randn(4, 3)).sum().backward()
    mesh = init_device_mesh("cpu", (2,))
    spread = distribute_tensor(torch.arange(10.0), mesh, [Shard(0)])
    captured = capture({"model": model, "spread": spread})
    plan = LocalPlanner().plan(captured, rank=rank, world_size=2)
    marked = [captured.tensors[number].label for number in sorted(captured.replicated)]
    entries = [entry.name for entry in plan.layout.entries]
    torch.save((marked, entries, spread.to_local()), f"{path}/{rank}.pt")
    dist.destroy_process_group()


def test_parameters_of_ddp_are_replicated_and_its_buffers_are_not(tmp_path: Path) -> None:
    # Ranks that are not this process's own fake one.
    fresh = multiprocessing.get_context("forkserver")
    fresh.set_forkserver_preload(PRELOADED)
    ranks = [fresh.Process(target=_run_ddp, args=(rank, str(tmp_path))) for rank in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    assert [each.exitcode for each in ranks] == [0, 0]
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    parameters = [f"model.module.{name}" for name in ("0.weight", "0.bias", "1.weight", "1.bias")]
    assert [marked for marked, _, _ in found] == [parameters] * 2
    names = [name for _, entries, _ in found for name in entries]
    assert all(names.count(name) == 1 for name in parameters)
    assert names.count("model.module.1.running_mean") == 2
    assert {"spread@0:5", "spread@5:10"} <= set(names)
    assert [part.tolist() for _, _, part in found] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


# ---- the next save ----


class Tagged(torch.Tensor):
    """A subclass of tensors."""


def placed(mesh: DeviceMesh, *placements: Any, shape: tuple[int, ...] = (4, 3)) -> DTensor:
    return DTensor.from_local(torch.ones(shape), mesh, list(placements), run_check=False)


def follow(before: Any, after: Any) -> bool:
    """Whether the cache of a state serves another, and finds in it what a walk does."""
    select = LabelFilter()
    with torch.no_grad():
        cache = capture_cache_of(flatten(OpenedState(before), select, pickling=False))
        assert cache is not None
        assert cache.capture(OpenedState(before), select) is not None
        found, expected = cache.capture(OpenedState(after), select), capture(after)
    if found is None:
        return False
    assert (found.tree, found.tensors) == (expected.tree, expected.tensors)
    assert fingerprint(found) == fingerprint(expected)
    assert [each.data_ptr() for each in found.memory] == [
        each.data_ptr() for each in expected.memory
    ]
    return True


def test_sharded_tensors_that_are_alike_are_found_in_the_cache(mesh: DeviceMesh) -> None:
    one = placed(mesh, Shard(0), Replicate())
    assert follow({"w": one}, {"w": one.detach()})
    assert follow({"w": one}, {"w": placed(mesh, Shard(0), Replicate())})
    assert follow({"w": one}, {"w": placed(init_device_mesh("cpu", (2, 2)), Shard(0), Replicate())})


def test_sharded_tensors_that_say_something_else_than_before_are_a_miss(
    mesh: DeviceMesh,
) -> None:
    one = placed(mesh, Shard(0), Replicate())
    select = LabelFilter()
    cache = capture_cache_of(flatten(OpenedState({"w": one}), select, pickling=False))
    assert cache is not None
    assert cache.capture(OpenedState({"w": one}), select) is not None
    one._spec.placements = (Shard(1), Replicate())
    assert cache.capture(OpenedState({"w": one}), select) is None


def test_sharded_tensors_that_are_not_alike_are_a_miss(mesh: DeviceMesh) -> None:
    one = placed(mesh, Shard(0), Replicate())
    strided = _StridedShard(0, split_factor=2)
    others: dict[str, Any] = {
        "placements": placed(mesh, Shard(1), Replicate()),
        "a strided shard": placed(mesh, strided, Replicate()),
        "mesh": placed(init_device_mesh("cpu", (4, 1)), Shard(0), Replicate()),
        "global shape": DTensor.from_local(
            torch.ones(4, 3), mesh, [Shard(0), Replicate()], run_check=False,
            shape=torch.Size((7, 3)), stride=(3, 1),
        ),
        "local shape": placed(mesh, Shard(0), Replicate(), shape=(4, 4)),
        "dtype": DTensor.from_local(
            torch.ones(4, 3).half(), mesh, [Shard(0), Replicate()], run_check=False
        ),
        "gradient": placed(mesh, Shard(0), Replicate()).requires_grad_(),
        "parameter": torch.nn.Parameter(placed(mesh, Shard(0), Replicate())),
        "plain": torch.ones(4, 3),
    }  # fmt: skip
    others["local class"] = placed(mesh, Shard(0), Replicate())
    others["local class"]._local_tensor = torch.ones(4, 3).as_subclass(Tagged)
    for what, other in others.items():
        assert not follow({"w": one}, {"w": other}), what


def test_sharded_parameters_are_followed(mesh: DeviceMesh) -> None:
    parameter = torch.nn.Parameter(placed(mesh, Shard(0), Replicate()))
    assert follow({"w": parameter}, {"w": parameter})
    assert not follow({"w": parameter}, {"w": placed(mesh, Shard(0), Replicate())})
    parameter.note = 1  # type: ignore[attr-defined]
    assert not follow(
        {"w": torch.nn.Parameter(placed(mesh, Shard(0), Replicate()))}, {"w": parameter}
    )
