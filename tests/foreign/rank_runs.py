"""Ranks that load foreign checkpoints: cases for :mod:`tests.support.rank_processes`."""

from __future__ import annotations

from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import ckpipe
from ckpipe.distributed import training_state
from tests.support.fork_server import Case
from tests.support.rank_processes import SETTINGS, tell
from tests.support.wrapped_models import wrapped


def whole(tensor: Any) -> torch.Tensor:
    """Return all elements of a tensor, gathered if it is distributed."""
    full: torch.Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach()


def into_wrappers(case: Case) -> None:
    """Load a file into a model in each wrapper, as a raw module and as a training state."""
    with ckpipe.SyncPipeline(case["root"], **SETTINGS) as pipeline:
        for kind in case["kinds"]:
            expected = safetensors.torch.load_file(case["files"][kind])
            for form in ("raw", "training"):
                model = wrapped(kind)
                with torch.no_grad():
                    for tensor in (*model.parameters(), *model.buffers()):
                        tensor.zero_()
                state: Any = {"model": model if form == "raw" else training_state(model)}
                if form == "raw" and kind == "ddp":
                    state = {"model": model.module}
                result = pipeline.load(state, source=case["files"][kind])
                assert result is not None
                assert (result.id, result.source) == (None, case["files"][kind])
                found = {
                    name.removeprefix("module."): whole(each)
                    for name, each in model.state_dict().items()
                }
                assert found.keys() == expected.keys()
                for name, each in expected.items():
                    assert torch.equal(found[name], each), (kind, form, name)
        assert pipeline.latest() is None
    tell(case, done=True)


def share_of_rows(case: Case) -> None:
    """Load a large tensor by rows into the ranks, and tell how much each has read."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    target = {"w": distribute_tensor(torch.zeros(case["rows"], 1024), mesh, [Shard(0)])}
    with ckpipe.SyncPipeline(case["root"], **SETTINGS) as pipeline:
        result = pipeline.load(target, source=case["file"])
        assert result is not None
        assert result.report is not None
        expected = safetensors.torch.load_file(case["file"])["w"]
        assert torch.equal(whole(target["w"]), expected)
        tell(case, read=result.report.bytes, needed=target["w"].to_local().nbytes)
