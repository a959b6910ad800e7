"""Apply ``include`` and ``exclude`` to a saved tree and a target; refuse values of single ranks.

Another number of ranks cannot load values that were different on each rank, unless the caller
passes a policy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ckpipe.errors import PerRankValue
from ckpipe.format.labels import Json, LabelFilter, join
from ckpipe.format.tree import (
    SETS,
    WRAPPERS,
    Node,
    children_of,
    leaf_labels,
    shared_containers,
    with_selected,
)
from ckpipe.state.kinds import is_stateful, part_of_registered
from ckpipe.types import PerRank

_MOST_LABELS = 10_000_000


def any_selected(obj: Any, label: str, select: LabelFilter) -> bool:
    """Tell whether the filter selects a leaf of a live object, which may be the object itself."""
    return select.selects_all or any(map(select, _live_labels(obj, label, select, set())))


def _live_labels(obj: Any, label: str, select: LabelFilter, above: set[int]) -> Iterator[str]:
    """Yield labels of a live object; objects of which the filter selects nothing are not asked."""
    if not select.may_select(label):
        return
    children = _live_children(obj)
    if not children or id(obj) in above:
        yield label
        return
    for key, child in children:
        yield from _live_labels(child, join(label, key), select, {*above, id(obj)})


def _live_children(obj: Any) -> list[tuple[Any, Any]] | None:
    if isinstance(obj, torch.Tensor | np.ndarray | type):
        return None
    if is_stateful(obj):
        return _live_children(obj.state_dict())
    if isinstance(obj, Mapping):
        return list(obj.items())
    if isinstance(obj, tuple) and hasattr(obj, "_fields"):
        return list(zip(obj._fields, obj, strict=True))
    if isinstance(obj, list | tuple) and not isinstance(obj, torch.Size):
        return list(enumerate(obj))
    if dataclasses.is_dataclass(obj):
        return [(f.name, getattr(obj, f.name, None)) for f in dataclasses.fields(obj)]
    return None


class LenientFilter(LabelFilter):
    """A filter that also leaves out what only one of checkpoint and target has, as far as allowed.

    Args:
        select: The filter.
        may_miss: Selects labels that the checkpoint may lack.
        may_remain: Selects labels that the target may lack.
        tree: The saved tree.
        into: The target.

    Attributes:
        missing: The labels of the target that it has left out, in their order.
        unexpected: Those of the checkpoint.
    """

    def __init__(
        self,
        select: LabelFilter,
        may_miss: LabelFilter,
        may_remain: LabelFilter,
        tree: Node,
        into: Any,
    ) -> None:
        super().__init__()
        self.selects_all, self.patterns = False, select.patterns
        self._select, self._may_miss, self._may_remain = select, may_miss, may_remain
        self._saved = set(_saved_labels(tree, "", shared_containers([tree]), frozenset()))
        lists = bool(may_remain.patterns[0])
        self._leaves = set(_live_labels(into, "", select, set()) if lists else ())
        self._live = {each for leaf in self._leaves for each in _with_all_above(leaf)}
        self.missing: dict[str, None] = {}
        self.unexpected: dict[str, None] = {}

    def __call__(self, label: str) -> bool:
        if not self._select(label):
            return False
        if label not in self._saved:
            if self._may_miss(label):
                self.missing[label] = None
                return False
        elif self._may_remain(label) and not self._is_live(label):
            self.unexpected[label] = None
            return False
        return True

    def _is_live(self, label: str) -> bool:
        """Tell whether the target has a label, one below it, or a leaf that it lies in."""
        return label in self._live or not self._leaves.isdisjoint(_with_all_above(label))

    def may_select(self, label: str) -> bool:
        return self._select.may_select(label)


def _with_all_above(label: str) -> Iterator[str]:
    """Yield a label and the labels of all that it may lie in, apart from the root."""
    while label:
        yield label
        label = label.rpartition(".")[0]


def unmatched(select: LabelFilter, trees: Iterable[Node]) -> list[str]:
    """Return the globs of ``include`` that match nothing in any of some saved trees.

    If a tree has more labels than real ones have, which only references make possible, the result
    is empty.
    """
    left = {each: LabelFilter([each]) for each in select.patterns[0] or ()}
    for tree in trees if left else ():
        known = shared_containers([tree])
        for number, label in enumerate(_saved_labels(tree, "", known, frozenset())):
            left = {each: matches for each, matches in left.items() if not matches(label)}
            if not left or number > _MOST_LABELS:
                return []
    return list(left)


def _saved_labels(
    node: Node, label: str, known: Mapping[int, Node], above: frozenset[int]
) -> Iterator[str]:
    """Yield the labels of a saved node and of all nodes inside, except absent ones."""
    if node.kind != "absent":
        yield label
    if node.kind in ("shared", "ref"):
        if node.head not in above:
            yield from _saved_labels(known[node.head], label, known, above | {node.head})
    elif node.kind in WRAPPERS:
        yield from _saved_labels(node.inner, label, known, above)
    for _, child, where in children_of(node, label):
        yield from _saved_labels(child, where, known, above)


def pruned(
    tree: Node, select: LabelFilter, definitions: Mapping[int, Node]
) -> tuple[Node, Mapping[int, Node]]:
    """Return the tree as if it had been saved with a filter; an empty result is absent.

    Args:
        tree: The saved tree.
        select: The filter.
        definitions: The containers that references in it point to.

    Returns:
        The pruned tree, and its definitions.

    Raises:
        UsageError: If the filter selects a part of a registered object.
    """
    if select.selects_all:
        return tree, definitions
    pruning = _Pruning(select, definitions)
    left = pruning.left_of(tree, "") or Node("absent")
    return left, {**definitions, **pruning.shared}


class _Pruning:
    def __init__(self, select: LabelFilter, definitions: Mapping[int, Node]) -> None:
        self._select, self._definitions = select, definitions
        self.shared: dict[int, Node] = {}
        self._partial: set[int] = set()
        self._left_out = 0

    def left_of(self, node: Node, label: str) -> Node | None:
        """Return a node without its unselected items; None if no item is left."""
        if node.kind == "absent":
            return None
        if node.kind in ("tensor", "value", *SETS):
            if self._select(label):
                return node
            self._left_out += 1
            return None
        if node.kind in ("shared", "ref"):
            return self._of_shared(node.head, label)
        if node.kind in WRAPPERS:
            return self._of_wrapper(node, label)
        children = children_of(node, label)
        kept = [self.left_of(child, where) for _, child, where in children]
        if all(child is None for child in kept) and (children or not self._select(label)):
            return None
        return with_selected(node, kept)

    def _of_shared(self, number: int, label: str) -> Node | None:
        if number in self.shared:
            self._left_out += number in self._partial
            return Node("ref", number)
        self.shared[number] = Node("absent")
        before = self._left_out
        inner = self.left_of(self._definitions[number], label)
        if self._left_out > before:
            self._partial.add(number)
        if inner is None:
            del self.shared[number]
            return None
        self.shared[number] = inner
        return Node("shared", number, nodes=[inner])

    def _of_wrapper(self, node: Node, label: str) -> Node | None:
        before = self._left_out
        inner = self.left_of(node.inner, label)
        if inner is not None and self._left_out > before:
            if not leaf_labels(inner, label):
                return None  # Empty containers alone are no reason to load an object.
            if node.kind in ("registered", "wrapper_tensor"):
                raise part_of_registered(label)
        return None if inner is None else node.with_nodes([inner])


Combine = Callable[[str, Sequence[Any]], Any]
"""A function that combines the values of all ranks; gets the label and the values by rank."""

PerRankPolicy = PerRank | Combine


@dataclass(frozen=True, slots=True)
class PerRankItems:
    """The tensors and values of a saved state that belong to a rank, if no rank fits.

    Args:
        combine: Combines the copies of all ranks; None refuses.
        tensors: For the number of a tensor, the parts that have a copy, and its number there; empty
            for one of a random generator.
        values: For the number of an inline value, the copies of all parts, encoded; empty for one
            of a random generator.
        derive: Derives the state of the rank's own generators from a saved one; None refuses.
        generators: The labels of these generators.
    """

    combine: Combine | None = None
    tensors: Mapping[int, Sequence[tuple[int, int]]] = field(default_factory=dict)
    values: Mapping[int, Sequence[Json]] = field(default_factory=dict)
    derive: Callable[[Any], Any] | None = None
    generators: frozenset[str] = frozenset()

    def refused(self, label: str, copies: Sequence[Any]) -> PerRankValue:
        """Return the error for a tensor or value that the caller's policy does not cover."""
        if not copies:
            return PerRankValue(
                "These random generators were saved by another rank, or by another number of "
                "ranks, and two ranks must not draw the same numbers",
                key=label or None,
                hint='Pass per_rank="derive" for generators of this rank\'s own, or "drop" to keep '
                "those of the target, or leave them out with exclude",
            )
        return PerRankValue(
            "Each rank saved a value of its own here, and the number of ranks has changed",
            key=label or None,
            hint='Pass per_rank="rank0", "drop" or a function that combines them, leave it out '
            "with exclude, or load with as many ranks as saved",
        )
