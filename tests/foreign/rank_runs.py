"""Ranks that load and write foreign checkpoints: cases for :mod:`tests.support.rank_processes`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import ckpipe
from ckpipe.distributed import training_state
from ckpipe.events import CheckpointExported
from tests.support.fork_server import Case
from tests.support.pipelines import load_existing
from tests.support.rank_processes import SETTINGS, collectives, tell
from tests.support.wrapped_models import Net, trained, wrapped


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
                result = load_existing(pipeline, state, source=case["files"][kind])
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


def save_shards(case: Case) -> None:
    """Save a model in shards, and whole by torch beside it."""
    model = wrapped("fsdp")
    with ckpipe.SyncPipeline(case["root"], **SETTINGS) as pipeline:
        pipeline.save({"model": model}, step=500).wait_complete(timeout=300)
    expected = {f"model.{name}": whole(each) for name, each in model.state_dict().items()}
    if dist.get_rank() == 0:
        torch.save(expected, f"{case['root']}.expected.pt")
    tell(case, done=True)


def _memory(name: str) -> int:
    """Return a line of this process's memory, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(each.split()[1]) << 10 for each in lines if each.startswith(name))


def share_of_rows(case: Case) -> None:
    """Load large tensors by rows into the ranks, and tell what each has read and used for it."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    target = {"w": distribute_tensor(torch.zeros(case["rows"], 1024), mesh, [Shard(0)])}
    with ckpipe.SyncPipeline(case["root"], **SETTINGS) as pipeline:
        for file in case["files"]:
            target["w"].to_local().fill_(0)
            before = _memory("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")  # begin a new peak
            result = load_existing(pipeline, target, source=file)
            used = _memory("VmHWM") - before
            assert result.report is not None
            tell(case, read=result.report.bytes, needed=target["w"].to_local().nbytes, used=used)
            expected = safetensors.torch.load_file(case["files"][0])["w"]
            assert torch.equal(whole(target["w"]), expected)


def export_together(case: Case) -> None:
    """Train FSDP2, save for the last time, and tell of the export that all ranks write."""
    model = wrapped("fsdp")
    optimizer = torch.optim.AdamW(model.parameters())
    trained(model, optimizer, range(2))
    settings = {"incomplete_after_seconds": 60.0, **case["settings"], **SETTINGS}
    if case.get("fails") == dist.get_rank():
        settings["export"] = {**settings["export"], "part": "absent"}
    before = collectives()
    try:
        with ckpipe.SyncPipeline(case["root"], **settings) as pipeline:
            pipeline.events.add(
                lambda event: (
                    tell(case, files=event.files) if isinstance(event, CheckpointExported) else None
                )
            )
            pipeline.save({"training": training_state(model, optimizer)}, step=2, final=True)
    except ckpipe.CkpipeError as error:
        tell(case, error=[type(error).__name__, str(error)])
    assert collectives() == before


def load_by_dcp(case: Case) -> None:
    """Load an exported folder with DCP into FSDP2 and plain models, and compare all values."""
    expected = torch.load(case["expected"])["training"]
    targets: dict[str, Any] = {"fsdp": wrapped("fsdp"), "plain": Net()}
    for model in targets.values():
        with torch.no_grad():
            for tensor in model.parameters():
                tensor.zero_()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
        model_state, optimizer_state = get_state_dict(model, optimizer)
        loaded = {"training": {"model": model_state, "optimizer": optimizer_state}}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they differ between versions of torch
            dcp_load(loaded, checkpoint_id=case["folder"])
        set_state_dict(
            model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state
        )
        found: Any = get_state_dict(model, optimizer)
        assert same_values(found[0], expected["model"])
        assert same_values(found[1]["state"], expected["optimizer"]["state"])
        assert found[1]["param_groups"][0]["lr"] == 1e-3
    tell(case, done=True)


def same_values(found: Any, expected: Any) -> bool:
    """Compare nested states, with distributed tensors gathered."""
    if isinstance(expected, dict):
        keys = found.keys() == expected.keys()
        return keys and all(same_values(found[key], expected[key]) for key in expected)
    return torch.equal(whole(found), whole(expected))
