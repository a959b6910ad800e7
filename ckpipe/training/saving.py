"""The state of optimizers by the names of parameters: how it is saved.

The form, which docs/format.md describes too::

    {"groups": {first: {"optimizer": class, "options": {...}, "params": {name: shape, ...}}},
     "state": {name: {key: value, ...}},
     "plain": {name: [key, ...]},
     "joint": {first: {"params": [name, ...], "state": {...}, "extra": {...}}}}

A group stands under the name of its first parameter and is a set of names, so that those of several
ranks are merged by their content. A parameter that an optimizer has and keeps nothing for stands
in its group only. A tied parameter has all its names in ``params``, and its state under each.

A tensor of the shape of its parameter is placed and sharded like it when it is loaded; any other
one, and one called ``step``, lies whole on each rank. ``plain`` names the exceptions. ``joint`` is
the state of no one parameter, such as that of LBFGS. ``plain`` and ``joint`` are there only if
something is in them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ckpipe.errors import UnsupportedState
from ckpipe.state.values import class_path
from ckpipe.training.names import is_sharded
from ckpipe.training.optimizers import NO_OPTIONS, NamedOptimizer


def optimizers_state(optimizers: Sequence[NamedOptimizer]) -> dict[str, Any]:
    """The state of optimizers in the form above.

    Raises:
        UnsupportedState: If a parameter belongs to two optimizers, or if state is sharded in a way
            that no other world could take up.
    """
    groups: dict[str, Any] = {}
    states: dict[str, Any] = {}
    plain: dict[str, Any] = {}
    joint: dict[str, Any] = {}
    taken: set[str] = set()
    for each in optimizers:
        for names in each.names:
            if names[0] in taken:
                raise UnsupportedState(
                    "Two optimizers step one parameter", key=names[0], hint="Give it to one of them"
                )
            taken.add(names[0])
        groups.update(_groups(each))
        together = each.kept_together
        if together is not None:
            _refuse_sharded(each, together)
            ordered = [names[0] for names in each.names]
            joint[ordered[0]] = {"params": ordered, **together}
        kept = each.taken["state"]
        alone = together is None or 0 not in together["state"]
        for number, parameter, names in zip(each.numbers, each.parameters, each.names, strict=True):
            state = kept.get(number)
            if not state or not alone:
                continue
            exceptions = [
                key for key, value in state.items() if _is_exception(key, value, parameter, names)
            ]
            for name in names:
                # Each its own dict, as one that stands in two places is slow to save.
                states[name] = dict(state)
                if exceptions:
                    plain[name] = list(exceptions)
    found = {"groups": groups, "state": states}
    if plain:
        found["plain"] = plain
    if joint:
        found["joint"] = joint
    return found


def is_placed_like(key: str, shape: Sequence[int], parameter: torch.Tensor) -> bool:
    """Tell whether a tensor of this shape is placed like its parameter, unless ``plain`` names
    it.
    """
    return key != "step" and parameter.shape == shape


def private_state(optimizers: Sequence[NamedOptimizer]) -> Iterator[tuple[str, str]]:
    """Names and keys of plain state that may differ between ranks that have it.

    It is what an optimizer keeps for a parameter of which this rank holds a part.
    """
    for each in optimizers:
        for number, parameter, names in zip(each.numbers, each.parameters, each.names, strict=True):
            if not is_sharded(parameter):
                continue
            for key, value in each.taken["state"].get(number, {}).items():
                if any(t.numel() > 1 and not isinstance(t, DTensor) for t in tensors_in(value)):
                    yield from ((name, key) for name in names)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a value of an optimizer's state, which may be a container."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)


def _groups(each: NamedOptimizer) -> Iterator[tuple[str, Any]]:
    for _, taken, places in each.groups:
        shapes = {
            name: each.parameters[place].shape for place in places for name in each.names[place]
        }
        if shapes:
            options = {key: value for key, value in taken.items() if key not in NO_OPTIONS}
            kind = class_path(type(each.optimizer))
            yield next(iter(shapes)), {"optimizer": kind, "options": options, "params": shapes}


def _is_exception(key: str, value: Any, parameter: torch.Tensor, names: Sequence[str]) -> bool:
    """Tell whether a value has its parameter's shape and is plain all the same.

    Raises:
        UnsupportedState: If it is sharded otherwise than its parameter.
    """
    if not isinstance(value, torch.Tensor):
        if any(isinstance(each, DTensor) for each in tensors_in(value)):
            raise _sharded_otherwise(key, names[0], "it is inside of a container")
        return False
    placed = isinstance(parameter, DTensor)
    like = is_placed_like(key, value.shape, parameter)
    if not isinstance(value, DTensor):
        return like and placed
    if not (like and placed):
        shapes = f"its shape is {list(value.shape)}, that of the parameter {list(parameter.shape)}"
        raise _sharded_otherwise(key, names[0], shapes)
    return False


def _sharded_otherwise(key: str, name: str, why: str) -> UnsupportedState:
    return UnsupportedState(
        f"The optimizer keeps {key!r} as a DTensor that is not sharded like its parameter: {why}",
        key=name,
        hint="Use an optimizer whose sharded state has the shapes of its parameters, or leave "
        "this one out of training_state",
    )


def _refuse_sharded(each: NamedOptimizer, together: Mapping[str, Any]) -> None:
    for parameter, names in zip(each.parameters, each.names, strict=True):
        if together["state"] and is_sharded(parameter):
            raise UnsupportedState(
                f"A {type(each.optimizer).__name__} keeps state for all its parameters together, "
                "and this one is sharded, so that no other world could take it up",
                key=names[0],
                hint="Use another optimizer for sharded parameters, or leave it out",
            )
