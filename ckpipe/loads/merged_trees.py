"""One tree of the trees of several ranks that hold different names.

The ranks of a pipeline or of experts have some names each. Merged, their trees are the state of
the whole run: containers have the keys of all, a tensor is the same wherever it has the same
label, and what stands in several trees in forms that cannot be brought together belongs to a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ckpipe.format.keys import Json, canonical, join
from ckpipe.format.manifest import Structure, TensorRow
from ckpipe.format.tree import MAPPINGS, RECORDS, SEQUENCES, Node, children_of

Origin = tuple[int, int]
"""A part, and a number in its structure."""


@dataclass(frozen=True, slots=True)
class Member:
    """A tree to be merged.

    Args:
        part: The part that stands for all of its structure.
        structure: The structure.
        values: The inline values of the part, encoded.
    """

    part: int
    structure: Structure
    values: Sequence[Json]


class MergedTree:
    """Merges trees; what the first says of a thing in several of them holds.

    Args:
        members: The trees.
        first_wins: Whether that is also so where they contradict each other.

    Attributes:
        tree: The root node.
        rows: The tensors, each label once.
        tensor_origins: For each tensor, where it was found.
        values: The inline values.
        value_origins: For each value, where it was found.
        conflicts: The values that stand for what could not be merged, or differs.
    """

    def __init__(self, members: Sequence[Member], *, first_wins: bool) -> None:
        self._first_wins = first_wins
        self.rows: list[TensorRow] = []
        self.tensor_origins: list[list[Origin]] = []
        self.values: list[Json] = []
        self.value_origins: list[list[Origin]] = []
        self.conflicts: set[int] = set()
        self._labels: dict[str, int] = {}
        self._shared: dict[Origin, int] = {}
        self._member = first = members[0]
        self.tree = self._adopted(first.structure.tree)
        for member in members[1:]:
            self._member = member
            self.tree = self._merged(self.tree, member.structure.tree)

    def _adopted(self, node: Node) -> Node:
        """A node of the member with the numbers of the merged tables."""
        tag = node[0]
        if tag == "tensor":
            return ["tensor", self._tensor(node[1])]
        if tag == "value":
            return ["value", self._value(node[1])]
        if tag == "shared":
            return ["shared", self._container(node[1]), self._adopted(node[2])]
        if tag == "ref":
            return ["ref", self._container(node[1])]
        return _rebuilt(node, map(self._adopted, _nodes(node)), self._adopted)

    def _merged(self, ours: Node, theirs: Node) -> Node:
        if ours[0] == "absent":
            return self._adopted(theirs)
        if theirs[0] in ("absent", "ref") or ours[0] == "ref":
            return ours
        if theirs[0] == "shared":
            if ours[0] != "shared":
                ours = ["shared", self._container(theirs[1]), ours]
            self._shared[self._member.part, theirs[1]] = ours[1]
            theirs = theirs[2]
        if ours[0] == "shared":
            return ["shared", ours[1], self._merged(ours[2], theirs)]
        if ours[0] == theirs[0] in MAPPINGS:
            return self._mapping(ours, theirs)
        if _alike(ours, theirs):
            pairs = zip(_nodes(ours), _nodes(theirs), strict=True)
            return _rebuilt(ours, (self._merged(a, b) for a, b in pairs), _itself)
        return self._leaf(ours, theirs)

    def _mapping(self, ours: Node, theirs: Node) -> Node:
        known = {canonical(key): child for key, child in zip(theirs[1], theirs[2], strict=True)}
        keys, nodes = list(ours[1]), []
        for key, child in zip(ours[1], ours[2], strict=True):
            other = known.pop(canonical(key), None)
            nodes.append(child if other is None else self._merged(child, other))
        for key, child in zip(theirs[1], theirs[2], strict=True):
            if canonical(key) in known:
                keys.append(key)
                nodes.append(self._adopted(child))
        return [ours[0], keys, nodes, *ours[3:]]

    def _leaf(self, ours: Node, theirs: Node) -> Node:
        if ours[0] == theirs[0] == "tensor":
            number = self._tensor(theirs[1])
            return ours if number == ours[1] else self._conflict(ours)
        if ours[0] == theirs[0] == "value":
            number = ours[1]
            self.value_origins[number].append((self._member.part, theirs[1]))
            differs = canonical(self.values[number]) != canonical(self._member.values[theirs[1]])
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
        return ["value", number]

    def _tensor(self, number: int) -> int:
        row = self._member.structure.tensors[number]
        found = self._labels.get(row.label)
        origin = (self._member.part, number)
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
        self.values.append(self._member.values[number])
        self.value_origins.append([(self._member.part, number)])
        return len(self.values) - 1

    def _container(self, number: int) -> int:
        return self._shared.setdefault((self._member.part, number), len(self._shared))


def _itself(node: Node) -> Node:
    return node


def _nodes(node: Node) -> Sequence[Node]:
    """The nodes directly inside of a container, without those of attributes."""
    tag = node[0]
    if tag in MAPPINGS:
        return node[2]  # type: ignore[no-any-return]
    if tag in SEQUENCES:
        return node[1]  # type: ignore[no-any-return]
    if tag in RECORDS:
        return node[3]  # type: ignore[no-any-return]
    return [node[-1]] if tag in ("registered", "stateful") else []


def _rebuilt(node: Node, nodes: Iterable[Node], attributes: Callable[[Node], Node]) -> Node:
    """A container with other nodes inside, and what a function makes of its attributes."""
    tag = node[0]
    if tag in MAPPINGS:
        rest = [attributes(each) for each in node[3:]] if tag == "ordered_dict" else node[3:]
        return [tag, node[1], list(nodes), *rest]
    if tag in SEQUENCES:
        return [tag, list(nodes), *node[2:]]
    if tag in RECORDS:
        return [tag, node[1], node[2], list(nodes)]
    return [*node[:-1], *nodes] if tag in ("registered", "stateful") else node


def _alike(ours: Node, theirs: Node) -> bool:
    """Whether two containers differ in nothing but what is in them."""
    if ours[0] != theirs[0] or not _nodes(ours) or len(_nodes(ours)) != len(_nodes(theirs)):
        return False
    empty = [_rebuilt(node, [], _itself) for node in (ours, theirs)]
    return empty[0] == empty[1]


def paths(node: Node, label: str = "") -> Iterator[str]:
    """The labels of all nodes of a tree."""
    yield label
    if node[0] in ("shared", "registered", "stateful"):
        yield from paths(node[-1], label)
    for key, child, _ in children_of(node, label):
        yield from paths(child, join(label, key))
