"""Open an object of the target that has ``load_state_dict``, and ask it about its saved state.

The state of an object is matched by its keys, not by the containers around it: the object decides
which of them it needs, and which tensors of its own are filled. Nothing is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from ckpipe.errors import CkpipeError, StructureMismatch, reason_of
from ckpipe.format.dtypes import dtype_of
from ckpipe.format.labels import decode_key, join
from ckpipe.format.tree import MAPPINGS, WRAPPERS, Node, children_of
from ckpipe.interpreter import user_code
from ckpipe.loading.factories import empty_mapping
from ckpipe.loading.match_record import NOTHING, MatchRecord, Use
from ckpipe.loading.optimizers import check_optimizer, has_pre_hooks
from ckpipe.loading.rehearsal import rehearse
from ckpipe.loading.stateful import (
    SavedObject,
    SavedTensor,
    check_generators,
    check_known,
    check_module,
    live_state,
    loads_as_torch_does,
    saves_as_torch_does,
)
from ckpipe.loading.wrappers import empty_wrapper
from ckpipe.reading.saved_state import is_generators
from ckpipe.state_helpers import RngState

OpenedObject = tuple[Any, Use, Callable[[Any], object]]
"""The live state of an object, its use, and the function that loads it."""


def open_object(record: MatchRecord, target: Any, node: Node, label: str) -> OpenedObject:
    """Read the live state of an object, and check that it takes the saved one.

    Args:
        record: The arguments of the match; gets its findings.
        target: The object.
        node: The saved node of its ``state_dict``.
        label: Its label in the state.

    Raises:
        TargetMismatch: If the object refuses the saved state.
    """
    if hasattr(type(target), "__ckpipe_targets__"):
        return _targets_of(record, target, node, label)
    live = record.memo.once(target, partial(live_state, target))
    use = Use.OFFERED
    if isinstance(target, torch.nn.Module):
        use = Use.FITTING
        if loads_as_torch_does(target):
            use = Use.NAMED
            saved = record.saved
            check_module(live, node, label, record.select, saved.common, record.above, saved.rows)
        if use is Use.FITTING or not saves_as_torch_does(target):
            live = _rehearsed(record, target, live, node, label)
    elif isinstance(target, torch.optim.Optimizer):
        recorded = record.saved.optimizers.get(label)
        lenient = record.request.optimizer_class == "any"
        use = Use.OFFERED if lenient or has_pre_hooks(target) else Use.FITTING
        saved_state = {
            key: _described(record, child, where)
            for key, child, where in children_of(node, label)
            if key in ("param_groups", "state")
        }
        whole = record.select.selects_all
        check_optimizer(target, saved_state, recorded, label, any_class=lenient, whole=whole)
    elif isinstance(live, dict):
        record.left += check_known(target, live, node, label, record.select)
        if isinstance(target, RngState) and record.select.selects_all:
            with _same_form(target, label):
                check_generators(_described(record, node, label), live)
    if isinstance(live, dict) and node.kind in MAPPINGS:
        names = {key if type(key) is str else decode_key(key) for key in node.keys}
        own = ((join(label, key), live[key]) for key in live if key not in names)
        record.kept += [where for where, each in own if record.is_selected(each, where)]
    return live, use, target.load_state_dict


def _targets_of(record: MatchRecord, target: Any, node: Node, label: str) -> OpenedObject:
    saved = SavedObject(
        _described(record, node, label),
        label,
        record.select,
        record.saved.common,
        record.request,
        record.memo,
        record.saved.from_others if record.saved.same_world else frozenset(),
        record.above,
    )
    with user_code("__ckpipe_targets__", label), _same_form(target, label):
        found = target.__ckpipe_targets__(saved)
    record.kept += found.missing
    record.left += found.unexpected
    return found.tree, Use.IN_PLACE, lambda _: found.attach()


_SLIPS = ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError


@contextmanager
def _same_form(target: Any, label: str) -> Iterator[None]:
    """Turn the errors of ckpipe's own objects about a saved state into a mismatch."""
    try:
        yield
    except _SLIPS as error:
        if isinstance(error, CkpipeError):
            raise
        raise StructureMismatch(
            f"The saved state has another form than this {type(target).__name__} saves: "
            f"{reason_of(error)}",
            key=label or None,
            hint="Leave it out with exclude",
        ) from error


def _rehearsed(
    record: MatchRecord, module: torch.nn.Module, live: Any, node: Node, label: str
) -> Any:
    """Return a module's state with the tensors to fill, after a rehearsal with the saved one.

    A saved tensor that the module converts, drops or resizes has ``NOTHING`` to be filled.

    Raises:
        TargetMismatch: If the module refuses the saved state.
    """
    if not isinstance(live, dict) or node.kind not in MAPPINGS:
        return live
    left = len(record.left)
    given = empty_mapping(node)()
    for key, child, where in children_of(node, label):
        if key in live or not record.is_elsewhere(child, label, where, live, Use.FITTING):
            given[key] = _described(record, child, where)
    del record.left[left:]
    if not record.select.selects_all:
        for key in live:
            if key not in given and not record.is_selected(live[key], join(label, key)):
                given[key] = live[key]
    if node.attributes is not None:
        vars(given).update(_described(record, node.attributes, join(label, "__dict__")))
    found = rehearse(module, given, live, module.load_state_dict, label, partial(join, label))
    if found is None:
        return live
    fresh = {key: NOTHING if each is None else each for key, each in found.items()}
    return {**live, **fresh}


def _described(record: MatchRecord, node: Node, label: str) -> Any:
    """Return a saved tree as objects, with a description in place of each tensor."""
    tag = node.kind
    if tag == "tensor":
        stored = record.targets.stored[node.head]
        held = partial(record.targets.held, stored)
        return SavedTensor(stored.loaded_dtype, tuple(stored.shape), held)
    if tag == "value":
        return record.value_of(node, label)
    if tag == "ref":
        return _described(record, record.definitions[node.head], label)
    if tag == "wrapper_tensor":
        size = tuple((node.head["shard"] or node.head)["size"])
        like = partial(empty_wrapper, record, node, label)
        return SavedTensor(dtype_of(node.head["dtype"], label), size, like=like)
    if tag in WRAPPERS:
        return _described(record, node.inner, label)
    if record.saved.per_rank.derive is not None and is_generators(node):
        return None  # It is made for this rank.
    children = [
        (key, _described(record, child, where))
        for key, child, where in children_of(node, label)
        if child.kind != "absent" or tag not in MAPPINGS
    ]
    if tag in MAPPINGS:
        return dict(children)
    values = [value for _, value in children]
    return tuple(values) if tag == "tuple" else values
