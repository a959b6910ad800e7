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

from ckpipe.format.keys import LabelFilter, join
from ckpipe.format.manifest import ManifestDocument
from ckpipe.format.tree import MAPPINGS, Node


def fitted(
    document: ManifestDocument, into: Any, select: LabelFilter
) -> tuple[ManifestDocument, LabelFilter, list[str]]:
    """Return a foreign checkpoint with the form of a target, if the target has one place for it.

    Args:
        document: The foreign checkpoint.
        into: The target; its containers are looked at, and no tensor is.
        select: Selects the labels to load.

    Returns:
        The checkpoint, the filter, and the labels of the target that are not its model.
    """
    structure = document.structures[0]
    path, kept, model = _place_of(into, structure.tree)
    tree = _with_ties(structure.tree, model)
    if not path and tree is structure.tree:
        return document, select, kept
    label = ""
    for key in path:
        label = join(label, key)
    for key in reversed(path):
        tree = ["dict", [key], [tree]]
    rows = structure.tensors
    if label:
        rows = tuple(replace(row, label=f"{label}.{row.label}") for row in rows)
        include, exclude = select.patterns
        select = LabelFilter(list(include or [label]), list(exclude))
    moved = replace(structure, tree=tree, tensors=rows)
    return replace(document, structures=(moved,)), select, kept


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
