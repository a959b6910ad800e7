"""Functions that make the objects of a state, once the bytes of its tensors are there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

Make = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Changeable:
    """Makes a container in two steps, between which it can be referred to.

    Args:
        shell: Makes the empty container.
        fill: Fills it.
    """

    shell: Make
    fill: Callable[[Any], None]

    def __call__(self) -> Any:
        made = self.shell()
        self.fill(made)
        return made


def same(obj: Any) -> Any:
    """The object itself: what a node makes whose counterpart stays in its place."""
    return obj


def stays(make: Make, obj: Any) -> bool:
    """Whether an object is known to make itself."""
    return type(make) is partial and make.func is same and make.args[0] is obj


__all__ = ["Changeable", "Make", "same", "stays"]
