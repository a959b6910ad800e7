"""Find the state that a rank loads from a checkpoint of several ranks.

If the number of ranks is unchanged, each rank loads its own save. Else it loads the values that all
ranks have alike, in the structure that they share; for values that each rank had for itself, the
caller must pass a policy.

The ranks of pipeline or expert parallelism save different labels. Their merged trees are the state
of the whole run: containers have the keys of all, and tensors with the same label are the same
tensor. Nodes of several trees that cannot be merged belong to a rank.

Random generators. Two ranks with the same generator draw the same dropout masks and the same
samples, and nothing fails. So a saved :class:`~ckpipe.RngState` belongs to the rank that saved it,
even if all ranks saved the same: another rank is refused, or gets a state that is derived from the
saved one and from its rank.
"""

from __future__ import annotations

import base64
import pickle
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ckpipe.errors import (
    CkpipeError,
    InvalidManifest,
    StructureMismatch,
    UnsupportedState,
    reason_of,
)
from ckpipe.format.labels import Json, LabelFilter, canonical
from ckpipe.format.manifest import ManifestDocument, OptimizerRow, TensorRow
from ckpipe.format.merge import differ_privately
from ckpipe.format.tree import MAPPINGS, Node, rewritten, walk
from ckpipe.reading.chunks import NeedsFullIndex
from ckpipe.reading.select import PerRankItems, PerRankPolicy
from ckpipe.state.values import UNREAD, decode_value
from ckpipe.state_helpers import derived_generators


@dataclass(frozen=True, slots=True)
class SavedState:
    """One state of a checkpoint.

    Args:
        tree: Its root node.
        rows: Its tensors.
        homes: For each tensor, a part that lists it, and its number there.
        values: Its inline values, encoded.
        per_rank: Its tensors and values that belong to a rank.
        common: The labels that all ranks had, if not all had the same ones.
        from_others: The labels that the loading rank did not have itself; in a world of another
            size, where no rank is the same, those that not all ranks had.
        same_world: Whether the number of ranks is unchanged.
        optimizers: The recorded facts of its optimizers, by label.
    """

    tree: Node
    rows: Sequence[TensorRow]
    homes: Sequence[tuple[int, int]]
    values: Sequence[Json]
    per_rank: PerRankItems
    common: frozenset[str] | None = None
    from_others: frozenset[str] = frozenset()
    same_world: bool = True
    optimizers: Mapping[str, OptimizerRow] = field(default_factory=dict)

    def value_of(self, number: int, label: str, *, pickling: bool) -> Any:
        """Return an inline value; the caller's function combines those that belong to a rank.

        Args:
            number: Its number.
            label: The label of its node.
            pickling: Whether pickled objects may be made.

        Raises:
            PerRankValue: If it belongs to a rank, and the caller's policy does not cover it.
            UnsupportedState: If it is pickled and that is refused.
            InvalidManifest: If it does not exist or is malformed.
        """
        if not 0 <= number < len(self.values):
            raise InvalidManifest(f"The tree names value {number}, which does not exist", key=label)
        copies = self.per_rank.values.get(number)
        if copies is None:
            return _decoded(self.values[number], label, pickling=pickling)
        if self.per_rank.combine is None or not copies:
            raise self.per_rank.refused(label, copies)
        made = [_decoded(each, label, pickling=pickling) for each in copies]
        return self.per_rank.combine(label, made)


def _decoded(data: Json, label: str, *, pickling: bool) -> Any:
    if isinstance(data, list) and data[:1] == ["pickle"]:
        return _unpickled(data, label, allowed=pickling)
    refuse_unread(data, label)
    try:
        return decode_value(data)
    except CkpipeError as error:
        error.key = error.key or label or None
        raise


def refuse_unread(data: Json, label: str) -> None:
    """Refuse an object of another program that was not made.

    Args:
        data: An inline value.
        label: The label of its node.

    Raises:
        UnsupportedState: If it stands for such an object.
    """
    if isinstance(data, list) and len(data) == 3 and data[0] == UNREAD:
        raise UnsupportedState(
            f"{data[2]} holds {data[1]}",
            key=label or data[2],
            hint="Leave it out, such as with exclude= or the transform ckpipe.Drop. If you trust "
            "the file's writer, load it with the program that wrote it, and save plain values in "
            "its place, and plain tensors, such as tensor.to_dense() or tensor.detach().clone()",
        )


def _unpickled(data: list[Any], label: str, *, allowed: bool) -> Any:
    if not allowed:
        raise UnsupportedState(
            "The checkpoint holds a pickled object, which could run any code when it is loaded",
            key=label or None,
            hint='Set pickle="allow" if you trust its writer, or leave it out with exclude',
        )
    try:
        return pickle.loads(base64.b64decode(data[1], validate=True))
    except Exception as error:
        raise InvalidManifest(
            f"The pickled object cannot be made: {reason_of(error)}", key=label or None
        ) from error


def state_of_part(document: ManifestDocument, number: int) -> SavedState:
    """Return the state that one rank saved."""
    part = document.parts[number]
    structure = document.structures[part.structure]
    homes = [(number, tensor) for tensor in range(len(structure.tensors))]
    return SavedState(
        structure.tree, structure.tensors, homes, part.values, PerRankItems(),
        optimizers={row.label: row for row in structure.optimizers},
    )  # fmt: skip


def state_for(
    document: ManifestDocument,
    rank: int,
    world_size: int,
    policy: PerRankPolicy,
    *,
    fresh: bool = True,
) -> SavedState:
    """Return the state that a rank of a world loads.

    Args:
        document: The checkpoint's index. If the number of ranks is unchanged, some of its parts
            with that of the rank are enough; the state is then the rank's own save.
        rank: The rank that loads.
        world_size: The number of ranks that load.
        policy: The policy for values that belong to one rank each.
        fresh: Whether there is no target, which could have labels of other ranks.
    """
    same = world_size == document.world_size
    if not document.whole:
        number = document.number_of(rank)
        if number is None or not same:
            raise NeedsFullIndex
        return state_of_part(document, number)
    base = rank if same else 0
    if len(document.structures) > 1 and not (same and fresh):
        return _merged_state(document, base, None if same else policy)
    saved = state_of_part(document, base)
    if same or policy == "rank0" or not document.per_rank:
        return saved
    differing, parts = document.per_rank[0], document.parts
    items = PerRankItems(
        policy if callable(policy) else None,
        {number: [(part, number) for part in range(len(parts))] for number in differing.tensors},
        {number: [part.values[number] for part in parts] for number in differing.values},
    )
    return replace(saved, per_rank=items)


def _merged_state(
    document: ManifestDocument, base: int, policy: PerRankPolicy | None
) -> SavedState:
    """Return the merged state of ranks with different structures.

    Args:
        document: The checkpoint's index.
        base: The part that takes precedence over the others.
        policy: The policy for values that belong to one rank each; None takes those of the base.
    """
    members = {document.parts[base].structure: base}
    for number, part in enumerate(document.parts):
        members.setdefault(part.structure, number)
    first_wins = policy is None or policy == "rank0"
    merged = _MergedTree(document, list(members.values()), first_wins=first_wins)
    items = PerRankItems()
    if not first_wins:
        combine = policy if callable(policy) else None
        items = PerRankItems(combine, *_differing(document, merged))
    homes = [origins[0] for origins in merged.tensor_origins]
    labels = [frozenset(label for _, label in walk(each.tree)) for each in document.structures]
    common = frozenset.intersection(*labels)
    own = labels[document.parts[base].structure] if policy is None else common
    optimizers = {
        row.label: row
        for number in reversed(members)
        for row in document.structures[number].optimizers
    }
    return SavedState(
        merged.tree, merged.rows, homes, merged.values, items, common,
        frozenset.union(*labels) - own, same_world=policy is None, optimizers=optimizers,
    )  # fmt: skip


def _differing(
    document: ManifestDocument, merged: _MergedTree
) -> tuple[dict[int, list[Origin]], dict[int, list[Json]]]:
    """Return the tensors and values of a merged tree that differ between ranks, with all copies."""
    ranks = defaultdict(list)
    for number, part in enumerate(document.parts):
        ranks[part.structure].append(number)

    def everywhere(origins: list[Origin]) -> list[Origin]:
        found = [(p, n) for part, n in origins for p in ranks[document.parts[part].structure]]
        return sorted(found)

    tensors = {
        number: everywhere(origins)
        for number, origins in enumerate(merged.tensor_origins)
        if any(n in document.per_rank[document.parts[p].structure].tensors for p, n in origins)
        or differ_privately(document, origins)
    }
    values = {
        number: [document.parts[p].values[n] for p, n in everywhere(origins)]
        for number, origins in enumerate(merged.value_origins)
        if number in merged.conflicts
        or any(n in document.per_rank[document.parts[p].structure].values for p, n in origins)
    }
    return tensors, values


def keep_generators_apart(
    saved: SavedState, document: ManifestDocument, rank: int, world_size: int, policy: PerRankPolicy
) -> SavedState:
    """Mark the random generators of a saved state that another rank may load as well.

    Args:
        saved: The state that the rank loads.
        document: The checkpoint of the state.
        rank: The rank that loads.
        world_size: The number of ranks that load.
        policy: The policy for values that belong to one rank each. A function is not called for
            generators: they are derived, as with ``"derive"``.
    """
    same_world = world_size == document.world_size
    if (same_world and saved.common is None) or (world_size == 1 and policy == "rank0"):
        return saved
    if not any(row.dtype == "uint8" and "torch" in row.label for row in saved.rows):
        return saved
    tensors: set[int] = set()
    values: set[int] = set()
    labels: set[str] = set()
    for node, label in walk(saved.tree):
        if not is_generators(node):
            continue
        leaves = [each for each, _ in walk(node)]
        numbers = {each.head for each in leaves if each.kind == "tensor"}
        if not same_world or any(saved.homes[number][0] != rank for number in numbers):
            labels.add(label)
            tensors |= numbers
            values.update(each.head for each in leaves if each.kind == "value")
    if not tensors:
        return saved
    items = replace(
        saved.per_rank,
        tensors={**saved.per_rank.tensors, **dict.fromkeys(tensors, ())},
        values={**saved.per_rank.values, **dict.fromkeys(values, ())},
        derive=partial(_derived, rank) if policy == "derive" or callable(policy) else None,
        generators=frozenset(labels),
    )
    return replace(saved, per_rank=items)


def is_generators(node: Node) -> bool:
    """Tell whether a node is the ``state_dict`` of an ``RngState``."""
    if node.kind not in MAPPINGS or not all(each in node.keys for each in _GENERATORS):
        return False
    python = node.nodes[node.keys.index("python")]
    return python.kind in MAPPINGS and all(
        key in python.keys for key in ("version", "internal", "gauss")
    )


_GENERATORS = ("python", "torch", "numpy")


def _derived(rank: int, state: Any) -> Any:
    try:
        return derived_generators(state, rank)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise StructureMismatch(
            f"The saved random generators are not as RngState saves them: {reason_of(error)}",
            hint="Leave them out with exclude",
        ) from error


def labels_of(saved: SavedState) -> frozenset[str]:
    """Return the labels of the tensors, values and generators that belong to a rank."""
    items = saved.per_rank
    own = {"tensor": items.tensors, "value": items.values}
    leaves = [(node, label) for node, label in walk(saved.tree) if node.kind in own]
    return items.generators | {label for node, label in leaves if node.head in own[node.kind]}


def exclude_labels(select: LabelFilter, labels: frozenset[str]) -> LabelFilter:
    """Return a filter that also excludes some labels."""
    return _ExcludingLabels(select, labels) if labels else select


class _ExcludingLabels(LabelFilter):
    def __init__(self, select: LabelFilter, labels: frozenset[str]) -> None:
        super().__init__()
        self._select, self._labels = select, labels
        self.selects_all = False

    def __call__(self, label: str) -> bool:
        return not self._left_out(label) and self._select(label)

    def _left_out(self, label: str) -> bool:
        end = len(label)
        while end > 0:
            if label[:end] in self._labels:
                return True
            end = label.rfind(".", 0, end)
        return False


Origin = tuple[int, int]
"""A part, and a number in its structure."""


class _MergedTree:
    """Merge the trees of some parts; a node of several parts is taken from the first.

    Args:
        document: The checkpoint's index.
        members: The numbers of the parts, each of a structure of its own.
        first_wins: Whether the first part is also right where parts contradict each other.

    Attributes:
        tree: The root node.
        rows: The tensors, each label once.
        tensor_origins: For each tensor, its parts and its numbers there.
        values: The inline values.
        value_origins: For each value, its parts and its numbers there.
        conflicts: The values that differ, and placeholders of nodes that could not be merged.
    """

    def __init__(
        self, document: ManifestDocument, members: Sequence[int], *, first_wins: bool
    ) -> None:
        self._document, self._first_wins = document, first_wins
        self.rows: list[TensorRow] = []
        self.tensor_origins: list[list[Origin]] = []
        self.values: list[Json] = []
        self.value_origins: list[list[Origin]] = []
        self.conflicts: set[int] = set()
        self._labels: dict[str, int] = {}
        self._shared: dict[Origin, int] = {}
        self.tree = Node("absent")
        for self._member in members:
            self._structure = document.structures[document.parts[self._member].structure]
            self.tree = self._merged(self.tree, self._structure.tree)

    def _adopted(self, node: Node) -> Node:
        """Return a tree of the member with the numbers of the merged tables."""
        numbers = {
            "tensor": self._tensor,
            "value": self._value,
            "shared": self._container,
            "ref": self._container,
        }

        def numbered(node: Node) -> Node:
            number = numbers.get(node.kind)
            return node if number is None else Node(node.kind, number(node.head), (), node.nodes)

        return rewritten(node, numbered)

    def _merged(self, ours: Node, theirs: Node) -> Node:
        if ours.kind == "absent":
            return self._adopted(theirs)
        if theirs.kind in ("absent", "ref") or ours.kind == "ref":
            return ours
        if theirs.kind == "shared":
            if ours.kind != "shared":
                ours = Node("shared", self._container(theirs.head), nodes=[ours])
            self._shared[self._member, theirs.head] = ours.head
            theirs = theirs.inner
        if ours.kind == "shared":
            return ours.with_nodes([self._merged(ours.inner, theirs)])
        if ours.kind == theirs.kind in MAPPINGS:
            return self._mapping(ours, theirs)
        if _alike(ours, theirs):
            pairs = zip(ours.nodes, theirs.nodes, strict=True)
            return ours.with_nodes(self._merged(a, b) for a, b in pairs)
        return self._leaf(ours, theirs)

    def _mapping(self, ours: Node, theirs: Node) -> Node:
        known = {canonical(key): child for key, child in theirs.items()}
        items = []
        for key, child in ours.items():
            other = known.pop(canonical(key), None)
            items.append((key, child if other is None else self._merged(child, other)))
        items += [
            (key, self._adopted(child)) for key, child in theirs.items() if canonical(key) in known
        ]
        return ours.with_items(items)

    def _leaf(self, ours: Node, theirs: Node) -> Node:
        if ours.kind == theirs.kind == "tensor":
            number = self._tensor(theirs.head)
            return ours if number == ours.head else self._conflict(ours)
        if ours.kind == theirs.kind == "value":
            number = ours.head
            self.value_origins[number].append((self._member, theirs.head))
            differs = canonical(self.values[number]) != canonical(
                self._document.parts[self._member].values[theirs.head]
            )
            if differs and not self._first_wins:
                self.conflicts.add(number)
            return ours
        return ours if ours == theirs else self._conflict(ours)

    def _conflict(self, ours: Node) -> Node:
        if self._first_wins:
            return ours
        number = len(self.values)
        self.values.append(None)
        self.value_origins.append([])
        self.conflicts.add(number)
        return Node("value", number)

    def _tensor(self, number: int) -> int:
        row = self._structure.tensors[number]
        found = self._labels.get(row.label)
        origin = (self._member, number)
        if found is None:
            found = self._labels[row.label] = len(self.rows)
            self.rows.append(row)
            self.tensor_origins.append([origin])
            if row.attributes:
                self.rows[found] = replace(row, attributes=self._adopted(row.attributes))
        elif origin not in self.tensor_origins[found]:
            self.tensor_origins[found].append(origin)
        return found

    def _value(self, number: int) -> int:
        self.values.append(self._document.parts[self._member].values[number])
        self.value_origins.append([(self._member, number)])
        return len(self.values) - 1

    def _container(self, number: int) -> int:
        return self._shared.setdefault((self._member, number), len(self._shared))


def _alike(ours: Node, theirs: Node) -> bool:
    """Tell whether two containers differ only in their items."""
    if not 0 < len(ours.nodes) == len(theirs.nodes):
        return False
    return ours.with_nodes([]) == theirs.with_nodes([])
