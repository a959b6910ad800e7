"""Saved trees as data: access to the content of nodes, and the checks of a tree from a store.

The tree of a manifest may be hostile, so its form is checked when the manifest is decoded. The
check keeps its own stack, so that no nesting can exhaust Python's, and visits every node once.
:mod:`ckpipe.state.flatten` defines the meaning of the nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ckpipe.errors import DuplicateName, InvalidManifest
from ckpipe.format.keys import Json, decode_key, joined
from ckpipe.format.manifest import Structure

Node = list[Any]
"""A node of a tree: a list whose first item is its kind."""

MAPPINGS = ("dict", "ordered_dict", "default_dict")
SEQUENCES = ("list", "tuple", "deque")
SETS = ("set", "frozenset")
RECORDS = ("named_tuple", "dataclass")
_LEAVES = ("tensor", "value", "ref", "absent", *SETS)
_WRAPPERS = ("registered", "stateful", "shared")
_CHILDREN = {
    **dict.fromkeys(MAPPINGS, 2),
    **dict.fromkeys(SEQUENCES, 1),
    **dict.fromkeys(RECORDS, 3),
}
"""For each kind of container, the item of the node that lists the nodes inside; its keys, if any,
come before."""
_KINDS = {*_LEAVES, *_WRAPPERS, *_CHILDREN}


def shared_containers(trees: Iterable[Node]) -> dict[int, Node]:
    """Return the containers of trees that references point to, by number."""
    found: dict[int, Node] = {}
    pending = list(trees)
    while pending:
        node = pending.pop()
        if node[0] == "shared":
            found[node[1]] = node[2]
        inner = [*nodes_of(node), *(node[3:] if node[0] == "ordered_dict" else ())]
        pending += [each for each in inner if each[0] not in _LEAVES]
    return found


def children_of(node: Node, label: str) -> list[tuple[Any, Node, str]]:
    """Return the keys, nodes and labels inside a container node; an empty list for other nodes."""
    at = _CHILDREN.get(node[0])
    if at is None:
        return []
    keys = list(range(len(node[at]))) if at == 1 else node[at - 1]
    if node[0] in MAPPINGS:
        keys = [key if type(key) is str else decode_key(key) for key in keys]
    return list(zip(keys, node[at], joined(label, keys), strict=True))


def nodes_of(node: Node) -> list[Node]:
    """Return the nodes directly inside a node, without keys and attributes."""
    at = _CHILDREN.get(node[0])
    if at is not None:
        return node[at]  # type: ignore[no-any-return]
    return [node[-1]] if node[0] in _WRAPPERS else []


def with_nodes(node: Node, nodes: Iterable[Node]) -> Node:
    """Return a copy of a node with other nodes inside, as many as it has."""
    at = _CHILDREN.get(node[0])
    if at is not None:
        return [*node[:at], list(nodes), *node[at + 1 :]]
    return [*node[:-1], *nodes] if node[0] in _WRAPPERS else node


def with_items(node: Node, keys: list[Any], nodes: list[Node]) -> Node:
    """Return a copy of the node of a mapping or a record with other keys and nodes."""
    at = _CHILDREN[node[0]]
    return [*node[: at - 1], keys, nodes, *node[at + 1 :]]


def walk(node: Node, label: str = "") -> Iterator[tuple[Node, str]]:
    """Yield every node of a tree with its label; references are not followed."""
    pending = [(node, label)]
    while pending:
        node, label = pending.pop()
        yield node, label
        if node[0] in _WRAPPERS:
            pending.append((node[-1], label))
        pending += [(child, where) for _, child, where in reversed(children_of(node, label))]


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
        if not _is_node(node) or node[0] not in _KINDS:
            raise InvalidManifest(f"This is not a node of a tree: {_brief(node)}")
        kind = node[0]
        if kind in limits:  # most nodes are leaves
            number = node[1] if len(node) == 2 else None
            if type(number) is not int or not 0 <= number < limits[kind]:
                raise InvalidManifest(f"A node of the tree points to a {kind} that is not there")
            continue
        match node:
            case ["absent"]:
                pass
            case ["list" | "tuple", list(below)]:
                stack += below
            case ["deque", list(below), longest] if longest is None or _is_count(longest):
                stack += below
            case ["set" | "frozenset", list(keys)]:
                _check_keys(keys)
            case ["dict" | "ordered_dict", list(keys), list(below)] if len(keys) == len(below):
                _check_keys(keys)
                stack += below
            case ["ordered_dict", list(keys), list(below), own] if len(keys) == len(below):
                _check_keys(keys)
                _check_attributes(own)
                stack += [*below, own]
            case ["default_dict", list(keys), list(below), None | str()] if len(keys) == len(below):
                _check_keys(keys)
                stack += below
            case ["named_tuple" | "dataclass", str(), list(keys), list(below)] if len(keys) == len(
                below
            ) and all(type(name) is str for name in keys):
                _check_keys(keys)
                stack += below
            case ["stateful", inner] | ["registered", str(), inner]:
                stack.append(inner)
            case ["shared", number, inner] if _is_count(number):
                if number in shared:
                    raise DuplicateName(f"Two containers of the tree have the number {number}")
                shared.add(number)
                stack.append(inner)
            case ["ref", number] if _is_count(number):
                references.add(number)
            case _:
                raise InvalidManifest(f"A node of the kind {kind!r} is malformed")
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


def _is_count(data: Json) -> bool:
    return type(data) is int and 0 <= data < 1 << 62


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
