"""Ranks that save incrementally: cases for :mod:`tests.support.rank_processes`."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ckpipe
from ckpipe.distributed import training_state
from ckpipe.integrations.dcp import CkpipeStorageReader, CkpipeStorageWriter
from tests.support.fork_server import Case
from tests.support.linked_saves import Links, check_stored_values, content, step
from tests.support.pipelines import load_existing
from tests.support.rank_processes import SETTINGS, collectives, tell

dcp: Any = torch.distributed.checkpoint  # it does not export what it has

SAVES = 5
MEBIBYTE = 1 << 20
Trainer = tuple[nn.Module, torch.optim.Optimizer]


def network() -> nn.Module:
    """Layers of which half are frozen; a half of a large one has more than a mebibyte."""
    model = nn.Sequential(
        nn.Linear(1040, 520), nn.Linear(1040, 520), nn.Linear(520, 90), nn.Linear(520, 90)
    )
    for frozen in (model[0], model[2]):
        frozen.requires_grad_(requires_grad=False)
    return model


def sharded(*mesh_shape: int) -> nn.Module:
    model = network()
    mesh = init_device_mesh(
        "cpu", mesh_shape, mesh_dim_names=("outer", "inner")[-len(mesh_shape) :]
    )
    for layer in model.children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def adam(model: nn.Module) -> Trainer:
    return model, torch.optim.AdamW(trained(model), foreach=False)


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [each for each in model.parameters() if each.requires_grad]


def low_bit() -> Trainer:
    """A sharded model, the moments of whose optimizer have eight bits."""
    import torchao.optim

    torch.compiler.set_stance("force_eager")
    model = sharded(dist.get_world_size())
    return model, torchao.optim.AdamW8bit(trained(model))


def quantised() -> Trainer:
    """A model with a frozen weight of four bits, of which all ranks have a replica."""
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

    model: Any = nn.Sequential(nn.Linear(1024, 2560), nn.Linear(520, 90))
    weight: Any = to_nf4(model[0].weight.detach(), block_size=64, scaler_block_size=64)
    model[0].weight = nn.Parameter(weight, requires_grad=False)
    return adam(DistributedDataParallel(model))


TRAINERS: dict[str, Callable[[], Trainer]] = {
    "ddp": lambda: adam(DistributedDataParallel(network())),
    "fsdp": lambda: adam(sharded(dist.get_world_size())),
    "hsdp": lambda: adam(sharded(2, dist.get_world_size() // 2)),
    "low bit": low_bit,
    "quantised": quantised,
}


def made(kind: str, seed: int) -> Trainer:
    """Make a model with an optimizer that has made a step, on all ranks alike."""
    torch.manual_seed(seed)
    model, optimizer = TRAINERS[kind]()
    step(optimizer, random.Random(seed), 1)
    return model, optimizer


def save(case: Case) -> None:
    """Save a trainer some times while few of its tensors change, and check each checkpoint."""
    warnings.simplefilter("ignore")  # torchao has many
    chance, rank = random.Random(case["seed"]), dist.get_rank()  # the same on all ranks
    trainer, other = made(case["kind"], 0), made(case["kind"], 1)
    state, target = ({"training": training_state(*each)} for each in (trainer, other))
    links = Links(Path(case["root"]), rank, dist.get_world_size())
    saved: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
    fields: Any = {**SETTINGS, "plan": case["plan"], "worker": case["worker"]}
    with ckpipe.SyncPipeline(
        case["root"], guard=trainer[1], incremental=True, **fields
    ) as pipeline:
        for number in range(SAVES):
            before = content(state), content(state, whole=True)
            started = collectives()
            handle = pipeline.save(state, step=number, until=case["until"])
            assert collectives() == started
            step(trainer[1], chance, 0.4)
            handle.wait_complete(timeout=300)
            saved[str(handle.id)] = before
            assert links.check(handle.id) == handle.report.linked_bytes
        tell(case, linked=links.linked)

        def check(id: str) -> None:
            local, every = saved[id]
            load_existing(pipeline, target, step=id)
            assert content(target) == local, id
            compared = check_stored_values(Path(case["root"]), id, every)
            assert compared > MEBIBYTE or case["kind"] == "low bit"

        check_all_and_one_alone(pipeline, saved, chance, check)


def check_all_and_one_alone(
    pipeline: ckpipe.SyncPipeline,
    saved: Iterable[str],
    chance: random.Random,
    check: Callable[[str], None],
) -> None:
    """Check each checkpoint, and one that is drawn once more when the others are deleted."""
    for id in saved:
        check(id)
    *others, last = chance.sample(sorted(saved), SAVES)
    dist.barrier()
    for id in others if dist.get_rank() == 0 else []:
        pipeline.delete(id, force=True)
    dist.barrier()
    check(last)
    dist.barrier()


def save_by_dcp(case: Case) -> None:
    """Save by DCP, whose items are boxes of tensors, and load by DCP."""
    warnings.simplefilter("ignore")
    root, chance, rank = case["root"], random.Random(case["seed"]), dist.get_rank()
    trainer, other = made(case["kind"], 0), made(case["kind"], 1)
    links = Links(Path(root), rank, dist.get_world_size() + 1)
    writer = CkpipeStorageWriter(
        root, incremental=True, worker=case["worker"], staging=SETTINGS["staging"]
    )
    saved: dict[str, tuple[Any, Any]] = {}
    with ckpipe.SyncPipeline(root, solo=True) as pipeline:

        def check(id: str) -> None:
            local, every = saved[id]
            target = dict(zip(("model", "optim"), get_state_dict(*other), strict=True))
            name = f"save {[*saved].index(id)}"
            dcp.load(target, checkpoint_id=name, storage_reader=CkpipeStorageReader(root))
            assert content(target) == local, id
            assert check_stored_values(Path(root), id, every) > MEBIBYTE

        for number in range(SAVES):
            state = dict(zip(("model", "optim"), get_state_dict(*trainer), strict=True))
            before = content(state), content(state, whole=True)
            dcp.save(state, checkpoint_id=f"save {number}", storage_writer=writer)
            (new,) = {each.id for each in pipeline.steps()} - saved.keys()
            saved[new] = before
            links.check(new)
            step(trainer[1], chance, 0.4)
            dist.barrier()
        tell(case, linked=links.linked)
        check_all_and_one_alone(pipeline, saved, chance, check)
