"""Ranks whose state holds objects that call collectives, as FSDP1 does."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel

import ckpipe
from ckpipe.distributed import training_state
from ckpipe.errors import StoreUnavailable, UnsupportedTopology
from ckpipe.testing import FaultyBackend
from ckpipe_local import LocalBackend
from tests.support.fork_server import Case
from tests.support.pipelines import load_existing
from tests.support.rank_processes import SETTINGS, tell


class Meets:
    """Meets its namesakes on the other ranks whenever it is saved or loaded."""

    def __init__(self, name: str, inner: Any = 0) -> None:
        self.name, self.inner, self.loaded = name, inner, 0

    def meet(self, *_: Any) -> None:
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, self.name)
        assert set(found) == {self.name}, found

    def state_dict(self) -> dict[str, Any]:
        self.meet()
        return {"inner": self.inner}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.meet()
        self.loaded += 1


class Registered(Meets):
    """The same for a type that is registered."""


ckpipe.register_type(
    Registered,
    to_state=lambda obj: [obj.name, obj.state_dict()["inner"]],
    from_state=lambda made: Registered(*made),
)


@dataclass
class Record:
    first: Any
    second: Any = field(default=None)


def hooked(name: str) -> torch.nn.Module:
    """Make a module whose hooks call collectives."""
    module, meets = torch.nn.Linear(2, 2), Meets(name)
    module.register_state_dict_post_hook(lambda *_: meets.meet())  # type: ignore[no-untyped-call]
    module.register_load_state_dict_pre_hook(lambda *_: meets.meet())  # type: ignore[no-untyped-call]
    return module


def in_order(rank: int, state: dict[Any, Any]) -> dict[Any, Any]:
    """Turn a dict round on odd ranks."""
    return dict(reversed(state.items())) if rank % 2 else state


def flat(width: int, **options: Any) -> torch.nn.Module:
    """Wrap a small model in FSDP1, in a group that does not wait for ever."""
    group = dist.new_group(timeout=timedelta(seconds=60))
    mesh = DeviceMesh.from_group(group, "cpu")
    torch.manual_seed(width)
    return FullyShardedDataParallel(
        torch.nn.Linear(width, 2), device_mesh=mesh, device_id=torch.device("cpu"),
        use_orig_params=True, **options,
    )  # fmt: skip


def _several(rank: int) -> Any:
    return in_order(rank, {name: Meets(name) for name in "abc"})


def _shared(rank: int) -> Any:
    one = Meets("one")
    return in_order(rank, {"a": one, "b": Meets("b"), "c": Meets("c"), "d": one})


def _mixed(rank: int) -> Any:
    keys = [10, 9, "9", True, None, 2.5, (1, "a")]
    return in_order(rank, {key: Meets(repr(key)) for key in keys})


def _attributes(rank: int) -> Any:
    record = Record(Meets("first"), Meets("second"))
    vars(record).update(in_order(rank, {"x": Meets("x"), "y": Meets("y")}))
    return {"record": record}


def _trainings(rank: int) -> Any:
    models = {name: flat(width) for name, width in (("x", 5), ("y", 9))}
    return in_order(
        rank,
        {
            name: training_state(model, torch.optim.AdamW(model.parameters()))
            for name, model in models.items()
        },
    )


STATES: dict[str, Callable[[int], Any]] = {
    "side by side": _several,
    "at different depths": lambda rank: in_order(
        rank, {"b": {"deep": _several(rank)}, "a": [Meets("0"), (Meets("1"),)], "c": Meets("c")}
    ),
    "in an object": lambda rank: in_order(
        rank, {"b": Meets("b", _several(rank)), "a": Meets("a", [_several(rank)])}
    ),
    "in two places": _shared,
    "under keys of all kinds": _mixed,
    "in attributes": _attributes,
    "hooks": lambda rank: in_order(rank, {name: hooked(name) for name in "ab"}),
    "registered": lambda rank: in_order(rank, {name: Registered(name) for name in "ab"}),
    "FSDP1": _trainings,
    "only some everywhere": lambda rank: {f"only {rank}": rank, **_several(rank)},
}


def another_order(case: Case) -> None:
    """Save and load states whose dicts have another order on each rank."""
    warnings.simplefilter("ignore")  # torch's own
    rank = dist.get_rank()
    with ckpipe.SyncPipeline(case["root"], **SETTINGS) as pipeline:
        for step, name in enumerate(case["states"]):
            state = STATES[name](rank)
            for again in range(2):  # the second save finds all as it was
                number = 2 * step + again
                pipeline.save(state, step=number).wait_complete(timeout=300)
                dist.barrier()
            load_existing(pipeline, state, step=number)
            if name != "FSDP1":
                assert list(load_existing(pipeline, step=number).state) == list(state), name


class Declared(Meets):
    """Says that it calls collectives."""

    def __ckpipe_collectives__(self) -> range:
        return range(dist.get_world_size())


def _fsdp1(rank: int) -> Any:
    model = flat(6)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 6)).sum().backward()
    optimizer.step()
    return training_state(model, optimizer)


JOINT: dict[str, Callable[[int], Any]] = {
    "training state": _fsdp1,
    "module": lambda rank: flat(6),
    "declared": lambda rank: Declared("declared", torch.ones(9)),
}
"""Objects that all ranks load together."""


def joint_state(rank: int, what: str) -> dict[str, Any]:
    """Make a state with such an object, and a tensor that each rank has alone."""
    return {"plain": {"own": torch.full((7,), float(rank))}, "joint": [JOINT[what](rank)]}


def fails_on_one_rank(case: Case) -> None:
    """Load where one rank fails; tell what each rank got, and load again without the fault."""
    warnings.simplefilter("ignore")
    for number, cell in enumerate(case["cells"]):
        _fails_on_one_rank(case, Path(f"{case['root']}-{number}"), *cell)
        dist.barrier()


def _fails_on_one_rank(
    case: Case, root: Path, what: str, fault: str, fallback: bool, step: int | None
) -> None:
    rank, backend = dist.get_rank(), FaultyBackend(LocalBackend(str(root)))
    scheme = f"gang{root.name.rpartition('-')[2]}"
    ckpipe.register_backend(scheme, lambda url: backend)
    settings = SETTINGS | {"upload": {"retries": 0}}
    if fault == "stays away":
        settings["load"] = {"agreement_timeout_seconds": 0.5}
    with ckpipe.SyncPipeline(f"{scheme}://store", **settings) as pipeline:
        state = joint_state(rank, what)
        for saved in (1, 2):
            pipeline.save(state, step=saved).wait_complete(timeout=300)
        dist.barrier()
        target = joint_state(rank, what)
        undo: Callable[[], object] = backend.heal
        if rank == 1:
            target, undo = broken(backend, root, fault, target)
        dist.barrier()
        found: Any = None
        try:
            if fault != "stays away" or rank == 0:
                result = pipeline.load(target, step=step, fallback=fallback)
                found = result and result.step
        except ckpipe.CkpipeError as error:
            found = [type(error).__name__, error.step, error.rank, error.message]
        tell(case, found=found)
        dist.barrier()
        undo()
        target = joint_state(rank, what)
        again = None
        while again is None:
            try:
                again = pipeline.load(target)
            except UnsupportedTopology:
                assert fault == "stays away"  # the other rank may again come too late
        assert again is not None
        assert again.step == 2
        assert torch.equal(target["plain"]["own"], state["plain"]["own"])
        if rank == 0:  # alone, without the objects
            assert pipeline.load(target, step=1, include=["plain"]) is not None


def broken(
    backend: FaultyBackend, root: Path, fault: str, target: dict[str, Any]
) -> tuple[dict[str, Any], Callable[[], object]]:
    """Bring about a fault on this rank; return its target, and what undoes the fault."""
    if fault == "damage":
        (path,) = root.glob("step-000000000002.*.0/rank-00001.safetensors")
        data = path.read_bytes()
        path.write_bytes(data[:-9] + bytes([data[-9] ^ 4]) + data[-8:])
        return target, lambda: path.write_bytes(data)
    if fault == "shape":
        target["plain"]["own"] = torch.zeros(8)
    if fault == "store":
        down = StoreUnavailable("down")
        backend.fail(down, lambda operation: "rank-00001" in operation.key, times=None)
    return target, backend.heal
