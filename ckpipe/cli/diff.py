"""The work of ``diff``: compare structure, inline values and tensors of two checkpoints."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import RenderableType
from rich.text import Text

from ckpipe.backend import Backend
from ckpipe.catalog.find import read_index
from ckpipe.catalog.inspect import check_expansion, labels_per_rank, tensor_bytes
from ckpipe.catalog.leases import reading
from ckpipe.cli.running import FOUND, OK, chosen
from ckpipe.cli.screen import Screen, SubProgress, one_line, table
from ckpipe.format.keys import Json, LabelFilter, label_filter, unique_label
from ckpipe.format.manifest import ManifestDocument, TensorRow
from ckpipe.format.tree import Node, children_of
from ckpipe.loading.load import read_tensors
from ckpipe.memory.arena import Arena
from ckpipe.settings import Settings
from ckpipe.store.registry import Access, open_store
from ckpipe.threads import in_thread

BATCH_BYTES = 128 << 20
"""How many bytes of each checkpoint are held in memory, unless a single tensor is larger."""

Side = tuple[Backend, ManifestDocument]


@dataclass(frozen=True, slots=True)
class Sides:
    """The two checkpoints to compare.

    Args:
        urls: Where the two checkpoints lie.
        steps: Their steps or ids.
        patterns: Globs of the names to look at; None for all.
        expanded: Whether expanded tensors may take far more than the checkpoints store.
    """

    urls: tuple[str, str]
    steps: tuple[str, str]
    patterns: Sequence[str] | None = None
    expanded: bool = False

    @property
    def select(self) -> LabelFilter:
        """The filter of the names to look at."""
        return label_filter(self.patterns)


async def differences(screen: Screen, sides: Sides, *, structure: bool) -> int:
    """Compares two checkpoints; returns the exit code.

    Args:
        screen: Where the result goes.
        sides: What to compare.
        structure: Whether to compare no values of tensors.
    """
    settings = screen.settings
    with screen.meter("comparing") as meter:
        share = SubProgress(meter)
        async with (
            open_store(sides.urls[0], settings, Access.READ, share.count) as one,
            open_store(sides.urls[1], settings, Access.READ, share.count) as two,
        ):
            infos = [await chosen(one, sides.steps[0]), await chosen(two, sides.steps[1])]

            async def compare() -> tuple[StructureDifference, list[TensorDifference]]:
                left, right = [
                    await read_index(backend, info.key)
                    for backend, info in zip((one, two), infos, strict=True)
                ]
                if not any(map(sides.select, labels_of(left) | labels_of(right))):
                    screen.matches_nothing(sides.patterns)
                found = _selected(compare_structures(left, right), sides.select)
                if structure:
                    return found, []
                comparing = _Comparing((one, left), (two, right), share, settings)
                return found, await comparing.run(found.common, expanded=sides.expanded)

            found, differing = await reading(
                one, infos[0].key, lambda: reading(two, infos[1].key, compare)
            )
    data = _data(found, differing, 0 if structure else len(found.common))
    ids = {"first": infos[0].id, "second": infos[1].id}
    screen.result({**ids, **data}, *_shown(found, differing), Text(_summary(data, structure)))
    return OK if data["same"] else FOUND


def _data(
    found: StructureDifference, differing: list[TensorDifference], compared: int
) -> dict[str, Any]:
    return {
        "same": not (found.only_first or found.only_second or found.changed or differing),
        "compared": compared,
        "only_first": found.only_first,
        "only_second": found.only_second,
        "changed": [
            {"label": label, "first": a, "second": b} for label, (a, b) in found.changed.items()
        ],
        "tensors": [asdict(each) for each in differing],
    }


def _selected(found: StructureDifference, select: LabelFilter) -> StructureDifference:
    return StructureDifference(
        tuple(filter(select, found.only_first)),
        tuple(filter(select, found.only_second)),
        {label: texts for label, texts in found.changed.items() if select(label)},
        tuple(filter(select, found.common)),
    )


class _Comparing:
    """Reads tensors that two checkpoints have alike, and compares them.

    What is shown of it counts every tensor four times: as it is read on either side, and as its
    two are compared.
    """

    def __init__(self, one: Side, two: Side, share: SubProgress, settings: Settings) -> None:
        self._sides, self._share, self._lanes = (one, two), share, settings.load.lanes
        self._sizes = sizes_of(one[1])
        self._arena = Arena(settings.staging.block_bytes)

    async def run(self, labels: Sequence[str], *, expanded: bool) -> list[TensorDifference]:
        """Those that differ of the tensors with these labels."""
        one, two = (bundle for _, bundle in self._sides)
        own = labels_per_rank(one) | labels_per_rank(two)
        if one.world_size != two.world_size:
            own = set()  # the ranks do not correspond, and those of the lowest are compared
        alike = [label for label in labels if label not in own]
        mine = [label for label in labels if label in own]
        ranks = range(one.world_size if mine else 0)
        nbytes = self._bytes(alike) + len(ranks) * self._bytes(mine)
        if not expanded:
            sizes = {label: self._sizes[label] for label in labels}
            check_expansion("A comparison", (one, two), nbytes, sizes)
        self._share.expect(4 * nbytes)
        try:
            found = await self._of_rank(alike, None)
            for rank in ranks:
                found += await self._of_rank(mine, rank)
        finally:
            self._arena.close()
        return found

    def _bytes(self, labels: Sequence[str]) -> int:
        return sum(self._sizes[label] for label in labels)

    async def _of_rank(self, labels: Sequence[str], rank: int | None) -> list[TensorDifference]:
        differing: list[TensorDifference] = []
        for batch in batches(self._sides[0][1], labels, BATCH_BYTES):
            left, right = [await self._read(side, batch, rank) for side in self._sides]
            for label in batch:
                with self._share.of(2 * self._sizes[label]):
                    # A rank need not have everything that others have.
                    if label in left and label in right:
                        tensors = left.pop(label), right.pop(label)
                        name = label if rank is None else f"{label} of rank {rank}"
                        found = await self._compared(name, *tensors)
                        differing += [] if found is None else [found]
        return differing

    async def _read(
        self, side: Side, batch: Sequence[str], rank: int | None
    ) -> dict[str, torch.Tensor]:
        with self._share.of(self._bytes(batch)):
            return await read_tensors(*side, batch, self._arena, lanes=self._lanes, rank=rank)

    async def _compared(
        self, name: str, one: torch.Tensor, two: torch.Tensor
    ) -> TensorDifference | None:
        comparison = await in_thread(Comparison, name, one, two)
        for a, b in comparison.pieces():
            # A thread is never abandoned, so one for each piece lets an interrupt through.
            await in_thread(comparison.add, a, b)
            self._share.count(a.nbytes + b.nbytes)
        return comparison.result()


def _summary(data: dict[str, Any], structure: bool) -> str:
    if structure:
        return f"the structures are {'alike' if data['same'] else 'not alike'}"
    return f"{len(data['tensors'])} of {data['compared']} tensors compared differ"


def _shown(
    found: StructureDifference, differing: list[TensorDifference]
) -> Iterator[RenderableType]:
    for sign, labels in (("-", found.only_first), ("+", found.only_second)):
        for label in labels:
            yield Text(one_line(f"{sign} {label}"))
    for label, (a, b) in found.changed.items():
        yield Text(one_line(f"~ {label}: {a} → {b}"))
    if differing:
        rows = [
            (
                each.label,
                f"{each.different}/{each.elements}",
                f"{each.norm:.6g}",
                f"{each.relative:.3g}",
                f"{each.largest:.6g}",
            )
            for each in differing
        ]
        headings = ("tensor", "elements", "|b-a|", "|b-a|/|a|", "largest")
        yield table(headings, rows, *headings[1:])


_AT_ONCE = 1 << 20


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """The difference between the values of one tensor.

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
    """The differences of two states apart from the values of tensors.

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


def compare_structures(first: ManifestDocument, second: ManifestDocument) -> StructureDifference:
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


def labels_of(bundle: ManifestDocument) -> set[str]:
    """The labels of all tensors and values of a checkpoint that are compared."""
    return {*_tensors(bundle), *_values(bundle)}


def sizes_of(bundle: ManifestDocument) -> dict[str, int]:
    """The bytes of each tensor of a checkpoint, by its label."""
    return {label: tensor_bytes(row) for label, row in _tensors(bundle).items()}


def batches(bundle: ManifestDocument, labels: Iterable[str], nbytes: int) -> Iterator[list[str]]:
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
        """The difference over all pieces; None if they are equal to the bit."""
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
    """Compare element by element: whole numbers as they are, since doubles do not hold them
    all.
    """
    if not (a.is_floating_point() or a.is_complex()):
        return a == b
    left, right = _wide(a), _wide(b)
    return (left == right) | (left.isnan() & right.isnan())


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _tensors(bundle: ManifestDocument) -> dict[str, TensorRow]:
    rows: dict[str, TensorRow] = {}
    for part in bundle.parts:
        for row in bundle.structures[part.structure].tensors:
            rows.setdefault(row.label, row)
    return rows


def _tensor_text(row: TensorRow) -> str:
    return f"{row.dtype}{list(row.shape)}"


def _values(bundle: ManifestDocument) -> dict[str, str]:
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
