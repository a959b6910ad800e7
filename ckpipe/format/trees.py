"""Saved trees as data: what lies in a node.

A tree comes from a manifest that anybody may have written; its form was checked when that was
decoded (:mod:`ckpipe.format.tree_checks`). :mod:`ckpipe.state.flatten` says what the nodes mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ckpipe.format.keys import decode_key, joined

Node = list[Any]
"""A node of a tree: a list whose first item says what it is."""

MAPPINGS = ("dict", "ordered_dict", "default_dict")
SEQUENCES = ("list", "tuple", "deque")
SETS = ("set", "frozenset")
RECORDS = ("named_tuple", "dataclass")
_LEAVES = ("tensor", "value", "ref", "absent", *SETS)


def shared_containers(trees: Iterable[Node]) -> dict[int, Node]:
    """The containers of trees that references point to, by number."""
    found: dict[int, Node] = {}
    pending = list(trees)
    while pending:
        node = pending.pop()
        if node[0] == "shared":
            found[node[1]] = node[2]
        pending += [inner for inner in _inner_nodes(node) if inner[0] not in _LEAVES]
    return found


def children_of(node: Node, label: str) -> list[tuple[Any, Node, str]]:
    """The keys, nodes and labels of what a container node holds; nothing for other nodes."""
    tag = node[0]
    if tag in MAPPINGS:
        keys = [key if type(key) is str else decode_key(key) for key in node[1]]
        return list(zip(keys, node[2], joined(label, keys), strict=True))
    if tag in SEQUENCES:
        keys = list(range(len(node[1])))
        return list(zip(keys, node[1], joined(label, keys), strict=True))
    if tag in RECORDS:
        return list(zip(node[2], node[3], joined(label, node[2]), strict=True))
    return []


def _inner_nodes(node: Node) -> list[Node]:
    """The nodes directly inside a node, without their keys."""
    tag = node[0]
    if tag in MAPPINGS:
        return [*node[2], *(node[3:] if tag == "ordered_dict" else ())]
    if tag in SEQUENCES:
        return node[1]  # type: ignore[no-any-return]
    if tag in RECORDS:
        return node[3]  # type: ignore[no-any-return]
    return [node[-1]] if tag in ("registered", "stateful", "shared") else []


def leaf_labels(node: Node, label: str) -> Iterator[str]:
    """The labels of the tensors, values and sets of a tree."""
    tag = node[0]
    if tag in ("tensor", "value", "ref", *SETS):
        yield label
    elif tag in ("shared", "registered", "stateful"):
        yield from leaf_labels(node[-1], label)
    for _, child, where in children_of(node, label):
        yield from leaf_labels(child, where)
