"""Saved trees as data: what lies in a node, and the checks of a tree from a store.

Anyone may have written the tree of a manifest, so its form is checked when that is decoded. The
check keeps its own stack, so that no nesting can exhaust Python's, and visits every node once.
:mod:`ckpipe.state.flatten` says what the nodes mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ckpipe.errors import DuplicateName, InvalidManifest
from ckpipe.format.keys import Json, decode_key, joined
from ckpipe.format.manifest import Structure

Node = list[Any]
"""A node of a tree: a list whose first item says what it is."""

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
"""Which item of a container's node lists the nodes inside; its keys, if any, come before."""


def shared_containers(trees: Iterable[Node]) -> dict[int, Node]:
    """The containers of trees that references point to, by number."""
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
    """The keys, nodes and labels of what a container node holds; nothing for other nodes."""
    at = _CHILDREN.get(node[0])
    if at is None:
        return []
    keys = list(range(len(node[at]))) if at == 1 else node[at - 1]
    if node[0] in MAPPINGS:
        keys = [key if type(key) is str else decode_key(key) for key in keys]
    return list(zip(keys, node[at], joined(label, keys), strict=True))


def nodes_of(node: Node) -> list[Node]:
    """The nodes directly inside a node, without keys and attributes."""
    at = _CHILDREN.get(node[0])
    if at is not None:
        return node[at]  # type: ignore[no-any-return]
    return [node[-1]] if node[0] in _WRAPPERS else []


def with_nodes(node: Node, nodes: Iterable[Node]) -> Node:
    """A copy of a node with others inside, as many as it has."""
    at = _CHILDREN.get(node[0])
    if at is not None:
        return [*node[:at], list(nodes), *node[at + 1 :]]
    return [*node[:-1], *nodes] if node[0] in _WRAPPERS else node


def with_items(node: Node, keys: list[Any], nodes: list[Node]) -> Node:
    """A copy of the node of a mapping or a record with other keys and nodes."""
    at = _CHILDREN[node[0]]
    return [*node[: at - 1], keys, nodes, *node[at + 1 :]]


def walk(node: Node, label: str = "") -> Iterator[tuple[Node, str]]:
    """Every node of a tree with its label; references are not followed."""
    yield node, label
    if node[0] in _WRAPPERS:
        yield from walk(node[-1], label)
    for _, child, where in children_of(node, label):
        yield from walk(child, where)


def leaf_labels(node: Node, label: str) -> list[str]:
    """The labels of the tensors, values, sets and references of a tree."""
    return [at for each, at in walk(node, label) if each[0] in _LEAVES and each[0] != "absent"]


def check_tree(structure: Structure) -> None:
    """Check the root node and the nodes of attributes.

    Raises:
        DuplicateName: If a container has a key twice.
        InvalidManifest: If a node is malformed or points to what is not there.
    """
    walk = _Walk(len(structure.tensors), structure.values)
    limits = walk.limits
    attributes = [row.attributes for row in structure.tensors if row.attributes is not None]
    _check_attributes(attributes)
    stack: list[Any] = [structure.tree, *attributes]
    while stack:
        node = stack.pop()
        check = _NODES.get(node[0]) if _is_node(node) else None
        if check is None:
            raise InvalidManifest(f"This is not a node of a tree: {_brief(node)}")
        # All but tensors and values that are there, as most are: a short way for these.
        stack += [
            each
            for each in check(walk, node)
            if type(each) is not list
            or len(each) != 2
            or type(each[0]) is not str
            or type(each[1]) is not int
            or not 0 <= each[1] < limits.get(each[0], 0)
        ]
    missing = walk.references - walk.shared
    if missing:
        raise InvalidManifest(f"A node refers to the shared container {min(missing)}, of none")


def _check_attributes(nodes: list[Node]) -> None:
    if any(not _is_node(node) or node[0] != "dict" for node in nodes):
        raise InvalidManifest("Attributes are no dict in the tree")


def _is_node(node: Any) -> bool:
    return type(node) is list and bool(node) and type(node[0]) is str


def _brief(node: Any) -> str:
    # A deep node is not printed, since printing recurses.
    kind = repr(node[0])[:100] if type(node) is list and node and type(node[0]) is str else ""
    return f"a list that begins with {kind}" if kind else f"a {type(node).__name__}"


class _Walk:
    def __init__(self, tensors: int, values: int) -> None:
        self.limits = {"tensor": tensors, "value": values}
        self.shared: set[int] = set()
        self.references: set[int] = set()


_Check = Callable[[_Walk, Node], list[Node]]
"""Checks one node and returns those below it."""


def _leaf(walk: _Walk, node: Node) -> list[Node]:
    number = node[1] if len(node) == 2 else None
    if type(number) is not int or not 0 <= number < walk.limits[node[0]]:
        raise InvalidManifest(f"A node of the tree points to a {node[0]} that is not there")
    return []


def _absent(walk: _Walk, node: Node) -> list[Node]:
    return _expect(node, len(node) == 1, [])


def _sequence(walk: _Walk, node: Node) -> list[Node]:
    return _expect(node, len(node) == 2 and type(node[1]) is list, node[-1])


def _deque(walk: _Walk, node: Node) -> list[Node]:
    _expect(node, len(node) == 3 and type(node[1]) is list, [])
    return _expect(node, node[2] is None or _is_count(node[2]), node[1])


def _set(walk: _Walk, node: Node) -> list[Node]:
    _expect(node, len(node) == 2 and type(node[1]) is list, [])
    _check_keys(node[1])
    return []


def _mapping(walk: _Walk, node: Node) -> list[Node]:
    return _items(node, 1, len(node) == 3)


def _ordered_dict(walk: _Walk, node: Node) -> list[Node]:
    nodes = _items(node, 1, len(node) in (3, 4))
    _check_attributes(node[3:])
    return [*nodes, *node[3:]]


def _default_dict(walk: _Walk, node: Node) -> list[Node]:
    return _items(node, 1, len(node) == 4 and (node[3] is None or type(node[3]) is str))


def _named(walk: _Walk, node: Node) -> list[Node]:
    nodes = _items(node, 2, len(node) == 4 and type(node[1]) is str)
    return _expect(node, all(type(name) is str for name in node[2]), nodes)


def _stateful(walk: _Walk, node: Node) -> list[Node]:
    return _expect(node, len(node) == 2, node[1:])


def _registered(walk: _Walk, node: Node) -> list[Node]:
    return _expect(node, len(node) == 3 and type(node[1]) is str, node[2:])


def _shared(walk: _Walk, node: Node) -> list[Node]:
    _expect(node, len(node) == 3 and _is_count(node[1]), [])
    if node[1] in walk.shared:
        raise DuplicateName(f"Two containers of the tree have the number {node[1]}")
    walk.shared.add(node[1])
    return node[2:]


def _reference(walk: _Walk, node: Node) -> list[Node]:
    _expect(node, len(node) == 2 and _is_count(node[1]), [])
    walk.references.add(node[1])
    return []


_NODES: dict[str, _Check] = {
    "tensor": _leaf,
    "value": _leaf,
    "absent": _absent,
    "dict": _mapping,
    "ordered_dict": _ordered_dict,
    "default_dict": _default_dict,
    "named_tuple": _named,
    "dataclass": _named,
    "list": _sequence,
    "tuple": _sequence,
    "deque": _deque,
    "set": _set,
    "frozenset": _set,
    "stateful": _stateful,
    "registered": _registered,
    "shared": _shared,
    "ref": _reference,
}


def _expect(node: Node, fits: bool, below: list[Node]) -> list[Node]:
    if not fits:
        raise InvalidManifest(f"A node of the kind {node[0]!r} is malformed")
    return below


def _is_count(data: Json) -> bool:
    return type(data) is int and 0 <= data < 1 << 62


def _items(node: Node, at: int, fits: bool) -> list[Node]:
    _expect(node, fits and type(node[at]) is list and type(node[at + 1]) is list, [])
    keys, nodes = node[at], node[at + 1]
    _expect(node, len(keys) == len(nodes), [])
    _check_keys(keys)
    return nodes  # type: ignore[no-any-return]


def _check_keys(keys: list[Json]) -> None:
    try:
        if not set(map(type, keys)) <= {str}:
            keys = [decode_key(key) for key in keys]
        distinct = len(set(keys))
    except RecursionError:
        raise InvalidManifest("A key is nested too deeply") from None
    if distinct < len(keys):
        raise DuplicateName("A container of the tree has a key twice")
