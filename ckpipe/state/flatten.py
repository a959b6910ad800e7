"""The walk over a state: from nested objects to a tree of plain JSON, tensors and values.

Theory. A manifest describes a state by a *tree*, in which every tensor and every inline value
stands as a number, so that ranks (and steps) which differ only in their values share one tree. A
node of the tree is a list whose first item is its kind::

    ["tensor", 3]                         the third row of the tensor table
    ["value", 7]                          the seventh inline value
    ["dict", [key, …], [node, …]]         likewise ordered_dict, default_dict, named_tuple, …
    ["list", [node, …]]                   likewise tuple, set, frozenset, deque
    ["stateful", node]                    what an object's state_dict() returned
    ["shared", 0, node] … ["ref", 0]      one container that stands in two places, or in itself
    ["absent"]                            an element that include or exclude left out

The walk reads no tensor's bytes. It looks at every leaf each time; what it keeps for the next time
(see :mod:`ckpipe.state.capture_cache`) is how to look faster, never what was seen.
"""

from __future__ import annotations

import base64
import io
import pickle
import sys
from collections.abc import Callable, Generator, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from ckpipe.errors import UnsupportedState
from ckpipe.format.keys import MAX_DIGITS, Json, LabelFilter, encode_key, join, unique_label
from ckpipe.format.tree import SETS, Node, leaf_labels
from ckpipe.state.kinds import (
    IMMUTABLE,
    Contents,
    ReplicatedTest,
    contents_of,
    kind_of,
    replicated_test,
)
from ckpipe.state.tensors import Shardings, TensorLeaf, attributes_of, is_dtensor_type, leaf_of
from ckpipe.state.values import PLAIN_VALUES, NotInline, class_path, encode_value

T = TypeVar("T")
Met = tuple[type[Any], Node | None]
"""A leaf as the walk met it: its class and its node, None if it was left out."""


@dataclass(slots=True)
class Captured:
    """A state taken apart: its structure, and what only this save has.

    Args:
        tree: The root node.
        tensors: The leaves that hold bytes, in the order of the walk; labels are unique.
        values: The inline values, encoded.
        replicated: The numbers of the plain tensors of which an object in the state says that
            all ranks hold them alike; see :mod:`ckpipe.state.kinds`.
        memory: For each leaf its bytes, as a plain tensor on the same memory.
        objects: For each leaf the tensor or array itself, as it stands in the state.
    """

    tree: Node
    tensors: list[TensorLeaf]
    values: list[Json]
    replicated: frozenset[int] = frozenset()
    memory: list[torch.Tensor] = field(default_factory=list)
    objects: list[Any] = field(default_factory=list)
    _derived: dict[Hashable, Any] = field(default_factory=dict)
    _described: dict[Hashable, Any] = field(default_factory=dict)

    def described(self, make: Callable[[Captured], T]) -> T:
        """Call a function of the structure once, for all captures whose tensors differ by address
        only.

        Args:
            make: A function of the tree, the number of values, and the leaves but for addresses.
        """
        if make not in self._described:
            self._described[make] = make(self)
        made: T = self._described[make]
        return made

    def derived(self, make: Callable[[Captured], T]) -> T:
        """Call a function of the structure once, for all captures that share it.

        Args:
            make: A function of tree, leaves and replicas alone.
        """
        if make not in self._derived:
            self._derived[make] = make(self)
        made: T = self._derived[make]
        return made

    @property
    def addresses(self) -> npt.NDArray[np.uint64]:
        """The address of the first element of each leaf, on whatever device."""
        return self.derived(_addresses)

    def again(self, values: list[Json], memory: list[torch.Tensor], objects: list[Any]) -> Captured:
        """A state of the very same structure, with other values and perhaps other bytes."""
        made = self.moved(self.tensors, values, memory, objects)
        made._derived = self._derived
        return made

    def moved(
        self,
        leaves: list[TensorLeaf],
        values: list[Json],
        memory: list[torch.Tensor],
        objects: list[Any],
    ) -> Captured:
        """The same of which some tensors lie elsewhere; their leaves differ by the address."""
        made = Captured(self.tree, leaves, values, self.replicated, memory, objects)
        made._described = self._described
        return made

    def forget_memory(self) -> None:
        """Lets go of the tensors; what was made of them stays."""
        self.memory, self.objects = [], []


def _addresses(captured: Captured) -> npt.NDArray[np.uint64]:
    return np.array([leaf.address for leaf in captured.tensors], np.uint64)


@dataclass(slots=True)
class ContainerVisit:
    """A container as the walk went through it.

    Args:
        kind: Its kind.
        type: Its class.
        label: Its label.
        keys: The keys of its children; None where they are counted.
        head: What else belongs to it.
        met: For each child the passage through it, or if it is a leaf its class and its node,
            which is None if it was left out.
        replicas: Whether it says which tensors are replicated.
        claimed: What it was asked of: labels from it on, and the numbers of the tensors.
        attached: Whether the tensors right in it, or if it is an object in what its
            ``state_dict`` returned, stand for what ``detach`` makes of them.
    """

    kind: str
    type: type[Any]
    label: str
    keys: list[Any] | None
    head: Json
    met: list[ContainerVisit | Met] = field(default_factory=list)
    replicas: bool = False
    claimed: list[tuple[str, int]] = field(default_factory=list)
    attached: bool = False


@dataclass(slots=True)
class Walked:
    """A walk that is over.

    Args:
        captured: What it found.
        root: Stands around the state, which is its only child.
        attributes: Of tensors that have attributes, the number and the passage through those.
        attached: The numbers of those that stand for what ``detach`` makes of them.
        repeatable: Whether a state that is met in the same way has the same tree: no container
            stands in two places, and nothing was pickled.
    """

    captured: Captured
    root: ContainerVisit
    attributes: list[tuple[int, ContainerVisit]]
    attached: frozenset[int]
    repeatable: bool

    def emptied_by(self, select: LabelFilter) -> bool:
        """Tell whether the filter left out something and kept nothing."""
        captured = self.captured
        kept = captured.tensors or captured.values or [*leaf_labels(captured.tree, "")]
        return not kept and _leaves_out(self.root, select)


def _leaves_out(passage: ContainerVisit, select: LabelFilter) -> bool:
    if passage.kind in SETS:
        return not select(passage.label)
    return any(
        _leaves_out(each, select) if isinstance(each, ContainerVisit) else each[1] is None
        for each in passage.met
    )


ABSENT: Node = ["absent"]

_TENSOR = "Save a tensor over it: torch.empty(0, dtype=torch.uint8).set_(storage)"


_FRAMES = 5
"""Calls that the walk makes for each container that it enters."""


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        """Refuse a storage: torch pickles it, and cannot make it again."""
        if isinstance(obj, torch.UntypedStorage):
            raise pickle.PicklingError("it holds a torch.UntypedStorage")
        return NotImplemented


def capture(state: Any, *, select: LabelFilter | None = None, pickling: bool = False) -> Captured:
    """Takes a state apart without reading a byte of its tensors.

    Args:
        state: Any nesting of what ckpipe saves.
        select: Which labels to keep.
        pickling: Whether objects of other types are pickled instead of refused.

    Raises:
        UnsupportedState: Names the first object that cannot be saved, by its label.
    """
    return walk(state, select or LabelFilter(), pickling=pickling).captured


def walk(state: Any, select: LabelFilter, *, pickling: bool) -> Walked:
    """Takes a state apart like :func:`capture`, and tells how.

    Raises:
        UnsupportedState: Names the first object that cannot be saved, by its label.
    """
    root = ContainerVisit("root", object, "", None, None)
    going = _Walk(select, pickling=pickling, met=root.met)
    try:
        tree = going.node(state, "")
    except RecursionError:
        limit = sys.getrecursionlimit()
        raise UnsupportedState(
            f"The state is nested too deeply: Python's recursion limit of {limit} is enough for "
            f"about {limit // _FRAMES - 10} containers in one another",
            hint="Flatten it, or raise the limit with sys.setrecursionlimit, for loads too",
        ) from None
    going.mark_shared()
    captured = Captured(
        tree or ["absent"],
        going.leaves,
        going.values,
        frozenset(going.replicated),
        going.memory,
        going.objects,
    )
    attached = frozenset(going.attached)
    return Walked(captured, root, going.attributes, attached, going.repeatable)


@dataclass(slots=True)
class _Walk:
    select: LabelFilter
    pickling: bool
    met: list[ContainerVisit | Met]
    leaves: list[TensorLeaf] = field(default_factory=list)
    memory: list[torch.Tensor] = field(default_factory=list)
    objects: list[Any] = field(default_factory=list)
    values: list[Json] = field(default_factory=list)
    replicated: set[int] = field(default_factory=set)
    attributes: list[tuple[int, ContainerVisit]] = field(default_factory=list)
    repeatable: bool = True
    attached: set[int] = field(default_factory=set)
    attached_in: Any = None
    _claims: list[tuple[ContainerVisit, ReplicatedTest]] = field(default_factory=list)
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
            return self.met_leaf(kind, self.tensor(obj, label))
        if kind in PLAIN_VALUES:
            return self.met_leaf(kind, self.value(obj, label))
        if is_dtensor_type(kind):
            return self.met_leaf(kind, self.tensor(obj, label))
        container = kind_of(obj)
        if container is not None:
            return self.container(container, obj, label)
        if isinstance(obj, torch.Tensor | np.ndarray):
            return self.met_leaf(kind, self.tensor(obj, label))
        return self.met_leaf(kind, self.value(obj, label))

    def met_leaf(self, kind: type[Any], node: Node | None) -> Node | None:
        self.met.append((kind, node))
        return node

    def tensor(self, obj: torch.Tensor | np.ndarray[Any, Any], label: str) -> Node | None:
        number = self._tensor_numbers.get(id(obj))
        if number is None:
            if not self.select(label):
                return None
            number = self._new_tensor(obj, label)
        for passage, is_replicated in self._claims:
            below = _below(label, passage.label)
            passage.claimed.append((below, number))
            if is_replicated(below):
                self.replicated.add(number)
        return ["tensor", number]

    def attached_tensor(self, obj: torch.Tensor, label: str) -> Node | None:
        """The node of what ``detach`` makes of a tensor."""
        node = None
        if self.select(label):
            detached = obj.detach()
            self._alive.append(detached)
            node = self.tensor(detached, label)
            assert node is not None
            self.objects[node[1]] = obj
            self.attached.add(node[1])
        return self.met_leaf(type(obj), node)

    def _new_tensor(self, obj: torch.Tensor | np.ndarray[Any, Any], label: str) -> int:
        name = unique_label(label, self._labels)
        leaf, memory = leaf_of(obj, name, self._shardings)
        number = self._tensor_numbers[id(obj)] = len(self.leaves)
        self.objects.append(obj)
        self.leaves.append(leaf)
        self.memory.append(memory)
        attributes = attributes_of(obj, leaf)
        if attributes:
            leaf.attributes = self._attributes(attributes, number, join(label, "__dict__"))
        return number

    def _attributes(self, attributes: dict[str, Any], number: int, label: str) -> Node | None:
        met, self.met = self.met, []
        try:
            node = self.node(attributes, label)
            (passage,) = self.met
        finally:
            self.met = met
        assert isinstance(passage, ContainerVisit)
        self.attributes.append((number, passage))
        return node

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
        self.repeatable = False
        kind = class_path(type(obj))
        if isinstance(obj, torch.UntypedStorage):
            raise UnsupportedState(
                "A bare storage cannot be saved", key=label or None, hint=_TENSOR
            )
        if not self.pickling and type(obj) is int:
            raise UnsupportedState(
                f"An int of more than {MAX_DIGITS} digits cannot be saved",
                key=label or None,
                hint='Save its bytes, as int.to_bytes makes them, or set pickle="allow"',
            )
        if isinstance(obj, Generator):
            raise UnsupportedState(
                "A generator cannot be saved",
                key=label or None,
                hint="Save list(...) of it, or the module itself in place of module.parameters()",
            )
        if not self.pickling:
            raise UnsupportedState(
                f"An object of type {kind} cannot be saved",
                key=label or None,
                hint="Give it state_dict and load_state_dict, call ckpipe.register_type, "
                'leave it out with exclude, or set pickle="allow"',
            )
        try:
            packed = io.BytesIO()
            _Pickler(packed).dump(obj)
            return ["pickle", base64.b64encode(packed.getvalue()).decode()]
        except Exception as error:
            raise UnsupportedState(
                f"An object of type {kind} cannot be pickled: {error}",
                key=label or None,
                hint="Give it state_dict and load_state_dict, or call ckpipe.register_type",
            ) from error

    def container(self, kind: str, obj: Any, label: str) -> Node | None:
        """Walks a container once; where it stands again, a reference stands instead.

        An immutable container is a reference only inside itself, where a copy would not end.
        """
        key = id(obj)
        if key in self._nodes:
            self.repeatable = False
            number = self._referenced.setdefault(key, len(self._referenced))
            return ["ref", number]
        node: Node = []
        self._nodes[key] = node
        self._alive.append(obj)
        filled = self._inside(kind, obj, label)
        if key not in self._referenced and (filled is None or type(obj) in IMMUTABLE):
            del self._nodes[key]
        if filled is None and key not in self._referenced:
            return None
        node[:] = ABSENT if filled is None else filled
        return node

    def _inside(self, kind: str, obj: Any, label: str) -> Node | None:
        is_replicated = replicated_test(obj) if kind == "stateful" else None
        contents = contents_of(kind, obj, label)
        passage = ContainerVisit(kind, type(obj), label, contents.keys, contents.head)
        passage.attached = contents.attached or obj is self.attached_in
        self.met.append(passage)
        met, self.met = self.met, passage.met
        if is_replicated is not None:
            passage.replicas = True
            self._claims.append((passage, is_replicated))
        try:
            return _BUILDERS[kind](self, kind, contents, passage)
        finally:
            self.met = met
            if is_replicated is not None:
                self._claims.pop()

    def items(self, contents: Contents, passage: ContainerVisit) -> tuple[list[Json], list[Node]]:
        """The encoded keys and the nodes of a mapping's selected items."""
        label, node_of = passage.label, self.attached_tensor if passage.attached else self.node
        keys: list[Json] = []
        nodes: list[Node] = []
        for key, item in zip(contents.keys or (), contents.children, strict=False):
            encoded = key if type(key) is str else encode_key(key, label)
            node = node_of(item, join(label, key))
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


_Builder = Callable[[_Walk, str, Contents, ContainerVisit], Node | None]


def _mapping(walk: _Walk, kind: str, contents: Contents, passage: ContainerVisit) -> Node | None:
    keys, nodes = walk.items(contents, passage)
    return None if contents.keys and not keys else [kind, keys, nodes]


def _ordered_dict(
    walk: _Walk, kind: str, contents: Contents, passage: ContainerVisit
) -> Node | None:
    node = _mapping(walk, kind, contents, passage)
    if not contents.head:
        return node
    if node is None:
        passage.met.append((dict, None))
        return None
    extra = walk.node(contents.children[-1], join(passage.label, "__dict__"))
    if extra is not None:
        node.append(extra)
    return node


def _default_dict(
    walk: _Walk, kind: str, contents: Contents, passage: ContainerVisit
) -> Node | None:
    node = _mapping(walk, kind, contents, passage)
    return None if node is None else [*node, contents.head]


def _sequence(walk: _Walk, kind: str, contents: Contents, passage: ContainerVisit) -> Node | None:
    """The nodes of a sequence's elements; None if there are some and none is selected."""
    label = passage.label
    nodes = [walk.node(item, join(label, n)) for n, item in enumerate(contents.children)]
    if nodes and all(node is None for node in nodes):
        return None
    return [kind, [list(ABSENT) if node is None else node for node in nodes]]


def _deque(walk: _Walk, kind: str, contents: Contents, passage: ContainerVisit) -> Node | None:
    node = _sequence(walk, kind, contents, passage)
    return None if node is None else [*node, contents.head]


def _set(walk: _Walk, kind: str, contents: Contents, passage: ContainerVisit) -> Node | None:
    return [kind, contents.head] if walk.select(passage.label) else None


def _named_tuple(
    walk: _Walk, kind: str, contents: Contents, passage: ContainerVisit
) -> Node | None:
    fields = contents.keys or []
    keys, nodes = walk.items(contents, passage)
    if len(keys) < len(fields):
        kept = dict(zip(keys, nodes, strict=True))
        if not kept:
            return None
        nodes = [kept.get(name, list(ABSENT)) for name in fields]
    return [kind, contents.head, fields, nodes]


def _dataclass(walk: _Walk, kind: str, contents: Contents, passage: ContainerVisit) -> Node | None:
    keys, nodes = walk.items(contents, passage)
    return [kind, contents.head, keys, nodes]


def _stateful(walk: _Walk, kind: str, contents: Contents, passage: ContainerVisit) -> Node | None:
    if contents.attached:
        walk.attached_in = contents.children[0]
    node = walk.node(contents.children[0], passage.label)
    return None if node is None else [kind, node]


def _registered(walk: _Walk, kind: str, contents: Contents, passage: ContainerVisit) -> Node | None:
    node = walk.node(contents.children[0], passage.label)
    return None if node is None else [kind, contents.head, node]


_BUILDERS: dict[str, _Builder] = {
    "dict": _mapping,
    "ordered_dict": _ordered_dict,
    "default_dict": _default_dict,
    "list": _sequence,
    "tuple": _sequence,
    "deque": _deque,
    "set": _set,
    "frozenset": _set,
    "named_tuple": _named_tuple,
    "dataclass": _dataclass,
    "stateful": _stateful,
    "registered": _registered,
}


__all__ = ["ABSENT", "Captured", "ContainerVisit", "Met", "Node", "T", "Walked", "capture", "walk"]
