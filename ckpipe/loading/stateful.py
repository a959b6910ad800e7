"""Objects with ``load_state_dict``: read their live state, and check them before they are changed.

``load_state_dict`` of a module or optimizer can fail half way, with parts of the object already
changed. So foreseeable errors are checked first: shapes, dtypes, the keys of modules that load as
torch does by default. :mod:`ckpipe.loading.optimizers` checks optimizers. The load fills the
tensors of the object's current ``state_dict`` instead of new ones, so that ``load_state_dict`` gets
the object's own tensors.

An object that can do better than ``load_state_dict`` has a method::

    def __ckpipe_targets__(self, saved: SavedObject) -> LoadTargets: ...

It is called before a byte is read and returns the tensors to fill: it checks that the saved object
fits, makes the tensors that it needs, and changes nothing. Once all bytes are read and verified,
``attach`` of the returned object is called instead of ``load_state_dict``.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import reduce
from itertools import chain, takewhile
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler

from ckpipe.errors import StructureMismatch
from ckpipe.format.labels import LabelFilter, join, unwrapped
from ckpipe.format.manifest import TensorRow
from ckpipe.format.tree import Node, children_of, leaf_labels
from ckpipe.reading.chunks import HeldElements
from ckpipe.reading.live_tensors import without_ties
from ckpipe.reading.select import any_selected
from ckpipe.state_helpers import RngState, numpy_state, python_state
from ckpipe.types import first_of

if TYPE_CHECKING:
    from ckpipe.loading.request import LoadRequest


def _plain_request() -> LoadRequest:
    from ckpipe.loading.request import LoadRequest  # imports settings, which batches do without

    return LoadRequest()


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor of a checkpoint before it is read.

    Args:
        dtype: Its dtype.
        shape: Its shape; of a sharded tensor the global shape.
        held: Tells how much of a target tensor's elements the checkpoint has; None for all.
        like: Of a wrapper tensor, makes one to fill, on a device, that is sharded like a DTensor
            if one is given; None for any other tensor.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    held: Callable[[torch.Tensor], HeldElements] | None = field(
        default=None, compare=False, repr=False
    )
    like: Callable[[torch.Tensor | None, torch.device], torch.Tensor] | None = field(
        default=None, compare=False, repr=False
    )


_Found = TypeVar("_Found")


class InspectionMemo:
    """A memo of the facts of live objects, for a load that is matched several times.

    To read such a fact may call a collective, as with FSDP1. Then all ranks must read it equally
    often, while the number of matches differs between ranks.
    """

    def __init__(self) -> None:
        self._found: dict[int, tuple[object, Any]] = {}

    def once(self, obj: object, look: Callable[[], _Found]) -> _Found:
        """Return the result of ``look`` for an object, computed at the first call."""
        if id(obj) not in self._found:
            self._found[id(obj)] = obj, look()  # keep the object, so that its id is not reused
        found: _Found = self._found[id(obj)][1]
        return found


@dataclass(frozen=True, slots=True)
class SavedObject:
    """An object of a checkpoint before its tensors are read.

    Args:
        state: Its saved ``state_dict``, with a :class:`SavedTensor` for each tensor, and without
            the labels that ``include`` and ``exclude`` leave out.
        label: Its label in the state.
        select: Selects the labels to load.
        common: The labels that all ranks had, if not all had the same ones.
        request: The arguments of the load.
        memo: The memo of facts of live objects.
        from_others: The labels that the loading rank did not save itself, in a world of equal size.
        above: The label below which the names of a foreign checkpoint were moved.
    """

    state: Any
    label: str = ""
    select: LabelFilter = field(default_factory=LabelFilter)
    common: frozenset[str] | None = None
    request: LoadRequest = field(default_factory=_plain_request)
    memo: InspectionMemo = field(default_factory=InspectionMemo)
    from_others: frozenset[str] = frozenset()
    above: str = ""

    def at(self, *path: Any) -> str:
        """Return the label of an item, by its path of keys."""
        return reduce(join, path, self.label)

    def selects(self, *path: Any) -> bool:
        """Tell whether an item is to be loaded, by its path of keys."""
        return self.select.selects_all or self.select(self.at(*path))

    def is_everywhere(self, label: str) -> bool:
        """Tell whether all ranks that saved had a label."""
        return self.common is None or label in self.common


@dataclass(slots=True)
class LoadTargets:
    """The tensors of an object that a load fills.

    Args:
        tree: Containers like those of the saved state. Each item is a tensor to fill, or None for
            an object that the load makes. Saved items without a key here are not read.
        attach: Puts the loaded items in place. It is called after all of ``tree`` is filled and
            each None replaced.
        missing: Labels that the object has and the checkpoint has not.
        unexpected: Labels that the checkpoint has and the object does without.
    """

    tree: Any
    attach: Callable[[], None]
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)


def live_state(obj: Any) -> Any:
    """Return an object's ``state_dict``, with a module's own parameters in it.

    ``load_state_dict`` of a module copies the given tensors onto its parameters, which costs
    nothing if they are the same objects.
    """
    if isinstance(obj, torch.nn.Module):
        try:
            return obj.state_dict(keep_vars=True)
        except TypeError:  # a subclass that takes no such argument
            return obj.state_dict()
    return obj.state_dict()


# They add a counter that old checkpoints lack, and refuse a counter that they do not have.
_NORMALIZATIONS = ("torch.nn.modules.batchnorm", "torch.nn.modules.instancenorm")


def loads_as_torch_does(module: torch.nn.Module) -> bool:
    """Tell whether a module loads as torch does by default, without code of its own."""
    base = torch.nn.Module
    return type(module).load_state_dict is base.load_state_dict and all(
        (
            type(each)._load_from_state_dict is base._load_from_state_dict
            or type(each)._load_from_state_dict.__module__ in _NORMALIZATIONS
        )
        and all(map(is_fsdp_hook, each._load_state_dict_pre_hooks.values()))
        and all(map(is_fsdp_hook, each._load_state_dict_post_hooks.values()))
        for each in module.modules()
    )


def is_fsdp_hook(hook: Any) -> bool:
    """Tell whether a hook is one of FSDP's own, which refuse and rename nothing."""
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp.")


def saves_as_torch_does(module: torch.nn.Module) -> bool:
    """Tell whether the state of a module has all keys that torch's load needs, and no others."""
    base = torch.nn.Module
    return type(module).state_dict is base.state_dict and all(
        type(each)._save_to_state_dict is base._save_to_state_dict and not each._state_dict_hooks
        for each in module.modules()
    )


def writable(obj: Any) -> AbstractContextManager[object]:
    """Enter inference mode for a module that was made in it: only there its tensors are written."""
    if not isinstance(obj, torch.nn.Module):
        return nullcontext()
    tensors = chain(obj.parameters(), obj.buffers())
    made_in_it = any(not is_lazy(each) and each.is_inference() for each in tensors)
    return torch.inference_mode() if made_in_it else nullcontext()


def is_extra_state(key: Any) -> bool:
    """Tell whether a key of a module's state is extra state, which may change its size."""
    return isinstance(key, str) and key.endswith("_extra_state")


def check_module(
    live: Any,
    node: Node,
    label: str,
    select: LabelFilter,
    common: frozenset[str] | None,
    above: str,
    rows: Sequence[TensorRow],
) -> None:
    """Refuse keys that do not fit those of a module that loads as torch does.

    Args:
        live: The current ``state_dict`` of the module.
        node: The saved node.
        label: Its label in the state.
        select: Selects the labels to load.
        common: The labels that all ranks had, if not all had the same ones.
        above: The label below which the names of a foreign checkpoint were moved.
        rows: The tensors of the checkpoint.

    Raises:
        StructureMismatch: If they do not fit.
    """
    children = children_of(node, label)
    saved = {key for key, _, _ in children}
    live = dict(live)
    missing = [
        join(label, key)
        for key in without_ties([each for each in live if each not in saved], live)
        if not key.endswith("num_batches_tracked")
        and any_selected(live[key], join(label, key), select)
    ]
    others = [(child, where) for key, child, where in children if key not in live]
    unexpected = [leaf for child, where in others for leaf in leaf_labels(child, where) or [where]]
    if common is not None:
        unexpected = [each for each in unexpected if each in common]
    if missing or unexpected:
        hint, allow = "Load it into a module of the same layers", "name what may differ in "
        shapes = (
            {row.label: tuple(row.shape) for row in rows},
            {join(label, key): tuple(getattr(each, "shape", ())) for key, each in live.items()},
        )
        raise mismatch(
            missing, unexpected, label,
            hint=hint, allow=f"{allow}allow_missing and allow_unexpected",
            names=leaf_labels(node, label), above=above, shapes=shapes,
        )  # fmt: skip


def check_known(obj: Any, live: Any, node: Node, label: str, select: LabelFilter) -> list[str]:
    """Refuse a state that a gradient scaler, a scheduler or generators cannot take.

    Args:
        obj: The object; of any other kind nothing is known.
        live: Its current ``state_dict``.
        node: The saved node.
        label: Its label in the state.
        select: Selects the labels to load.

    Returns:
        The labels that it ignores: those of an enabled scaler, if it is disabled itself.

    Raises:
        StructureMismatch: If it would fail, or if the state is that of another class.
    """
    is_scheduler = isinstance(obj, LRScheduler) and type(obj).__module__ == LRScheduler.__module__
    if not is_scheduler and not isinstance(obj, torch.amp.GradScaler | RngState):
        return []
    saved = {key: (child, where) for key, child, where in children_of(_inside(node), label)}
    lacks = [key for key in live if key not in saved and select(join(label, key))]
    if isinstance(obj, torch.amp.GradScaler):
        if not live:
            return [where for _, where in saved.values()]
        if lacks:
            raise StructureMismatch(
                f"The scaler is enabled and the saved one was not: it lacks {', '.join(lacks)}",
                key=label or None,
                hint="Make it with enabled=False, or leave it out with exclude",
            )
    elif isinstance(obj, RngState):
        _refuse_other_class(obj, [key for key in lacks if key != "cuda"], label)
    else:
        more = [key for key in saved if key not in live and (key in _LISTS or _is_option(key))]
        # torch may have added or removed an option since the save, but not both.
        lost = [key for key in lacks if key in _LISTS or (more and _is_option(key))]
        _refuse_other_class(obj, lost, label)
        for key in _LISTS & live.keys() & saved.keys():
            child, where = saved[key]
            inner = children_of(_inside(child), where)
            if len(inner) != len(live[key]):
                _refuse_other_class(obj, [f"{len(live[key])} {key}"], where)
            for number, each, place in inner if key == "_schedulers" else ():
                nested = vars(obj)[key][number]
                check_known(nested, live[key][number], each, place, select)
    return []


def check_generators(saved: Any, live: Any) -> None:
    """Set new generators to a saved state that is not read yet, with the tensors of a live one.

    Args:
        saved: The state of an ``RngState``, with a :class:`SavedTensor` for each tensor; None for a
            state that the load makes.
        live: The current one.

    Raises:
        Exception: The error of the generator that does not take it.
    """
    if saved is not None:
        rehearsed = _with_tensors(saved, live)
        torch.Generator().set_state(rehearsed["torch"])
        np.random.RandomState().set_state(numpy_state(rehearsed["numpy"]))
        random.Random().setstate(python_state(rehearsed["python"]))


def _with_tensors(saved: Any, live: Any) -> Any:
    if isinstance(saved, dict):
        return {key: _with_tensors(each, live[key]) for key, each in saved.items() if key in live}
    if isinstance(saved, SavedTensor) and saved.shape != live.shape:
        raise ValueError(f"a generator has a state of shape {saved.shape}")
    return live if isinstance(saved, SavedTensor) else saved


_LISTS = {"_schedulers", "lr_lambdas"}


def _is_option(key: Any) -> bool:
    return isinstance(key, str) and not key.startswith("_") and key != "verbose"


def _refuse_other_class(obj: Any, lacks: list[str], label: str) -> None:
    if lacks:
        kind = type(obj).__name__
        raise StructureMismatch(
            f"The state is of another class: it lacks {', '.join(lacks)}, which {kind} needs",
            key=label or None,
            hint="Load it into an object as it was saved, or leave it out with exclude",
        )


def _inside(node: Node) -> Node:
    return node.inner if node.kind == "shared" else node


_Shapes = Mapping[str, tuple[int, ...]]


def mismatch(
    missing: list[str],
    unexpected: list[str],
    label: str = "",
    *,
    hint: str,
    allow: str = "",
    names: list[str] | None = None,
    above: str = "",
    shapes: tuple[_Shapes, _Shapes] = ({}, {}),
) -> StructureMismatch:
    """Return the error for labels that only the checkpoint or only the target has.

    Args:
        missing: Labels that the checkpoint lacks.
        unexpected: Labels that the target lacks.
        label: The label of the object that has them.
        hint: The next step for the caller, unless a change of names is better.
        allow: How to load without what is missing. It is proposed unless saved tensors are left
            over that may be the missing ones under other names.
        names: The labels of all leaves of the checkpoint; None if ``unexpected`` has them.
        above: The label below which the names of a foreign checkpoint were moved.
        shapes: The known shapes in the checkpoint and in the target, by label.
    """
    bare = {unwrapped(each) for each in missing} & {unwrapped(each) for each in unexpected}
    if bare:
        hint = (
            "The names in the checkpoint or in the target have a prefix of a wrapper, such as DDP "
            "or torch.compile: save and load ckpipe.distributed.training_state(model, optimizer), "
            "which has the names of the bare model"
        )
    cut = len(above) + 1 if above else 0
    lost, left = ([each[cut:] for each in group] for group in (missing, unexpected))
    saved, live = ({name[cut:]: shape for name, shape in of.items()} for of in shapes)
    whole = names is None or len(names) == len(unexpected)
    rename = _renaming(lost, left, saved, live, whole=whole)
    allowed = _may_lack(missing, unexpected, *shapes)
    if rename:
        hint = f"Most names fit with transform=[{rename}]. {hint}"
    elif allow and not bare and allowed:
        hint = f"{hint}, or {allow}"
    elif missing and unexpected and not bare:
        hint += ", or let ckpipe.Rename give what has other names those of the target"
    parts = [
        f"{title}: {first_of(list(map(repr, labels)), 8)}"
        for title, labels in (
            ("missing in the checkpoint", missing),
            ("unexpected in it", unexpected),
        )
        if labels
    ]
    return StructureMismatch(
        "The checkpoint does not fit the target; " + "; ".join(parts), key=label or None, hint=hint
    )


_ROLES = tuple(
    re.compile(rf"(?:^|[._])(?:{words})")
    for words in (
        r"heads?\b|cls|classifier|score|fc\b|logits|predictions|pooler|embed_out|output\b|proj_out|qa_out",
        r"\w*emb|wte|wpe|shared\b",
        r"\w*norm|ln_?\w?\b|bn",
        r"enc",
        r"dec",
        r"\w*att",
        r"mlp|ffn|experts?",
    )
)
"""What names of layers tell of their role; the first is that of heads."""


def _role(name: str) -> int | str | None:
    """Return the role of a layer, or its number; None if its name tells nothing."""
    numbers = re.findall(r"\b\d+\.?$", name)
    roles = [n for n, words in enumerate(_ROLES) if words.search(name)]
    return next(iter([*roles, *numbers]), None)


def _may_lack(missing: list[str], unexpected: list[str], saved: _Shapes, live: _Shapes) -> bool:
    """Tell whether what is missing is none of the weights that are left over.

    That holds for the layers of a new head, unless a layer that is none has the shape of one.
    """
    lost = [each for each in missing if not live or each in live]
    left = [each for each in unexpected if not saved or each in saved]
    sizes = [None, *map(live.get, lost)]
    heads = all(_role(each.rpartition(".")[0]) == 0 for each in lost)
    hidden = [each for each in left if _role(each.rpartition(".")[0]) != 0]
    return not left or (heads and not any(not live or saved.get(each) in sizes for each in hidden))


def _renaming(
    missing: list[str], unexpected: list[str], saved: _Shapes, live: _Shapes, *, whole: bool
) -> str:
    """Return the transforms with which names fit that differ by a prefix only; empty if none do.

    A layer is proposed for another one if all of it is left over, its shapes are the same, and both
    are heads or one has more above or below it. Others may have another role, as q and k.

    Args:
        missing: The names that the target has alone.
        unexpected: The names that the checkpoint has alone.
        saved: Shapes in the checkpoint that are known.
        live: Shapes in the target that are known.
        whole: Whether the checkpoint has no other names.
    """
    if not missing or not unexpected:
        return ""
    parts, there = missing[0].split("."), set(unexpected)
    alike = {old: _common_end(parts, old.split(".")) for old in unexpected}
    for old in sorted(unexpected, key=lambda each: -alike[each])[:8]:
        if not alike[old]:
            break
        new_prefix = ".".join([*parts[: len(parts) - alike[old]], ""])
        old_parts = old.split(".")
        old_prefix = ".".join([*old_parts[: len(old_parts) - alike[old]], ""])
        if old_prefix == new_prefix or not all(m.startswith(new_prefix) for m in missing):
            continue
        pairs = {old_prefix + each[len(new_prefix) :]: each for each in missing}
        fits = pairs.keys() & there
        roles = {_role(old_prefix), _role(new_prefix)} if old_prefix and new_prefix else set()
        if any("." not in each[len(new_prefix) :] for each in missing) and roles:  # a layer
            good = len(roles) == 1 and len(fits) == len(pairs)
        else:
            good = len(roles - {None}) < 2 and 2 * len(fits) >= len(pairs)
        one, other = f".{old_prefix}", f".{new_prefix}"
        inside = one.startswith(other) or one.endswith(other)
        inside = inside or other.startswith(one) or other.endswith(one)
        good = good and (whole or inside or roles == {0})
        if good and all(live.get(pairs[each]) in (None, saved.get(each)) for each in fits):
            rename = f"ckpipe.Rename({{{old_prefix + '*'!r}: {new_prefix + '*'!r}}})"
            left = sorted(there - pairs.keys())
            if not left:
                return rename
            kept = {each.partition(".")[0] for each in pairs}
            if whole and kept.isdisjoint(each.partition(".")[0] for each in left):
                return f"ckpipe.Only({', '.join(map(repr, sorted(kept)))}), {rename}"
            numbered = sorted({re.sub(r"\b\d+\b", "*", each) for each in left})
            if not any(map(LabelFilter(numbered), pairs)):
                left = numbered
            return f"ckpipe.Drop({', '.join(map(repr, left))}), {rename}" if len(left) < 9 else ""
    return ""


def _common_end(left: list[str], right: list[str]) -> int:
    pairs = zip(reversed(left), reversed(right), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
