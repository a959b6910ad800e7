"""Tensors, DTensors and arrays of the target: which stored tensors can be loaded into them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from ckpipe.errors import CkpipeError, DtypeMismatch, ShapeMismatch, StructureMismatch
from ckpipe.reading.chunks import StoredTensor
from ckpipe.state.placements import HeldBox
from ckpipe.state.tensors import (
    FREED,
    NUMPY,
    PLAIN_TYPES,
    WHILE_IT_HAS_MEMORY,
    Shardings,
    is_freed,
    is_sharded_tensor,
    local_part,
    unsupported_sharded_tensor,
)
from ckpipe.state.values import plain_numpy_dtype
from ckpipe.state.wrappers import rank_on


def tie_of(tensor: Any) -> Hashable:
    """Return a key that all names of one tensor have, also plain ones of the same memory."""
    if type(tensor) not in PLAIN_TYPES or tensor.layout is not torch.strided:
        return id(tensor)
    place = tensor.data_ptr()  # 0 on the device meta, and if it has no elements
    return (
        (tensor.device, place, tensor.shape, tensor.stride(), tensor.dtype) if place else id(tensor)
    )


def without_ties(names: Iterable[str], tensors: Mapping[str, Any]) -> list[str]:
    """Return names with one of each tensor, the first."""
    first: dict[Hashable, str] = {}
    for name in names:
        first.setdefault(tie_of(tensors[name]), name)
    return list(first.values())


def is_placed(obj: Any) -> bool:
    """Tell whether a tensor is a DTensor: a local tensor with a mesh and placements."""
    return (
        type(obj) not in PLAIN_TYPES and hasattr(obj, "device_mesh") and hasattr(obj, "placements")
    )


def why_unplaceable(obj: Any) -> str:
    """Return the reason why a DTensor cannot be loaded into; empty if it can."""
    for placement in obj.placements:
        if placement.is_partial():
            return f"has the placement {placement}, whose values are the sum of several"
        if not placement.is_replicate() and not hasattr(placement, "dim"):
            return f"has the placement {placement}, which is unknown"
    return ""


def regions_of(obj: Any, shardings: Shardings, label: str) -> tuple[HeldBox, ...]:
    """Return the regions of the global tensor in a DTensor's local tensor, and their places in it.

    Args:
        obj: The DTensor; none of its placements is unplaceable.
        shardings: A cache of the shardings of other DTensors.
        label: Its name in the state, for errors.

    Raises:
        ShapeMismatch: If its local tensor has another shape than its placements give this rank:
            a load would write beyond its memory.
        UnsupportedTopology: If the ranks of its mesh are no longer known.
    """
    mesh = obj.device_mesh
    place = mesh.get_coordinate()
    if place is None:  # a process that is not on the mesh holds nothing
        return ()
    spread, rank = shardings.of(obj, label), rank_on(mesh)
    given, expected = tuple(obj._local_tensor.shape), spread.local_shape(rank)
    if given != expected:
        raise ShapeMismatch(
            f"The local part of this DTensor has the shape {list(given)}, and its placements give "
            f"this rank {list(expected or ())}",
            rank=rank,
            key=label,
            hint="Lay it out with distribute_tensor, or give from_local the true global shape",
        )
    return spread.held(rank)


FILLABLE = (torch.Tensor, np.ndarray)
"""The types that a tensor can be loaded into; a union would be made anew for every tensor."""


def writable_view(obj: torch.Tensor | np.ndarray[Any, Any]) -> torch.Tensor | None:
    """Return the memory of a tensor or array as a writable plain tensor; None if impossible."""
    if isinstance(obj, np.ndarray):
        return _array_view(obj)
    kind = type(obj)
    if kind not in PLAIN_TYPES:
        if is_placed(obj):
            obj = local_part(obj)
            kind = type(obj)
        if kind not in PLAIN_TYPES and _is_wrapper(obj):
            return None
    if obj.layout is not torch.strided or obj.is_meta or obj.is_nested or obj.is_quantized:
        return None
    if kind is torch.Tensor and not obj.requires_grad:
        return obj
    plain = obj.detach()
    return plain if type(plain) is torch.Tensor else plain.as_subclass(torch.Tensor)


def _has_no_memory(obj: torch.Tensor) -> bool:
    part = local_part(obj) if is_placed(obj) else obj
    plain = type(part) in PLAIN_TYPES and part.layout is torch.strided and not part.is_nested
    return plain and is_freed(part)


def _is_wrapper(obj: torch.Tensor) -> bool:
    return hasattr(obj, "__tensor_flatten__") or hasattr(obj, "device_mesh") or is_lazy(obj)


def _array_view(array: np.ndarray[Any, Any]) -> torch.Tensor | None:
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        return None
    try:
        return torch.from_numpy(array)
    except (TypeError, ValueError):
        # torch lacks the dtype: view the bytes, which numpy allows only for contiguous arrays.
        if array.dtype.hasobject or not array.flags.c_contiguous or not array.size:
            return None
        raw = array.reshape(-1).view(np.uint8)
        return torch.from_numpy(raw.reshape(*array.shape, array.dtype.itemsize))


def misfit(
    stored: StoredTensor, live: torch.Tensor | np.ndarray[Any, Any], *, cast: bool
) -> CkpipeError | None:
    """Return the reason why a stored tensor cannot be loaded into a live one; None if it can.

    Args:
        stored: The stored tensor.
        live: The tensor or array of the target.
        cast: Whether the values may be converted to the dtype of the target.
    """
    if (
        isinstance(live, torch.Tensor)
        and type(live) in PLAIN_TYPES
        and live.dtype is stored.loaded_dtype
        and live.layout is torch.strided
        and live.shape == stored.row.shape
        and live.data_ptr()
    ):
        return None  # The fast path, which nearly all tensors take.
    if type(live) not in PLAIN_TYPES and is_sharded_tensor(live):
        return unsupported_sharded_tensor(stored.label)
    if isinstance(live, torch.Tensor) and _has_no_memory(live):
        return StructureMismatch(f"The target {FREED}", key=stored.label, hint=WHILE_IT_HAS_MEMORY)
    convertible, shape, dtype = True, stored.shape, stored.loaded_dtype
    if isinstance(live, np.ndarray):
        convertible, shape, dtype = _array_form(stored)
        if live.dtype != dtype and convertible:
            # The view of an array whose dtype torch lacks has its bytes, not its values.
            view = _array_view(live)
            convertible = view is None or view.shape == live.shape
    if isinstance(live, torch.Tensor) and live.is_meta:
        return StructureMismatch(
            "The target is on the meta device and has no memory",
            key=stored.label,
            hint="Give it memory with to_empty() before loading",
        )
    if is_placed(live) and why_unplaceable(live):
        return StructureMismatch(
            f"The target is a distributed tensor that {why_unplaceable(live)}",
            key=stored.label,
            hint="Redistribute it before loading, or leave it out with exclude",
        )
    if tuple(live.shape) != shape:
        return ShapeMismatch(
            f"The shape is {list(shape)} in the checkpoint and {list(live.shape)} in the target",
            key=stored.label,
            hint="Load it into a target of the saved shape, or leave it out with exclude",
        )
    if live.dtype != dtype and not (cast and convertible):
        return DtypeMismatch(
            f"The dtype is {dtype} in the checkpoint and {live.dtype} in the target",
            key=stored.label,
            hint="Pass cast=True to convert the values, or leave it out with exclude",
        )
    return None


def _array_form(stored: StoredTensor) -> tuple[bool, tuple[int, ...], Any]:
    """Return whether its values can be converted, its shape, and its dtype or None, for numpy."""
    if stored.row.kind != NUMPY or stored.row.detail is None:
        try:
            dtype = torch.empty(0, dtype=stored.loaded_dtype, device="cpu").numpy().dtype
        except TypeError:
            return True, stored.shape, None
        return True, stored.shape, dtype
    dtype = plain_numpy_dtype(stored.row.detail, stored.row.label)
    as_bytes = stored.dtype is torch.uint8 and dtype != np.uint8
    return not as_bytes, stored.shape[:-1] if as_bytes else stored.shape, dtype
