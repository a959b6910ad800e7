"""What real ranks save of DTensors, by gloo and by nothing but it: written once, loaded whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import ckpipe
from ckpipe import errors
from tests.support.fork_server import Case
from tests.support.pipelines import loaded_state
from tests.support.rank_processes import Gang
from tests.support.stored_files import data_bytes

WORLD = 4


def make_model() -> torch.nn.Sequential:
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(130, 257), torch.nn.Linear(257, 1030, bias=False))


def whole_state() -> dict[str, Any]:
    """What the ranks' state is, in one piece."""
    wide = torch.arange(7 * 36.0).reshape(7, 36)
    return {
        "model": dict(make_model().state_dict()),
        "strided": wide,
        "uneven": torch.arange(5.0),
        "step": torch.tensor(3.0),
        "vector": torch.arange(300_000, dtype=torch.float64),
    }


def spread_state(rank: int) -> dict[str, Any]:
    """The same, spread over a mesh of two replicas of two shards."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    whole = whole_state()
    model = make_model()
    fully_shard(model, mesh=mesh)
    # What torch cuts for a rank, of a placement that distribute_tensor refuses.
    pieces, _ = _StridedShard(1, split_factor=3)._split_tensor(whole["strided"], 2)
    local = pieces[rank % 2].t().contiguous().t()
    strided = DTensor.from_local(
        local,
        mesh,
        [Replicate(), _StridedShard(1, split_factor=3)],
        run_check=False,
        shape=whole["strided"].shape,
        stride=whole["strided"].stride(),
    )
    flat = init_device_mesh("cpu", (WORLD,))
    return {
        "model": model,
        "strided": strided,
        "uneven": distribute_tensor(whole["uneven"], flat, [Shard(0)]),
        "step": distribute_tensor(whole["step"], flat, [Replicate()]),
        "vector": whole["vector"],
    }


def save_and_load(case: Case) -> None:
    """Save in one of the ranks, and load where it was."""
    root, rank = case["root"], dist.get_rank()
    state, whole = spread_state(rank), whole_state()
    strided = state["strided"].to_local().clone()  # torch 2.10 cannot put it together
    plan = {"replicated": ["vector"]}
    with ckpipe.SyncPipeline(root, attempt_id="first", plan=plan) as pipeline:
        pipeline.save(state, step=5).wait_complete(timeout=300)
        with torch.no_grad():
            for each in (state["model"][0].weight, state["strided"], state["vector"]):
                each.zero_()
        assert pipeline.load(state, step=5) is not None
    assert torch.equal(state["model"][0].weight.full_tensor(), whole["model"]["0.weight"])
    assert torch.equal(state["vector"], whole["vector"])
    assert torch.equal(state["strided"].to_local(), strided)
    # A mesh of which not all ranks save is no checkpoint of its own.
    alone = ckpipe.SyncPipeline(f"{root}-alone-{rank}", solo=True)
    with alone as pipeline, pytest.raises(errors.UnsupportedTopology, match="on a mesh"):
        pipeline.save(state, step=5).wait()


@pytest.fixture(scope="module")
def root(world: Gang, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that four processes have saved, and loaded where it was."""
    root = tmp_path_factory.mktemp("ranks") / "run"
    world.succeed("tests.ranks.test_sharded_saves:save_and_load", root, WORLD)
    return root


def test_process_without_ranks_loads_all_of_it(root: Path) -> None:
    with ckpipe.SyncPipeline(str(root)) as pipeline:
        result = loaded_state(pipeline)
    expected = whole_state()
    for name in ("strided", "uneven", "step", "vector"):
        assert torch.equal(result[name], expected[name]), name
    for name, tensor in expected["model"].items():
        assert torch.equal(result["model"][name], tensor), name


def test_every_byte_is_written_once_and_by_all_ranks(root: Path) -> None:
    sizes = data_bytes(root)
    assert len(sizes) == WORLD
    state = whole_state()
    tensors = [*state.pop("model").values(), *state.values()]
    total = sum(tensor.nbytes for tensor in tensors)
    assert sum(sizes) == total
    assert max(sizes) <= 1.05 * total / WORLD
