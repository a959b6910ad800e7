"""States of many ranks without their bytes: descriptions of tensors on meshes that are made up."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ckpipe.planning import Captured, LocalPlanner, RankPlan
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


def mesh(*shape: int) -> Mesh:
    """A mesh of all ranks from 0 on."""
    return Mesh(shape, tuple(range(math.prod(shape))))


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
    leaves, marked = held_by(rank, tensors), frozenset(replicated)
    numbers = frozenset(n for n, leaf in enumerate(leaves) if leaf.label in marked)
    captured = Captured(["absent"], leaves, [], numbers)
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
