"""Saved trees as data: access to the content of nodes, and the checks of a tree from a store.

The tree of a manifest may be hostile, so its form is checked when the manifest is decoded. The
check keeps its own stack, so that no nesting can exhaust Python's, and visits every node once.
:mod:`ckpipe.state.flatten` defines the meaning of the nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ckpipe.errors import DuplicateName, InvalidManifest
from ckpipe.format.labels import Json, decode_key, joined
from ckpipe.format.manifest import MAX_DIMENSIONS, Structure, TensorRow

Node = list[Any]
"""A node of a tree: a list whose first item is its kind."""

FORMS: dict[str, tuple[str, ...]] = {
    "tensor": ("count",),
    "value": ("count",),
    "absent": (),
    "set": ("keys",),
    "frozenset": ("keys",),
    "list": ("nodes",),
    "tuple": ("nodes",),
    "deque": ("nodes", "count?"),
    "dict": ("keys", "nodes"),
    "ordered_dict": ("keys", "nodes"),
    "default_dict": ("keys", "nodes", "text?"),
    "named_tuple": ("text", "fields", "nodes"),
    "dataclass": ("text", "attributes", "nodes"),
    "stateful": ("node",),
    "registered": ("text", "node"),
    "wrapper_tensor": ("wrapper", "node"),
    "shared": ("count", "node"),
    "ref": ("count",),
}
"""The items of each kind of node after its kind; one with ``?`` may be null. An ordered dict with
attributes has one more item, their node. A filter leaves keys and attributes out; elements and
fields become ``["absent"]``.
"""

MAPPINGS = tuple(kind for kind, form in FORMS.items() if form[:2] == ("keys", "nodes"))
SETS = tuple(kind for kind, form in FORMS.items() if form == ("keys",))
WRAPPERS = tuple(kind for kind, form in FORMS.items() if "node" in form)
_LEAVES = ("tensor", "value", "ref", "absent", *SETS)
_CHILDREN = {kind: 1 + form.index("nodes") for kind, form in FORMS.items() if "nodes" in form}
_KEYS = {kind: at - 1 for kind, at in _CHILDREN.items() if at > 1} | dict.fromkeys(SETS, 1)
_DROPPING = (*MAPPINGS, *(kind for kind, form in FORMS.items() if "attributes" in form))


def shared_containers(trees: Iterable[Node]) -> dict[int, Node]:
    """Return the containers of trees that references point to, by number."""
    return {node[1]: node[2] for node in _containers(trees) if node[0] == "shared"}


def version_of(tree: Node, tensors: Iterable[TensorRow]) -> int:
    """Return the least version of the format that has all nodes of a tree and of attributes."""
    trees = [tree, *(row.attributes for row in tensors if row.attributes)]
    return 2 if any(node[0] == "wrapper_tensor" for node in _containers(trees)) else 1


def _containers(trees: Iterable[Node]) -> Iterator[Node]:
    pending = list(trees)
    while pending:
        node = pending.pop()
        yield node
        inner = [*nodes_of(node), *(node[3:] if node[0] == "ordered_dict" else ())]
        pending += [each for each in inner if each[0] not in _LEAVES]


def children_of(node: Node, label: str) -> list[tuple[Any, Node, str]]:
    """Return the keys, nodes and labels inside a container node; an empty list for other nodes."""
    at = _CHILDREN.get(node[0])
    if at is None:
        return []
    keys: Sequence[Any] = range(len(node[at]))
    if at > 1:
        keys = [key if type(key) is str else decode_key(key) for key in node[at - 1]]
    return list(zip(keys, node[at], joined(label, keys), strict=True))


def nodes_of(node: Node) -> list[Node]:
    """Return the nodes directly inside a node, without keys and attributes."""
    at = _CHILDREN.get(node[0])
    if at is not None:
        return node[at]  # type: ignore[no-any-return]
    return [node[-1]] if node[0] in WRAPPERS else []


def with_nodes(node: Node, nodes: Iterable[Node]) -> Node:
    """Return a copy of a node with other nodes inside, as many as it has."""
    at = _CHILDREN.get(node[0])
    if at is not None:
        return [*node[:at], list(nodes), *node[at + 1 :]]
    return [*node[:-1], *nodes] if node[0] in WRAPPERS else node


def node_of(kind: str, head: Json, keys: list[Json]) -> Node:
    """Return a container's node without nodes inside; ``head`` is its item besides the keys."""
    known = {"keys": keys, "attributes": keys, "fields": keys, "nodes": [], "node": None}
    return [kind, *(known.get(item, head) for item in FORMS[kind])]


def with_selected(node: Node, nodes: Sequence[Node | None]) -> Node:
    """Return a copy of a container's node with other nodes inside; None leaves one out."""
    if node[0] not in _DROPPING:
        return with_nodes(node, [["absent"] if each is None else each for each in nodes])
    at = _CHILDREN[node[0]]
    pairs = [(k, each) for k, each in zip(node[at - 1], nodes, strict=True) if each is not None]
    return [*node[: at - 1], [key for key, _ in pairs], [n for _, n in pairs], *node[at + 1 :]]


def walk(node: Node, label: str = "") -> Iterator[tuple[Node, str]]:
    """Yield every node of a tree with its label; references are not followed."""
    pending = [(node, label)]
    while pending:
        node, label = pending.pop()
        yield node, label
        if node[0] in _CHILDREN:  # most nodes are leaves
            pending += [(child, where) for _, child, where in reversed(children_of(node, label))]
        elif node[0] in WRAPPERS:
            pending.append((node[-1], label))


def wrappers_in(structure: Structure) -> list[tuple[str, Node]]:
    """Return the outermost wrapper tensors of a structure, with their labels."""
    found: list[tuple[str, Node]] = []
    inside = "\0"
    for node, label in walk(structure.tree) if structure.version > 1 else ():
        if node[0] == "wrapper_tensor" and not label.startswith(inside):
            found.append((label, node))
            inside = f"{label}."
    return found


def leaf_labels(node: Node, label: str) -> list[str]:
    """Return the labels of the tensors, values, sets and references of a tree."""
    return [at for each, at in walk(node, label) if each[0] in _LEAVES and each[0] != "absent"]


def check_tree(structure: Structure) -> None:
    """Check the root node and the nodes of attributes.

    Raises:
        DuplicateName: If a container has a key twice.
        InvalidManifest: If a node is malformed, or points to a row, value or container that does
            not exist.
    """
    limits = {"tensor": len(structure.tensors), "value": structure.values}
    shared: set[int] = set()
    references: set[int] = set()
    attributes = [row.attributes for row in structure.tensors if row.attributes is not None]
    for node in attributes:
        _check_attributes(node)
    stack: list[Any] = [structure.tree, *attributes]
    while stack:
        node = stack.pop()
        if not _is_node(node) or node[0] not in FORMS:
            raise InvalidManifest(f"This is not a node of a tree: {_brief(node)}")
        kind = node[0]
        if kind in limits:  # most nodes are leaves
            number = node[1] if len(node) == 2 else None
            if type(number) is not int or not 0 <= number < limits[kind]:
                raise InvalidManifest(f"A node of the tree points to a {kind} that is not there")
            continue
        if kind == "ordered_dict" and len(node) == 4:
            _check_attributes(node[3])
            stack.append(node[3])
            node = node[:3]
        if not _is_well_formed(node):
            raise InvalidManifest(f"A node of the kind {kind!r} is malformed")
        if kind == "wrapper_tensor":
            if structure.version < 2 or not _is_node(node[2]) or node[2][0] != "dict":
                raise InvalidManifest("A wrapper_tensor is malformed, or in version 1")
            context, values = node[1]["context"]
            check_tree(Structure(context, (), len(values)))
            if any(each[0] in ("shared", "stateful") for each in _containers([context])):
                raise InvalidManifest("The context of a wrapper tensor is no plain data")
        if kind in _KEYS:
            _check_keys(node[_KEYS[kind]])
        if kind == "ref":
            references.add(node[1])
        elif kind == "shared":
            if node[1] in shared:
                raise DuplicateName(f"Two containers of the tree have the number {node[1]}")
            shared.add(node[1])
        stack += nodes_of(node)
    missing = references - shared
    if missing:
        raise InvalidManifest(
            f"A node refers to the shared container {min(missing)}, which is not there"
        )


def _check_attributes(node: Any) -> None:
    if not _is_node(node) or node[0] != "dict":
        raise InvalidManifest("Attributes are no dict in the tree")


def _is_node(node: Any) -> bool:
    return type(node) is list and bool(node) and type(node[0]) is str


def _is_well_formed(node: Node) -> bool:
    """Tell whether a node has the form of its kind; nodes inside are not looked at."""
    form, at = FORMS[node[0]], _CHILDREN.get(node[0])
    if len(node) != len(form) + 1:
        return False
    if not all(_FITS[item](data) for item, data in zip(form, node[1:], strict=True)):
        return False
    return at is None or at == 1 or len(node[at - 1]) == len(node[at])


def _is_count(data: Json) -> bool:
    return type(data) is int and 0 <= data < 1 << 62


def _is_names(data: Json) -> bool:
    return type(data) is list and all(type(name) is str for name in data)


def _is_wrapper(data: Json) -> bool:
    return _has(data, _WRAPPER) and (data["shard"] is None or _has(data["shard"], _SHARD))


def _has(data: Json, members: dict[str, Callable[[Any], bool]]) -> bool:
    """Tell whether an object has exactly some members, each of its form."""
    if type(data) is not dict or data.keys() != members.keys():
        return False
    return all(fits(data[name]) for name, fits in members.items())


def _is_size(data: Json) -> bool:
    return type(data) is list and len(data) <= MAX_DIMENSIONS and all(map(_is_count, data))


_WRAPPER: dict[str, Callable[[Any], bool]] = {
    "class": lambda data: type(data) is str,
    "context": lambda data: type(data) is list and len(data) == 2 and type(data[1]) is list,
    "dtype": lambda data: type(data) is str,
    "size": _is_size,
    "stride": _is_size,
    "kind": lambda data: data in ("tensor", "parameter", "buffer"),
    "detail": lambda data: data in (None, "persistent", "transient"),
    "requires_grad": lambda data: type(data) is bool,
    "shard": lambda data: True,
}
_SHARD = {"layout": _WRAPPER["class"], "size": _is_size}
"""The facts of a wrapper tensor and of its shard, and the check of each."""


_FITS: dict[str, Callable[[Any], bool]] = {
    "wrapper": _is_wrapper,
    "node": lambda data: True,
    "nodes": lambda data: type(data) is list,
    "keys": lambda data: type(data) is list,
    "attributes": _is_names,
    "fields": _is_names,
    "text": lambda data: type(data) is str,
    "text?": lambda data: data is None or type(data) is str,
    "count": _is_count,
    "count?": lambda data: data is None or _is_count(data),
}


def _brief(node: Any) -> str:
    # A deep node is not printed, since printing recurses.
    if _is_node(node):
        return f"a list that begins with {node[0]!r:.100}"
    return f"a {type(node).__name__}"


def _check_keys(keys: list[Json]) -> None:
    try:
        if not set(map(type, keys)) <= {str}:
            keys = [decode_key(key) for key in keys]
        distinct = len(set(keys))
    except RecursionError:
        raise InvalidManifest("A key is nested too deeply") from None
    if distinct < len(keys):
        raise DuplicateName("A container of the tree has a key twice")
