"""Which state a rank loads from a checkpoint that several have written.

With as many ranks as saved, each gets what it saved itself. With another number, it gets what all
of them have alike, in the structure that they share; what each rank had for itself needs a word
from the caller.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ckpipe.errors import UnsupportedTopology
from ckpipe.keys import Json, LabelFilter
from ckpipe.manifest import Bundle, TensorRow
from ckpipe.per_rank import PerRankItems, PerRankPolicy
from ckpipe.structure import Node
from ckpipe.trees import children_of


@dataclass(frozen=True, slots=True)
class SavedState:
    """One state of a checkpoint.

    Args:
        tree: Its root node.
        rows: Its tensors.
        homes: For each tensor, a part that lists it, and its number there.
        values: Its inline values, encoded.
        per_rank: What of it belongs to a rank.
    """

    tree: Node
    rows: Sequence[TensorRow]
    homes: Sequence[tuple[int, int]]
    values: Sequence[Json]
    per_rank: PerRankItems


def state_of_part(bundle: Bundle, number: int) -> SavedState:
    """What one rank saved."""
    part = bundle.parts[number]
    structure = bundle.structures[part.structure]
    homes = [(number, tensor) for tensor in range(len(structure.tensors))]
    return SavedState(structure.tree, structure.tensors, homes, part.values, PerRankItems())


def state_for(bundle: Bundle, rank: int, world_size: int, policy: PerRankPolicy) -> SavedState:
    """The state that a rank of a world loads.

    Args:
        bundle: The checkpoint's index.
        rank: The rank that loads.
        world_size: How many ranks load.
        policy: What becomes of values that belong to one rank each.

    Raises:
        UnsupportedTopology: If ranks saved different structures, and as many do not load.
    """
    if world_size == bundle.world_size:
        return state_of_part(bundle, rank)
    if len(bundle.structures) > 1:
        raise UnsupportedTopology(
            f"The {bundle.world_size} ranks of the checkpoint saved states of different "
            f"structure, which {world_size} cannot load yet",
            step=bundle.id.step,
            hint="Load it with as many ranks as saved it",
        )
    first = state_of_part(bundle, 0)
    if policy == "rank0" or not bundle.per_rank:
        return first
    differing, parts = bundle.per_rank[0], bundle.parts
    items = PerRankItems(
        policy if callable(policy) else None,
        {number: [(part, number) for part in range(len(parts))] for number in differing.tensors},
        {number: [part.values[number] for part in parts] for number in differing.values},
    )
    return SavedState(first.tree, first.rows, first.homes, first.values, items)


def labels_of(saved: SavedState) -> frozenset[str]:
    """The labels of what belongs to a rank."""
    return frozenset(_labels(saved.tree, "", saved.per_rank))


def _labels(node: Node, label: str, items: PerRankItems) -> Iterable[str]:
    tag = node[0]
    if (tag == "tensor" and node[1] in items.tensors) or (
        tag == "value" and node[1] in items.values
    ):
        yield label
    elif tag in ("shared", "registered", "stateful"):
        yield from _labels(node[-1], label, items)
    for _, child, where in children_of(node, label):
        yield from _labels(child, where, items)


def without(select: LabelFilter, labels: frozenset[str]) -> LabelFilter:
    """A filter that leaves out some labels as well."""
    return _Without(select, labels) if labels else select


class _Without(LabelFilter):
    def __init__(self, select: LabelFilter, labels: frozenset[str]) -> None:
        super().__init__()
        self._select, self._labels = select, labels
        self.selects_all = False

    def __call__(self, label: str) -> bool:
        return label not in self._labels and self._select(label)
