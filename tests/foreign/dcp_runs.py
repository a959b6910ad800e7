"""Ranks that save with ``torch.distributed.checkpoint``, and load what it has written."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save

import ckpipe
from ckpipe.distributed import training_state
from tests.foreign.rank_runs import whole
from tests.support.fork_server import Case
from tests.support.pipelines import load_existing
from tests.support.rank_processes import SETTINGS, tell
from tests.support.wrapped_models import trained, wrapped


def made(kind: str, *, steps: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = wrapped(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (1 + steps))
    trained(model, optimizer, range(steps))
    return model, optimizer


def facts(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return all values of a model and its optimizer, under names and whole."""
    states: Any = get_state_dict(model, optimizer)
    state = {
        f"{name}.{key}": whole(value)
        for name, each in states[1]["state"].items()
        for key, value in each.items()
    }
    return {name: whole(each) for name, each in states[0].items()} | state


def save_with_dcp(case: Case) -> None:
    """Save a trained model by DCP in each form, and whole by torch beside it."""
    warnings.simplefilter("ignore")
    model, optimizer = made(case["kind"], steps=2)
    for form in ("nested", "flat"):
        options = StateDictOptions(flatten_optimizer_state_dict=form == "flat")
        model_state, optim_state = get_state_dict(model, optimizer, options=options)
        state = {"model": model_state, "optim": optim_state, "step": 2}
        save(state, checkpoint_id=f"{case['root']}.{form}")
    expected = facts(model, optimizer)
    if dist.get_rank() == 0:
        torch.save(expected, f"{case['root']}.expected.pt")
    tell(case, saved=True)


def save_with_its_hugging_face_writer(case: Case) -> None:
    """Save a model in shards of all ranks, and whole by torch beside it."""
    warnings.simplefilter("ignore")
    model, _ = made(case["kind"], steps=1)
    state = model.state_dict()
    writer = HuggingFaceStorageWriter(path=case["folder"], save_distributed=True)
    save(dict(state), storage_writer=writer)
    expected = {name: whole(each) for name, each in state.items()}
    if dist.get_rank() == 0:
        torch.save(expected, f"{case['root']}.expected.pt")


def load_from_dcp(case: Case) -> None:
    """Load both forms into a model of another wrapper or another number of ranks."""
    warnings.simplefilter("ignore")
    expected = torch.load(f"{case['root']}.expected.pt", weights_only=True)
    with ckpipe.SyncPipeline(case["root"], **SETTINGS) as pipeline:
        for form in ("nested", "flat"):
            model, optimizer = made(case["kind"], steps=1)
            state = {"training": training_state(model, optimizer)}
            load_existing(pipeline, state, source=f"{case['root']}.{form}")
            assert optimizer.param_groups[0]["lr"] == 0.03
            found = facts(model, optimizer)
            assert found.keys() == expected.keys()
            for name, each in expected.items():
                assert torch.equal(found[name], each), (form, name)
    tell(case, loaded=True)
