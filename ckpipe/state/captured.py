"""A state taken apart, and the way that the walk took through it.

:mod:`ckpipe.state.structure` makes both; a :mod:`ckpipe.state.trail` is made of the second.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from ckpipe.format.keys import Json, LabelFilter
from ckpipe.format.trees import SETS, Node, leaf_labels
from ckpipe.state.tensors import TensorLeaf

T = TypeVar("T")
Met = tuple[type[Any], Node | None]
"""A leaf as the walk met it: its class and its node, None if it was left out."""


@dataclass(slots=True)
class Captured:
    """A state taken apart: its structure, and what only this save has.

    Args:
        tree: The root node.
        tensors: The leaves that hold bytes, in the order of the walk; labels are unique.
        values: The inline values, encoded.
        replicated: The numbers of the plain tensors of which an object in the state says that
            all ranks hold them alike; see :mod:`ckpipe.state.replication`.
        memory: For each leaf its bytes, as a plain tensor on the same memory.
        objects: For each leaf the tensor or array itself, as it stands in the state.
    """

    tree: Node
    tensors: list[TensorLeaf]
    values: list[Json]
    replicated: frozenset[int] = frozenset()
    memory: list[torch.Tensor] = field(default_factory=list)
    objects: list[Any] = field(default_factory=list)
    _derived: dict[Hashable, Any] = field(default_factory=dict)
    _described: dict[Hashable, Any] = field(default_factory=dict)

    def described(self, make: Callable[[Captured], T]) -> T:
        """What a function makes of the structure wherever its tensors lie, made once.

        Args:
            make: A function of the tree, the number of values, and the leaves but for addresses.
        """
        if make not in self._described:
            self._described[make] = make(self)
        made: T = self._described[make]
        return made

    def derived(self, make: Callable[[Captured], T]) -> T:
        """What a function makes of the structure, made once for all captures that share it.

        Args:
            make: A function of tree, leaves and replicas alone.
        """
        if make not in self._derived:
            self._derived[make] = make(self)
        made: T = self._derived[make]
        return made

    @property
    def addresses(self) -> npt.NDArray[np.uint64]:
        """Where the first element of each leaf lies, on whatever device."""
        return self.derived(_addresses)

    def again(self, values: list[Json], memory: list[torch.Tensor], objects: list[Any]) -> Captured:
        """A state of the very same structure, with other values and perhaps other bytes."""
        made = self.moved(self.tensors, values, memory, objects)
        made._derived = self._derived
        return made

    def moved(
        self,
        leaves: list[TensorLeaf],
        values: list[Json],
        memory: list[torch.Tensor],
        objects: list[Any],
    ) -> Captured:
        """The same of which some tensors lie elsewhere; their leaves differ by the address."""
        made = Captured(self.tree, leaves, values, self.replicated, memory, objects)
        made._described = self._described
        return made

    def forget_memory(self) -> None:
        """Lets go of the tensors; what was made of them stays."""
        self.memory, self.objects = [], []


def _addresses(captured: Captured) -> npt.NDArray[np.uint64]:
    return np.array([leaf.address for leaf in captured.tensors], np.uint64)


@dataclass(slots=True)
class Passage:
    """A container as the walk went through it.

    Args:
        kind: Its kind.
        type: Its class.
        label: Its label.
        keys: The keys of its children; None where they are counted.
        head: What else belongs to it.
        met: For each child the passage through it, or if it is a leaf its class and its node,
            which is None if it was left out.
        replicas: Whether it says which tensors are replicated.
        claimed: What it was asked of: labels from it on, and the numbers of the tensors.
        attached: Whether the tensors right in it, or if it is an object in what its
            ``state_dict`` returned, stand for what ``detach`` makes of them.
    """

    kind: str
    type: type[Any]
    label: str
    keys: list[Any] | None
    head: Json
    met: list[Passage | Met] = field(default_factory=list)
    replicas: bool = False
    claimed: list[tuple[str, int]] = field(default_factory=list)
    attached: bool = False


@dataclass(slots=True)
class Walked:
    """A walk that is over.

    Args:
        captured: What it found.
        root: Stands around the state, which is its only child.
        attributes: Of tensors that have attributes, the number and the passage through those.
        attached: The numbers of those that stand for what ``detach`` makes of them.
        repeatable: Whether a state that is met in the same way has the same tree: no container
            stands in two places, and nothing was pickled.
    """

    captured: Captured
    root: Passage
    attributes: list[tuple[int, Passage]]
    attached: frozenset[int]
    repeatable: bool

    def emptied_by(self, select: LabelFilter) -> bool:
        """Whether nothing of the state was kept, and something was left out by this filter."""
        captured = self.captured
        kept = captured.tensors or captured.values or [*leaf_labels(captured.tree, "")]
        return not kept and _leaves_out(self.root, select)


def _leaves_out(passage: Passage, select: LabelFilter) -> bool:
    if passage.kind in SETS:
        return not select(passage.label)
    return any(
        _leaves_out(each, select) if isinstance(each, Passage) else each[1] is None
        for each in passage.met
    )
