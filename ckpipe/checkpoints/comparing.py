"""What two checkpoints differ in: their structure, inline values and tensors. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from ckpipe.checkpoints.inspection import tensor_bytes
from ckpipe.format.keys import Json, unique_label
from ckpipe.format.manifest import Bundle, TensorRow
from ckpipe.format.trees import Node, children_of

_AT_ONCE = 1 << 20


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """How the values of one tensor differ.

    Norms are those of the differences of elements, computed in double precision. Two NaN count
    as equal; a NaN against a number makes the norms NaN.

    Args:
        label: The tensor's label.
        elements: How many elements it has.
        different: How many of them differ in value.
        norm: The Euclidean norm of the differences, ``|b - a|``.
        relative: That norm by the norm of the first, ``|b - a| / |a|``; infinite if ``a`` is 0.
        largest: The largest absolute difference.
    """

    label: str
    elements: int
    different: int
    norm: float
    relative: float
    largest: float


@dataclass(frozen=True, slots=True)
class StructureDifference:
    """How two states differ apart from the values of tensors.

    Args:
        only_first: Labels of tensors and values that only the first has.
        only_second: Labels that only the second has.
        changed: For each label that both have, and with another shape, dtype or inline value,
            both as text.
        common: Labels of tensors that both have alike, in the order of the first.
    """

    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    changed: Mapping[str, tuple[str, str]]
    common: tuple[str, ...]


def compare_structures(first: Bundle, second: Bundle) -> StructureDifference:
    """Compares what two indexes say of names, shapes, dtypes and inline values.

    Where the ranks of a checkpoint have different inline values, all of them are compared.
    """
    tensors = [_tensors(each) for each in (first, second)]
    values = [_values(each) for each in (first, second)]
    texts = [
        {label: _tensor_text(row) for label, row in rows.items()} | others
        for rows, others in zip(tensors, values, strict=True)
    ]
    both = [label for label in texts[0] if label in texts[1]]
    changed = {
        label: (texts[0][label], texts[1][label])
        for label in both
        if texts[0][label] != texts[1][label]
    }
    return StructureDifference(
        tuple(label for label in texts[0] if label not in texts[1]),
        tuple(label for label in texts[1] if label not in texts[0]),
        changed,
        tuple(label for label in both if label in tensors[0] and label not in changed),
    )


def labels_of(bundle: Bundle) -> set[str]:
    """The labels of all tensors and values of a checkpoint that are compared."""
    return {*_tensors(bundle), *_values(bundle)}


def sizes_of(bundle: Bundle) -> dict[str, int]:
    """The bytes of each tensor of a checkpoint, by its label."""
    return {label: tensor_bytes(row) for label, row in _tensors(bundle).items()}


def batches(bundle: Bundle, labels: Iterable[str], nbytes: int) -> Iterator[list[str]]:
    """Groups tensors so that each group has about so many bytes, or is one tensor alone.

    Args:
        bundle: The index that has the tensors.
        labels: Their labels.
        nbytes: The most bytes of a group that has more than one.
    """
    sizes = sizes_of(bundle)
    batch: list[str] = []
    filled = 0
    for label in labels:
        size = sizes[label]
        if batch and filled + size > nbytes:
            yield batch
            batch, filled = [], 0
        batch.append(label)
        filled += size
    if batch:
        yield batch


def compare_tensors(
    label: str, first: torch.Tensor, second: torch.Tensor
) -> TensorDifference | None:
    """Compares two tensors of one shape and dtype; None if they are equal to the bit.

    Args:
        label: What to call them.
        first: The one.
        second: The other.
    """
    comparison = Comparison(label, first, second)
    for a, b in comparison.pieces():
        comparison.add(a, b)
    return comparison.result()


class Comparison:
    """The same piece by piece, for who wants to stop or to say how far it is.

    Args:
        label: What to call the tensors.
        first: The one.
        second: The other.
    """

    def __init__(self, label: str, first: torch.Tensor, second: torch.Tensor) -> None:
        self._label = label
        self._one, self._two = [
            each.detach().resolve_conj().resolve_neg().reshape(-1) for each in (first, second)
        ]
        self._different, self._squares, self._base, self._largest = 0, 0.0, 0.0, 0.0
        self._same_bits = True

    def pieces(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Both tensors in pieces of some MiB, so that converting them takes little memory."""
        for at in range(0, self._one.numel(), _AT_ONCE):
            yield self._one[at : at + _AT_ONCE], self._two[at : at + _AT_ONCE]

    def add(self, a: torch.Tensor, b: torch.Tensor) -> None:
        """Compares a piece of the one with that of the other."""
        self._same_bits = self._same_bits and torch.equal(_bits(a), _bits(b))
        left, right = _wide(a), _wide(b)
        alike = _alike(a, b)
        gap = torch.where(alike, 0.0, (right - left).abs()).double()
        self._different += int((~alike).sum())
        self._squares += float(gap.square().sum())
        self._base += float(left.abs().double().square().nansum())
        self._largest = _larger(self._largest, float(gap.max()))

    def result(self) -> TensorDifference | None:
        """What all pieces came to; None if they are equal to the bit."""
        if self._same_bits:
            return None
        norm = math.sqrt(self._squares)
        relative = norm / math.sqrt(self._base) if self._base else (math.inf if norm else 0.0)
        return TensorDifference(
            self._label, self._one.numel(), self._different, norm, relative, self._largest
        )


def _larger(one: float, other: float) -> float:
    return math.nan if math.isnan(one) or math.isnan(other) else max(one, other)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def _alike(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Which elements are equal: whole numbers as they are, since doubles do not hold them all."""
    if not (a.is_floating_point() or a.is_complex()):
        return a == b
    left, right = _wide(a), _wide(b)
    return (left == right) | (left.isnan() & right.isnan())


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _tensors(bundle: Bundle) -> dict[str, TensorRow]:
    rows: dict[str, TensorRow] = {}
    for part in bundle.parts:
        for row in bundle.structures[part.structure].tensors:
            rows.setdefault(row.label, row)
    return rows


def _tensor_text(row: TensorRow) -> str:
    return f"{row.dtype}{list(row.shape)}"


def _values(bundle: Bundle) -> dict[str, str]:
    """The inline values of a checkpoint as text, those of all ranks where they differ."""
    found: dict[str, list[str]] = {}
    for part in bundle.parts:
        for label, node in _leaves(bundle.structures[part.structure].tree):
            found.setdefault(label, []).append(_leaf_text(node, part.values))
    return {
        label: texts[0] if len(set(texts)) == 1 else " | ".join(texts)
        for label, texts in found.items()
    }


def _leaves(tree: Node) -> Iterator[tuple[str, Node]]:
    pending: list[tuple[Node, str]] = [(tree, "")]
    taken: set[str] = set()
    while pending:
        node, label = pending.pop()
        if node[0] in ("value", "set", "frozenset"):
            yield unique_label(label, taken), node
        elif node[0] in ("shared", "registered", "stateful"):
            pending.append((node[-1], label))
        else:
            inner = [(child, where) for _, child, where in children_of(node, label)]
            pending += reversed(inner)


def _leaf_text(node: Node, values: tuple[Json, ...]) -> str:
    return json.dumps(values[node[1]] if node[0] == "value" else node)


__all__ = [
    "Comparison",
    "StructureDifference",
    "TensorDifference",
    "batches",
    "compare_structures",
    "compare_tensors",
    "labels_of",
    "sizes_of",
]
