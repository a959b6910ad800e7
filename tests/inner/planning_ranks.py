"""Plan made-up states of many ranks, which have no bytes, each rank alone or all together."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from ckpipe import GlobalPlanner
from ckpipe.format.boxes import Box
from ckpipe.plan.assignment import assign, describe
from ckpipe.plan.global_plan import PlanRounds, SharedPlan, divide
from ckpipe.planning import Captured, LocalPlanner, RankPlan, assemble
from ckpipe.state.placements import Mesh, Placement, Sharding, sharding
from ckpipe.state.tensors import TensorLeaf

GAP = 64
"""Bytes between tensors, so that none of them overlap."""


@dataclass(frozen=True)
class Tensor:
    """A tensor of a state: a shape for one that is plain, a sharding for a DTensor.

    ``tied`` names the tensor whose memory it shares.
    """

    label: str
    layout: tuple[int, ...] | Sharding
    dtype: str = "float32"
    tied: str | None = None


def mesh(*shape: int, ranks: Sequence[int] | None = None) -> Mesh:
    """A mesh of ranks in an order, or of all from 0 on."""
    return Mesh(shape, tuple(range(math.prod(shape)) if ranks is None else ranks))


def on(where: Mesh, shape: tuple[int, ...], *dims: int | None) -> Sharding:
    """A tensor on a mesh, cut along the dimensions given; None for replicated."""
    return sharding(where, tuple(Placement(dim) for dim in dims), shape)


def held_by(rank: int, tensors: Iterable[Tensor]) -> list[TensorLeaf]:
    """What the walk would find of tensors on a rank."""
    address, places, leaves = 1 << 20, dict[str, int](), list[TensorLeaf]()
    for each in tensors:
        dtype: torch.dtype = getattr(torch, each.dtype)
        spread = each.layout if isinstance(each.layout, Sharding) else None
        local = each.layout if not isinstance(each.layout, Sharding) else None
        if spread is not None:
            local = spread.local_shape(rank)
        data = torch.empty((0,) if local is None else local, dtype=dtype, device="meta")
        if each.label not in places:
            places[each.label] = places[each.tied] if each.tied else address
            address += data.nbytes + GAP
        leaves.append(
            TensorLeaf(
                each.label, each.dtype, tuple(data.shape), data.stride(), "cpu", "tensor",
                None, False, "", places[each.label], data.nbytes, data.nbytes, True, None, spread,
            )
        )  # fmt: skip
    return leaves


def planned(
    rank: int, world_size: int, tensors: Iterable[Tensor], replicated: Iterable[str] = ()
) -> RankPlan:
    """The local plan of a rank for a made up state.

    Args:
        rank: The rank.
        world_size: How many ranks there are.
        tensors: The tensors that it holds.
        replicated: Labels of plain tensors of which the state says that they are replicated.
    """
    captured = captured_by(rank, tensors, replicated)
    return LocalPlanner().plan(captured, rank=rank, world_size=world_size)


def gpt2(where: Mesh, *dims: int | None, dtype: str = "float32") -> list[Tensor]:
    """GPT-2 of 124 million parameters, its head tied to its embedding."""
    width = 768
    shapes: dict[str, tuple[int, ...]] = {"wte": (50257, width), "wpe": (1024, width)}
    for n in range(12):
        for name, shape in {
            "ln_1.weight": (width,), "ln_1.bias": (width,),
            "attn.c_attn.weight": (width, 3 * width), "attn.c_attn.bias": (3 * width,),
            "attn.c_proj.weight": (width, width), "attn.c_proj.bias": (width,),
            "ln_2.weight": (width,), "ln_2.bias": (width,),
            "mlp.c_fc.weight": (width, 4 * width), "mlp.c_fc.bias": (4 * width,),
            "mlp.c_proj.weight": (4 * width, width), "mlp.c_proj.bias": (width,),
        }.items():  # fmt: skip
            shapes[f"h.{n}.{name}"] = shape
    shapes |= {"ln_f.weight": (width,), "ln_f.bias": (width,)}
    found = [Tensor(label, on(where, shape, *dims), dtype) for label, shape in shapes.items()]
    return [*found, Tensor("lm_head", on(where, shapes["wte"], *dims), dtype, tied="wte")]


def llama70b(where: Mesh, *dims: int | None) -> list[Tensor]:
    """The parameters of a model with the shapes of Llama 3 70B."""
    width, wide, keys = 8192, 28672, 1024
    shapes: dict[str, tuple[int, ...]] = {"embed": (128256, width), "head": (128256, width)}
    for n in range(80):
        for name, shape in {
            "q": (width, width), "k": (keys, width), "v": (keys, width), "o": (width, width),
            "gate": (wide, width), "up": (wide, width), "down": (width, wide),
            "norm_1": (width,), "norm_2": (width,),
        }.items():  # fmt: skip
            shapes[f"layers.{n}.{name}"] = shape
    shapes["norm"] = (width,)
    return [Tensor(name, on(where, shape, *dims), "bfloat16") for name, shape in shapes.items()]


State = Callable[[int], Sequence[Tensor]]
"""The tensors of each rank."""


def captured_by(rank: int, tensors: Iterable[Tensor], replicated: Iterable[str] = ()) -> Captured:
    """What the walk would find on a rank, with the labels of what is said to be replicated."""
    leaves, marked = held_by(rank, tensors), frozenset(replicated)
    numbers = {n: None for n, leaf in enumerate(leaves) if leaf.label in marked}
    return Captured(["absent"], leaves, [], numbers)


class Ranks:
    """The planners of a world; each has a connection of its own to one store.

    Args:
        connect: Makes connections.
        size: How many ranks there are.
        seconds: How long they wait for each other.
    """

    def __init__(self, connect: Callable[[], Any], size: int, seconds: float = 20.0) -> None:
        self.planners = [GlobalPlanner(connect(), timeout_seconds=seconds) for _ in range(size)]

    def plan(
        self,
        save: str,
        state: State,
        replicated: Sequence[str] = (),
        *,
        ranks: Sequence[int] | None = None,
    ) -> list[RankPlan | Exception]:
        """Has some or all of the ranks plan one save, at the same time."""
        size = len(self.planners)
        chosen = range(size) if ranks is None else ranks

        def one(rank: int) -> RankPlan | Exception:
            captured = captured_by(rank, state(rank), replicated)
            try:
                return self.planners[rank].plan_save(
                    captured, save=f"run/{save}", rank=rank, world_size=size
                )
            except Exception as error:
                return error

        with ThreadPoolExecutor(len(chosen)) as pool:
            return list(pool.map(one, chosen))

    def plans(self, save: str, state: State, replicated: Sequence[str] = ()) -> list[RankPlan]:
        """The plans of all ranks, which all come to one."""
        found = []
        for each in self.plan(save, state, replicated):
            if isinstance(each, Exception):
                raise each
            found.append(each)
        return found


@contextmanager
def hurried(seconds: float, present: Sequence[int]) -> Iterator[None]:
    """Ranks of this process wait only so long for others meanwhile.

    Args:
        seconds: How long, from when all that are present have made their offers.
        present: Which ranks those are; they find each other however busy the machine is.
    """
    agree, awaited = PlanRounds._agree, PlanRounds._awaited

    def agree_soon(rounds: PlanRounds, *args: Any) -> Any:
        patient, rounds._seconds = rounds._seconds, seconds
        try:
            return agree(rounds, *args)
        finally:
            rounds._seconds = patient

    def awaited_once_met(rounds: PlanRounds, keys: Sequence[str]) -> bool:
        save = keys[0].partition("/")[0]
        while not rounds._store.check([f"{save}/offer/{rank}" for rank in present]):
            os.sched_yield()
        return awaited(rounds, keys)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlanRounds, "_agree", agree_soon)
        patch.setattr(PlanRounds, "_awaited", awaited_once_met)
        yield


def written(plans: Iterable[RankPlan]) -> list[list[str]]:
    """The names of the entries that each rank writes, sorted."""
    return [sorted(entry.name for entry in plan.layout.entries) for plan in plans]


def nbytes(tensor: Tensor) -> int:
    """The bytes of a whole tensor."""
    shape = tensor.layout.shape if isinstance(tensor.layout, Sharding) else tensor.layout
    dtype: torch.dtype = getattr(torch, tensor.dtype)
    return math.prod(shape) * dtype.itemsize


def written_bytes(plan: RankPlan) -> int:
    """How much a rank writes."""
    return sum(entry.nbytes for entry in plan.layout.entries)


def check_balance(sizes: Iterable[int], mean: float) -> None:
    """Check that no rank writes more or less than the others by more than five percent."""
    for size in sizes:
        assert 0.95 * mean <= size <= 1.05 * mean


def jointly(
    size: int, captured: Callable[[int], Captured], ranks: Sequence[int] | None = None
) -> list[RankPlan]:
    """The plans of all or some ranks, decided as rank 0 would, without a store."""
    states = [captured(rank) for rank in range(size)]
    described = [
        describe(each.tensors, each.replicated, rank=rank, world_size=size)
        for rank, each in enumerate(states)
    ]
    plans = []
    answers = assign([each.offer for each in described], [each.private for each in described])
    for rank in range(size) if ranks is None else ranks:
        own = described[rank]
        pairs = zip(own.offer, answers[rank], strict=True)
        shared = SharedPlan(1, 0, "", {each.name: (each, cuts) for each, cuts in pairs})
        units = divide(shared, states[rank].tensors, own.shares, rank=rank)
        plans.append(assemble(states[rank], units, rank=rank, world_size=size))
    return plans


Identity = tuple[str, str, tuple[int, ...], Box | None]


def unwritten(plans: Sequence[RankPlan], states: Sequence[Captured]) -> list[Identity]:
    """What ranks leave to others that these do not write; a checkpoint with such never counts."""

    def identities(rank: int) -> list[tuple[int | None, Identity]]:
        leaves = states[rank].tensors
        return [
            (row.owner, (leaf.label, leaf.dtype, leaf.full_shape, row.box))
            for row in plans[rank].layout.chunks
            for leaf in [leaves[row.tensor]]
        ]

    rows = [identities(rank) for rank in range(len(plans))]
    own = [{what for owner, what in each if owner is None} for each in rows]
    return [
        what
        for each in rows
        for owner, what in each
        if owner is not None and what not in own[owner]
    ]
