"""Bring the weights of another program to the place where the target has its model.

Files of weights hold one flat dict of names. A run's state has a model somewhere, and more besides.
So the tree of such a file is moved below the one model of the target, and only that is loaded: the
rest of the state keeps its values, and is told as missing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from ckpipe.format.labels import Json, LabelFilter, canonical, join
from ckpipe.format.manifest import ManifestDocument
from ckpipe.format.tree import MAPPINGS, Node


def fitted(
    document: ManifestDocument, into: Any, select: LabelFilter
) -> tuple[ManifestDocument, LabelFilter, list[str], str]:
    """Return a foreign checkpoint with the form of a target, if the target has one place for it.

    Args:
        document: The foreign checkpoint.
        into: The target; its containers are looked at, and no tensor is.
        select: Selects the labels to load.

    Returns:
        The checkpoint, the filter, the labels of the target that are not its model, and the label
        below which the names were moved.
    """
    structure, (part,) = document.structures[0], document.parts
    path, kept, model = _place_of(into, structure.tree)
    tree = _with_ties(structure.tree, model)
    nested = tree
    for key in reversed(path):
        nested = ["dict", [key], [nested]]
    values = list(part.values)
    adapted = _with_optimizers(nested, into, values)
    if adapted is structure.tree:
        return document, select, kept, ""
    label = ""
    for key in path:
        label = join(label, key)
    rows = structure.tensors
    if label:
        rows = tuple(replace(row, label=f"{label}.{row.label}") for row in rows)
        include, exclude = select.patterns
        select = LabelFilter(list(include or [label]), list(exclude))
    moved = replace(structure, tree=adapted, tensors=rows, values=len(values))
    parts = (replace(part, values=tuple(values)),)
    return replace(document, structures=(moved,), parts=parts), select, kept, label


def _place_of(into: Any, tree: Node) -> tuple[list[str], list[str], Any]:
    """Return the path of the target's model, the labels beside it, and the model."""
    path: list[str] = []
    kept: list[str] = []
    label = ""
    while tree[0] in MAPPINGS:
        names = {key for key in tree[1] if isinstance(key, str)}
        weights = getattr(type(into), "__ckpipe_weights__", None)
        if weights is not None:
            return (path if weights in names else [*path, weights]), kept, None
        if not isinstance(into, dict) or not names.isdisjoint(into):
            break
        models = [key for key, value in into.items() if _is_model(value)]
        if len(models) != 1 or not isinstance(models[0], str):
            break
        kept += [join(label, key) for key in into if key != models[0]]
        path.append(models[0])
        label, into = join(label, models[0]), into[models[0]]
    return path, kept, into


def _is_model(value: Any) -> bool:
    return isinstance(value, torch.nn.Module) or hasattr(type(value), "__ckpipe_weights__")


def _with_ties(tree: Node, model: Any) -> Node:
    """Return the tree with all names of tied parameters, of which other programs write one."""
    if not isinstance(model, torch.nn.Module) or tree[0] not in MAPPINGS:
        return tree
    known = dict(zip(tree[1], tree[2], strict=True))
    ties: defaultdict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        ties[id(parameter)].append(name)
    more: Mapping[str, Node] = {
        name: known[given]
        for names in ties.values()
        if (given := next((each for each in names if each in known), None)) is not None
        for name in names
        if name not in known
    }
    if not more:
        return tree
    return [tree[0], [*tree[1], *more], [*tree[2], *more.values()], *tree[3:]]


def _with_optimizers(tree: Node, into: Any, values: list[Json]) -> Node:
    """Return the tree with the optimizers of training states in the form that these read.

    ``torch.distributed.checkpoint.state_dict`` has two forms. One is that of an optimizer, with
    names in place of numbers. The other is flat: ``state.<name>.<key>`` and
    ``param_groups.<name>.<option>``.

    Args:
        tree: The node.
        into: The target at this node.
        values: The inline values; gets the names of parameters.
    """
    if tree[0] not in MAPPINGS:
        return tree
    items = dict(zip(map(canonical, tree[1]), tree[2], strict=True))
    if isinstance(into, dict):
        adapted = [
            _with_optimizers(node, into[key], values) if isinstance(key, str) and key in into
            else node
            for key, node in zip(tree[1], tree[2], strict=True)
        ]  # fmt: skip
        if all(ours is theirs for ours, theirs in zip(adapted, tree[2], strict=True)):
            return tree
        return [tree[0], tree[1], adapted, *tree[3:]]
    if not hasattr(type(into), "__ckpipe_weights__"):
        return tree
    name = next((each for each in _OPTIMIZER_KEYS if canonical(each) in items), None)
    if name is None:
        return tree
    node = items[canonical(name)]
    flat = node[0] in MAPPINGS and bool(node[1]) and all(map(_is_flat, node[1]))
    if name == "optimizer" and not flat:
        return tree
    keys = ["optimizer" if key == name else key for key in tree[1]]
    nodes = [
        _nested_optimizer(each, values) if flat and key == name else each
        for key, each in zip(tree[1], tree[2], strict=True)
    ]
    return [tree[0], keys, nodes, *tree[3:]]


_OPTIMIZER_KEYS = ("optimizer", "optim", "optimizers")
"""Keys under which programs save the state of their optimizers beside the model's."""


def _is_flat(key: Json) -> bool:
    return isinstance(key, str) and key.startswith(("state.", "param_groups."))


def _nested_optimizer(node: Node, values: list[Json]) -> Node:
    """Return the nested form of a flat state, with a group of its own for each parameter."""
    found: dict[str, dict[str, dict[str, Node]]] = {"state": {}, "param_groups": {}}
    for key, child in zip(node[1], node[2], strict=True):
        kind, _, rest = key.partition(".")
        name, _, option = rest.rpartition(".")
        found[kind].setdefault(name, {})[option] = child
    groups: list[Node] = []
    for name, options in found["param_groups"].items():
        values.append(name)
        params: Node = ["list", [["value", len(values) - 1]]]
        groups.append(["dict", ["params", *options], [params, *options.values()]])
    states = [["dict", list(each), list(each.values())] for each in found["state"].values()]
    state = ["dict", list(found["state"]), states]
    return ["dict", ["state", "param_groups"], [state, ["list", groups]]]
