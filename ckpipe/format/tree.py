"""The nodes of saved trees: what is in each kind, how a tree is walked, copied and written.

On the store a node is a list whose first item is its kind, as :mod:`ckpipe.state.flatten` shows.
In memory it is a :class:`Node`. Only this module knows the positions in the lists. A tree from a
store may be hostile, and its nesting must not exhaust Python's stack, so reading keeps a stack of
its own. Note 80 of ``docs/design.md`` tells why a node is an object.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from sys import intern
from typing import Any

from ckpipe.errors import InvalidManifest
from ckpipe.format.labels import Json, canonical, decode_key, joined


@dataclass(slots=True)
class Node:
    """A node of a tree.

    Args:
        kind: Its kind, one of :data:`FORMS`.
        head: The number of a leaf or a shared container, or other facts, as JSON.
        keys: Its keys, members or names of fields, encoded.
        nodes: The nodes inside, one for each key if there are keys. A wrapper has one.
        attributes: The node of the attributes of an ordered dict.
    """

    kind: str
    head: Json = None
    keys: Sequence[Json] = ()
    nodes: Sequence[Node] = ()
    attributes: Node | None = None

    @property
    def inner(self) -> Node:
        """The node in a wrapper."""
        return self.nodes[0]

    def items(self) -> Iterator[tuple[Json, Node]]:
        """Return pairs of a key, encoded, and the node under it."""
        return zip(self.keys, self.nodes, strict=True)

    def with_nodes(self, nodes: Iterable[Node]) -> Node:
        """Return a copy with other nodes inside, as many as it has."""
        return Node(self.kind, self.head, self.keys, list(nodes), self.attributes)

    def with_items(self, items: Iterable[tuple[Json, Node]]) -> Node:
        """Return a copy of a mapping with other items."""
        pairs = list(items)
        keys, nodes = [key for key, _ in pairs], [each for _, each in pairs]
        return Node(self.kind, self.head, keys, nodes, self.attributes)

    def become(self, other: Node) -> None:
        """Take over the content of another node, in all trees that this one is in."""
        self.kind, self.head, self.keys = other.kind, other.head, other.keys
        self.nodes, self.attributes = other.nodes, other.attributes

    def __reduce__(self) -> Any:
        """Pickle the whole tree as lists, which takes a tenth of the time."""
        return decoded, (encoded(self),)


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
"""The items of each kind of node after its kind, as it is stored; one with ``?`` may be null. An
ordered dict with attributes has one more item, their node. A filter leaves keys and attributes out;
elements and fields become ``["absent"]``.
"""

MAPPINGS = tuple(kind for kind, form in FORMS.items() if form[:2] == ("keys", "nodes"))
SETS = tuple(kind for kind, form in FORMS.items() if form == ("keys",))
WRAPPERS = tuple(kind for kind, form in FORMS.items() if "node" in form)
_POINTERS = ("tensor", "value", "ref")
LEAVES = (*_POINTERS, *SETS)
"""The kinds of nodes that hold something and have no nodes inside."""

_NUMBERED = ("tensor", "value")
_FIELDS = {
    "nodes": "nodes", "node": "inner", "keys": "keys", "fields": "keys", "attributes": "keys",
}  # fmt: skip
"""The field of :class:`Node` for each item of a form; the head for all others."""
_HELD = {kind: {_FIELDS.get(item, "head") for item in form} for kind, form in FORMS.items()}
_DROPPING = (*MAPPINGS, *(kind for kind, form in FORMS.items() if "attributes" in form))


def container_node(kind: str, head: Json, keys: Sequence[Json], nodes: Sequence[Node]) -> Node:
    """Return a container's node, without the head or keys that nodes of its kind do not have."""
    held = _HELD[kind]
    return Node(kind, head if "head" in held else None, keys if "keys" in held else (), nodes)


def mapping(items: Mapping[str, Node]) -> Node:
    """Return the node of a dict."""
    return Node("dict", keys=list(items), nodes=list(items.values()))


# Lists


def tree_json(data: Json) -> str:
    """Return the JSON of data that may hold nodes."""
    return canonical(data, _listed)


def _listed(node: Node) -> list[Json]:
    if node.kind in _NUMBERED:  # most nodes
        return [node.kind, node.head]
    items = [node.kind, *(getattr(node, _FIELDS.get(item, "head")) for item in FORMS[node.kind])]
    return items if node.attributes is None else [*items, node.attributes]


def encoded(tree: Node) -> Json:
    """Return the lists in which a tree is stored."""
    return json.loads(tree_json(tree))


def decoded(data: Json) -> Node:
    """Read a tree from its lists; its numbers and keys are not looked at.

    Raises:
        InvalidManifest: If a node is malformed.
    """
    found: list[Node] = []
    pending: list[_Pending] = [(found.append, [data])]
    while pending:
        put, items = pending.pop()
        for item in items:
            is_pair = type(item) is list and len(item) == 2
            if is_pair and item[0] in _NUMBERED and type(item[1]) is int:  # most nodes
                put(Node(intern(item[0]), item[1]))
            else:
                put(_opened(item, pending))
    return found[0]


_Pending = tuple[Callable[[Node], object], Sequence[Json]]
"""Lists of nodes that are still to be read, and the function that takes each."""


def _opened(data: list[Json], pending: list[_Pending]) -> Node:
    """Return the node of a list, and note what is still to be read for it."""
    if not _is_node(data) or data[0] not in FORMS:
        raise InvalidManifest(f"This is not a node of a tree: {_brief(data)}")
    node, form = Node(intern(data[0])), FORMS[data[0]]
    attributes = data[3:4] if node.kind == "ordered_dict" else []
    fits = len(data) - len(attributes) == len(form) + 1
    for item, value in zip(form, data[1:], strict=False):
        fits = fits and _FITS[item](value)
        if item == "node":
            node.nodes = [value]
        else:
            setattr(node, _FIELDS.get(item, "head"), value)
    inner, nodes = node.nodes, list[Node]()
    if not fits or ({"keys", "nodes"} <= _HELD[node.kind] and len(node.keys) != len(inner)):
        raise InvalidManifest(f"A node of the kind {node.kind!r} is malformed")
    if inner:
        node.nodes = nodes
        pending.append((nodes.append, inner))
    if attributes:
        pending.append((partial(setattr, node, "attributes"), attributes))
    return node


def _is_node(data: Json) -> bool:
    return type(data) is list and bool(data) and type(data[0]) is str


def is_count(data: Json) -> bool:
    return type(data) is int and 0 <= data < 1 << 62


def _is_names(data: Json) -> bool:
    return type(data) is list and all(type(name) is str for name in data)


_FITS: dict[str, Callable[[Any], bool]] = {
    "wrapper": lambda data: type(data) is dict,
    "node": lambda data: True,
    "nodes": lambda data: type(data) is list,
    "keys": lambda data: type(data) is list,
    "attributes": _is_names,
    "fields": _is_names,
    "text": lambda data: type(data) is str,
    "text?": lambda data: data is None or type(data) is str,
    "count": is_count,
    "count?": lambda data: data is None or is_count(data),
}


def _brief(data: Json) -> str:
    # A deep node is not printed, since printing recurses.
    if _is_node(data):
        return f"a list that begins with {data[0]!r:.100}"
    return f"a {type(data).__name__}"


# Walks


def containers(trees: Iterable[Node]) -> Iterator[Node]:
    """Yield the roots of trees and all containers in them, also those of attributes."""
    pending = list(trees)
    while pending:
        node = pending.pop()
        yield node
        pending += [each for each in node.nodes if each.kind not in _POINTERS]
        if node.attributes is not None:
            pending.append(node.attributes)


def shared_containers(trees: Iterable[Node]) -> dict[int, Node]:
    """Return the containers of trees that references point to, by number."""
    return {node.head: node.inner for node in containers(trees) if node.kind == "shared"}


def version_of(trees: Iterable[Node]) -> int:
    """Return the least version of the format that has all nodes of some trees."""
    return 2 if any(node.kind == "wrapper_tensor" for node in containers(trees)) else 1


def children_of(node: Node, label: str) -> list[tuple[Any, Node, str]]:
    """Return the keys, nodes and labels inside a container node; an empty list for other nodes."""
    if not node.nodes or node.kind in WRAPPERS:
        return []
    keys: Sequence[Any] = range(len(node.nodes))
    if node.keys:
        keys = [key if type(key) is str else decode_key(key) for key in node.keys]
    return list(zip(keys, node.nodes, joined(label, keys), strict=True))


def walk(node: Node, label: str = "") -> Iterator[tuple[Node, str]]:
    """Yield every node of a tree with its label; references are not followed."""
    pending = [(node, label)]
    while pending:
        node, label = pending.pop()
        yield node, label
        if not node.nodes:  # most nodes are leaves
            continue
        if node.kind in WRAPPERS:
            pending.append((node.inner, label))
        else:
            pending += [(child, where) for _, child, where in reversed(children_of(node, label))]


def wrappers_in(tree: Node) -> list[tuple[str, Node]]:
    """Return the outermost wrapper tensors of a tree, with their labels."""
    found: list[tuple[str, Node]] = []
    inside = "\0"
    for node, label in walk(tree) if version_of([tree]) > 1 else ():
        if node.kind == "wrapper_tensor" and not label.startswith(inside):
            found.append((label, node))
            inside = f"{label}."
    return found


def leaf_labels(node: Node, label: str) -> list[str]:
    """Return the labels of the tensors, values, sets and references of a tree."""
    return [at for each, at in walk(node, label) if each.kind in LEAVES]


# Copies


def rewritten(node: Node, visit: Callable[[Node], Node]) -> Node:
    """Return a copy of a tree with the results of a function in place of its nodes.

    Args:
        node: The root.
        visit: The function. It gets outer nodes first, and the nodes inside of what it returns.
    """
    made = visit(node)
    if not made.nodes and made.attributes is None:  # most nodes are leaves
        return made
    copy = made.with_nodes(rewritten(each, visit) for each in made.nodes)
    copy.attributes = made.attributes and rewritten(made.attributes, visit)
    return copy


def with_selected(node: Node, nodes: Sequence[Node | None]) -> Node:
    """Return a copy of a container's node with other nodes inside; None leaves one out."""
    if node.kind not in _DROPPING:
        return node.with_nodes(Node("absent") if each is None else each for each in nodes)
    pairs = zip(node.keys, nodes, strict=True)
    return node.with_items((key, each) for key, each in pairs if each is not None)
