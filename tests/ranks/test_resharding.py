"""Saved by ranks as ckpipe plans it for them, loaded by other ranks: made-up and real ones."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import ckpipe
from ckpipe.distributed import training_state
from ckpipe.errors import ShapeMismatch
from ckpipe.testing import MemoryBackend
from tests.inner.made_up_ranks import load_as, request, store_planned
from tests.support.fork_server import Case
from tests.support.pipelines import same
from tests.support.placed_tensors import placed, rank_of
from tests.support.rank_processes import Gang, tell, told

LAYOUTS: list[tuple[tuple[int, ...], tuple[Any, ...]]] = [
    ((3,), (Shard(0),)),
    ((4,), (Shard(1),)),
    ((2,), (Replicate(),)),
    ((2, 2), (Replicate(), Shard(0))),
    ((2, 3), (Shard(0), Shard(1))),
    ((3, 2), (_StridedShard(0, split_factor=2), Shard(0))),
    ((2, 2, 2), (Replicate(), _StridedShard(1, split_factor=2), Shard(1))),
]


def tensors(
    mesh: tuple[int, ...], placements: tuple[Any, ...], factor: float, width: int
) -> dict[str, Any]:
    """A state with tensors of a mesh: uneven, tied, empty, and without dimensions."""
    full = torch.arange(1.0, 35 * width + 1).reshape(7, 5, width) * factor
    w = placed(full, mesh, placements)
    spread = (Replicate(),) * len(mesh)
    return {
        "w": w,
        "tied": w.detach(),
        "few": placed(torch.ones(2, 2) * factor, mesh, placements),
        "none": placed(torch.ones(0, 5), mesh, placements),
        "scalar": placed(torch.tensor(2.0) * factor, mesh, spread),
        "plain": torch.full((3,), 4.0) * factor,
    }


def local_parts(state: dict[str, Any]) -> list[torch.Tensor]:
    return [each.to_local() if hasattr(each, "to_local") else each for each in state.values()]


@pytest.mark.sample(7)
@pytest.mark.parametrize("width", [20_001, 1], ids=["cut", "whole"])
@pytest.mark.parametrize("saved", range(len(LAYOUTS)))
async def test_what_ranks_save_loads_into_any_mesh(saved: int, width: int) -> None:
    mesh, placements = LAYOUTS[saved]
    backend = MemoryBackend()
    document = await store_planned(
        backend, lambda rank: tensors(mesh, placements, 1.0, width), math.prod(mesh)
    )
    for mesh, placements in LAYOUTS:
        world_size = math.prod(mesh)
        for rank in (0, world_size - 1):
            with rank_of(rank, world_size):
                target = tensors(mesh, placements, 0.0, width)
                await load_as(backend, document, rank, world_size, request(target))
                expected = tensors(mesh, placements, 1.0, width)
                assert same(local_parts(target), local_parts(expected))
    state = (await load_as(backend, document, 0, 1, request())).state
    with rank_of(0, 1):
        expected = tensors((1,), (Replicate(),), 1.0, width)
        assert same(local_parts(state), local_parts(expected))
    assert state["w"].data_ptr() == state["tied"].data_ptr()


async def test_a_local_part_of_another_shape_than_its_placements_say_is_not_filled() -> None:
    backend = MemoryBackend()
    full = torch.arange(1.0, 36.0).reshape(7, 5)
    document = await store_planned(backend, lambda rank: {"w": placed(full, (2,), (Shard(0),))}, 2)
    with rank_of(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        local = torch.zeros(1, 5)
        wrong = DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=full.shape, stride=full.stride()
        )
        with pytest.raises(ShapeMismatch, match=r"\[1, 5\].*\[4, 5\].*rank 0, key 'w'"):
            await load_as(backend, document, 0, 2, request({"w": wrong}))
    assert not local.any()


# Real ranks


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))


def training(*, sharded: bool) -> dict[str, Any]:
    net = model()
    if sharded:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for each in (net[0], net[2], net):  # type: ignore[index]
            fully_shard(each, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    return {"model": net, "optimizer": optimizer}


def saved_state(state: dict[str, Any]) -> dict[str, Any]:
    return {
        "training": training_state(state["model"], state["optimizer"]),
        "epoch": torch.tensor(7),
        "progress": {"steps": 4},
    }


def losses(state: dict[str, Any], steps: int) -> list[float]:
    """The same batches on every rank, so that any number of them does the same."""
    found = []
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        batch = torch.randn(8, 6, generator=generator)
        state["optimizer"].zero_grad()
        loss = state["model"](batch).square().mean()
        loss.backward()
        state["optimizer"].step()
        found.append(loss.item())
    return found


def save(case: Case) -> None:
    """Train on sharded ranks, save, and tell how the training goes on."""
    state = training(sharded=True)
    losses(state, 4)
    with ckpipe.SyncPipeline(case["root"], attempt_id="saving") as pipeline:
        pipeline.save(saved_state(state), step=4).wait_complete(timeout=300)
    tell(case, expected=losses(state, 3))


def load(root: str | Path, world_size: int) -> list[float]:
    """Load as one of so many ranks, and train on."""
    state = training(sharded=world_size > 1)
    target = {**saved_state(state), "epoch": torch.tensor(0), "progress": {}}
    with ckpipe.SyncPipeline(root, attempt_id=f"loading-{world_size}") as pipeline:
        pipeline.load(target, step=4, strict=False)
    assert target["epoch"] == 7
    return losses(state, 3)


def go_on(case: Case) -> None:
    """Load on sharded ranks, and tell how the training goes on."""
    tell(case, found=load(case["root"], case["ranks"]))


def test_fsdp_goes_on_with_other_numbers_of_ranks_as_if_it_had_never_stopped(
    world: Gang, root: Path
) -> None:
    world.succeed("tests.ranks.test_resharding:save", root, 4)
    expected = pytest.approx(told(root, "expected")[0][0], rel=1e-4)
    assert load(root, 1) == expected
    world.succeed("tests.ranks.test_resharding:go_on", root, 3)
    assert told(root, "found") == {rank: [expected] for rank in range(3)}
