"""The walk over a state: from nested objects to a tree of plain JSON, tensors and values.

Theory. A manifest describes a state by a *tree*, in which every tensor and every inline value
stands as a number, so that ranks (and steps) which differ only in their values share one tree. A
node of the tree is a list whose first item says what it is::

    ["tensor", 3]                         the third row of the tensor table
    ["value", 7]                          the seventh inline value
    ["dict", [key, …], [node, …]]         likewise ordered_dict, default_dict, named_tuple, …
    ["list", [node, …]]                   likewise tuple, set, frozenset, deque
    ["stateful", node]                    what an object's state_dict() returned
    ["shared", 0, node] … ["ref", 0]      one container that stands in two places, or in itself
    ["absent"]                            an element that include or exclude left out

The walk looks at every leaf each time and keeps nothing from one save to the next, so it cannot
go stale; it reads no tensor's bytes.
"""

from __future__ import annotations

import base64
import dataclasses
import pickle
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ckpipe.dtensors import Shardings, is_dtensor_type
from ckpipe.errors import UnsupportedState
from ckpipe.keys import Json, LabelFilter, encode_key, join, unique_label
from ckpipe.registered_types import registered_for
from ckpipe.replication import ReplicatedTest, replicated_test
from ckpipe.tensors import WRAPPER_MARKS, TensorLeaf, numpy_leaf, tensor_leaf
from ckpipe.user_code import user_code
from ckpipe.values import PLAIN_VALUES, NotInline, class_path, encode_value

Node = list[Any]
ABSENT: Node = ["absent"]


@dataclass(slots=True)
class Captured:
    """A state taken apart.

    Args:
        tree: The root node.
        tensors: The leaves that hold bytes, in the order of the walk; labels are unique.
        values: The inline values, encoded.
        replicated: The numbers of the plain tensors of which an object in the state says that
            all ranks hold them alike; see :mod:`ckpipe.replication`.
    """

    tree: Node
    tensors: list[TensorLeaf]
    values: list[Json]
    replicated: frozenset[int] = frozenset()


def capture(state: Any, *, select: LabelFilter | None = None, pickling: bool = False) -> Captured:
    """Takes a state apart without reading a byte of its tensors.

    Args:
        state: Any nesting of what ckpipe saves.
        select: Which labels to keep.
        pickling: Whether objects of other types are pickled instead of refused.

    Raises:
        UnsupportedState: Names the first object that cannot be saved, by its label.
    """
    walk = _Walk(select or LabelFilter(), pickling=pickling)
    try:
        tree = walk.node(state, "")
    except RecursionError:
        raise UnsupportedState(
            "The state is nested too deeply", hint="Flatten it, or raise sys.setrecursionlimit"
        ) from None
    walk.mark_shared()
    return Captured(tree or ["absent"], walk.tensors, walk.values, frozenset(walk.replicated))


def is_stateful(obj: Any) -> bool:
    """Whether an object is saved by its ``state_dict`` and loaded by its ``load_state_dict``."""
    return callable(getattr(obj, "state_dict", None)) and callable(
        getattr(obj, "load_state_dict", None)
    )


@dataclass(slots=True)
class _Walk:
    select: LabelFilter
    pickling: bool
    tensors: list[TensorLeaf] = field(default_factory=list)
    values: list[Json] = field(default_factory=list)
    replicated: set[int] = field(default_factory=set)
    _claims: list[tuple[str, ReplicatedTest]] = field(default_factory=list)
    _shardings: Shardings = field(default_factory=Shardings)
    _labels: set[str] = field(default_factory=set)
    _nodes: dict[int, Node] = field(default_factory=dict)
    _tensor_numbers: dict[int, int] = field(default_factory=dict)
    _referenced: dict[int, int] = field(default_factory=dict)
    # Results of state_dict() die with the walk otherwise, and their ids would be used again.
    _alive: list[Any] = field(default_factory=list)

    def node(self, obj: Any, label: str) -> Node | None:
        """The node of an object; None if nothing of it is selected."""
        kind = type(obj)
        if kind is torch.Tensor or kind is torch.nn.Parameter or kind is np.ndarray:
            return self.tensor(obj, label)
        if kind in PLAIN_VALUES:
            return self.value(obj, label)
        if is_dtensor_type(kind):
            return self.tensor(obj, label)
        handler = _CONTAINERS.get(kind) or _handler_for(obj)
        if handler is not None:
            return self.container(obj, label, handler)
        if isinstance(obj, torch.Tensor | np.ndarray):
            return self.tensor(obj, label)
        return self.value(obj, label)

    def tensor(self, obj: torch.Tensor | np.ndarray[Any, Any], label: str) -> Node | None:
        number = self._tensor_numbers.get(id(obj))
        if number is None:
            if not self.select(label):
                return None
            number = self._new_tensor(obj, label)
        if self._claims and any(is_so(_below(label, top)) for top, is_so in self._claims):
            self.replicated.add(number)
        return ["tensor", number]

    def _new_tensor(self, obj: torch.Tensor | np.ndarray[Any, Any], label: str) -> int:
        name = unique_label(label, self._labels)
        if isinstance(obj, np.ndarray):
            leaf = numpy_leaf(obj, name)
        else:
            leaf = tensor_leaf(obj, name, self._shardings)
        number = self._tensor_numbers[id(obj)] = len(self.tensors)
        self._alive.append(obj)
        self.tensors.append(leaf)
        attributes = getattr(obj, "__dict__", None)
        if attributes and leaf.sharding is not None:
            attributes = {k: v for k, v in attributes.items() if k not in WRAPPER_MARKS}
        if attributes:
            leaf.attributes = self.node(dict(attributes), join(label, "__dict__"))
        return number

    def claimed(self, obj: Any, label: str) -> Node | None:
        """The node of what an object's ``state_dict`` returns, with what it says of replicas."""
        is_replicated = replicated_test(obj)
        with user_code("state_dict", label):
            state = obj.state_dict()
        if is_replicated is None:
            return self.node(state, label)
        self._claims.append((label, is_replicated))
        try:
            return self.node(state, label)
        finally:
            self._claims.pop()

    def value(self, value: Any, label: str) -> Node | None:
        if not self.select(label):
            return None
        try:
            data = encode_value(value)
        except NotInline:
            data = self._pickled(value, label)
        self.values.append(data)
        return ["value", len(self.values) - 1]

    def _pickled(self, obj: Any, label: str) -> Json:
        kind = class_path(type(obj))
        if not self.pickling:
            raise UnsupportedState(
                f"An object of type {kind} cannot be saved",
                key=label or None,
                hint="Give it state_dict and load_state_dict, call ckpipe.register_type, "
                'leave it out with exclude, or set pickle="allow"',
            )
        try:
            return ["pickle", base64.b64encode(pickle.dumps(obj)).decode()]
        except Exception as error:
            raise UnsupportedState(
                f"An object of type {kind} cannot be pickled: {error}", key=label or None
            ) from error

    def container(self, obj: Any, label: str, handler: _Handler) -> Node | None:
        """Walks a container once; where it stands again, a reference stands instead.

        An immutable container is a reference only inside itself, where a copy would not end.
        """
        key = id(obj)
        if key in self._nodes:
            number = self._referenced.setdefault(key, len(self._referenced))
            return ["ref", number]
        node: Node = []
        self._nodes[key] = node
        self._alive.append(obj)
        filled = handler(self, obj, label)
        if key not in self._referenced and (filled is None or type(obj) in _IMMUTABLE):
            del self._nodes[key]
        if filled is None and key not in self._referenced:
            return None
        node[:] = ABSENT if filled is None else filled
        return node

    def children(self, items: Iterable[Any], label: str) -> list[Node] | None:
        """The nodes of a sequence's elements; None if there are some and none is selected."""
        nodes = [self.node(item, join(label, index)) for index, item in enumerate(items)]
        if nodes and all(node is None for node in nodes):
            return None
        return [list(ABSENT) if node is None else node for node in nodes]

    def items(self, pairs: Iterable[tuple[Any, Any]], label: str) -> tuple[list[Json], list[Node]]:
        """The encoded keys and the nodes of a mapping's selected items."""
        keys: list[Json] = []
        nodes: list[Node] = []
        for key, item in pairs:
            encoded = key if type(key) is str else encode_key(key, label)
            node = self.node(item, join(label, key))
            if node is not None:
                keys.append(encoded)
                nodes.append(node)
        return keys, nodes

    def mark_shared(self) -> None:
        """Gives the containers that something refers to their numbers."""
        for key, number in self._referenced.items():
            node = self._nodes[key]
            node[:] = ["shared", number, list(node)]


def _below(label: str, top: str) -> str:
    return label[len(top) + 1 :] if top else label


_Handler = Callable[[_Walk, Any, str], Node | None]


def _mapping(tag: str) -> _Handler:
    def handle(walk: _Walk, obj: Mapping[Any, Any], label: str) -> Node | None:
        keys, nodes = walk.items(obj.items(), label)
        if obj and not keys:
            return None
        return [tag, keys, nodes]

    return handle


def _sequence(tag: str) -> _Handler:
    def handle(walk: _Walk, obj: Iterable[Any], label: str) -> Node | None:
        nodes = walk.children(obj, label)
        return None if nodes is None else [tag, nodes]

    return handle


def _ordered_dict(walk: _Walk, obj: OrderedDict[Any, Any], label: str) -> Node | None:
    # A module's state_dict carries the versions of its parts in an attribute.
    keys, nodes = walk.items(obj.items(), label)
    if obj and not keys:
        return None
    node: Node = ["ordered_dict", keys, nodes]
    if vars(obj):
        extra = walk.node(dict(vars(obj)), join(label, "__dict__"))
        if extra is not None:
            node.append(extra)
    return node


def _default_dict(walk: _Walk, obj: defaultdict[Any, Any], label: str) -> Node | None:
    factory = obj.default_factory
    if factory is not None and factory not in FACTORIES.values():
        raise UnsupportedState(
            f"A defaultdict has the factory {factory!r:.100}",
            key=label or None,
            hint="Factories that can be saved are " + ", ".join(FACTORIES),
        )
    keys, nodes = walk.items(obj.items(), label)
    name = next((name for name, each in FACTORIES.items() if each is factory), None)
    return None if obj and not keys else ["default_dict", keys, nodes, name]


FACTORIES: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (list, dict, set, int, float, str, tuple, bool, bytes)
}
"""The factories a defaultdict may have."""


def _deque(walk: _Walk, obj: deque[Any], label: str) -> Node | None:
    nodes = walk.children(obj, label)
    return None if nodes is None else ["deque", nodes, obj.maxlen]


def _set(walk: _Walk, obj: set[Any] | frozenset[Any], label: str) -> Node | None:
    # Sorted by their form, so that equal sets make equal trees.
    members = sorted(obj, key=lambda member: repr(encode_key(member, label)))
    if not walk.select(label):
        return None
    return [type(obj).__name__, [encode_key(member, label) for member in members]]


def _named_tuple(walk: _Walk, obj: Any, label: str) -> Node | None:
    keys, nodes = walk.items(zip(obj._fields, obj, strict=True), label)
    if len(keys) < len(obj):
        kept = dict(zip(keys, nodes, strict=True))
        if not kept:
            return None
        nodes = [kept.get(name, list(ABSENT)) for name in obj._fields]
    return ["named_tuple", class_path(type(obj)), list(obj._fields), nodes]


def _dataclass(walk: _Walk, obj: Any, label: str) -> Node | None:
    keys, nodes = walk.items(_attributes(obj), label)
    return ["dataclass", class_path(type(obj)), keys, nodes]


def _attributes(obj: Any) -> Iterator[tuple[str, Any]]:
    names = [each.name for each in dataclasses.fields(obj) if hasattr(obj, each.name)]
    for name in names:
        yield name, getattr(obj, name)
    for name, value in getattr(obj, "__dict__", {}).items():
        if name not in names:
            yield name, value


def _stateful(walk: _Walk, obj: Any, label: str) -> Node | None:
    node = walk.claimed(obj, label)
    return None if node is None else ["stateful", node]


def _registered(walk: _Walk, obj: Any, label: str) -> Node | None:
    known = registered_for(type(obj))
    assert known is not None
    with user_code("to_state", label):
        state = known.to_state(obj)
    node = walk.node(state, label)
    return None if node is None else ["registered", known.name, node]


_CONTAINERS: dict[type[Any], _Handler] = {
    dict: _mapping("dict"),
    list: _sequence("list"),
    tuple: _sequence("tuple"),
    OrderedDict: _ordered_dict,
    defaultdict: _default_dict,
    deque: _deque,
    set: _set,
    frozenset: _set,
}

_IMMUTABLE = frozenset((tuple, frozenset, set))


def _handler_for(obj: Any) -> _Handler | None:
    if registered_for(type(obj)) is not None:
        return _registered
    if isinstance(obj, type):
        return None
    if not isinstance(obj, torch.Tensor) and is_stateful(obj):
        return _stateful
    if isinstance(obj, tuple) and hasattr(obj, "_fields"):
        return _named_tuple
    if dataclasses.is_dataclass(obj):
        return _dataclass
    return None
