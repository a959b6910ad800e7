"""Objects with ``load_state_dict``: what they hold now, and what must fit before they are touched.

``load_state_dict`` of a module or optimizer can fail half way, with parts of the object already
changed. What can be foreseen is therefore checked before: shapes, dtypes, the keys of modules
that load as torch does by default, the groups of optimizers.

Parts of a state may have a meaning only together. An object says which by an attribute of its
class, ``__ckpipe_together__``: paths of keys in its state, of which a load takes all from the
checkpoint or leaves all as they are.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch

from ckpipe.errors import StructureMismatch
from ckpipe.format.keys import LabelFilter, join
from ckpipe.format.trees import Node, children_of
from ckpipe.loads.hints import Hint
from ckpipe.loads.selecting import any_selected


def live_state(obj: Any) -> Any:
    """What an object's ``state_dict`` holds, with a module's own parameters in it.

    ``load_state_dict`` of a module copies what it is given onto its parameters, which costs
    nothing where they are the same objects.
    """
    if isinstance(obj, torch.nn.Module):
        try:
            return obj.state_dict(keep_vars=True)
        except TypeError:  # a subclass that takes no such argument
            return obj.state_dict()
    return obj.state_dict()


def hint_for(obj: Any, select: LabelFilter) -> Hint:
    """What a rebuilt state may take from an object."""
    return Hint(live_state(obj), isinstance(obj, _STRICT), select)


_STRICT = (torch.nn.Module, torch.optim.Optimizer)


def check_stateful(obj: Any, hint: Hint, node: Node, label: str) -> None:
    """Makes sure that an object can load a saved state, as far as that can be known.

    Args:
        obj: The object.
        hint: What it holds.
        node: What was saved.
        label: Where it stands in the state.

    Raises:
        StructureMismatch: If it cannot.
    """
    _check_together(obj, hint, node, label)
    if isinstance(obj, torch.nn.Module) and _loads_as_torch_does(obj):
        _check_module(hint, node, label)
    elif isinstance(obj, torch.optim.Optimizer):
        _check_optimizer(obj, node, label)


def _check_together(obj: Any, hint: Hint, node: Node, label: str) -> None:
    paths: tuple[tuple[str, ...], ...] = getattr(type(obj), "__ckpipe_together__", ())
    if hint.select.selects_all or not paths:
        return
    taken = [path for path in paths if _is_taken(node, path)]
    kept = [path for path in paths if _is_kept(hint, path, label)]
    if taken and kept:
        one, other = _label(taken[0], label), _label(kept[0], label)
        raise StructureMismatch(
            f"{one!r} is to be loaded and {other!r} is not, and one without the other would be "
            "misread",
            key=label or None,
            hint=f"Include {other!r} as well, or leave both out",
        )


def _label(path: tuple[str, ...], top: str) -> str:
    return reduce(join, path, top)


def _is_taken(node: Node, path: tuple[str, ...]) -> bool:
    """Whether anything is to be loaded at a path; empty containers are there in any case."""
    for step in path:
        found = [child for key, child, _ in children_of(_inside(node), "") if key == step]
        if not found:
            return False
        (node,) = found
    return _holds_any(node)


def _holds_any(node: Node) -> bool:
    if node[0] in ("tensor", "value"):
        return True
    return any(_holds_any(child) for _, child, _ in children_of(_inside(node), ""))


def _is_kept(hint: Hint, path: tuple[str, ...], label: str) -> bool:
    """Whether an object has something at a path, and keeps it because it was not selected."""
    live = hint.live
    for step in path:
        live = live.get(step) if isinstance(live, dict) else None
    return bool(live) and not any_selected(live, _label(path, label), hint.select)


def _loads_as_torch_does(module: torch.nn.Module) -> bool:
    base = torch.nn.Module
    return type(module).load_state_dict is base.load_state_dict and all(
        type(each)._load_from_state_dict is base._load_from_state_dict
        and not each._load_state_dict_pre_hooks
        and not each._load_state_dict_post_hooks
        for each in module.modules()
    )


def _check_module(hint: Hint, node: Node, label: str) -> None:
    saved = {key for key, _, _ in children_of(node, label)}
    live = dict(hint.live)
    missing = [
        join(label, key)
        for key in live
        if key not in saved and any_selected(live[key], join(label, key), hint.select)
    ]
    unexpected = [join(label, key) for key in saved if key not in live]
    if missing or unexpected:
        raise mismatch(missing, unexpected, label, hint="Load it into a module of the same layers")


def _check_optimizer(obj: torch.optim.Optimizer, node: Node, label: str) -> None:
    groups = next((n for key, n, _ in children_of(node, label) if key == "param_groups"), None)
    if groups is None:
        return
    saved = [_parameter_count(group) for _, group, _ in children_of(_inside(groups), "")]
    live = [len(group["params"]) for group in obj.param_groups]
    if saved != live and None not in saved:
        raise StructureMismatch(
            f"The optimizer has groups of {live} parameters, the checkpoint of {saved}",
            key=label or None,
            hint="Make it over the same parameters in the same groups",
        )


def _parameter_count(group: Node) -> int | None:
    """How many parameters a saved group has; None if that was not selected."""
    for key, node, _ in children_of(_inside(group), ""):
        if key == "params":
            return len(children_of(_inside(node), ""))
    return None


def _inside(node: Node) -> Node:
    inner: Node = node[2] if node[0] == "shared" else node
    return inner


def mismatch(
    missing: list[str], unexpected: list[str], label: str = "", *, hint: str
) -> StructureMismatch:
    """The error for labels that only one side has."""
    parts = [
        f"{title}: {_some(labels)}"
        for title, labels in (
            ("missing in the checkpoint", missing),
            ("unexpected in it", unexpected),
        )
        if labels
    ]
    return StructureMismatch(
        "The checkpoint does not fit the target; " + "; ".join(parts), key=label or None, hint=hint
    )


def _some(labels: list[str], most: int = 8) -> str:
    named = ", ".join(repr(label) for label in labels[:most])
    return f"{named} and {len(labels) - most} more" if len(labels) > most else named
