"""Bring the weights of another program to the place where the target has its model.

Files of weights hold one flat dict of names. A run's state has a model somewhere, and more besides.
So the tree of such a file is moved below the one model of the target, and only that is loaded: the
rest of the state keeps its values, and is told as missing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ckpipe.errors import StructureMismatch
from ckpipe.format.labels import Json, LabelFilter, decode_key, join
from ckpipe.format.manifest import ManifestDocument, TensorRow
from ckpipe.format.tree import MAPPINGS, Node, mapping
from ckpipe.loading.by_label import flattened
from ckpipe.loading.optimizers import check_counts, check_state
from ckpipe.loading.stateful import SavedTensor
from ckpipe.reading.live_tensors import tie_of
from ckpipe.state import training_form as form
from ckpipe.state.values import UNREAD, decode_value


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

    Raises:
        StructureMismatch: If the optimizer of a training state has parameters in other groups.
        ShapeMismatch: If its parameters have other shapes.
    """
    structure, (part,) = document.structures[0], document.parts
    path, kept, target = _place_of(into, structure.tree)
    nested = _with_ties(structure.tree, target)
    for key in reversed(path):
        nested = mapping({key: nested})
    values = list(part.values)
    adapted = _Optimizers(structure.tensors, values, select).named(nested, into, "")
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
    """Return the path of the target's model, the labels beside it, and the object there."""
    path: list[str] = []
    kept: list[str] = []
    label = ""
    while tree.kind in MAPPINGS:
        names = {key for key in tree.keys if isinstance(key, str)}
        weights = getattr(type(into), form.WEIGHTS, None)
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


def parameters_of(into: Any, label: str = "") -> dict[str, list[str]]:
    """Return for the label of each model in a target those of its parameters, in their order."""
    if isinstance(into, dict | list | tuple):
        items = into.items() if isinstance(into, dict) else enumerate(into)
        inner = [parameters_of(each, join(label, key)) for key, each in items]
        return {at: names for models in inner for at, names in models.items()}
    modules = [into] if isinstance(into, torch.nn.Module) else []
    if weights := getattr(type(into), form.WEIGHTS, None):
        label, modules = join(label, weights), into._modules
    return {label: [join(label, n) for each in modules for n, _ in each.named_parameters()]}


def has_place_for(into: Any, label: str) -> bool:
    """Return False if a target certainly takes nothing under a label of a checkpoint."""
    if isinstance(into, dict) and not any(map(form.is_training_state, into.values())):
        return any(f"{label}.".startswith(f"{join('', key)}.") for key in into)
    return not isinstance(into, torch.nn.Module)


def _is_model(value: Any) -> bool:
    return isinstance(value, torch.nn.Module) or form.is_training_state(value)


def _with_ties(tree: Node, into: Any) -> Node:
    """Return the tree with all names of tied tensors, of which other programs write one."""
    if tree.kind not in MAPPINGS:
        return tree
    if isinstance(into, dict):
        return tree.with_nodes(
            _with_ties(node, into.get(key)) if isinstance(key, str) else node
            for key, node in tree.items()
        )
    if not isinstance(into, torch.nn.Module):
        return tree
    flat = flattened(tree)  # a transform may have put names below a prefix
    known = dict(flat.items())
    ties: defaultdict[Hashable, list[str]] = defaultdict(list)
    for path, module in into.named_modules(remove_duplicate=False):
        for name, each in (*module._parameters.items(), *module._buffers.items()):
            if each is not None and name not in module._non_persistent_buffers_set:
                ties[tie_of(each)].append(f"{path}.{name}" if path else name)
    more: Mapping[str, Node] = {
        name: known[given]
        for names in ties.values()
        if (given := next((each for each in names if each in known), None)) is not None
        for name in names
        if name not in known
    }
    if not more or len(known) < len(flat.keys):  # of two equal names neither may win
        return tree
    return flat.with_items([*flat.items(), *more.items()])


class _Optimizers:
    """Puts the optimizers of training states into the form that these read: by name.

    Programs save three others. ``torch.optim.Optimizer.state_dict`` numbers its parameters in the
    order of its groups. ``torch.distributed.checkpoint.state_dict`` has names in place of these
    numbers, or flat keys ``state.<name>.<key>`` and ``param_groups.<name>.<option>``.

    Args:
        rows: The tensors of the checkpoint.
        values: Its inline values; gets the names of parameters.
        select: Selects the labels to load.
    """

    def __init__(self, rows: Sequence[TensorRow], values: list[Json], select: LabelFilter) -> None:
        self._rows, self._values, self._select = rows, values, select

    def named(self, tree: Node, into: Any, label: str) -> Node:
        """Return a tree with the optimizers of the training states in a target by name."""
        if tree.kind not in MAPPINGS:
            return tree
        if isinstance(into, dict):
            tree = _gathered(tree, into)
            return tree.with_nodes(
                self.named(node, into[key], join(label, key))
                if node.kind in MAPPINGS and isinstance(key, str) and key in into
                else node
                for key, node in tree.items()
            )
        name = next((each for each in _OPTIMIZER_KEYS if each in tree.keys), None)
        if name is None or not form.is_training_state(into):
            return tree
        label = join(label, form.OPTIMIZER)
        node = tree.nodes[tree.keys.index(name)]
        if node.kind in MAPPINGS and self._select.may_select(label):
            if node.keys and all(map(_is_flat, node.keys)):
                node = self._unflattened(node)
            else:
                node = self._unnumbered(node, into.__ckpipe_look__()[1], label)
        return tree.with_items(
            (form.OPTIMIZER, node) if key == name else (key, each) for key, each in tree.items()
        )

    def _value(self, value: Json) -> Node:
        self._values.append(value)
        return Node("value", len(self._values) - 1)

    def _unflattened(self, node: Node) -> Node:
        """Return the nested form of a flat state, with a group of its own for each parameter."""
        found: dict[str, dict[str, dict[str, Node]]] = {"state": {}, "param_groups": {}}
        for key, child in node.items():
            kind, _, rest = key.partition(".")
            name, _, option = rest.rpartition(".")
            found[kind].setdefault(name, {})[option] = child
        groups: list[Node] = [
            mapping({"params": Node("list", nodes=[self._value(name)]), **options})
            for name, options in found["param_groups"].items()
        ]
        state = mapping({name: mapping(each) for name, each in found["state"].items()})
        return mapping({"state": state, "param_groups": Node("list", nodes=groups)})

    def _unnumbered(self, node: Node, optimizers: Sequence[Any], label: str) -> Node:
        """Return a state with the names of parameters in place of their numbers."""
        saved = self._opened(node)
        groups = form.groups_of(saved.get("param_groups"))
        numbers = [number for group in groups for number in group.get("params", ())]
        if not numbers or not all(type(each) is int for each in numbers) or not optimizers:
            return node
        if len(optimizers) > 1 or optimizers[0].fsdp is not None:
            raise StructureMismatch(
                "The checkpoint numbers the parameters of one optimizer, in the order of its "
                "groups, which several optimizers and FSDP1 do not have",
                key=label,
                hint="Load the optimizer's state into a training_state of one optimizer",
            )
        optimizer = optimizers[0].optimizer
        check_counts(optimizer, groups, label)
        check_state(optimizer, form.states_of(saved), groups, label)
        names = dict(zip(numbers, (each[0] for each in optimizers[0].names), strict=True))
        items = dict(node.items())
        found = []
        for each, group in zip(items["param_groups"].nodes, groups, strict=True):
            params = Node("list", nodes=[self._value(names[number]) for number in group["params"]])
            found.append(
                each.with_nodes(params if key == "params" else child for key, child in each.items())
            )
        items["param_groups"] = Node("list", nodes=found)
        if "state" in items:
            state = items["state"]
            items["state"] = state.with_items(
                (names[key] if key in numbers else key, each) for key, each in state.items()
            )
        return mapping(items)

    def _opened(self, node: Node) -> Any:
        """Return a tree as Python's objects, with a description in place of each tensor."""
        if node.kind == "tensor":
            row = self._rows[node.head]
            return SavedTensor(getattr(torch, row.dtype), row.shape)
        if node.kind == "value":
            data = self._values[node.head]
            return None if isinstance(data, list) and data[0] == UNREAD else decode_value(data)
        if node.kind in MAPPINGS:
            return {decode_key(key): self._opened(each) for key, each in node.items()}
        return list(map(self._opened, node.nodes)) if node.kind in ("list", "tuple") else None


def _gathered(tree: Node, into: dict[Any, Any]) -> Node:
    """Return a tree with a model and its optimizer below the one training state of a dict."""
    homes = [
        key
        for key, value in into.items()
        if form.is_training_state(value) and isinstance(key, str) and key not in tree.keys
    ]
    parts = [each for each in ("model", *_OPTIMIZER_KEYS) if each in tree.keys and each not in into]
    if len(homes) != 1 or "model" not in parts:
        return tree
    inner = mapping({key: node for key, node in tree.items() if key in parts})
    beside = [(key, node) for key, node in tree.items() if key not in parts]
    return tree.with_items([*beside, (homes[0], inner)])


_OPTIMIZER_KEYS = (form.OPTIMIZER, "optim", "optimizers")
"""Keys under which programs save the state of their optimizers beside the model's."""


def _is_flat(key: Json) -> bool:
    return isinstance(key, str) and key.startswith((f"{form.STATE}.", f"{form.PARAM_GROUPS}."))
