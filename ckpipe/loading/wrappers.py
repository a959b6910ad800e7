"""Wrapper tensors of a checkpoint: whether a live one takes them, and new ones to fill."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ckpipe.errors import (
    CkpipeError,
    InvalidManifest,
    ShapeMismatch,
    StructureMismatch,
    UnsupportedState,
    reason_of,
)
from ckpipe.format.boxes import contiguous_stride
from ckpipe.format.dtypes import DTYPES, NAMES
from ckpipe.format.labels import Json, canonical
from ckpipe.format.manifest import TensorRow
from ckpipe.format.tree import Node, children_of, decoded
from ckpipe.interpreter import user_code
from ckpipe.loading.factories import Factory, tensor_object
from ckpipe.loading.match_record import MatchRecord
from ckpipe.reading.fill import normal_tensors
from ckpipe.reading.live_tensors import why_unplaceable, writable_view
from ckpipe.reading.select import PerRankItems
from ckpipe.state.kinds import open_wrapper
from ckpipe.state.tensors import (
    PLAIN_TYPES,
    dtensor_type,
    is_wrapper,
    is_wrapper_class,
)
from ckpipe.state.values import resolve_class
from ckpipe.state.wrappers import (
    cut_of,
    inner_placements,
    part_shape,
    rank_on,
    registered,
)

_SAME = "Make the target as it was saved, or leave it out with exclude"
_SHARD = (
    "Load with the mesh and the number of ranks that saved it, or save it again after "
    "ckpipe.register_wrapper(cls, cut=...) has told how its inner tensors are cut"
)


def dequantized(
    dtype: str, label: str, _facts: Mapping[str, Json], make: Callable[[], Any]
) -> torch.Tensor:
    """Return the values of a new wrapper as a plain tensor, as its class computes them.

    Raises:
        UnsupportedState: If the class does not.
    """
    made = make()
    try:
        # NF4Tensor has the latter only; its ``dequantize`` is another function.
        plain = getattr(made, "get_original_weight", made.dequantize)().to(DTYPES[dtype])
    except (RuntimeError, TypeError, AttributeError) as error:
        plain, reason = None, f": {reason_of(error)}"
    else:
        reason = ""
    if type(plain) not in PLAIN_TYPES or plain.shape != made.shape:
        raise UnsupportedState(
            f"A {type(made).__qualname__} cannot be dequantised{reason:.200}",
            key=label or None,
            hint="Give its class a method dequantize, or leave it out of the export",
        )
    return plain  # type: ignore[no-any-return]


# A live wrapper


def fitting_parts(
    facts: dict[str, Json],
    names: Sequence[str],
    live: Any,
    label: str,
    ranks: Collection[int] = frozenset(),
) -> dict[str, torch.Tensor]:
    """Return the inner tensors of a live wrapper that is to be filled with a saved one.

    Strides, gradients and the kind are those of the live one.

    Args:
        facts: The facts of the saved one.
        names: The names of its inner tensors.
        live: The live one.
        label: Its label.
        ranks: The ranks that have saved it.

    Raises:
        ShapeMismatch: If its size differs.
        StructureMismatch: If its class, context, dtype, inner names or shard differ, or an inner
            tensor cannot be written.
    """
    if type(live) is dtensor_type() and (why := why_unplaceable(live)):
        raise StructureMismatch(f"The target is a distributed tensor that {why}", key=label or None)
    apart = open_wrapper(live, label)
    saved = {**facts, "inner tensors": list(names)}
    here = {**apart.facts, "inner tensors": list(apart.inner)}
    if saved["shard"] and here["shard"]:
        rank = rank_on(live.device_mesh)
        saved["shard"] = {**saved["shard"], "ranks": sorted(ranks) or [rank]}
        here["shard"] = {**here["shard"], "ranks": [rank]}
    compared = ("class", "shard", "size", "dtype", "context", "inner tensors")
    differs = next((n for n in compared if canonical(saved[n]) != canonical(here[n])), None)
    if differs is not None:
        kind = ShapeMismatch if differs == "size" else StructureMismatch
        raise kind(
            f"This wrapper tensor differs in its {differs}: {saved[differs]!r:.300} in the "
            f"checkpoint, {here[differs]!r:.300} in the target",
            key=label or None,
            hint=_SHARD if differs == "shard" else _SAME,
        )
    for name, each in apart.inner.items():
        if not is_wrapper(each) and not each.is_meta and writable_view(each) is None:
            raise StructureMismatch(
                f"The inner tensor {name!r} of the target cannot be written", key=label or None
            )
    return apart.inner


# A new wrapper


def planned_wrapper(
    record: MatchRecord, facts: dict[str, Json], label: str, *, placed: bool = False
) -> tuple[Any, Factory]:
    """Return the class of a saved wrapper that is made anew, and a factory of its context.

    Args:
        record: The arguments of the match.
        facts: The facts of its node.
        label: Its label.
        placed: Whether it is made like a DTensor of the target.

    Raises:
        StructureMismatch: If a class is not here, or this is a shard and no DTensor tells where.
        InvalidManifest: If the context is malformed.
    """
    if facts["shard"] is not None and not placed:
        raise StructureMismatch(
            "This wrapper tensor is a shard of one rank, and the target has no tensor that is "
            "sharded in the same way",
            key=label or None,
            hint=_SHARD,
        )
    path, (tree, values), saved = facts["class"], facts["context"], record.saved
    cls = registered.get(path) or resolve_class(path, torch.Tensor, label)
    if not is_wrapper_class(cls):
        raise StructureMismatch(f"{path} was a wrapper class when it was saved", key=label or None)
    record.saved = replace(saved, values=values, per_rank=PerRankItems(), common=None)
    try:
        return cls, record.plan(record, decoded(tree), label)
    finally:
        record.saved = saved


def put_together(
    cls: Any, facts: dict[str, Json], context: Any, inner: dict[str, Any], label: str
) -> torch.Tensor:
    """Make a wrapper tensor of its facts, context and inner tensors.

    Raises:
        InvalidManifest: If its class makes another tensor of them.
    """
    size, stride = torch.Size(facts["size"]), tuple(facts["stride"])
    try:
        with user_code("__tensor_unflatten__", label), normal_tensors():
            made = cls.__tensor_unflatten__(inner, context, size, stride)
        form = type(made), NAMES.get(made.dtype), made.shape
        if form != (cls, facts["dtype"], size) or not is_wrapper(made):
            raise InvalidManifest(f"{facts['class']} makes {form} of these inner tensors")
        kind = {name: facts[name] for name in ("kind", "detail", "requires_grad")}
        wrapper: torch.Tensor = tensor_object(TensorRow(label, facts["dtype"], size, **kind), made)
        for name, each in inner.items():
            if getattr(wrapper, name, None) is None:  # a class of torchao forgets its scale
                setattr(wrapper, name, each)
        return wrapper
    except CkpipeError as error:
        error.key = error.key or label or None
        raise
    except Exception as error:
        raise InvalidManifest(
            f"{facts['class']} cannot be made of the saved inner tensors: {reason_of(error)}",
            key=label or None,
            hint="Install the version of the library that saved it, or leave it out with exclude",
        ) from error


def empty_wrapper(
    record: MatchRecord, node: Node, label: str, placed: Any, device: torch.device
) -> torch.Tensor:
    """Make a wrapper to fill with a saved one.

    A class may not look at the values of inner tensors when it puts them together, since torch's
    compiler does so with tensors without values.

    Args:
        record: The arguments of the match.
        node: The node of the saved wrapper.
        label: Its label.
        placed: The DTensor like which it is sharded; None for a plain one.
        device: Its device.

    Raises:
        StructureMismatch: If the class is not here, or it cannot be sharded like this.
    """
    if placed is None:
        return _empty(record, node, label, device)
    mesh, placements, size = placed.device_mesh, placed.placements, placed.shape
    local = _empty(record, node, label, device, mesh, placements)
    made: torch.Tensor = dtensor_type().from_local(
        local, mesh, placements, run_check=False, shape=size, stride=contiguous_stride(size)
    )
    return made


def _empty(
    record: MatchRecord,
    node: Node,
    label: str,
    device: torch.device,
    mesh: Any = None,
    placements: Sequence[Any] = (),
) -> torch.Tensor:
    """Make a tensor to fill with a saved one, or this rank's part of it on a mesh."""
    while node.kind in ("shared", "ref"):
        node = record.definitions[node.head]
    uneven = StructureMismatch(
        "This wrapper tensor is sharded in the target, and how its inner tensors are cut is "
        "unknown, or the ranks do not divide its size",
        key=label or None,
        hint=_SHARD,
    )
    if node.kind == "tensor":
        stored = record.targets.stored[node.head]
        shape = part_shape(stored.shape, mesh, placements)
        if shape is None:
            raise uneven
        with normal_tensors():
            return torch.empty(shape, dtype=stored.dtype, device=device)
    facts = node.head
    cls, make_context = planned_wrapper(record, facts, label, placed=mesh is not None)
    context, placements_of = make_context(), None
    if mesh is not None and facts["shard"] is None:
        (cut, resize), size = cut_of(cls), part_shape(facts["size"], mesh, placements)
        placements_of = inner_placements(cut, mesh, placements, facts["size"])
        if size is None or placements_of is None:
            raise uneven
        context = resize(context, torch.Size(size))
        facts = {**facts, "size": size, "stride": contiguous_stride(size)}
    inner = {}
    for name, child, below in children_of(node.inner, label):
        layout = (mesh, placements_of(name)) if placements_of else ()
        inner[name] = _empty(record, child, below, device, *layout)
    return put_together(cls, facts, context, inner, label)
