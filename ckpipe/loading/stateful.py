"""Objects with ``load_state_dict``: what they hold now, and what must fit before they are touched.

``load_state_dict`` of a module or optimizer can fail half way, with parts of the object already
changed. What can be foreseen is therefore checked before: shapes, dtypes, the keys of modules that
load as torch does by default, the groups of optimizers. The tensors that an object's own
``state_dict`` holds now are filled and used instead of new ones, so that ``load_state_dict`` finds
its own.

An object that can do better than ``load_state_dict`` says so by a method::

    def __ckpipe_targets__(self, saved: SavedObject) -> LoadTargets: ...

It is asked what is to be filled, before a byte is read: it finds out whether all fits, makes what
tensors it needs, and touches nothing. Once all bytes are there and verified, ``attach`` of its
answer is called, and ``load_state_dict`` is not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, TypeVar

import torch

from ckpipe.errors import StructureMismatch
from ckpipe.format.keys import LabelFilter, join
from ckpipe.format.tree import Node, children_of
from ckpipe.loading.select import any_selected


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor of a checkpoint before it is read.

    Args:
        dtype: Its dtype.
        shape: Its shape; of a sharded tensor that of all shards together.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]


_Found = TypeVar("_Found")


class Looks:
    """Remember what was found out of live objects, for a load that is matched several times.

    Looking may call a collective, as with FSDP1, and then all ranks must do so equally often. How
    often they match is up to each.
    """

    def __init__(self) -> None:
        self._found: dict[int, tuple[object, Any]] = {}

    def once(self, obj: object, look: Callable[[], _Found]) -> _Found:
        """What a look at an object finds, or has found before."""
        if id(obj) not in self._found:
            self._found[id(obj)] = obj, look()  # with the object, as its identity must not go
        found: _Found = self._found[id(obj)][1]
        return found


@dataclass(frozen=True, slots=True)
class SavedObject:
    """An object of a checkpoint before its tensors are read.

    Args:
        state: What its ``state_dict`` returned, with a :class:`SavedTensor` for each tensor, and
            without what ``include`` and ``exclude`` leave out.
        label: Where it stands in the state.
        select: Which labels are to be loaded.
        common: The labels that all ranks had, if not all had the same ones.
        cast: Whether values may be converted to the dtype of a target tensor.
        looks: What was found out of objects so far.
    """

    state: Any
    label: str = ""
    select: LabelFilter = field(default_factory=LabelFilter)
    common: frozenset[str] | None = None
    cast: bool = False
    looks: Looks = field(default_factory=Looks)

    def at(self, *path: Any) -> str:
        """The label of a part."""
        return reduce(join, path, self.label)

    def selects(self, *path: Any) -> bool:
        """Tell whether a part is to be loaded."""
        return self.select.selects_all or self.select(self.at(*path))

    def is_everywhere(self, label: str) -> bool:
        """Tell whether all ranks that saved had something of a label."""
        return self.common is None or label in self.common


@dataclass(slots=True)
class LoadTargets:
    """The parts of an object that a load is to fill.

    Args:
        tree: Containers like those of the saved state, with a tensor in each place that is to be
            filled, and None for what is made anew. What it has no key for is left in the store.
        attach: Puts what was loaded in place. By then all of ``tree`` is filled, each None
            replaced.
        missing: Labels that the object has and the checkpoint has not.
        unexpected: Labels that the checkpoint has and the object does without.
    """

    tree: Any
    attach: Callable[[], None]
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)


def live_state(obj: Any) -> Any:
    """The contents of an object's ``state_dict``, with a module's own parameters in it.

    ``load_state_dict`` of a module copies what it is given onto its parameters, which costs
    nothing where they are the same objects.
    """
    if isinstance(obj, torch.nn.Module):
        try:
            return obj.state_dict(keep_vars=True)
        except TypeError:  # a subclass that takes no such argument
            return obj.state_dict()
    return obj.state_dict()


# They add a counter that checkpoints of old versions lack, and refuse one that is not theirs.
_NORMALIZATIONS = ("torch.nn.modules.batchnorm", "torch.nn.modules.instancenorm")


def loads_as_torch_does(module: torch.nn.Module) -> bool:
    """Tell whether a module loads as torch does by default, without code of its own."""
    base = torch.nn.Module
    return type(module).load_state_dict is base.load_state_dict and all(
        (
            type(each)._load_from_state_dict is base._load_from_state_dict
            or type(each)._load_from_state_dict.__module__ in _NORMALIZATIONS
        )
        and not each._load_state_dict_pre_hooks
        and not each._load_state_dict_post_hooks
        for each in module.modules()
    )


def check_module(
    live: Any, node: Node, label: str, select: LabelFilter, common: frozenset[str] | None
) -> None:
    """Refuse keys that do not fit those of a module that loads as torch does.

    Args:
        live: The state that it holds.
        node: What was saved.
        label: Where it stands in the state.
        select: What of it is to be loaded.
        common: The labels that all ranks had, if not all had the same ones.

    Raises:
        StructureMismatch: If they do not fit.
    """
    saved = {key for key, _, _ in children_of(node, label)}
    live = dict(live)
    missing = [
        join(label, key)
        for key in live
        if key not in saved
        and not key.endswith("num_batches_tracked")
        and any_selected(live[key], join(label, key), select)
    ]
    unexpected = [join(label, key) for key in saved if key not in live]
    if common is not None:
        unexpected = [each for each in unexpected if each in common]
    if missing or unexpected:
        raise mismatch(missing, unexpected, label, hint="Load it into a module of the same layers")


def check_optimizer(obj: torch.optim.Optimizer, node: Node, label: str, *, options: bool) -> None:
    """Refuse groups that do not fit those of an optimizer.

    ``load_state_dict`` takes groups that lack what the optimizer's step needs, those of another
    kind of optimizer, as they are, and the first step fails, or works without its state. Options
    that torch has added since, an optimizer's own ``__setstate__`` adds too; it is asked on a copy.
    """
    kind = type(obj)
    groups = next((n for key, n, _ in children_of(node, label) if key == "param_groups"), None)
    if groups is None:
        return
    saved = [
        {key: child for key, child, _ in children_of(_inside(group), "")}
        for _, group, _ in children_of(_inside(groups), "")
    ]
    # A group without parameters is one whose parameters were not selected.
    counts = [
        len(children_of(_inside(group["params"]), "")) if "params" in group else None
        for group in saved
    ]
    live = [len(group["params"]) for group in obj.param_groups]
    if counts != live and None not in counts:
        raise StructureMismatch(
            f"The optimizer has groups of {live} parameters, the checkpoint of {counts}",
            key=label or None,
            hint="Make it over the same parameters in the same groups",
        )
    if not options or kind.load_state_dict is not torch.optim.Optimizer.load_state_dict:
        return
    has = sorted({key for group in saved for key in group if key not in obj.defaults} - {"params"})
    bare: list[dict[Any, Any]] = [{**dict.fromkeys(group), "params": []} for group in saved]
    try:
        copy = object.__new__(kind)
        copy.__setstate__({"defaults": dict(obj.defaults), "state": {}, "param_groups": bare})
    except Exception:  # an optimizer of the user's that wants more, and says so itself
        return
    needed = obj.defaults.keys() - _WAYS_TO_STEP
    lacks = sorted({key for key in needed for group in bare if key not in group})
    if lacks:
        raise StructureMismatch(
            f"The state is of another kind of optimizer: it lacks {', '.join(lacks)}, which "
            f"{kind.__name__} needs" + (f", and has {', '.join(has)}" if has else ""),
            key=label or None,
            hint="Make the kind of optimizer that was saved, or leave its state out with exclude",
        )


# Torch adds one of them to the defaults of any optimizer once it has loaded a state.
_WAYS_TO_STEP = {"foreach", "fused", "capturable", "differentiable"}


def _inside(node: Node) -> Node:
    inner: Node = node[2] if node[0] == "shared" else node
    return inner


def mismatch(
    missing: list[str], unexpected: list[str], label: str = "", *, hint: str
) -> StructureMismatch:
    """The error for labels that only one side has."""
    bare = {_unwrapped(each) for each in missing} & {_unwrapped(each) for each in unexpected}
    if bare:
        hint = (
            "The names on one side have a prefix of a wrapper, such as DDP or torch.compile: save "
            "and load ckpipe.distributed.training_state(model, optimizer), which has the names of "
            "the bare model"
        )
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


_WRAPPER_NAMES = ("module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def _unwrapped(label: str) -> str:
    """A label without the names under which wrappers hold a module."""
    return ".".join([part for part in label.split(".") if part not in _WRAPPER_NAMES])


def _some(labels: list[str], most: int = 8) -> str:
    named = ", ".join(repr(label) for label in labels[:most])
    return f"{named} and {len(labels) - most} more" if len(labels) > most else named
