"""Arrange a saved mapping as a target has it, for loads in which labels count and not containers.

A label does not tell ``{"a.b": x}`` from ``{"a": {"b": x}}``. Transforms name labels, so either
form of the result fits either form of the target.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ckpipe.format.tree import MAPPINGS, Node
from ckpipe.loading.stateful import is_extra_state


def flattened(node: Node) -> Node:
    """Return the state of a module with dotted keys in place of mappings, as all modules have it.

    Only extra state may be a mapping.
    """
    if node[0] not in MAPPINGS:
        return node
    keys, nodes = [], []
    for key, child in zip(node[1], node[2], strict=True):
        inner = child[1] if child[0] == "stateful" else child
        if inner[0] not in MAPPINGS or not isinstance(key, str) or is_extra_state(key):
            keys.append(key)
            nodes.append(child)
            continue
        inner = flattened(inner)
        keys += [f"{key}.{each}" for each in inner[1]]
        nodes += inner[2]
    return [node[0], keys, nodes, *node[3:]]


def flattened_at(node: Node, key: str | None) -> Node:
    """Return a mapping in which the state of a module is flat, under one key."""
    if node[0] not in MAPPINGS or key not in node[1]:
        return node
    pairs = zip(node[1], node[2], strict=True)
    nodes = [flattened(child) if each == key else child for each, child in pairs]
    return [node[0], node[1], nodes, *node[3:]]


def regrouped(node: Node, live: Mapping[Any, Any], is_value: Callable[[Any], bool]) -> Node:
    """Return a mapping with dotted keys or mappings inside, as the target has them.

    Args:
        node: The mapping.
        live: The mapping of the target.
        is_value: Tells whether an object of the target is neither a container nor a tensor.
    """
    names = [key for key in live if isinstance(key, str)]
    given = list(zip(node[1], node[2], strict=True))
    for at, (key, child) in reversed([*enumerate(given)]):
        inner = child[1] if child[0] == "stateful" else child
        dotted = isinstance(key, str) and any(each.startswith(f"{key}.") for each in names)
        if dotted and key not in live and inner[0] in MAPPINGS:
            inner = flattened(inner)
            keys = (f"{key}.{each}" for each in inner[1])
            given[at : at + 1] = zip(keys, inner[2], strict=True)
    known = {key for key, _ in given if isinstance(key, str)}
    absent = [key for key in names if key not in known and not is_value(live[key])]
    groups: dict[str, Node] = {}
    found: list[tuple[Any, Node]] = []
    for key, child in given:
        group = next((each for each in absent if str(key).startswith(f"{each}.")), None)
        if group is None or not isinstance(key, str):
            found.append((key, child))
            continue
        if group not in groups:
            groups[group] = ["dict", [], []]
            found.append((group, groups[group]))
        groups[group][1].append(key[len(group) + 1 :])
        groups[group][2].append(child)
    return [node[0], [key for key, _ in found], [each for _, each in found], *node[3:]]
