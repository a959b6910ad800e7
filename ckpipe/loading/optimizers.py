"""Check that a saved state fits an optimizer: its class, its options, the order of its parameters.

``torch.optim.Optimizer.load_state_dict`` matches parameters by their order, and compares only the
numbers of groups and parameters. So it accepts the state of another class of optimizer, whose next
step fails or computes something else, and moments of other parameters.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import LBFGS, Optimizer

from ckpipe.errors import ShapeMismatch, StructureMismatch, reason_of
from ckpipe.format.labels import unwrapped
from ckpipe.format.manifest import OptimizerRow
from ckpipe.loading.stateful import SavedTensor
from ckpipe.state.training_form import NO_OPTIONS, OWN_OPTIONS, groups_of, states_of
from ckpipe.state.values import optimizer_kind, shapes_of_parameters

logger = logging.getLogger("ckpipe")

# Keys of a group that are no options of the optimizer: learning rate schedulers add most of them.
_NO_OPTIONS = {
    *NO_OPTIONS, "initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum"
}  # fmt: skip


def has_pre_hooks(optimizer: Optimizer) -> bool:
    """True if hooks of an optimizer change a state before ``load_state_dict`` looks at it."""
    return bool(getattr(optimizer, "_optimizer_load_state_dict_pre_hooks", None))


def kind_mismatch(
    saved: str,
    options: Collection[str] | None,
    optimizer: Optimizer,
    label: str,
    leave_out: str,
) -> StructureMismatch | None:
    """Compare the class of an optimizer with that of the saved one.

    A class of the same name and options in another module counts as the same, since a script is
    ``__main__`` and becomes a module when another one imports it.

    Args:
        saved: The saved class, as :func:`ckpipe.state.values.optimizer_kind` returns it; empty if
            it was not saved. Then only the options are compared.
        options: The keys of a saved group; None if not all of them are loaded.
        optimizer: The optimizer.
        label: Its label in the state.
        leave_out: The argument of ``load`` that leaves the optimizer out, for the hint.

    Returns:
        The error to raise; None if the classes are the same.
    """
    kind = optimizer_kind(optimizer)
    if saved == kind:
        return None
    lacks, surplus = ([], []) if options is None else _differences(options, optimizer)
    if not lacks and not surplus:
        if not saved:
            return None
        if _names(saved) == _names(kind):
            logger.info("%s: the optimizer was a %s and is a %s", label, saved, kind)
            return None
    facts = [
        f"{text} {', '.join(keys)}"
        for text, keys in (("lacks the options", lacks), ("has the options", surplus))
        if keys
    ]
    there = f"of a {saved}" if saved else "of another class of optimizer"
    return StructureMismatch(
        f"The checkpoint has the state {there}, and the target is a {kind}"
        + (f"; the state {' and '.join(facts)}" if facts else ""),
        key=label or None,
        hint=f"Make an optimizer of the saved class, leave it out with {leave_out}, or pass "
        'optimizer_class="any" to load it as torch does',
    )


def _names(kind: str) -> str:
    """Return the names of classes without their modules."""
    return re.sub(r"[^(:]*:", "", kind)


def _differences(options: Collection[str], optimizer: Optimizer) -> tuple[list[str], list[str]]:
    """Return the options that a saved group lacks, and those that only it has.

    If a class has got options since the save, its ``__setstate__`` adds them; it is called on a
    copy to find out.
    """
    group: dict[str, Any] = {**dict.fromkeys(options), "params": []}
    try:
        copy = object.__new__(type(optimizer))
        copy.__setstate__(
            {"defaults": dict(optimizer.defaults), "state": {}, "param_groups": [group]}
        )
    except Exception:  # a custom optimizer that needs more, and raises its own error in the load
        return [], []
    known = {key for each in optimizer.param_groups for key in each}
    lacks = optimizer.defaults.keys() - {*OWN_OPTIONS} - group.keys()
    surplus = set(options) - optimizer.defaults.keys() - known - {*OWN_OPTIONS} - _NO_OPTIONS
    return sorted(lacks), sorted(map(str, surplus))


def check_optimizer(
    optimizer: Optimizer,
    saved: Mapping[str, Any],
    recorded: OptimizerRow | None,
    label: str,
    *,
    any_class: bool,
    whole: bool,
) -> None:
    """Refuse a saved ``state_dict`` that does not fit an optimizer.

    Hooks on ``load_state_dict`` may make another state first, so with such hooks only the class is
    compared.

    Args:
        optimizer: The optimizer.
        saved: The saved ``state_dict``, with a :class:`SavedTensor` for each tensor.
        recorded: The recorded facts of the saved optimizer; None if there are none, as in older
            checkpoints, and for a ``state_dict`` that was saved as a dict.
        label: Its label in the state.
        any_class: Whether the class may differ.
        whole: Whether all of the saved state is loaded.

    Raises:
        StructureMismatch: If class, groups or names of parameters differ.
        ShapeMismatch: If a parameter has another shape.
    """
    groups = groups_of(saved.get("param_groups"))
    adapted = has_pre_hooks(optimizer)
    own_form = adapted or type(optimizer).load_state_dict is not Optimizer.load_state_dict
    has_form = "state" in saved and groups and all("params" in each for each in groups)
    if whole and not own_form and not has_form:
        raise StructureMismatch(
            "The checkpoint has no state and param_groups here, as an optimizer's state has",
            key=label or None,
            hint="Load the flat state that torch.distributed.checkpoint makes into "
            "ckpipe.distributed.training_state(model, optimizer)",
        )
    if not adapted:
        check_counts(optimizer, groups, label)
    if not any_class:
        _check_kind(optimizer, groups if whole else (), recorded, label, adapted=adapted)
    other_class = any_class and (recorded is None or recorded.kind != optimizer_kind(optimizer))
    if other_class or (whole and not own_form):
        check_conversion(optimizer, groups, states_of(saved), label)
    if adapted:
        return
    _check_names(optimizer, groups, label)
    if recorded is not None:
        _check_shapes(optimizer, recorded.shapes, label)
    elif not any_class:
        check_state(optimizer, states_of(saved), groups, label)


def check_counts(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]], label: str) -> None:
    """Refuse saved groups of other sizes.

    Raises:
        StructureMismatch: If a group has another number of parameters.
    """
    if not all("params" in group for group in groups) or not groups:
        return  # they were not selected
    counts = [len(group["params"]) for group in groups]
    live = [len(group["params"]) for group in optimizer.param_groups]
    if counts != live:
        raise StructureMismatch(
            f"The optimizer has groups of {live} parameters, the checkpoint of {counts}",
            key=label or None,
            hint="Make it over the same parameters in the same groups",
        )


def _check_kind(
    optimizer: Optimizer,
    groups: Sequence[Mapping[str, Any]],
    recorded: OptimizerRow | None,
    label: str,
    *,
    adapted: bool,
) -> None:
    own = type(optimizer).load_state_dict is not Optimizer.load_state_dict
    saved = "" if recorded is None else recorded.kind
    leave_out = f"exclude=[{label!r}]" if label else "exclude"
    for group in groups or ({},):
        options = None if not groups or ((own or adapted) and not saved) else list(group)
        error = kind_mismatch(saved, options, optimizer, label, leave_out)
        if error is not None:
            raise error
        lacks = [] if options is None or own or adapted else _differences(options, optimizer)[0]
        if lacks:
            raise StructureMismatch(
                f"The saved groups lack {', '.join(lacks)}, which a {optimizer_kind(optimizer)} "
                "needs",
                key=label or None,
                hint=f"Make the optimizer that was saved, or leave it out with {leave_out}",
            )


def _check_names(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]], label: str) -> None:
    first = 0
    for group, live in zip(groups, optimizer.param_groups, strict=False):
        there, here = group.get("param_names") or (), live.get("param_names") or ()
        for number, (saved, own) in enumerate(zip(there, here, strict=False), first):
            if unwrapped(str(saved)) != unwrapped(own):
                raise StructureMismatch(
                    f"Parameter {number} of the optimizer is {own!r} here and {saved!r} in the "
                    "checkpoint",
                    key=label or None,
                    hint="Make it over the same parameters in the same order, or save and load "
                    "ckpipe.distributed.training_state(model, optimizer), which matches names",
                )
        first += len(live["params"])


_ORDER = "Make the optimizer over the same parameters in the same order"


def _check_shapes(
    optimizer: Optimizer, saved: Sequence[tuple[int, ...] | None], label: str
) -> None:
    here = shapes_of_parameters(optimizer)
    if len(here) != len(saved):
        raise StructureMismatch(
            f"The optimizer has {len(here)} parameters here and {len(saved)} in the checkpoint",
            key=label or None,
            hint=_ORDER,
        )
    for number, (own, shape) in enumerate(zip(here, saved, strict=True)):
        if own != shape and own is not None and shape is not None:
            raise ShapeMismatch(
                f"Parameter {number} of the optimizer has the shape {list(own)} here and "
                f"{list(shape)} in the checkpoint",
                key=label or None,
                hint=_ORDER,
            )


def check_state(
    optimizer: Optimizer,
    states: Mapping[Any, Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
    label: str,
) -> None:
    """Compare shapes of state with those of parameters, for torch's own classes.

    Raises:
        ShapeMismatch: If they differ.
    """
    if not _is_torchs(optimizer) or isinstance(optimizer, LBFGS):
        return
    numbers = [number for group in groups for number in group.get("params", ())]
    for number, own in zip(numbers, shapes_of_parameters(optimizer), strict=False):
        for key, value in states.get(number, {}).items():
            follows = isinstance(value, SavedTensor) and value.shape and key not in _OTHER_SHAPES
            if follows and own is not None and value.shape != own:
                raise ShapeMismatch(
                    f"The state {key!r} of parameter {number} has the shape {list(value.shape)} in "
                    f"the checkpoint, and the parameter {list(own)} here",
                    key=label or None,
                    hint=_ORDER,
                )


def check_conversion(
    optimizer: Optimizer,
    groups: Iterable[Mapping[str, Any]],
    states: Mapping[Any, Any],
    label: str,
) -> None:
    """Try whether torch's own class takes a saved state: some raise in the load.

    Args:
        optimizer: The optimizer.
        groups: The saved groups.
        states: The saved state of parameters, with a :class:`SavedTensor` for each tensor.
        label: Its label in the state.

    Raises:
        StructureMismatch: If it does not.
    """
    if not _is_torchs(optimizer):
        return
    zero = torch.zeros(())
    tried = {
        torch.zeros(()): {
            key: zero if isinstance(value, SavedTensor) else value for key, value in state.items()
        }
        for state in states.values()
    }
    bare = [{**dict.fromkeys(group), "params": list(tried)} for group in groups]
    try:
        copy = object.__new__(type(optimizer))
        copy.__setstate__(
            {"defaults": dict(optimizer.defaults), "state": tried, "param_groups": bare}
        )
    except Exception as error:
        raise StructureMismatch(
            f"torch cannot load this state into a {type(optimizer).__name__}: {reason_of(error)}",
            key=label or None,
            hint="Leave the optimizer's state out with exclude",
        ) from error


def _is_torchs(optimizer: Optimizer) -> bool:
    return f"{type(optimizer).__module__}.".startswith("torch.optim.")


_OTHER_SHAPES = ("step", "row_var", "col_var")
"""The keys of torch's optimizers for state that has not the shape of its parameter."""
