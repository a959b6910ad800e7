"""Wrapper tensors: subclasses that keep their values in other tensors.

Theory. A class with ``__tensor_flatten__`` and ``__tensor_unflatten__`` tells the names of its
inner tensors and a context, and makes a tensor of them again; torch's compiler relies on both. So
quantised weights, float8 and low-bit optimizer state are saved as a node that has the class, the
context and the outer facts, around a dict of the inner tensors. These are then tensors like any
other: they may be shared, tied, sharded, or wrappers themselves. The context is a small tree with
values of its own.

A DTensor may have a wrapper as its local tensor. If the class tells how its inner tensors are cut
(:func:`register_wrapper`), or nothing is cut, they are saved as DTensors of their own. Otherwise
the inner tensors of a rank belong to its shard, and only the same shard takes them back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist

from ckpipe.errors import UnsupportedState
from ckpipe.format.dtypes import NAMES
from ckpipe.format.labels import Json, canonical
from ckpipe.interpreter import user_code
from ckpipe.state.tensors import (
    BUFFER,
    PARAMETER,
    PLAIN,
    Shardings,
    dtensor_type,
    local_part,
    persistence,
)
from ckpipe.state.values import class_path, lasting_path

Cut = Callable[[str, int], int | None]
Resize = Callable[[Any, torch.Size], Any]


registered: dict[str, type[torch.Tensor]] = {}
"""The registered classes by their paths."""

_functions: dict[type[torch.Tensor], tuple[Cut | None, Resize]] = {}


def register_wrapper(
    cls: type[torch.Tensor], *, cut: Cut | None = None, resize: Resize | None = None
) -> None:
    """Tell ckpipe how the inner tensors of a wrapper class are cut, so that it may be resharded.

    A wrapper class has ``__tensor_flatten__`` and ``__tensor_unflatten__``. Without this call its
    tensors are saved too; as local tensors of a sharded DTensor they then load only into the same
    shards. A program that loads with another mesh must make the same call.

    Args:
        cls: The class; its subclasses need calls of their own.
        cut: Gets the name of an inner tensor and a dimension of the outer one. Returns the
            dimension along which the inner tensor is cut if the outer one is cut along that
            dimension, in as many equal parts and in the same order; None if every part has the
            whole inner tensor. It must raise for a dimension along which it cannot be cut. Outer
            dimensions that cannot be divided into equal parts are saved as without ``cut``.
        resize: Gets the context of a tensor and the outer size of another one that it is a part of,
            or that is a part of it, and returns the context of that; None if all parts have the
            same context.
    """
    registered[class_path(cls)] = cls
    _functions[cls] = cut, resize or _same_context


def _same_context(context: Any, size: torch.Size) -> Any:
    return context


def cut_of(cls: type[torch.Tensor]) -> tuple[Cut | None, Resize]:
    """Return the functions with which a class is registered."""
    return _functions.get(cls, (None, _same_context))


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A wrapper tensor of a state, taken apart.

    Args:
        facts: The facts of its node, as ``docs/format.md`` defines them, without the context.
        context: Its context.
        inner: Its inner tensors by name.
        replicas: The ranks that hold its shard; empty if its inner tensors know it themselves.
    """

    facts: dict[str, Json]
    context: Any
    inner: dict[str, torch.Tensor]
    replicas: tuple[int, ...] = ()


def take_apart(obj: Any, label: str, *, detached: bool = False) -> Wrapper:
    """Take a wrapper tensor apart; reads no byte.

    Args:
        obj: The tensor.
        label: Its label in the state.
        detached: True to describe it as if it were detached.

    Raises:
        UnsupportedState: If an inner item is no tensor.
    """
    placed = type(obj) is dtensor_type()
    local: Any = local_part(obj) if placed else obj
    cut, resize = cut_of(type(local))
    path = class_path(type(local))
    with user_code("__tensor_flatten__", label):
        names, context = local.__tensor_flatten__()
        inner = {name: getattr(local, name) for name in names}
    if not all(isinstance(each, torch.Tensor) for each in inner.values()):
        raise UnsupportedState(
            f"This {path} names an inner tensor that is none",
            key=label or None,
            hint="Leave it out",
        )
    size, stride, shard = local.shape, local.stride(), None
    replicas: tuple[int, ...] = ()
    if placed:
        layout = Shardings().of(obj, label)
        parts = inner_placements(cut, obj.device_mesh, obj.placements, obj.shape)
        if parts is not None:
            size, stride = obj.shape, obj.stride()
            context = resize(context, size)
            inner = {
                name: dtensor_type().from_local(each, obj.device_mesh, parts(name), run_check=False)
                for name, each in inner.items()
            }
        else:
            replicas = layout.replicas(rank_on(obj.device_mesh))
            cuts = [[each.dim, each.split_factor] for each in layout.placements]
            shards = canonical([layout.mesh.shape, layout.mesh.ranks, cuts])
            digest = blake2b(shards.encode(), digest_size=8).hexdigest()
            shard = {"layout": digest, "size": list(obj.shape)}
    kind, detail = PLAIN, None
    if not detached and isinstance(obj, torch.nn.Parameter):
        kind = PARAMETER
    elif not detached and isinstance(obj, torch.nn.Buffer):
        kind, detail = BUFFER, persistence(obj)
    facts = {
        "class": path if path in registered else lasting_path(type(local)),
        "dtype": NAMES.get(obj.dtype, str(obj.dtype)),
        "size": list(size),
        "stride": list(stride),
        "kind": kind,
        "detail": detail,
        "requires_grad": obj.requires_grad and not detached,
        "shard": shard,
    }
    return Wrapper(facts, context, inner, replicas)


def rank_on(mesh: Any) -> int:
    """Return this process's rank; by its place on the mesh if the process group is gone.

    torch may return an equal mesh that was made when this process had another rank, so the place
    on the mesh is not used first.
    """
    if dist.is_initialized():
        return dist.get_rank()
    return int(mesh.mesh[tuple(mesh.get_coordinate())])


def inner_placements(
    cut: Cut | None, mesh: Any, placements: Sequence[Any], shape: Sequence[int]
) -> Callable[[str], list[Any]] | None:
    """Return a function for the placements of inner tensors; None if they are not known."""
    from torch.distributed.tensor import Replicate, Shard

    whole = [p.is_replicate() or n == 1 for n, p in zip(mesh.shape, placements, strict=True)]
    if not all(whole) and (cut is None or part_shape(shape, mesh, placements) is None):
        return None

    def inner(name: str) -> list[Any]:
        found: list[Any] = []
        for each, is_whole in zip(placements, whole, strict=True):
            dim = None if is_whole else cut(name, each.dim)  # type: ignore[misc]
            if dim is None or type(each) is Shard:
                found.append(Replicate() if dim is None else Shard(dim))
            else:
                found.append(type(each)(dim, split_factor=each.split_factor))
        return found

    return inner


def part_shape(
    shape: Sequence[int], mesh: Any, placements: Sequence[Any]
) -> tuple[int, ...] | None:
    """Return the shape of each rank's part of a tensor; None if the parts are not equal."""
    sizes = list(shape)
    for n, placement in zip(mesh.shape if placements else (), placements, strict=True):
        if not placement.is_replicate():
            if sizes[placement.dim] % n:
                return None
            sizes[placement.dim] //= n
    return tuple(sizes)
