"""Containers of a state: how each kind is told from the others, and what lies in one.

The walk that takes a state apart and the trail that checks whether a later state is like it both
read containers by what is said here.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from ckpipe.errors import UnsupportedState
from ckpipe.format.keys import Json, encode_key
from ckpipe.state.module_states import attached_state
from ckpipe.state.registered_types import registered_for
from ckpipe.state.values import lasting_path
from ckpipe.tasks.user_code import user_code

IMMUTABLE = frozenset((tuple, frozenset, set))
"""Kinds of which the same object in two places is saved as two."""


class Contents(NamedTuple):
    """What lies in a container.

    Args:
        children: The objects in it.
        keys: The key of each child; None where they are counted.
        head: What else belongs to it, as JSON.
        attached: Whether the tensors in its only child stand for what ``detach`` makes of them.
    """

    children: list[Any]
    keys: list[Any] | None = None
    head: Json = None
    attached: bool = False


def kind_of(obj: Any) -> str | None:
    """The kind of a container, as a tree names it; None for everything else."""
    return _EXACT.get(type(obj)) or _inexact(obj)


def is_stateful(obj: Any) -> bool:
    """Whether an object is saved by its ``state_dict`` and loaded by its ``load_state_dict``."""
    return callable(getattr(obj, "state_dict", None)) and callable(
        getattr(obj, "load_state_dict", None)
    )


def contents_of(kind: str, obj: Any, label: str) -> Contents:
    """What lies in a container, by its kind; runs the user's code for objects that have some.

    Raises:
        UnsupportedState: If it is of no form that can be saved.
    """
    return _CONTENTS[kind](obj, label)


_EXACT: dict[type[Any], str] = {
    dict: "dict",
    list: "list",
    tuple: "tuple",
    OrderedDict: "ordered_dict",
    defaultdict: "default_dict",
    deque: "deque",
    set: "set",
    frozenset: "frozenset",
}


def _inexact(obj: Any) -> str | None:
    if registered_for(type(obj)) is not None:
        return "registered"
    if isinstance(obj, type):
        return None
    if not isinstance(obj, torch.Tensor) and is_stateful(obj):
        return "stateful"
    if isinstance(obj, tuple) and hasattr(obj, "_fields"):
        return "named_tuple"
    if dataclasses.is_dataclass(obj):
        return "dataclass"
    return None


def _mapping(obj: Any, label: str) -> Contents:
    return Contents(list(obj.values()), list(obj))


def _sequence(obj: Any, label: str) -> Contents:
    return Contents(list(obj))


def _ordered_dict(obj: OrderedDict[Any, Any], label: str) -> Contents:
    # A module's state_dict carries the versions of its parts in an attribute. It comes last.
    attributes = vars(obj)
    children = list(obj.values())
    if attributes:
        children.append(dict(attributes))
    return Contents(children, list(obj), bool(attributes))


def _default_dict(obj: defaultdict[Any, Any], label: str) -> Contents:
    factory = obj.default_factory
    name = next((name for name, each in FACTORIES.items() if each is factory), None)
    if factory is not None and name is None:
        raise UnsupportedState(
            f"A defaultdict has the factory {factory!r:.100}",
            key=label or None,
            hint="Factories that can be saved are " + ", ".join(FACTORIES),
        )
    return Contents(list(obj.values()), list(obj), name)


FACTORIES: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (list, dict, set, int, float, str, tuple, bool, bytes)
}
"""The factories a defaultdict may have."""


def _deque(obj: deque[Any], label: str) -> Contents:
    return Contents(list(obj), None, obj.maxlen)


def _set(obj: set[Any] | frozenset[Any], label: str) -> Contents:
    # Sorted by their form, so that equal sets make equal trees.
    members = sorted(obj, key=lambda member: repr(encode_key(member, label)))
    return Contents([], None, [encode_key(member, label) for member in members])


def _named_tuple(obj: Any, label: str) -> Contents:
    return Contents(list(obj), list(obj._fields), lasting_path(type(obj)))


def _dataclass(obj: Any, label: str) -> Contents:
    attributes = dict(_attributes(obj))
    return Contents(list(attributes.values()), list(attributes), lasting_path(type(obj)))


def _attributes(obj: Any) -> Iterator[tuple[str, Any]]:
    names = [each.name for each in dataclasses.fields(obj) if hasattr(obj, each.name)]
    for name in names:
        yield name, getattr(obj, name)
    for name, value in getattr(obj, "__dict__", {}).items():
        if name not in names:
            yield name, value


def _stateful(obj: Any, label: str) -> Contents:
    with user_code("state_dict", label):
        attached = attached_state(obj)
        if attached is not None:
            return Contents([attached], attached=True)
        return Contents([obj.state_dict()])


def _registered(obj: Any, label: str) -> Contents:
    known = registered_for(type(obj))
    assert known is not None
    with user_code("to_state", label):
        return Contents([known.to_state(obj)], None, known.name)


_CONTENTS: dict[str, Callable[[Any, str], Contents]] = {
    "dict": _mapping,
    "list": _sequence,
    "tuple": _sequence,
    "ordered_dict": _ordered_dict,
    "default_dict": _default_dict,
    "deque": _deque,
    "set": _set,
    "frozenset": _set,
    "named_tuple": _named_tuple,
    "dataclass": _dataclass,
    "stateful": _stateful,
    "registered": _registered,
}


__all__ = ["FACTORIES", "IMMUTABLE", "Contents", "contents_of", "is_stateful", "kind_of"]
