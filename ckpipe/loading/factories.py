"""Make the objects of a loaded state once its bytes are read, cycles included.

Theory. :mod:`ckpipe.loading.match` plans a factory for each node; all of them run at the end of a
load. An object that stays the very same is not assigned again, so a program that observes
assignments sees only those that change something.

Cycles. A mutable container is registered before it is filled, so references inside it find it. An
immutable container exists only once its elements do. A reference to it from inside raises
:class:`_Unfinished`; the nearest mutable container around the reference catches it, and fills the
open place when the missing container is there. Every cycle goes through a mutable container, as
Python cannot make another.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ckpipe.errors import InvalidManifest, StructureMismatch
from ckpipe.format.manifest import TensorRow
from ckpipe.format.tree import Node
from ckpipe.reading.fill import normal_tensors
from ckpipe.state.kinds import FACTORIES
from ckpipe.state.tensors import BUFFER, NUMPY, PARAMETER, SUBCLASS, as_array
from ckpipe.state.values import plain_numpy_dtype, resolve_class

Factory = Callable[[], Any]

Key = tuple[int | None, int | None]
"""The number of a shared container and the identity of its live counterpart."""


@dataclass(frozen=True, slots=True)
class MutableFactory:
    """Make a container in two steps; references to it are possible in between.

    Args:
        shell: Makes the empty container, or returns the live one.
        fill: Fills it.
    """

    shell: Factory
    fill: Callable[[Any], None]

    def __call__(self) -> Any:
        made = self.shell()
        self.fill(made)
        return made


class _Unfinished(Exception):  # a signal between functions of this file
    def __init__(self, key: Key) -> None:
        self.key = key


class Builder:
    """Make shared containers and objects once, and put objects into containers.

    Attributes:
        planned: The factories of shared containers and of objects.
    """

    def __init__(self) -> None:
        self.planned: dict[Key, Factory] = {}
        self._built: dict[Key, Any] = {}
        self._building: set[Key] = set()
        self._late: defaultdict[Key, list[Factory]] = defaultdict(list)

    def plan(self, key: Key, make: Factory) -> None:
        """Plan a container or an object that is made once."""
        self.planned[key] = partial(self._make_once, key, make)

    def _make_once(self, key: Key, make: Factory) -> Any:
        if key in self._built:
            return self._built[key]
        if key in self._building:
            raise _Unfinished(key)
        if isinstance(make, MutableFactory):
            made = self._built[key] = make.shell()
            make.fill(made)
            return made
        self._building.add(key)
        try:
            made = self._built[key] = make()
        finally:
            self._building.discard(key)
        for late in self._late.pop(key, ()):
            late()
        return made

    def put(self, assign: Callable[[Any], object], make: Factory, meanwhile: Any = None) -> None:
        """Assign an object now, or once it is there; ``meanwhile`` takes its place."""
        try:
            value = make()
        except _Unfinished as unfinished:
            assign(meanwhile)
            self._late[unfinished.key].append(partial(self.put, assign, make, meanwhile))
        else:
            assign(value)

    def put_key(self, made: Any, key: Any, make: Factory) -> None:
        """Set a key of a mapping, if it changes."""
        self.put(partial(_set_key, made, key), make)

    def put_index(self, made: Any, index: int, make: Factory) -> None:
        """Set an element of a sequence, if it changes."""
        self.put(partial(_set_index, made, index), make)

    def update(self, attributes: Factory, obj: Any) -> None:
        """Update the attributes of an object."""
        self.put(vars(obj).update, attributes, {})

    def set_attributes(
        self, found: list[tuple[str, Factory]], assign: Callable[[Any, str, Any], None], made: Any
    ) -> None:
        """Set the attributes of a dataclass that change."""
        for name, make in found:
            self.put(partial(_set_attribute, assign, made, name), make)

    def forget(self) -> None:
        """Drop all factories and objects."""
        for each in (self.planned, self._built, self._late):
            each.clear()


def same(obj: Any) -> Any:
    """Return the object."""
    return obj


def stays(make: Factory, obj: Any) -> bool:
    """Tell whether a factory returns the very object."""
    return type(make) is partial and make.func is same and make.args[0] is obj


def never() -> Any:
    """Refuse a container inside itself that is not made yet."""
    raise InvalidManifest("The tree has a shared container that refers only to itself")


# The object of a node


def tensor_object(row: TensorRow, plain: torch.Tensor) -> Any:
    """Make the object of a tensor in a state, such as a parameter, or an array over its memory."""
    try:
        with normal_tensors():
            if row.kind == NUMPY:
                return as_array(plain, plain_numpy_dtype(row.detail or "", row.label))
            if row.kind == PARAMETER:
                return torch.nn.Parameter(plain, requires_grad=row.requires_grad)
            if row.kind == BUFFER:
                plain = torch.nn.Buffer(plain, persistent=row.detail == "persistent")
            elif row.kind == SUBCLASS:
                kind = resolve_class(row.detail or "", torch.Tensor, row.label)
                plain = plain.as_subclass(kind)
            with torch._C.DisableTorchFunctionSubclass():
                return plain.requires_grad_() if row.requires_grad else plain
    except (TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, StructureMismatch):
            raise
        raise InvalidManifest(
            f"No {row.kind} can be made of a tensor of {row.dtype}: {error}", key=row.label
        ) from error


def empty_mapping(node: Node) -> Callable[[], Any]:
    """Return the factory of the empty mapping of a node."""
    if node.kind == "dict":
        return dict
    if node.kind == "ordered_dict":
        return OrderedDict
    assert node.kind == "default_dict", node.kind
    name = node.head
    if name is not None and name not in FACTORIES:
        raise InvalidManifest(f"A defaultdict has the unknown factory {name!r:.100}")
    return partial(defaultdict, None if name is None else FACTORIES[name])


def named_tuple_class(node: Node, label: str) -> Any:
    """Return the class of a named tuple, whose fields are the saved ones."""
    cls = resolve_class(node.head, tuple, label)
    if list(getattr(cls, "_fields", ())) != node.keys:
        raise StructureMismatch(
            f"The named tuple {node.head} has the fields {getattr(cls, '_fields', ())} here "
            f"and {node.keys} in the checkpoint",
            key=label or None,
        )
    return cls


def dataclass_class(node: Node, label: str) -> Any:
    """Return the class of a dataclass, whose objects may have the saved attributes."""
    cls = resolve_class(node.head, object, label)
    is_dataclass: bool = dataclasses.is_dataclass(cls)
    if not is_dataclass:
        raise StructureMismatch(f"{cls!r} was a dataclass when it was saved", key=label or None)
    for name in node.keys:
        if name.startswith("__") or not (cls.__dictoffset__ or hasattr(cls, name)):
            raise StructureMismatch(
                f"Objects of the dataclass {cls.__qualname__} have no attribute {name!r:.100}",
                key=label or None,
            )
    return cls


# Putting in place


def _set_key(made: Any, key: Any, value: Any) -> None:
    if key not in made or made[key] is not value:
        made[key] = value


def _set_index(made: Any, index: int, value: Any) -> None:
    if made[index] is not value:
        made[index] = value


_ABSENT = object()


def _set_attribute(
    assign: Callable[[Any, str, Any], None], made: Any, name: str, value: Any
) -> None:
    if getattr(made, name, _ABSENT) is not value:
        assign(made, name, value)


def refill(live: set[Any] | Counter[Any], make: Factory) -> Any:
    """Replace the members and attributes of a set or a Counter by the made ones, in order."""
    made = make()
    live.clear()
    live.update(made)
    if isinstance(live, Counter):
        vars(live).update(vars(made))
    return live


def remake_frozen(live: Any, found: list[tuple[str, Factory]]) -> Any:
    """Return a copy of a frozen dataclass with the made values; itself if no value changes."""
    changed = {name: make() for name, make in found}
    if all(new is getattr(live, name) for name, new in changed.items()):
        return live
    remade = copy.copy(live)
    for name, new in changed.items():
        object.__setattr__(remade, name, new)
    return remade
