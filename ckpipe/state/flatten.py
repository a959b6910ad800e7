"""The walk over a state: from nested objects to a tree of nodes, tensors and values.

Theory. A manifest describes a state by a *tree* that refers to every tensor and every inline value
by a number. So ranks (and steps) that differ only in their values share one tree. A node of the
tree (:class:`ckpipe.format.tree.Node`) is stored as a list whose first item is its kind::

    ["tensor", 3]                         the third row of the tensor table
    ["value", 7]                          the seventh inline value
    ["dict", [key, …], [node, …]]         likewise ordered_dict, default_dict, named_tuple, …
    ["list", [node, …]]                   likewise tuple, set, frozenset, deque
    ["stateful", node]                    the result of an object's state_dict()
    ["shared", 0, node] … ["ref", 0]      one container in two places, or inside itself
    ["absent"]                            an element that include or exclude left out

A capture has two steps. First all containers are opened, plain ones in the order of the walk. Then
the user's ``state_dict`` methods are called, in the order of their labels: they may call
collectives, and dicts may have another order on each rank. Their results are opened likewise, until
no object is left. Then the tree is made of their contents. From one save to the next
usually only bytes and numbers change. If the opened containers and the tensors are like those of
the last save (see :mod:`ckpipe.state.capture_cache`), the second step is skipped. Neither step
reads a tensor's bytes.
"""

from __future__ import annotations

import base64
import contextlib
import io
import pickle
import sys
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from ckpipe.errors import UnsupportedState, reason_of
from ckpipe.format.labels import MAX_DIGITS, Json, LabelFilter, encode_key, join, unique_label
from ckpipe.format.manifest import OptimizerRow, Structure, TensorRow, trees_of
from ckpipe.format.tree import (
    SETS,
    Node,
    container_node,
    leaf_labels,
    version_of,
    with_selected,
)
from ckpipe.state.kinds import (
    DATACLASS,
    DICT,
    ROOT,
    STATEFUL,
    WRAPPER_TENSOR,
    Container,
    Kind,
    ReplicaGroup,
    ReplicatedTest,
    kind_of,
    part_of_registered,
    replica_group,
    replicated_test,
)
from ckpipe.state.tensors import (
    PLAIN_TYPES,
    Shardings,
    TensorLeaf,
    attributes_of,
    dtensor_type,
    is_wrapper,
    leaf_of,
)
from ckpipe.state.values import (
    PLAIN_VALUES,
    NotInline,
    class_path,
    encode_value,
    shapes_of_parameters,
)

T = TypeVar("T")


@dataclass(slots=True)
class Captured:
    """A flattened state: its structure, and the values and memory of this save.

    Args:
        tree: The root node.
        tensors: The leaves that hold bytes, in the order of the walk; labels are unique.
        values: The inline values, encoded.
        replicated: The numbers of the tensors that an object in the state marks as held alike by
            several ranks, each with these ranks, or None for all; see :mod:`ckpipe.state.kinds`.
        optimizers: The facts of optimizers that their ``state_dict`` lacks.
        memory: For each leaf its bytes, as a plain tensor on the same memory.
        objects: For each leaf the tensor or array itself, as it is in the state.
    """

    tree: Node
    tensors: list[TensorLeaf]
    values: list[Json]
    replicated: Mapping[int, ReplicaGroup] = field(default_factory=dict)
    optimizers: tuple[OptimizerRow, ...] = ()
    memory: list[torch.Tensor] = field(default_factory=list)
    objects: list[Any] = field(default_factory=list)
    _derived: dict[Hashable, Any] = field(default_factory=dict)
    _described: dict[Hashable, Any] = field(default_factory=dict)

    def described(self, make: Callable[[Captured], T]) -> T:
        """Cache a function of the structure, for all captures that differ only by addresses.

        Args:
            make: A function of the tree, the number of values, and the leaves without addresses.
        """
        if make not in self._described:
            self._described[make] = make(self)
        made: T = self._described[make]
        return made

    def derived(self, make: Callable[[Captured], T]) -> T:
        """Cache a function of the structure, for all captures that share it.

        Args:
            make: A function of tree, leaves and replicas alone.
        """
        if make not in self._derived:
            self._derived[make] = make(self)
        made: T = self._derived[make]
        return made

    @property
    def addresses(self) -> npt.NDArray[np.uint64]:
        """The address of the first element of each leaf, on any device."""
        return self.derived(_addresses)

    def again(
        self,
        leaves: list[TensorLeaf],
        values: list[Json],
        memory: list[torch.Tensor],
        objects: list[Any],
    ) -> Captured:
        """Return a state of the same structure, with other values and perhaps other memory.

        Args:
            leaves: Its leaves: these, or new ones that differ only by the address.
            values: Its inline values, encoded.
            memory: For each leaf its bytes.
            objects: For each leaf the tensor or array itself.
        """
        made = Captured(
            self.tree, leaves, values, self.replicated, self.optimizers, memory, objects
        )
        made._described = self._described
        if leaves is self.tensors:
            made._derived = self._derived
        return made

    def forget_memory(self) -> None:
        """Drop the tensors; the structure stays."""
        self.memory, self.objects = [], []


def structure_of(captured: Captured) -> Structure:
    """Return the structure of a state, as its manifest has it."""
    rows = tuple(
        TensorRow(
            leaf.label, leaf.dtype, leaf.full_shape, leaf.device.partition(":")[0], leaf.kind,
            leaf.detail, leaf.requires_grad, leaf.lazy, leaf.attributes,
        )
        for leaf in captured.tensors
    )  # fmt: skip
    version = version_of(trees_of(captured.tree, rows))
    return Structure(captured.tree, rows, len(captured.values), captured.optimizers, version)


def _addresses(captured: Captured) -> npt.NDArray[np.uint64]:
    return np.array([leaf.address for leaf in captured.tensors], np.uint64)


_SURE_LEAVES = PLAIN_VALUES.union(PLAIN_TYPES, (np.ndarray,))


class OpenedState:
    """All containers of a state, opened.

    An immutable container in two places is opened twice, any other one once.

    Args:
        state: Any nesting of objects that ckpipe saves.
        replicated: Selects labels of tensors that all ranks hold alike, whatever objects declare.

    Attributes:
        root: A container around the state, which is its only child.
        containers: All of them, in the order in which they were opened.
        met: The state, and the children of all containers in that order.
        repeated: True if a container is in two places.

    Raises:
        UnsupportedState: If a container cannot be saved, or they are nested too deeply.
    """

    def __init__(self, state: Any, replicated: LabelFilter | None = None) -> None:
        self.containers: list[Container] = []
        self.met: list[Any] = []
        self.repeated = False
        self._known: dict[int, Container] = {}
        self._referenced: set[int] = set()
        self._waiting: dict[int, Container] = {}
        self._dtensor = dtensor_type()
        self.root = Container(ROOT, None, children=[state])
        if replicated is not None:
            self.root.is_replicated = lambda label, _: replicated(label)
        with _depth_checked():
            self._open_inner(self.root)
            self._open_waiting()

    def open(self, opened: Container) -> Container:
        """Open a container and all containers in it, unless it is open; return the open one."""
        opened = self._open(opened)
        self._open_waiting()
        return opened

    def _open_waiting(self) -> None:
        while self._waiting:
            waiting, self._waiting = list(self._waiting.values()), {}
            for each in sorted(waiting, key=_place):
                if each.kind is STATEFUL:
                    each.is_replicated = replicated_test(each.obj)
                each.open()
                self._open_inner(each)

    def _open(self, opened: Container) -> Container:
        obj = opened.obj
        known = self._known.get(id(obj))
        if known is not None:
            self.repeated = True
            self._referenced.add(id(obj))
            if id(obj) in self._waiting and _place(opened) < _place(known):
                known.where = opened.where  # its first place may differ between ranks
            return known
        self._known[id(obj)] = opened
        if opened.kind.wraps:
            self._waiting[id(obj)] = opened
            return opened
        opened.open()
        self._open_inner(opened)
        if opened.kind.saved_twice and id(obj) not in self._referenced:
            del self._known[id(obj)]
        return opened

    def _open_inner(self, outer: Container) -> None:
        children, leaves = outer.children, _SURE_LEAVES
        outer.first = len(self.met)
        self.containers.append(outer)
        self.met += children
        kinds = set(map(type, children)) - leaves
        if self._dtensor in kinds and all(map(self._is_leaf, children)):
            return
        for index, child in enumerate(children if kinds else ()):
            if self._is_leaf(child) or (
                outer.attached and isinstance(child, torch.Tensor) and not is_wrapper(child)
            ):
                continue
            kind = kind_of(child)
            if kind is not None:
                # No reference to the outer one: only the garbage collector would free a cycle.
                where = partial(_child_path, outer.where, outer.kind, outer.keys, index)
                attached = outer.live or (outer.attached and kind is WRAPPER_TENSOR)
                outer.inner[index] = self._open(Container(kind, child, where, attached))

    def _is_leaf(self, child: Any) -> bool:
        if type(child) is self._dtensor:
            return type(child._local_tensor) is torch.Tensor
        return type(child) in _SURE_LEAVES


def _place(opened: Container) -> str:
    """Return the path of a container, in which 1 and ``"1"`` differ."""
    return opened.where(repr)


def _child_path(
    where: Callable[[Callable[[object], str]], str],
    kind: Kind,
    keys: list[Any] | None,
    index: int,
    part: Callable[[object], str],
) -> str:
    path = where(part)
    if kind.wraps:
        return path
    key: Any = index
    if keys is not None:
        key = keys[index] if index < len(keys) else "__dict__"
    return f"{path}.{part(key)}" if path else part(key)


@contextlib.contextmanager
def _depth_checked() -> Iterator[None]:
    try:
        yield
    except RecursionError:
        limit = sys.getrecursionlimit()
        raise UnsupportedState(
            f"The state is nested too deeply: Python's recursion limit of {limit} is enough for "
            f"about {limit // _FRAMES - 10} containers in one another",
            hint="Flatten it, or raise the limit with sys.setrecursionlimit, for loads too",
        ) from None


_FRAMES = 4
"""Calls for each container in another."""


_TENSOR = "Save a tensor over it: torch.empty(0, dtype=torch.uint8).set_(storage)"


class _StorageRefuser(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        """Refuse a storage: torch pickles it, but cannot restore it."""
        if isinstance(obj, torch.UntypedStorage):
            raise pickle.PicklingError("it holds a torch.UntypedStorage")
        return NotImplemented


def flatten(opened: OpenedState, select: LabelFilter, *, pickling: bool) -> Flattened:
    """Make the tree of a state, and note its tensors and values; reads no byte of a tensor.

    Raises:
        UnsupportedState: If an object cannot be saved; names the first one by its label.
    """
    making = Flattened(opened, select, pickling)
    if (told := opened.root.is_replicated) is not None:
        making._claims.append(("", told, making.asked.setdefault(id(opened.root), [])))
    with _depth_checked():
        tree = making.child(opened.root, 0, "")
    making.finish(tree or Node("absent"))
    return making


@dataclass(slots=True)
class Flattened:
    """A tree under construction, and the places of its leaves: indices of ``OpenedState.met``.

    Args:
        opened: The state.
        select: The filter of labels to keep.
        pickling: True to pickle objects of other types, False to refuse them.

    Attributes:
        captured: The result.
        tensors: For each tensor, its first place.
        values: For each value, its place.
        repeats: The other places of tensors, with their numbers.
        left_out: Places of leaves that were not selected.
        attached: The numbers of tensors that are saved as if they were detached.
        asked: The queries of containers with a test for replicated tensors, by the ids of
            :class:`Container`: labels below them, and the numbers of tensors.
        omitted: True if a leaf was not selected.
        repeatable: True if a state with the same objects in the same places has the same tree: no
            container is in two places, no tensor has attributes, and no object was pickled.
    """

    opened: OpenedState
    select: LabelFilter
    pickling: bool
    captured: Captured = field(default_factory=lambda: Captured(Node("absent"), [], []))
    tensors: list[int] = field(default_factory=list)
    values: list[int] = field(default_factory=list)
    repeats: list[tuple[int, int]] = field(default_factory=list)
    left_out: list[int] = field(default_factory=list)
    attached: set[int] = field(default_factory=set)
    asked: dict[int, list[tuple[str, int]]] = field(default_factory=dict)
    omitted: bool = False
    repeatable: bool = True
    _replicated: dict[int, ReplicaGroup] = field(default_factory=dict)
    _claims: list[tuple[str, ReplicatedTest, list[tuple[str, int]]]] = field(default_factory=list)
    _shardings: Shardings = field(default_factory=Shardings)
    _labels: set[str] = field(default_factory=set)
    _nodes: dict[int, Node] = field(default_factory=dict)
    _numbers: dict[int, int] = field(default_factory=dict)
    _referenced: dict[int, int] = field(default_factory=dict)
    _partial: set[int] = field(default_factory=set)

    @property
    def is_emptied(self) -> bool:
        """True if the filter left out leaves and kept none."""
        captured = self.captured
        kept = captured.tensors or captured.values or leaf_labels(captured.tree, "")
        return self.omitted and not kept

    def finish(self, tree: Node) -> None:
        """Number the containers that are referenced."""
        for key, number in self._referenced.items():
            node = self._nodes[key]
            node.become(Node("shared", number, nodes=[node.with_nodes(node.nodes)]))
        self.captured.tree, self.captured.replicated = tree, self._replicated
        self.repeatable = self.repeatable and not self.opened.repeated

    # Leaves

    def child(self, outer: Container, index: int, label: str) -> Node | None:
        """Return the node of a container's child; None if no leaf of it is selected."""
        inner = outer.inner.get(index)
        if inner is not None:
            return self.container(inner, label)
        obj, place = outer.children[index], outer.first + index
        if isinstance(obj, (torch.Tensor, np.ndarray)):
            node = self.tensor(obj, label, place, attached=outer.attached)
        else:
            node = self.value(obj, label, place)
        if node is None:
            self.omitted = True
            if not outer.attached:
                self.left_out.append(place)
        return node

    def tensor(self, obj: Any, label: str, place: int, *, attached: bool) -> Node | None:
        # An attached tensor is saved as a new detached one, which is in no other place.
        number = None if attached else self._numbers.get(id(obj))
        if number is not None:
            self.repeats.append((place, number))
        elif not self.select(label):
            return None
        else:
            number = len(self.tensors)
            self.tensors.append(place)
            if attached:
                self.attached.add(number)
            self._new_tensor(obj, number, label)
        for top, is_replicated, asked in self._claims:
            below = label[len(top) + 1 :] if top else label
            asked.append((below, number))
            told = is_replicated(below, obj)
            if told:
                self._replicated.setdefault(number, replica_group(told))
        return Node("tensor", number)

    def _new_tensor(self, obj: Any, number: int, label: str) -> None:
        name = unique_label(label, self._labels)
        attached = number in self.attached
        leaf, memory = leaf_of(obj.detach() if attached else obj, name, self._shardings)
        self.captured.objects.append(obj)
        self.captured.tensors.append(leaf)
        self.captured.memory.append(memory)
        if attached:
            return
        self._numbers[id(obj)] = number
        attributes = attributes_of(obj, leaf)
        if attributes:
            self.repeatable = False
            where = join(label, "__dict__")
            opened = self.opened.open(Container(DICT, attributes, lambda _: where))
            leaf.attributes = self.container(opened, where)

    def value(self, value: Any, label: str, place: int) -> Node | None:
        if not self.select(label):
            return None
        try:
            data = encode_value(value)
        except NotInline:
            data = self._pickled(value, label)
        self.values.append(place)
        self.captured.values.append(data)
        return Node("value", len(self.values) - 1)

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
                hint='Save its bytes by int.to_bytes, or set pickle="allow"',
            )
        if isinstance(obj, Generator):
            raise UnsupportedState(
                "A generator cannot be saved",
                key=label or None,
                hint="Save list(...) of it, or the module itself instead of module.parameters()",
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
            _StorageRefuser(packed).dump(obj)
            return ["pickle", base64.b64encode(packed.getvalue()).decode()]
        except Exception as error:
            raise UnsupportedState(
                f"An object of type {kind} cannot be pickled: {reason_of(error)}",
                key=label or None,
                hint="Give it state_dict and load_state_dict, or call ckpipe.register_type",
            ) from error

    # Containers

    def container(self, opened: Container, label: str) -> Node | None:
        """Return the node of a container; in its second place, a reference."""
        key = id(opened)
        if key in self._nodes:
            self.omitted |= key in self._partial
            return Node("ref", self._referenced.setdefault(key, len(self._referenced)))
        self._nodes[key] = node = Node("absent")
        if opened.is_replicated is not None:
            self._claims.append((label, opened.is_replicated, self.asked.setdefault(key, [])))
        before, self.omitted = self.omitted, False
        filled = self._filled(opened, label)
        if self.omitted:
            self._partial.add(key)
        self.omitted |= before
        if opened.is_replicated is not None:
            self._claims.pop()
        if filled is None and key not in self._referenced:
            del self._nodes[key]
            return None
        if filled is not None:
            node.become(filled)
        return node

    def _note_optimizer(self, opened: Container, label: str) -> None:
        if opened.head is not None:
            row = OptimizerRow(label, opened.head, shapes_of_parameters(opened.obj))
            self.captured.optimizers += (row,)

    def _filled(self, opened: Container, label: str) -> Node | None:
        """Return the node of a container; None if it has children and none is selected."""
        kind, children, head = opened.kind, opened.children, opened.head
        if kind.name in SETS:
            if self.select(label):
                return Node(kind.name, keys=head)
            self.omitted = True
            return None
        if kind.wraps:
            nodes_before, referenced_before = len(self._nodes), len(self._referenced)
            inner = self.child(opened, 0, label)
            if inner is None or (self.omitted and not leaf_labels(inner, label)):
                # Empty containers alone are no part of an object, nor may others refer to them.
                while len(self._nodes) > nodes_before:
                    self._nodes.popitem()
                while len(self._referenced) > referenced_before:
                    self._referenced.popitem()
                return None
            if kind is STATEFUL:
                self._note_optimizer(opened, label)
            elif self.omitted:
                raise part_of_registered(label)
            return container_node(kind.name, head, (), [inner])
        names = range(len(children)) if opened.keys is None else opened.keys
        keys = [each if type(each) is str else encode_key(each, label) for each in names]
        nodes = [self.child(opened, n, join(label, name)) for n, name in enumerate(names)]
        if kind is not DATACLASS and nodes and all(node is None for node in nodes):
            return None
        filled = with_selected(container_node(kind.name, head, keys, ()), nodes)
        if len(children) > len(names):  # the attributes of an ordered dict
            filled.attributes = self.child(opened, len(names), join(label, "__dict__"))
        return filled
