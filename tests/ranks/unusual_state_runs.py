"""What real ranks do with states that they have in unusual ways; :mod:`rank_processes` runs it."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ckpipe
import ckpipe.distributed
from ckpipe.errors import CkpipeError, InvalidManifest, PerRankValue, UnsupportedTopology
from ckpipe.testing import FaultyBackend, Landing
from ckpipe.testing.wrappers import Operation
from ckpipe_local import LocalBackend
from tests.ranks.unusual_states import FULL, HALVES, ODD, on, spread, wrong
from tests.support.fork_server import Case
from tests.support.killed_runs import note
from tests.support.rank_processes import SETTINGS, URL, collectives, private, tell


@contextlib.contextmanager
def opened(case: Case, **fields: Any) -> Iterator[ckpipe.SyncPipeline]:
    """A pipeline on the root of a case; nobody calls a collective while it is open."""
    before = collectives()
    with ckpipe.SyncPipeline(case["root"], **SETTINGS | fields) as pipeline:
        yield pipeline
    assert collectives() == before


def local(tensor: Any) -> torch.Tensor:
    """The part of a tensor that this rank has."""
    part: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """This rank's parts of two states are alike."""
    for name, tensor in expected.items():
        assert torch.equal(local(found[name]), local(tensor)), name


def layouts(case: Case) -> None:
    """Save a state in odd layouts and load each into others."""
    for plan in ("local", "global"):
        with opened(case | {"root": f"{case['root']}-{plan}"}, plan=plan) as pipeline:
            for saved, loaded in case["pairs"]:
                handle = pipeline.save(ODD[saved](1))
                handle.wait_complete(timeout=300)
                target = ODD[loaded](-1)
                assert pipeline.load(target, step=handle.step) is not None
                assert_same(target, ODD[loaded](1))


def refused(case: Case) -> None:
    """Save what cannot be saved, and tell the errors."""
    rank = dist.get_rank()
    # The rank that completes a checkpoint keeps the error as well, for whoever closes.
    with contextlib.suppress(InvalidManifest), opened(case, plan=case["plan"]) as pipeline:
        for step, what in enumerate(case["saves"]):
            try:
                pipeline.save(wrong(rank, what), step=step).wait_complete(timeout=300)
            except CkpipeError as error:
                found = [type(error).__name__, error.step, error.rank is not None, error.key]
                tell(case, refused=[what, *found])


def meshes_of_their_own(case: Case) -> None:
    """Save different values by one name on two meshes, and load them there and elsewhere."""
    far = 1 + dist.get_rank() // 2
    rows, turned = spread(HALVES, Shard(0)), spread([3, 1, 0, 2], Shard(0))
    with opened(case) as pipeline:
        pipeline.save(rows(far), step=1).wait_complete(timeout=300)
        target = rows(-1)
        pipeline.load(target)
        assert_same(target, rows(far))
        try:
            pipeline.load(target := turned(-1))
        except PerRankValue as error:
            tell(case, refused=[error.step, error.rank, error.key])
        assert_same(target, turned(-1))
        pipeline.load(target, per_rank="rank0")
        if dist.get_rank() == 3:  # the first of that mesh
            assert_same({"w": target["w"]}, {"w": turned(1)["w"]})


def stage_of(stage: int, ranks: list[int], experts: list[int], factor: int) -> dict[str, Any]:
    """What a rank has of a model in two stages, whose ranks have experts of their own."""
    return {
        f"layer{stage}": on(ranks, FULL * factor + stage, Shard(0)),
        f"bias{stage}": torch.full((5,), factor * (stage + 1.0)),
        "experts": {f"e{n}": torch.full((3,), factor * (n + 1.0)) for n in experts},
        "step": torch.tensor(3.0 * factor),
    }


def save_stages(case: Case) -> None:
    """Save two stages, each cut over two ranks, with an expert and a generator of each rank."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    planner = {"planner": case["plan"]}
    if case["plan"] == "global":  # what some ranks have alike, a rank cannot know by itself
        planner["replicated"] = ["bias*"]
    mine = partial(stage_of, rank // 2, HALVES[rank], [rank])
    with opened(case, plan=planner) as pipeline:
        state = mine(1) | {"rng": ckpipe.RngState()}
        pipeline.save(state, step=3).wait_complete(timeout=300)
        drawn, target = torch.rand(4), mine(-1) | {"rng": ckpipe.RngState()}
        assert pipeline.load(target) is not None
        assert torch.equal(torch.rand(4), drawn)
        check_stage(target, mine(1))


def load_stages(case: Case) -> None:
    """Load a stage into each of two ranks, with the experts of both that had it."""
    rank = dist.get_rank()
    mine = partial(stage_of, rank, [rank], [2 * rank, 2 * rank + 1])
    with opened(case) as pipeline:
        target = mine(-1)
        assert pipeline.load(target, exclude=["rng"]) is not None
        check_stage(target, mine(1))


def check_stage(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert_same(found["experts"], expected["experts"])
    plain = ("experts", "rng")
    assert_same(found, {name: each for name, each in expected.items() if name not in plain})


def racing(case: Case) -> None:
    """Save and load what is newest again and again, while others are elsewhere."""
    rank = dist.get_rank()
    with opened(case) as pipeline:
        for step in range(case["saves"]):
            for _ in range(rank * step % 3):  # some have more to compute
                torch.linalg.svd(torch.randn(60, 60))
            pipeline.save(private(rank, step), step=step).wait()
            loaded = pipeline.load()
            tell(case, loaded=loaded.step if loaded else None)
            if loaded:
                assert torch.equal(loaded.state["mine"], private(rank, loaded.step)["mine"])


def is_commit(operation: Operation) -> bool:
    return operation.verb == "put" and "/m/0/" in operation.key


def straggle(case: Case) -> None:
    """Save a step.

    A rank that is late outlives its world, and commits only when there is a file that says so.
    """
    rank, go = dist.get_rank(), Path(f"{case['root']}.go")
    backend = FaultyBackend(LocalBackend(case["root"]))

    def wait(operation: Operation) -> None:
        tell(case, waits=True)
        while not go.exists():
            os.sched_yield()

    if case.get("late") == rank:
        if os.fork():
            os._exit(0)
        backend.call(wait, is_commit, Landing.BEFORE)
    ckpipe.register_backend("gang", lambda url: backend)
    with ckpipe.SyncPipeline(URL, **SETTINGS) as pipeline:
        loaded = pipeline.load()
        tell(case, loaded=loaded.step if loaded else None)
        if "step" in case:
            pipeline.save(private(rank, case["step"]), step=case["step"]).wait()
            tell(case, committed=case["step"])


class Tied(torch.nn.Module):
    """An embedding whose weight is that of the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(9, 4)
        self.head = torch.nn.Linear(4, 9, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.embedding(tokens))
        return out


def tied(case: Case) -> None:
    """Train, save or load a sharded model with tied weights, and tell its losses."""
    torch.manual_seed(5)
    model = Tied()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = {"training": ckpipe.distributed.training_state(model, optimizer)}
    if case["save"]:
        losses_of(model, optimizer, 3)
    with opened(case) as pipeline:
        if case["save"]:
            pipeline.save(state, step=1).wait_complete(timeout=300)
        else:
            assert pipeline.load(state) is not None
    assert model.head.weight is model.embedding.weight
    tell(case, losses=losses_of(model, optimizer, 3))


def fewer_layers(case: Case) -> None:
    """Load a sharded module into one of fewer layers; tell the error and whether it was changed."""

    def layers(count: int) -> torch.nn.Module:
        torch.manual_seed(count)
        model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(count)))
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        return model

    with opened(case) as pipeline:
        pipeline.save({"model": layers(3)}, step=1).wait_complete(timeout=300)
        target = layers(2)
        before = [local(each).clone() for each in target.parameters()]
        try:
            pipeline.load({"model": target})
        except CkpipeError as error:
            same = all(map(torch.equal, before, map(local, target.parameters())))
            tell(case, fewer=[type(error).__name__, error.message, same])


class Loop(torch.nn.Module):
    """Weights of its own and of a layer in it, tied."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(9, 4))
        self.inner = Tied()
        self.inner.embedding.weight = self.inner.head.weight = self.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(tokens) + self.weight.sum()
        return out


def tied_as(kind: str, wrapper: str) -> torch.nn.Module:
    """Make a model with tied weights, or with equal or other weights in their place."""
    torch.manual_seed(5)
    model = Loop() if kind == "deep" else Tied()
    if kind in ("equal", "other"):
        assert isinstance(model, Tied)
        weight = model.embedding.weight.detach().clone()
        model.head.weight = torch.nn.Parameter(weight + (kind == "other"))
    if wrapper == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    if wrapper.startswith("fsdp1"):
        return FullyShardedDataParallel(
            model,
            use_orig_params=wrapper == "fsdp1",
            device_mesh=init_device_mesh("cpu", (dist.get_world_size(),)),
            device_id=torch.device("cpu"),
        )
    return model


def tied_in_wrappers(case: Case) -> None:
    """Save tied weights in wrappers and load them into others; tell what came of it."""
    warnings.simplefilter("ignore")  # torch's own
    with ckpipe.SyncPipeline(case["root"], **SETTINGS) as pipeline:
        for step, (kind, saved, loaded) in enumerate(case["cells"]):
            model = tied_as(kind, saved)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            separate = kind in ("equal", "other")
            if not separate:  # else the first step would make them different
                losses_of(model, optimizer, 2)
            state = {"training": ckpipe.distributed.training_state(model, optimizer)}
            pipeline.save(state, step=step).wait_complete(timeout=300)
            target = tied_as("tied" if separate else kind, loaded)
            other = torch.optim.AdamW(target.parameters(), lr=0.1)
            losses_of(target, other, 1)
            state = {"training": ckpipe.distributed.training_state(target, other)}
            try:
                pipeline.load(state, step=step)
                found = losses_of(target, other, 1 if separate else 3)
                control = losses_of(model, optimizer, 1 if separate else 3)
                tell(case, tied="loads" if found == control else [found, control])
            except CkpipeError as error:
                tell(case, tied=type(error).__name__)


def losses_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    """Losses of some steps on the same tokens everywhere."""
    found = []
    for _ in range(steps):
        loss = model(torch.arange(9)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def meshes_within_meshes(case: Case) -> None:
    """Save tensors on parts of a mesh that was made after opening, and load them onto others.

    One of the ranks loads a part of them only. In the end the process group is gone.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    with ckpipe.SyncPipeline(case["root"], **SETTINGS) as pipeline:
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "tp"))
        flat = mesh._flatten("all")
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        group = DeviceMesh.from_group(groups[rank // 2], "cpu")
        places: list[tuple[DeviceMesh, list[Any]]] = [
            (mesh, [Shard(0), Shard(0)]), (group, [Shard(1)]), (mesh["dp"], [Shard(0)]),
            (mesh["tp"], [Shard(1)]), (flat, [Shard(0)]), (mesh, [Replicate(), Shard(1)]),
        ]  # fmt: skip

        def state(factor: int, turn: int) -> dict[str, Any]:
            turned = [*places[turn:], *places[:turn]]
            parts = {
                f"w{n}": distribute_tensor(FULL * factor, where, cut, src_data_rank=None)
                for n, (where, cut) in enumerate(turned)
            }
            return parts | {"mine": torch.full((3,), float(factor * rank))}

        pipeline.save(state(1, 0), step=1).wait_complete(timeout=300)
        for turn in [*case["turns"], 0]:
            target, part = state(-1, turn), ["mine"] if rank == turn % size else None
            pipeline.load(target, include=part)
            whole = state(1, turn)
            assert_same(target, state(-1, turn) | {"mine": whole["mine"]} if part else whole)
        tell(case, loaded=True)
        dist.barrier()
        dist.destroy_process_group()
        kept = {name: target[name] for name in ("w0", "w1", "mine")}
        expected = {name: local(each).clone() for name, each in kept.items()}
        pipeline.save(kept, step=2).wait_complete(timeout=300)
        for each in kept.values():
            local(each).zero_()
        pipeline.load(kept)
        assert_same(kept, expected)
        try:
            pipeline.save(target, step=3).wait()
        except UnsupportedTopology as error:
            refused = [error.step, error.key]
            note(case["root"], json.dumps({"rank": rank, "refused": refused}))


class Holder:
    """An object with one thing in its state."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def state_dict(self) -> dict[str, Any]:
        return {"w": self.held}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.held = state["w"]


def sharded_tensors(case: Case) -> None:
    """Save ShardedTensors, and load into some; tell the errors."""
    warnings.simplefilter("ignore")  # torch's own
    ranks = range(dist.get_world_size())
    spec = ChunkShardingSpec(dim=0, placements=[f"rank:{rank}/cpu" for rank in ranks])
    sharded, plain = sharded_tensor.rand(spec, 10, 20), torch.zeros(10, 20)
    model = FullyShardedDataParallel(
        torch.nn.Linear(4, 4), device_id=torch.device("cpu"), use_orig_params=True
    )
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    FullyShardedDataParallel.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    kept = FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]
    bare = torch.nn.Linear(4, 4).state_dict()
    plain_kept = {key: {"exp_avg": bare["bias"]} for key in kept}
    states = {
        "in containers": ({"in": [{"w": sharded}]}, {"in": [{"w": plain}]}),
        "in an object": ({"in": Holder([sharded])}, {"in": {"w": [plain]}}),
        "in a module": ({"in": model}, {"in": bare}),
        "of an optimizer": ({"in": kept}, {"in": plain_kept}),
    }
    with ckpipe.SyncPipeline(case["root"], **SETTINGS) as pipeline:
        for step, (name, (state, plain_state)) in enumerate(states.items()):
            pipeline.save(plain_state, step=step).wait_complete(timeout=300)
            for attempt in (pipeline.save, pipeline.load):
                found: Any = None
                try:
                    attempt(state, step=step)
                except CkpipeError as error:
                    found = [type(error).__name__, error.key]
                tell(case, sharded=[name, attempt.__name__, found])
