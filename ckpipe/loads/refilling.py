"""Containers of the target once the bytes are there: filled again, or made anew if they are frozen.

What stays the very same object is not assigned, so that whoever looks at assignments sees those
alone that change something.
"""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

from ckpipe.loads.making import Make


def refill_set(target: set[Any], make: Make) -> Any:
    """Gives a set the members that are made."""
    members = make()
    target.clear()
    target.update(members)
    return target


def refill_dict(
    target: dict[Any, Any], found: list[tuple[Any, Make]], attributes: Make | None
) -> Any:
    """Puts what is made under the keys of a dict, and attributes on the dict itself."""
    for key, make in found:
        new = make()
        if new is not target[key]:
            target[key] = new
    if attributes is not None:
        vars(target).update(attributes())
    return target


def refill_counter(target: Counter[Any], make: Make) -> Any:
    """Gives a Counter the counts and attributes that are made, in their order."""
    made = make()
    target.clear()
    target.update(made)
    vars(target).update(vars(made))
    return target


def refill_sequence(target: Any, makers: list[Make]) -> Any:
    """Gives a list or deque the elements that are made."""
    made = [make() for make in makers]
    if len(made) != len(target):
        target.clear()
        target.extend(made)
        return target
    for index, new in enumerate(made):
        if new is not target[index]:
            target[index] = new
    return target


def remake_tuple(target: tuple[Any, ...], makers: list[Make]) -> Any:
    """A tuple of what is made, of the target's class; the target itself if it has the very same."""
    made = [make() for make in makers]
    if len(made) == len(target) and all(new is old for new, old in zip(made, target, strict=True)):
        return target
    return tuple.__new__(type(target), made)


def refill_dataclass(target: Any, found: list[tuple[str, Make]]) -> Any:
    """Sets what is made as attributes."""
    for name, make in found:
        new = make()
        if new is not getattr(target, name):
            setattr(target, name, new)
    return target


def remake_dataclass(target: Any, found: list[tuple[str, Make]]) -> Any:
    """A copy of a frozen dataclass with what is made; the target itself if it has the very same."""
    changed = {name: make() for name, make in found}
    if all(new is getattr(target, name) for name, new in changed.items()):
        return target
    remade = copy.copy(target)
    for name, new in changed.items():
        object.__setattr__(remade, name, new)
    return remade


__all__ = [
    "refill_counter",
    "refill_dataclass",
    "refill_dict",
    "refill_sequence",
    "refill_set",
    "remake_dataclass",
    "remake_tuple",
]
