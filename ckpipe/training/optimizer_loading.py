"""Match the saved state of optimizers with live ones, by the names of their parameters.

The match ends, and new tensors are made, before a byte is read; new state is attached once all
bytes are verified.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ckpipe.errors import ShapeMismatch, SharingConflict, StructureMismatch
from ckpipe.loading.optimizers import check_conversion, kind_mismatch
from ckpipe.loading.stateful import LoadTargets, SavedObject, SavedTensor
from ckpipe.state import training_form as form
from ckpipe.state.tensors import is_wrapper
from ckpipe.training.names import ModelNames, is_sharded
from ckpipe.training.optimizers import NamedOptimizer, attach, is_placed_like
from ckpipe.types import first_of


@dataclass(slots=True)
class _SavedGroup:
    """A saved group of parameters.

    Args:
        label: Its label in the state.
        kind: The class of its optimizer; empty if that was not saved.
        options: Its options.
        shapes: The shapes of its parameters by their names; None if a shape was not saved.
        targets: The targets of the options, a dict in the tree of targets.
    """

    label: str
    kind: str
    options: Mapping[str, Any]
    shapes: Mapping[str, Any]
    targets: dict[str, Any] = field(default_factory=dict)

    def compared(self) -> dict[str, Any]:
        """Return the options that must agree if several groups become one."""
        skipped = (*form.OWN_OPTIONS, *form.NO_OPTIONS)
        return {key: value for key, value in self.options.items() if key not in skipped}


class OptimizerMatch:
    """Matches saved optimizers with live ones, by the names of parameters.

    Attributes:
        tree: The tree of targets: of the saved form, with tensors to fill, and None for values that
            are made anew.
    """

    def __init__(
        self,
        saved: SavedObject,
        model: ModelNames,
        optimizers: Sequence[NamedOptimizer],
        found: LoadTargets,
        elsewhere: Callable[[str], bool],
        *,
        stages: bool,
    ) -> None:
        self._saved, self._optimizers, self._found = saved, optimizers, found
        self._is_elsewhere, self._stages = elsewhere, stages
        self._there = saved.state[form.OPTIMIZER]
        self._at = partial(saved.at, form.OPTIMIZER)
        self.tree: dict[str, Any] = {}
        self._states: list[dict[int, dict[str, Any] | None]] = [{} for _ in optimizers]
        self._options: list[list[tuple[dict[str, Any], dict[str, Any]]]] = [[] for _ in optimizers]
        self._together: dict[int, dict[str, Any]] = {}
        self._kept = self._there.get(form.STATE, {})
        self._with_joint_state: set[int] = set()
        self._of_another_class: set[int] = set()
        for each in optimizers:
            for parameter, names in zip(each.parameters, each.names, strict=True):
                refuse_meta(parameter, self._at(form.STATE, names[0]))
        self._check_form()
        groups = self._saved_groups()
        ours = frozenset(name for names in model.parameters.values() for name in names)
        self._match_groups(groups)
        self._match_empty_groups()
        self._match_joint(ours)
        if form.STATE in self._there:
            self.tree[form.STATE] = {}
            self._match_state()
            self._find_dropped(groups, ours)
        for number in self._of_another_class:
            self._check_conversion(number)

    def attach(self) -> None:
        """Put the loaded state into the optimizers, once all of it is read."""
        for number, each in enumerate(self._optimizers):
            states: dict[int, dict[str, Any] | None] = {}
            for place, state in self._states[number].items():
                device = each.parameters[place].device
                states[place] = state and {
                    key: value if isinstance(value, torch.Tensor) else _moved(value, device)
                    for key, value in state.items()
                }
            together = self._together.get(number)
            if together is not None:
                together = _moved(together, each.parameters[0].device)
            other = number in self._of_another_class
            attach(each, states, self._options[number], together, of_another_class=other)

    def _check_form(self) -> None:
        """Check that all that is called by it is of the form of a state by names.

        Raises:
            StructureMismatch: If it is not; transforms may have put its parts elsewhere.
        """
        depths = {form.GROUPS: 2, form.STATE: 1, form.EMPTY: 2, form.JOINT: 1}  # of dicts in each
        pending: list[tuple[tuple[Any, ...], Any, int]] = [
            ((form.OPTIMIZER, each), self._there.get(each, {}), depth)
            for each, depth in depths.items()
        ]
        for path, held, depth in pending:
            if not isinstance(held, Mapping):
                raise StructureMismatch(
                    "This is no part of the state of an optimizer by names of parameters",
                    key=self._saved.at(*path),
                    hint="Rename the model and its optimizer in one transform. To load the model "
                    f"alone, pass include=[{self._saved.at(form.MODEL)!r}]",
                )
            items = held.items() if depth else ()
            pending += [((*path, k), each, depth - 1) for k, each in items if k != "optimizer"]

    # Groups

    def _saved_groups(self) -> list[_SavedGroup]:
        if form.PARAM_GROUPS in self._there:  # as DCP has it
            found = [
                _SavedGroup(
                    self._at(form.PARAM_GROUPS, number),
                    "",
                    {key: value for key, value in group.items() if key not in form.NO_OPTIONS},
                    dict.fromkeys(group.get("params", ())),
                )
                for number, group in enumerate(self._there[form.PARAM_GROUPS])
            ]
            self.tree[form.PARAM_GROUPS] = [each.targets for each in found]
            return found
        found = []
        self.tree[form.GROUPS] = {}
        for first, group in self._there.get(form.GROUPS, {}).items():
            found.append(
                _SavedGroup(
                    self._at(form.GROUPS, first),
                    group.get("optimizer", ""),
                    group.get("options", {}),
                    group.get("params", {first: None}),
                )
            )
            if "options" in group:
                self.tree[form.GROUPS][first] = {"options": found[-1].targets}
        return found

    def _match_groups(self, groups: Sequence[_SavedGroup]) -> None:
        """Map each saved group into one live group.

        Raises:
            StructureMismatch: If a group would be divided, or if several with different options
                would become one.
            ShapeMismatch: If a parameter has another shape.
        """
        of_name: defaultdict[str, list[int]] = defaultdict(list)
        for number, saved in enumerate(groups):
            for name in saved.shapes:
                of_name[name].append(number)
        homes: dict[int, tuple[dict[str, Any], str]] = {}
        for number, each in enumerate(self._optimizers):
            for live, _, places in each.groups:
                into: dict[int, str] = {}
                for place in places:
                    for name in each.names[place]:
                        for saved_number in of_name.get(name, ()):
                            self._check_shape(groups[saved_number], name, each.parameters[place])
                            into.setdefault(saved_number, name)
                for saved_number, name in into.items():
                    home = homes.setdefault(saved_number, (live, name))
                    if home[0] is not live:
                        raise _divided(groups[saved_number], home[1], name)
                self._match_options([groups[n] for n in into], live, each, number)

    def _match_empty_groups(self) -> None:
        """Map saved groups without parameters to such groups of the same optimizer.

        Raises:
            StructureMismatch: If the optimizer has another number of them.
        """
        if form.EMPTY not in self._there:
            return
        tree = self.tree[form.EMPTY] = {}
        for first, saved in self._there[form.EMPTY].items():
            label = self._at(form.EMPTY, first)
            homes = [
                (live, each, number)
                for number, each in enumerate(self._optimizers)
                if any(first in names for names in each.names) or not (first or each.names)
                for live, _, places in each.groups
                if not places
            ]
            groups = [
                _SavedGroup(
                    self._at(form.EMPTY, first, number),
                    group.get("optimizer", ""),
                    group.get("options", {}),
                    {},
                )
                for number, group in saved.items()
            ]
            if len(homes) != len(groups):
                # The same group may have parameters where the model is divided otherwise.
                if self._stages or not self._saved.is_everywhere(label):
                    self._found.unexpected.append(label)
                    continue
                raise StructureMismatch(
                    f"The checkpoint has {len(groups)} param groups without parameters, and the "
                    f"optimizer {len(homes)}",
                    key=label,
                    hint="Make the optimizer's groups as they were saved, or leave the options out "
                    f"with exclude=[{label!r}]",
                )
            tree[first] = {
                number: {"options": group.targets} if "options" in saved[number] else {}
                for number, group in zip(saved, groups, strict=True)
            }
            named = {live.get("name"): (live, each, number) for live, each, number in homes}
            if None not in named and named.keys() == {each.options.get("name") for each in groups}:
                homes = [named[group.options["name"]] for group in groups]
            for group, (live, each, number) in zip(groups, homes, strict=True):
                self._match_options([group], live, each, number)

    def _check_shape(self, group: _SavedGroup, name: str, parameter: torch.Tensor) -> None:
        shape, select = group.shapes[name], self._saved.select
        if not select.may_select(self._at(form.STATE, name)):
            return
        if shape is not None and tuple(shape) != tuple(parameter.shape):
            raise ShapeMismatch(
                f"The optimizer's parameter has the shape {list(parameter.shape)} here and "
                f"{list(shape)} in the checkpoint",
                key=self._at(form.STATE, name),
                hint="Load it into a model of the same layers",
            )

    def _match_options(
        self,
        groups: Sequence[_SavedGroup],
        live: dict[str, Any],
        each: NamedOptimizer,
        number: int,
    ) -> None:
        for group in groups:
            self._check_kind(group, each, number)
            if not _same(group.compared(), groups[0].compared()):
                raise _differing(groups[0], group)
            for key, value in group.compared().items():
                if not isinstance(value, SavedTensor):
                    group.targets[key] = None
                elif isinstance(live.get(key), torch.Tensor):
                    group.targets[key] = live[key]
                else:  # one tensor for all groups, so that their bytes must agree
                    fresh = groups[0].targets.get(key)
                    made = torch.empty(value.shape, dtype=value.dtype) if fresh is None else fresh
                    group.targets[key] = made
        if groups and groups[0].targets:
            self._options[number].append((live, groups[0].targets))

    def _check_kind(self, group: _SavedGroup, each: NamedOptimizer, number: int) -> None:
        """Compare the class of an optimizer with that of a saved group's.

        Raises:
            StructureMismatch: If they differ, and the load may not give state to another class.
        """
        whole = self._saved.select.selects_all
        error = kind_mismatch(
            group.kind,
            group.options if whole else None,
            each.optimizer,
            group.label,
            f"include=[{self._saved.at(form.MODEL)!r}]",
        )
        if error is not None and self._saved.request.optimizer_class != "any":
            raise error
        if error is not None:
            self._of_another_class.add(number)

    def _check_conversion(self, number: int) -> None:
        each = self._optimizers[number]
        states: dict[Any, Any] = {
            place: self._kept[name]
            for place, names in enumerate(each.names)
            for name in names
            if name in self._kept
        }
        for first, together in self._there.get(form.JOINT, {}).items():
            if first in (each.names[0] if each.names else ()):
                states |= together.get("state", {})
        groups = [live for live, _ in self._options[number]]
        check_conversion(each.optimizer, groups, states, self._at())

    # State

    def _match_state(self) -> None:
        plain, model = self._there.get(form.PLAIN, {}), self._saved.state.get(form.MODEL, {})
        for number, each in enumerate(self._optimizers):
            self._check_units(each)
            for _, taken, places in each.groups:
                for place in places:
                    names, parameter = each.names[place], each.parameters[place]
                    there = [name for name in names if name in self._kept]
                    first = self._held_state(there[0], parameter) if there else {}
                    if not first:
                        self._go_without(number, place, names)
                        continue
                    live = each.taken["state"].get(each.numbers[place], {})
                    lies_plain = plain.get(there[0], ())
                    state = {
                        key: _tensor_for(
                            key,
                            self._cast(key, value, model.get(there[0]), parameter),
                            parameter,
                            live.get(key),
                            taken,
                            is_plain=key in lies_plain,
                        )
                        for key, value in first.items()
                    }
                    for key in live.keys() - first.keys():
                        if not self._saved.selects(form.OPTIMIZER, form.STATE, there[0], key):
                            state[key] = live[key]
                    for name in there:
                        if not _same(self._held_state(name, parameter), first):
                            raise SharingConflict(
                                f"The target ties {name!r} and {there[0]!r}, for which the "
                                "checkpoint holds different state",
                                key=self._at(form.STATE, name),
                                hint="Load into a model whose parameters are not tied",
                            )
                        # Each of several names has its own dict in the tree, with the same tensors.
                        self.tree[form.STATE][name] = dict(state)
                    self._states[number][place] = self.tree[form.STATE][there[0]]

    def _held_state(self, name: str, parameter: torch.Tensor) -> Mapping[str, Any]:
        """Return the saved state of a parameter's elements on this rank.

        Some ranks may have had no state for their shards, such as those of experts that have got
        no token yet.

        Raises:
            StructureMismatch: If this rank holds elements with saved state and others without.
        """
        state: Mapping[str, Any] = self._kept[name]
        at = partial(self._at, form.STATE, name)
        if all(self._saved.is_everywhere(at(key)) for key in state):
            return state
        held = {
            key: value.held(parameter)
            for key, value in state.items()
            if isinstance(value, SavedTensor)
            and value.held is not None
            and value.shape == parameter.shape
            and not self._saved.is_everywhere(at(key))
        }
        for key, elements in held.items():
            if elements.some and not elements.all:
                raise StructureMismatch(
                    f"Ranks {first_of(list(map(str, elements.without)))} saved no state for their "
                    "shards of this parameter, and this rank needs elements of them and others",
                    key=at(key),
                    hint="Load it with the ranks and shards that saved it, or drop the state of "
                    f"the parameter with exclude=[{at()!r}]",
                )
        theirs = is_sharded(parameter) and at() in self._saved.from_others
        dropped = {key for key, each in held.items() if not each.some and (theirs or not each.all)}
        if dropped == held.keys() and (dropped or theirs):
            return {}
        return {key: value for key, value in state.items() if key not in dropped}

    def _check_units(self, each: NamedOptimizer) -> None:
        """Check that all parameters of one flat parameter of FSDP1 have state, or none has.

        Raises:
            StructureMismatch: If only some have state.
        """
        for unit in each.units:
            without = [name for name in unit if name not in self._kept]
            if without and len(without) < len(unit):
                raise StructureMismatch(
                    "The checkpoint has no optimizer state for this parameter, but has state for "
                    "others in the same flat parameter of FSDP1",
                    key=self._at(form.STATE, without[0]),
                    hint="Wrap the model with use_orig_params=True, or use fully_shard",
                )

    def _cast(self, key: str, value: Any, saved: Any, parameter: torch.Tensor) -> Any:
        """Cast state with its parameter if it had the parameter's dtype and casts are allowed."""
        if not (self._saved.request.cast and isinstance(value, SavedTensor)):
            return value
        had_its_dtype = isinstance(saved, SavedTensor) and value.dtype == saved.dtype
        if had_its_dtype and key != "step" and value.like is None:
            return SavedTensor(parameter.dtype, value.shape)
        return value

    def _go_without(self, number: int, place: int, names: Sequence[str]) -> None:
        """Record that a parameter has no saved state, if the load selects its state."""
        if self._saved.selects(form.OPTIMIZER, form.STATE, names[0]):
            self._states[number][place] = None
            if number in self._with_joint_state:
                return
            self._found.missing.append(self._at(form.STATE, names[0]))

    def _find_dropped(self, groups: Sequence[_SavedGroup], ours: frozenset[str]) -> None:
        """Check that no saved state is dropped silently.

        Raises:
            StructureMismatch: If there is state for a parameter that no optimizer has.
        """
        held = {name for each in self._optimizers for names in each.names for name in names}
        for name in self._kept:
            if name in held:
                continue
            label = self._at(form.STATE, name)
            if name not in ours and self._is_elsewhere(label):
                continue
            raise StructureMismatch(
                "The checkpoint has optimizer state for a parameter that no optimizer here has",
                key=label,
                hint="Give the parameter to an optimizer, frozen or not, or drop its state with "
                f"exclude=[{label!r}]",
            )
        known = {name for group in groups for name in group.shapes} - set(self._kept)
        labels = [self._at(form.STATE, name) for name in known - held]
        self._found.unexpected += filter(self._saved.select.may_select, labels)

    def _match_joint(self, ours: frozenset[str]) -> None:
        """Find the optimizer of each joint state.

        Raises:
            StructureMismatch: If no optimizer has the same parameters in the same order.
        """
        if form.JOINT not in self._there:
            return
        tree = self.tree[form.JOINT] = {}
        for first, together in self._there[form.JOINT].items():
            ordered = list(together.get("params", ()))
            label = self._at(form.JOINT, first)
            if ours.isdisjoint(ordered) and self._is_elsewhere(label):
                continue  # another rank's stage has them
            for number, each in enumerate(self._optimizers):
                if len(ordered) == len(each.names) and all(
                    name in names for name, names in zip(ordered, each.names, strict=True)
                ):
                    parts = together.keys() & {"state", "extra"}
                    tree[first] = self._together[number] = dict.fromkeys(parts)
                    if 0 in together.get("state", {}):
                        self._with_joint_state.add(number)
                    break
            else:
                raise StructureMismatch(
                    "The checkpoint has state of an optimizer for all its parameters together: "
                    f"{_some(ordered)}, in this order. No optimizer here has them like that",
                    key=label,
                    hint="Make the optimizer over the same parameters in the same order",
                )


def _tensor_for(
    key: str,
    value: Any,
    parameter: torch.Tensor,
    live: Any,
    group: Mapping[str, Any],
    *,
    is_plain: bool,
) -> torch.Tensor | None:
    """Return the target tensor for a value of a parameter's state; None if the value is no tensor.

    A live tensor that fits is reused, so no state is in memory twice.
    """
    if not isinstance(value, SavedTensor):
        return None
    like = is_placed_like(key, value.shape, parameter) and not is_plain
    placed = hasattr(parameter, "placements") and like
    if value.like is not None:
        if is_wrapper(live) and hasattr(live, "placements") == placed:
            return live  # type: ignore[no-any-return]
        return value.like(parameter if placed else None, parameter.device)
    if (
        isinstance(live, torch.Tensor)
        and live.dtype == value.dtype
        and live.shape == value.shape
        and hasattr(live, "placements") == placed
        and not live.is_meta
        and not is_wrapper(live)
    ):
        return live
    if like:
        return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
    on_device = key != "step" or group.get("capturable") or group.get("fused")
    device = parameter.device if on_device else "cpu"
    return torch.empty(value.shape, dtype=value.dtype, device=device)


def _moved(value: Any, device: torch.device) -> Any:
    """Return a value of an optimizer's state with its tensors on a device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _moved(each, device) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)([_moved(each, device) for each in value])
    return value


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        one[key] == other[key] or repr(one[key]) == repr(other[key]) for key in one
    )


def _divided(group: _SavedGroup, one: str, other: str) -> StructureMismatch:
    return StructureMismatch(
        f"A param group of the checkpoint has {one!r} and {other!r}, which are in two groups here",
        key=group.label,
        hint="Make the optimizer's groups as they were saved, or leave the options out with "
        f"exclude=[{group.label!r}]",
    )


def _differing(one: _SavedGroup, other: _SavedGroup) -> StructureMismatch:
    ours, theirs = one.compared(), other.compared()
    keys = [key for key in {**ours, **theirs} if not _same(_only(ours, key), _only(theirs, key))]
    return StructureMismatch(
        f"Two param groups of the checkpoint are one here, and differ in {', '.join(keys)}: that "
        f"of {_some(one.shapes)} and that of {_some(other.shapes)}",
        key=other.label,
        hint="Make the optimizer's groups as they were saved, or leave the options out with "
        f"exclude=[{other.label!r}]",
    )


def _only(options: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {key: options[key]} if key in options else {}


def _some(names: Iterable[str]) -> str:
    return first_of(list(map(repr, names)), 4)


def refuse_meta(tensor: Any, label: str) -> None:
    if isinstance(tensor, torch.Tensor) and tensor.is_meta:
        raise StructureMismatch(
            "The target is on the meta device and has no memory to load into",
            key=label,
            hint="Call model.to_empty(device=...) first, and make the optimizer after that",
        )
