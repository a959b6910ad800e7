"""Wrapper tensors of a checkpoint: whether a live one takes them, and new ones to fill."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from ckpipe.errors import InvalidManifest, ShapeMismatch, StructureMismatch, UnsupportedState
from ckpipe.format.dtypes import DTYPES
from ckpipe.format.labels import Json
from ckpipe.format.tree import Node, children_of, walk
from ckpipe.loading.chunks import StoredTensors
from ckpipe.loading.fill import normal_tensors
from ckpipe.loading.live_tensors import why_unplaceable, writable_view
from ckpipe.state.tensors import PLAIN_TYPES, dtensor_type, local_part
from ckpipe.state.wrappers import (
    differing_fact,
    inner_placements,
    is_wrapper,
    put_together,
    rank_on,
    resized,
    sharded,
    take_apart,
    wrapper_class,
)

_SHARD = (
    "Load with the mesh and the number of ranks that saved it, or save it again after "
    "ckpipe.register_wrapper(cls, cut=...) has told how its inner tensors are cut"
)


def fresh_class(facts: dict[str, Json], label: str) -> Any:
    """Return the class of a saved wrapper that is made anew.

    Raises:
        StructureMismatch: If the class is not here, or this is a shard that needs a target.
    """
    if facts["shard"] is not None:
        raise StructureMismatch(
            "This wrapper tensor is a shard of one rank, and the target has no tensor that is "
            "sharded in the same way",
            key=label or None,
            hint=_SHARD,
        )
    return wrapper_class(facts["class"], label)


def dequantized(made: Any, dtype: str, label: str) -> torch.Tensor:
    """Return the values of a wrapper as a plain tensor, as its class computes them.

    Raises:
        UnsupportedState: If the class does not.
    """
    try:
        # NF4Tensor has the latter only; its ``dequantize`` is another function.
        plain = getattr(made, "get_original_weight", made.dequantize)().to(DTYPES[dtype])
    except (RuntimeError, TypeError, AttributeError) as error:
        plain, reason = None, f": {error}"
    else:
        reason = ""
    if type(plain) not in PLAIN_TYPES or plain.shape != made.shape:
        raise UnsupportedState(
            f"A {type(made).__qualname__} cannot be dequantised{reason:.200}",
            key=label or None,
            hint="Give its class a method dequantize, or leave it out of the export",
        )
    return plain  # type: ignore[no-any-return]


def fitting_parts(
    facts: dict[str, Json], inner: Node, live: Any, label: str, stored: StoredTensors
) -> dict[str, torch.Tensor]:
    """Return the inner tensors of a live wrapper that is to be filled with a saved one.

    Raises:
        ShapeMismatch: If its size differs.
        StructureMismatch: If its class, context, dtype, inner names or shard differ, or an inner
            tensor cannot be written.
    """
    if type(live) is dtensor_type() and (why := why_unplaceable(live)):
        raise StructureMismatch(f"The target is a distributed tensor that {why}", key=label or None)
    apart = take_apart(live, label)
    differs = differing_fact(facts, apart.facts)
    if differs == "shard" or (
        facts["shard"] and _saved_by(inner, stored) != {rank_on(live.device_mesh)}
    ):
        raise StructureMismatch(
            "This wrapper tensor is a shard of one rank, and the target is another shard of it",
            key=label or None,
            hint=_SHARD,
        )
    if differs is not None:
        there, here = facts[differs], apart.facts[differs]
        kind = ShapeMismatch if differs == "size" else StructureMismatch
        raise kind(
            f"The {differs} of this wrapper tensor is {there!r:.300} in the checkpoint and "
            f"{here!r:.300} in the target",
            key=label or None,
            hint="Make the target as it was saved, or leave it out with exclude",
        )
    if inner[1] != list(apart.inner):
        raise StructureMismatch(
            f"This wrapper tensor has the inner tensors {inner[1]!r:.300} in the checkpoint and "
            f"{list(apart.inner)!r:.300} in the target",
            key=label or None,
        )
    for name, each in apart.inner.items():
        if not is_wrapper(each) and not each.is_meta and writable_view(each) is None:
            raise StructureMismatch(
                f"The inner tensor {name!r} of the target cannot be written", key=label or None
            )
    return apart.inner


def _saved_by(inner: Node, stored: StoredTensors) -> set[int]:
    return {stored.rank_of(node[1]) for node, _ in walk(inner) if node[0] == "tensor"}


def form_of(facts: dict[str, Json], label: str) -> tuple[torch.dtype, tuple[int, ...]]:
    """Return dtype and global shape of a saved wrapper.

    Raises:
        InvalidManifest: If the dtype is unknown.
    """
    dtype = DTYPES.get(facts["dtype"])
    if dtype is None:
        raise InvalidManifest(f"This dtype is unknown: {facts['dtype']!r:.100}", key=label or None)
    return dtype, tuple((facts["shard"] or facts)["size"])


def empty_like(
    node: Node,
    label: str,
    stored: StoredTensors,
    definitions: Mapping[int, Node],
    placed: Any,
    device: torch.device,
) -> torch.Tensor:
    """Make a wrapper to fill with a saved one.

    A class may not look at the values of inner tensors when it puts them together, since torch's
    compiler does so with tensors without values.

    Args:
        node: The node of the saved wrapper.
        label: Its label.
        stored: The tensors of the checkpoint.
        definitions: The containers that references point to, by number.
        placed: The DTensor like which it is sharded, or its layout; None for a plain one.
        device: Its device.

    Raises:
        StructureMismatch: If the class is not here, or it cannot be sharded like this.
    """
    facts, mesh, parts = node[1], getattr(placed, "device_mesh", None), None
    cls = fresh_class(facts, label) if placed is None else wrapper_class(facts["class"], label)
    if placed is not None and facts["shard"] is None:
        parts = inner_placements(cls, mesh, placed.placements, placed.shape)
        if parts is None:
            raise StructureMismatch(
                "This wrapper tensor is whole in the checkpoint and sharded in the target, and how "
                "its inner tensors are cut is unknown, or the ranks do not divide its size",
                key=label or None,
                hint=_SHARD,
            )
        facts = resized(cls, facts, _local_shape(placed.shape, mesh, placed.placements, label))
    inner: dict[str, torch.Tensor] = {}
    for name, child, below in children_of(node[2], label):
        while child[0] in ("shared", "ref"):
            child = definitions[child[1]]
        layout = None if parts is None else parts(name)
        if child[0] == "wrapper_tensor":
            size = torch.Size(child[1]["size"])
            like = layout and SimpleNamespace(device_mesh=mesh, placements=layout, shape=size)
            part = empty_like(child, below, stored, definitions, like, device)
            inner[name] = local_part(part) if type(part) is dtensor_type() else part
        else:
            held = stored[child[1]]
            shape = held.shape if layout is None else _local_shape(held.shape, mesh, layout, below)
            with normal_tensors():
                inner[name] = torch.empty(shape, dtype=held.dtype, device=device)
    with normal_tensors():
        made: torch.Tensor = put_together(cls, facts, inner, label)
        if placed is None:
            return made
        whole: torch.Tensor = sharded(made, mesh, placed.placements, placed.shape)
        return whole


def _local_shape(
    shape: Sequence[int], mesh: Any, placements: Sequence[Any], label: str
) -> tuple[int, ...]:
    sizes = list(shape)
    for n, placement in zip(mesh.shape, placements, strict=True):
        if not placement.is_replicate():
            if sizes[placement.dim] % n:
                raise ShapeMismatch(
                    f"A shape of {list(shape)} cannot be cut into {n} equal parts",
                    key=label or None,
                    hint="Load with a number of ranks that divides it",
                )
            sizes[placement.dim] //= n
    return tuple(sizes)
