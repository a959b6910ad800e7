"""States that real ranks plan for together, and the stores that they do it through."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, TCPStore
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import ckpipe
from tests.support.placed_tensors import local_part

_ONE = [Shard(0), Shard(1), Replicate()]
LAYOUTS: list[tuple[Any, ...]] = [
    *((each,) for each in _ONE),
    *((outer, inner) for outer in [*_ONE, Shard(2)] for inner in _ONE),
    *((_StridedShard(dim, split_factor=2), Shard(dim)) for dim in range(2)),
    (Replicate(), _StridedShard(0, split_factor=3)),
]
"""Every way to lay a tensor out on four ranks that differs from the others, in one or two
dimensions."""

_meshes: dict[int, DeviceMesh] = {}


def shared(rank: int, what: str) -> dict[str, Any]:
    """A state of which ranks have some alike; ``what`` says what is special about it."""
    spread = cut_by_rows(torch.arange(36.0).view(9, 4))
    state = {"w": torch.arange(1000.0), "d": spread, "own": torch.full((4,), float(rank))}
    if what == f"alone{rank}" or what.startswith("more"):
        state[what] = torch.arange(50.0)
    if what == "unlike" and rank == 2:
        state["w"] = torch.arange(1001.0)
    return state


def cut_by_rows(full: torch.Tensor) -> DTensor:
    """A tensor cut over all ranks, without a word to the others."""
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh = DeviceMesh("cpu", list(range(size)), _init_backend=False)
    local = full.chunk(size)[rank].clone()
    return DTensor.from_local(local, mesh, [Shard(0)], shape=full.shape, stride=full.stride())


def _own_store(kind: str, root: Path) -> Any:
    """A store for planning; None for that of the process group."""
    if kind == "default":
        return None
    if kind == "file":
        return FileStore(f"{root}.own-store", -1)
    # As a program would, with a port that only rank 0 can know.
    known = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True)
        known.set("port", str(store.port))
        return store
    return TCPStore("127.0.0.1", int(known.get("port")), is_master=False)


def laid_out(full: torch.Tensor, layout: int) -> DTensor:
    """A tensor in one of ``LAYOUTS``, cut by torch's own placements without a word to others."""
    placements = LAYOUTS[layout]
    shape = (4,) if len(placements) == 1 else (2, 2)
    if len(shape) not in _meshes:
        ranks = torch.arange(4).view(shape)
        _meshes[len(shape)] = DeviceMesh("cpu", ranks, _init_backend=False)
    mesh = _meshes[len(shape)]
    coordinate = torch.unravel_index(torch.tensor(dist.get_rank()), shape)
    local = local_part(full, shape, placements, [int(index) for index in coordinate])
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
    )


def check_layouts(pipeline: ckpipe.SyncPipeline, saved: int, loaded: int) -> None:
    """Save a tensor in one layout and load it into another; so do all other ranks."""
    full = torch.arange(7 * 6 * 5.0).view(7, 6, 5)
    own, again = full[dist.get_rank()], torch.zeros(6, 5)
    handle = pipeline.save({"w": laid_out(full, saved), "own": own})
    handle.wait_complete(timeout=300)
    target = laid_out(torch.full_like(full, -1), loaded)
    assert pipeline.load({"w": target, "own": again}, step=handle.step) is not None
    assert torch.equal(target.to_local(), laid_out(full, loaded).to_local())
    assert torch.equal(again, own)


def joint_planner(store: str, root: Path, seconds: float) -> Any:
    """The setting by which ranks plan through a store of this kind."""
    marked, own = ["w", "more*", "alone*"], _own_store(store, root)
    if own is None:
        return {"planner": "global", "timeout_seconds": seconds, "replicated": marked}
    return ckpipe.GlobalPlanner(own, replicated=marked, timeout_seconds=seconds)


def check_shared(pipeline: ckpipe.SyncPipeline) -> None:
    """Load what was saved first of :func:`shared`."""
    rank = dist.get_rank()
    target = shared(rank, "same")
    target["d"].to_local().zero_()
    assert pipeline.load(target, step=0) is not None
    assert torch.equal(target["d"].to_local(), shared(rank, "same")["d"].to_local())
    assert target["own"].tolist() == [float(rank)] * 4
