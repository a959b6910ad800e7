"""The form of a training state, and the labels of optimizers in it and in states of others.

Theory. ``training_state`` saves a model and its optimizers by the names of parameters::

    {"model": {name: tensor, ...}, "versions": {module: number, ...}, "optimizer":
        {"groups": {first: {"optimizer": class, "options": {...}, "params": {name: shape, ...}}},
         "state": {name: {key: value, ...}},
         "plain": {name: [key, ...]},
         "empty": {first: {number: {"optimizer": class, "options": {...}}, ...}},
         "joint": {first: {"params": [name, ...], "state": {...}, "extra": {...}}}}}

The key of a group is the name of its first parameter. A group is a set of names, so the groups of
several ranks are merged by their content. A parameter without state is only in its group. A tied
parameter has all its names in ``params``, and its state under each.

A tensor of the shape of its parameter is placed and sharded like it when it is loaded. Any other
tensor, and one called ``step``, is whole on each rank. ``plain`` names the exceptions. ``joint`` is
state that belongs to no single parameter, such as that of LBFGS. ``empty`` has the groups without
parameters, numbered, under the first parameter of their optimizer. ``plain``, ``joint`` and
``empty`` exist only if they are not empty; ``optimizer`` only if there is one.

torch and DCP have ``state`` beside a list ``param_groups``, nested or flat, and parameters under
their numbers or names. So the *head* of an optimizer, the label of all of it with a dot behind, is
empty at the root, and is found by the labels behind it: groups, or the names of usual moments.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

MODEL, VERSIONS, OPTIMIZER = "model", "versions", "optimizer"
GROUPS, STATE, PLAIN, EMPTY, JOINT = "groups", "state", "plain", "empty", "joint"
PARAM_GROUPS = "param_groups"

WEIGHTS = "__ckpipe_weights__"
"""The attribute in which the class of a training state has the key of its model."""

OWN_OPTIONS = ("foreach", "fused", "capturable", "differentiable")
"""Options that change the implementation and not the result: a load leaves them as they are.
torch adds one of them to the defaults of any optimizer that has loaded a state."""

NO_OPTIONS = ("params", "param_names")
"""Keys of a group that name its parameters."""

_GROUPS = re.compile(
    r"(?:^|(?<=\.))(?:param_groups(?:\.|$)|groups\.(?=(?:.*\.)?(?:options|params)\.))"
)
_BARE = re.compile(
    r"(?:^|(?<=\.))state\.(?!(?:.*\.)?state\.)(?=.*\.(?:exp_avg\w*|exp_inf|momentum_buffer|"
    r"square_avg|acc_delta)$)|(?<=\boptimizer\.)state\."
)
_INSIDE = re.compile(r"(?:^|(?<=\.))(?:state|joint|param_groups|groups|plain|empty)\.")
_LISTED = re.compile(r"(?:^|\.)param_groups\.\d+\.params\.\d+$")
_PLACE = re.compile(r"((?:.*\.)?)optimizer\.(state|plain|groups\..*\.params)\.(.+)")


def is_training_state(value: Any) -> bool:
    return hasattr(type(value), WEIGHTS)


def grouped_heads(labels: Iterable[str]) -> set[str]:
    """Return the heads of the optimizers that have groups."""
    return {label[: each.start()] for label in labels for each in _GROUPS.finditer(label)}


def heads_in(labels: Collection[str]) -> set[str]:
    """Return the heads of the optimizers that have groups, or usual moments."""
    heads = grouped_heads(labels)
    rest = (label for label in labels if head_of(label, heads) is None)
    return heads | {label[: each.start()] for label in rest for each in _BARE.finditer(label)}


def head_of(label: str, heads: Collection[str]) -> str | None:
    """Return the head of the optimizer in which a label lies, if it lies in one."""
    found = (label[: each.start()] for each in _INSIDE.finditer(label))
    return next((each for each in found if each in heads), None)


def is_of_state(label: str, head: str) -> bool:
    """Tell whether a label is of the state of a parameter, or of several together."""
    return label.startswith((f"{head}{STATE}.", f"{head}{JOINT}."))


def is_listed(label: str) -> bool:
    """Tell whether a label is of a parameter's name or number in a list, as torch has them."""
    return _LISTED.search(label) is not None


class ParameterPlace(NamedTuple):
    """The place of a value of a parameter in the optimizer of a training state.

    Args:
        above: The label of the training state, with a dot behind it; empty at the root.
        home: The part of the optimizer, such as ``state``, or ``groups.w.params``.
        name: The name of the parameter.
        key: The key of the value in its state; empty elsewhere.
    """

    above: str
    home: str
    name: str
    key: str

    @property
    def model(self) -> str:
        """The label of the model with a dot behind it."""
        return f"{self.above}{MODEL}."

    def of(self, name: str) -> str:
        """Return the label of this value of another parameter."""
        return ".".join(filter(None, (f"{self.above}{OPTIMIZER}", self.home, name, self.key)))


def place_of(label: str) -> ParameterPlace | None:
    """Return the place that a label tells; None if it is none."""
    found = _PLACE.fullmatch(label)
    if found is None:
        return None
    above, home, name = found.groups()
    name, _, key = name.rpartition(".") if home == STATE else (name, "", "")
    return ParameterPlace(above, home, name, key)


# The form of torch


def states_of(saved: Mapping[str, Any]) -> Mapping[Any, Mapping[str, Any]]:
    """Return the saved state of parameters; none if an optimizer has a form of its own for it."""
    states: Mapping[Any, Mapping[str, Any]] = saved.get(STATE, {})
    usual = isinstance(states, dict) and all(isinstance(each, dict) for each in states.values())
    return states if usual else {}


def groups_of(saved: Any) -> Sequence[Mapping[str, Any]]:
    """Return saved groups; none if an optimizer has a form of its own for them."""
    usual = isinstance(saved, list) and all(
        isinstance(group, dict) and isinstance(group.get("params", []), list) for group in saved
    )
    return saved if usual else ()


def in_torch_form(value: Any) -> Any:
    """Return a training state as torch's ``get_state_dict`` has it, and any other value as it is.

    State that belongs to no single parameter, as that of LBFGS, has no such form and stays.
    """
    if not isinstance(value, Mapping) or not value.keys() >= {MODEL, VERSIONS}:
        return value
    optimizer = value.get(OPTIMIZER)
    made = {MODEL: value[MODEL]}
    if optimizer is None:
        return made
    if optimizer.keys() & {GROUPS, STATE, JOINT} != {GROUPS, STATE}:
        return {**made, OPTIMIZER: optimizer}
    empty = [each for of in optimizer.get(EMPTY, {}).values() for each in of.values()]
    groups = [
        {"params": list(each.get("params", ())), **each["options"]}
        for each in (*optimizer[GROUPS].values(), *empty)
    ]
    return {**made, OPTIMIZER: {STATE: optimizer[STATE], PARAM_GROUPS: groups}}
