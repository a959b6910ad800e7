"""Saved trees as data: their form, and what lies in a node.

A tree comes from a manifest that anybody may have written, so its form is checked once, before
anything walks it. :mod:`ckpipe.structure` says what the nodes mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ckpipe.errors import InvalidManifest
from ckpipe.keys import decode_key, join
from ckpipe.structure import Node

MAPPINGS = ("dict", "ordered_dict", "default_dict")
SEQUENCES = ("list", "tuple", "deque")
SETS = ("set", "frozenset")
RECORDS = ("named_tuple", "dataclass")


def checked_definitions(trees: Iterable[Any]) -> dict[int, Node]:
    """Checks the form of trees; returns the containers that references point to, by number.

    Raises:
        InvalidManifest: If a node has another form than its kind, a number is given twice, or a
            reference points nowhere.
    """
    found: dict[int, Node] = {}
    references: set[int] = set()
    pending = list(trees)
    while pending:
        node = pending.pop()
        check = _FORMS.get(node[0]) if isinstance(node, list) and node and _text(node[0]) else None
        if check is None or not check(*node[1:]):
            raise InvalidManifest(f"The tree has a node that is none: {node!r:.200}")
        if node[0] == "shared":
            if node[1] in found:
                raise InvalidManifest(f"The tree has two containers of number {node[1]}")
            found[node[1]] = node[2]
        elif node[0] == "ref":
            references.add(node[1])
        else:
            pending += _inner_nodes(node)
            continue
        pending += node[2:]
    lost = references.difference(found)
    if lost:
        raise InvalidManifest(f"The tree refers to containers that it has not: {sorted(lost)}")
    return found


def _text(data: Any) -> bool:
    return isinstance(data, str)


def _number(data: Any = None, *more: Any) -> bool:
    return type(data) is int and data >= 0 and not more


def _items(items: Any = None, *more: Any) -> bool:
    return isinstance(items, list) and not more


def _deque(items: Any = None, length: Any = None, *more: Any) -> bool:
    return _items(items, *more) and (length is None or _number(length))


def _mapping(keys: Any = None, nodes: Any = None, *rest: Any) -> bool:
    return isinstance(keys, list) and isinstance(nodes, list) and len(keys) == len(nodes)


def _record(name: Any = None, keys: Any = None, nodes: Any = None, *rest: Any) -> bool:
    return _text(name) and _mapping(keys, nodes) and all(map(_text, keys)) and not rest


_FORMS: dict[str, Callable[..., bool]] = {
    "tensor": _number,
    "value": _number,
    "ref": _number,
    "absent": lambda *rest: not rest,
    "dict": lambda *items: _mapping(*items) and len(items) == 2,
    "ordered_dict": lambda *items: _mapping(*items) and len(items) <= 3,
    "default_dict": lambda *items: (
        _mapping(*items) and len(items) == 3 and (items[2] is None or _text(items[2]))
    ),
    "list": _items,
    "tuple": _items,
    "set": _items,
    "frozenset": _items,
    "deque": _deque,
    "named_tuple": _record,
    "dataclass": _record,
    "stateful": lambda *rest: len(rest) == 1,
    "registered": lambda *rest: len(rest) == 2 and _text(rest[0]),
    "shared": lambda *rest: len(rest) == 2 and _number(rest[0]),
}


def children_of(node: Node, label: str) -> list[tuple[Any, Node, str]]:
    """The keys, nodes and labels of what a container node holds; nothing for other nodes."""
    tag = node[0]
    if tag in MAPPINGS:
        keys = [key if type(key) is str else decode_key(key) for key in node[1]]
        return [(key, child, join(label, key)) for key, child in zip(keys, node[2], strict=True)]
    if tag in SEQUENCES:
        return [(key, child, join(label, key)) for key, child in enumerate(node[1])]
    if tag in RECORDS:
        return [(k, child, join(label, k)) for k, child in zip(node[2], node[3], strict=True)]
    return []


def _inner_nodes(node: Node) -> list[Node]:
    """The nodes directly inside a node that is not shared, without their keys."""
    tag = node[0]
    if tag in MAPPINGS:
        return [*node[2], *(node[3:] if tag == "ordered_dict" else ())]
    if tag in SEQUENCES:
        return list(node[1])
    if tag in RECORDS:
        return list(node[3])
    return [node[-1]] if tag in ("registered", "stateful") else []


def leaf_labels(node: Node, label: str) -> Iterator[str]:
    """The labels of the tensors, values and sets of a tree."""
    tag = node[0]
    if tag in ("tensor", "value", "ref", *SETS):
        yield label
    elif tag in ("shared", "registered", "stateful"):
        yield from leaf_labels(node[-1], label)
    for _, child, where in children_of(node, label):
        yield from leaf_labels(child, where)
