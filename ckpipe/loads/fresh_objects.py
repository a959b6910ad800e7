"""New objects of the kinds a manifest names, made without running their constructors."""

from __future__ import annotations

import base64
import dataclasses
import pickle
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ckpipe.errors import InvalidManifest, StructureMismatch, UnsupportedState
from ckpipe.format.manifest import TensorRow
from ckpipe.format.tree import Node
from ckpipe.state.kinds import FACTORIES
from ckpipe.state.tensors import BUFFER, NUMPY, PARAMETER, SUBCLASS, as_array
from ckpipe.state.values import plain_numpy_dtype, resolve_class


def tensor_object(row: TensorRow, plain: torch.Tensor) -> Any:
    """What stands in a state for a tensor: a parameter, say, or a numpy array over its memory.

    Args:
        row: What the structure says of it.
        plain: The tensor that holds its elements.

    Raises:
        StructureMismatch: If it is of a class that this program does not have.
        InvalidManifest: If such a tensor cannot be of that kind.
    """
    try:
        if row.kind == NUMPY:
            return as_array(plain, plain_numpy_dtype(row.detail or "", row.label))
        if row.kind == PARAMETER:
            return torch.nn.Parameter(plain, requires_grad=row.requires_grad)
        if row.kind == BUFFER:
            plain = torch.nn.Buffer(plain, persistent=row.detail == "persistent")
        elif row.kind == SUBCLASS:
            plain = plain.as_subclass(resolve_class(row.detail or "", torch.Tensor))
        with torch._C.DisableTorchFunctionSubclass():
            return plain.requires_grad_() if row.requires_grad else plain
    except (TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, StructureMismatch):
            raise
        raise InvalidManifest(
            f"No {row.kind} can be made of a tensor of {row.dtype}: {error}", key=row.label
        ) from error


def unpickled(data: list[Any], label: str, *, allowed: bool) -> Any:
    """The object of a pickled value.

    Raises:
        UnsupportedState: If that is not allowed.
        InvalidManifest: If it cannot be made.
    """
    if not allowed:
        raise UnsupportedState(
            "The checkpoint holds a pickled object, which could run any code when it is loaded",
            key=label or None,
            hint='Pass pickle="allow" if you trust who wrote it, or leave it out with exclude',
        )
    try:
        return pickle.loads(base64.b64decode(data[1], validate=True))
    except Exception as error:
        raise InvalidManifest(
            f"The pickled object cannot be made: {error}", key=label or None
        ) from error


def empty_mapping(node: Node) -> Callable[[], Any]:
    """What makes the empty mapping of a node."""
    if node[0] == "dict":
        return dict
    if node[0] == "ordered_dict":
        return OrderedDict
    name = node[3]
    if name is not None and name not in FACTORIES:
        raise InvalidManifest(f"A defaultdict has the unknown factory {name!r:.100}")
    return partial(defaultdict, None if name is None else FACTORIES[name])


def check_attributes(cls: Any, names: list[str], label: str) -> None:
    """Makes sure that a class is a dataclass whose objects can have these attributes."""
    is_dataclass: bool = dataclasses.is_dataclass(cls)
    if not is_dataclass:
        raise StructureMismatch(f"{cls!r} was a dataclass when it was saved", key=label or None)
    for name in names:
        if name.startswith("__") or not (cls.__dictoffset__ or hasattr(cls, name)):
            raise StructureMismatch(
                f"Objects of the dataclass {cls.__qualname__} have no attribute {name!r:.100}",
                key=label or None,
            )
