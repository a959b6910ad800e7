"""Arrange a saved mapping as a target has it, for loads in which labels count and not containers.

A label does not tell ``{"a.b": x}`` from ``{"a": {"b": x}}``. Transforms name labels, so either
form of the result fits either form of the target.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ckpipe.format.tree import MAPPINGS, Node, mapping
from ckpipe.loading.stateful import is_extra_state


def flattened(node: Node) -> Node:
    """Return the state of a module with dotted keys in place of mappings, as all modules have it.

    Only extra state may be a mapping.
    """
    if node.kind not in MAPPINGS:
        return node
    items = []
    for key, child in node.items():
        inner = _bare(child)
        if inner.kind not in MAPPINGS or not isinstance(key, str) or is_extra_state(key):
            items.append((key, child))
        else:
            items += [(f"{key}.{below}", each) for below, each in flattened(inner).items()]
    return node.with_items(items)


def _bare(node: Node) -> Node:
    return node.inner if node.kind == "stateful" else node


def flattened_at(node: Node, key: str | None) -> Node:
    """Return a mapping in which the state of a module is flat, under one key."""
    if node.kind not in MAPPINGS or key not in node.keys:
        return node
    return node.with_nodes(
        flattened(child) if each == key else child for each, child in node.items()
    )


def regrouped(node: Node, live: Mapping[Any, Any], is_value: Callable[[Any], bool]) -> Node:
    """Return a mapping with dotted keys or mappings inside, as the target has them.

    Args:
        node: The mapping.
        live: The mapping of the target.
        is_value: Tells whether an object of the target is neither a container nor a tensor.
    """
    names = [key for key in live if isinstance(key, str)]
    given = list(node.items())
    for at, (key, child) in reversed([*enumerate(given)]):
        inner = _bare(child)
        dotted = isinstance(key, str) and any(each.startswith(f"{key}.") for each in names)
        if dotted and key not in live and inner.kind in MAPPINGS:
            flat = flattened(inner).items()
            given[at : at + 1] = [(f"{key}.{below}", each) for below, each in flat]
    known = {key for key, _ in given if isinstance(key, str)}
    absent = [key for key in names if key not in known and not is_value(live[key])]
    groups: dict[str, Node] = {}
    inside: dict[str, dict[str, Node]] = {}
    found: list[tuple[Any, Node]] = []
    for key, child in given:
        group = next((each for each in absent if str(key).startswith(f"{each}.")), None)
        if group is None or not isinstance(key, str):
            found.append((key, child))
            continue
        if group not in groups:
            groups[group], inside[group] = Node("dict"), {}
            found.append((group, groups[group]))
        inside[group][key[len(group) + 1 :]] = child
    for group, items in inside.items():
        groups[group].become(mapping(items))
    return node.with_items(found)
