"""The work of ``diff``: compare structure, inline values and tensors of two checkpoints."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
from rich.console import RenderableType
from rich.text import Text

from ckpipe.catalog.inspect import batches, check_expansion, labels_per_rank, tensor_bytes
from ckpipe.catalog.opened import Opened
from ckpipe.cli.running import FOUND, OK, no_match
from ckpipe.cli.screen import Meter, Screen, signed, table
from ckpipe.foreign.source import open_place
from ckpipe.format.labels import LabelFilter, label_filter, unique_label
from ckpipe.format.manifest import ManifestDocument, TensorRow
from ckpipe.format.tree import SETS, walk
from ckpipe.loading.labelled_tensors import LabelledTensors
from ckpipe.memory.arena import Arena
from ckpipe.reading.comparison import Comparison, TensorDifference
from ckpipe.settings import Settings
from ckpipe.threads import in_thread

BATCH_BYTES = 128 << 20
"""The bytes of each checkpoint in memory at a time, unless a single tensor is larger."""


async def differences(
    screen: Screen,
    urls: tuple[str, str],
    steps: tuple[int | str | None, int | str | None],
    patterns: Sequence[str] | None,
    *,
    structure: bool,
    expanded: bool,
) -> int:
    """Compare two checkpoints and return the exit code.

    Args:
        screen: Prints the result.
        urls: The URLs of the two checkpoints.
        steps: Their steps or ids; None for the newest, or for that of another program.
        patterns: Globs of the names to compare; None for all.
        structure: Whether to leave out the values of tensors.
        expanded: Whether expanded tensors may take far more bytes than the checkpoints store.
    """
    settings, select = screen.settings, label_filter(patterns)
    with screen.meter("comparing") as meter:
        async with open_place(urls[0], settings) as one, open_place(urls[1], settings) as two:
            infos = await one.chosen(steps[0]), await two.chosen(steps[1])
            async with one.opened(infos[0]) as left, two.opened(infos[1]) as right:
                documents = left.document, right.document
                names = {*_texts(documents[0]), *_texts(documents[1])}
                if patterns and not any(map(select, names)):
                    raise no_match(patterns, sorted(names))
                found = compare_structures(*documents, select)
                differing: list[TensorDifference] = []
                if not structure:
                    differing = await _compare(
                        (left, right), found.common, meter, settings, expanded=expanded
                    )
                    for side in (left, right):
                        await side.check_unchanged()
    same = not (found.only_first or found.only_second or found.changed or differing)
    compared = 0 if structure else len(found.common)
    nan = [each.nan for each in documents]
    data = {
        "first": documents[0].name,
        "second": documents[1].name,
        "nan": nan,
        "same": same,
        "compared": compared,
        "only_first": found.only_first,
        "only_second": found.only_second,
        "changed": [
            {"label": label, "first": a, "second": b} for label, (a, b) in found.changed.items()
        ],
        "tensors": [asdict(each) for each in differing],
    }
    summary = f"{len(differing)} of {compared} tensors compared differ"
    if structure:
        summary = f"the structures are {'alike' if same else 'not alike'}"
    if any(nan):
        summary += f"; the first has {nan[0]} NaN, the second {nan[1]}"
    screen.result(data, *_shown(found, differing), Text(summary))
    return OK if same else FOUND


async def _difference(
    name: str, first: torch.Tensor, second: torch.Tensor
) -> TensorDifference | None:
    """Compare two tensors; return None if they are equal."""
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return _of_other_form(name, first)
    comparison = await in_thread(Comparison, first, second)
    for a, b in comparison.pieces():
        # No thread is abandoned: one for each lets an interrupt through.
        await in_thread(comparison.add, a, b)
    return comparison.result(name)


async def _compare(
    sides: tuple[Opened, Opened],
    labels: Sequence[str],
    meter: Meter,
    settings: Settings,
    *,
    expanded: bool,
) -> list[TensorDifference]:
    """Compare tensors that two checkpoints have alike, batch by batch; return the differences.

    The meter counts the bytes of both: half of them as they are read, half as they are compared.
    """
    one, two = (each.document for each in sides)
    sizes = {label: tensor_bytes(row) for label, row in _tensors(one).items()}
    own = labels_per_rank(one) | labels_per_rank(two)
    if one.world_size != two.world_size:
        own = set()  # the ranks do not correspond, and those of the lowest are compared
    work: list[tuple[int | None, list[str]]] = [
        (None, [each for each in labels if each not in own])
    ]
    if mine := [label for label in labels if label in own]:
        work += [(rank, mine) for rank in range(one.world_size)]
    nbytes = sum(sizes[label] for _, group in work for label in group)
    if not expanded:
        chosen = {label: sizes[label] for label in labels}
        hint = "Leave the tensor out with --match, or run the command with --expanded"
        check_expansion("A comparison", (one, two), nbytes, chosen, hint)
    meter.expect(2 * nbytes)
    differing = []
    arena = Arena(settings.staging.block_bytes)
    try:
        for rank, group in work:
            tensors = [await in_thread(LabelledTensors, each, rank) for each in sides]
            for batch in batches(group, sizes.__getitem__, BATCH_BYTES):
                read = []
                for side in tensors:
                    read.append(await side.read(batch, arena, settings.load.lanes))
                    meter.advance(sum(sizes[label] for label in batch) // 2)
                for label in batch:
                    # A rank need not have all tensors of other ranks.
                    if label in read[0] and label in read[1]:
                        name = label if rank is None else f"{label} of rank {rank}"
                        found = await _difference(name, *(each.pop(label) for each in read))
                        differing += [] if found is None else [found]
                    meter.advance(sizes[label])
    finally:
        arena.close()
    return differing


def _shown(
    found: StructureDifference, differing: list[TensorDifference]
) -> Iterator[RenderableType]:
    for sign, labels in (("-", found.only_first), ("+", found.only_second)):
        for label in labels:
            yield signed(sign, label)
    for label, (a, b) in found.changed.items():
        yield signed("~", f"{label}: {a} → {b}")
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
        yield table(headings, rows, *headings[1:], flexible=[("tensor", 20)])


@dataclass(frozen=True, slots=True)
class StructureDifference:
    """The differences of two states apart from the values of tensors.

    Args:
        only_first: Labels of tensors and values that only the first has.
        only_second: Labels that only the second has.
        changed: For each label that both have with different shapes, dtypes or inline values:
            both as text.
        common: Labels of tensors that both have with one shape and dtype, in the order of the
            first.
    """

    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    changed: Mapping[str, tuple[str, str]]
    common: tuple[str, ...]


def compare_structures(
    first: ManifestDocument, second: ManifestDocument, select: LabelFilter
) -> StructureDifference:
    """Compare names, shapes, dtypes and inline values of two indexes.

    If the ranks of a checkpoint have different inline values, all of them are compared.

    Args:
        first: The one index.
        second: The other.
        select: The labels to compare.
    """
    one, two = [
        {label: text for label, text in _texts(each).items() if select(label)}
        for each in (first, second)
    ]
    changed = {
        label: (text, two[label]) for label, text in one.items() if two.get(label, text) != text
    }
    tensors = _tensors(first).keys() & _tensors(second).keys()
    return StructureDifference(
        tuple(label for label in one if label not in two),
        tuple(label for label in two if label not in one),
        changed,
        tuple(each for each in one if each in two and each in tensors and each not in changed),
    )


def _of_other_form(label: str, first: torch.Tensor) -> TensorDifference:
    """Return the difference to a tensor of another shape or dtype, without norms."""
    n = first.numel()
    return TensorDifference(label, n, n, math.nan, math.nan, math.nan)


def _tensors(document: ManifestDocument) -> dict[str, TensorRow]:
    rows: dict[str, TensorRow] = {}
    for part in document.parts:
        for row in document.structures[part.structure].tensors:
            rows.setdefault(row.label, row)
    return rows


def _texts(document: ManifestDocument) -> dict[str, str]:
    """Write tensors and inline values as text; if values differ between ranks, those of all."""
    found: dict[str, list[str]] = {}
    for part in document.parts:
        taken: set[str] = set()
        for node, label in walk(document.structures[part.structure].tree):
            kind = node.kind
            if kind in ("value", "wrapper_tensor", *SETS):
                value = (
                    part.values[node.head] if kind == "value" else [kind, node.head or node.keys]
                )
                found.setdefault(unique_label(label, taken), []).append(json.dumps(value))
    tensors = {label: f"{row.dtype}{list(row.shape)}" for label, row in _tensors(document).items()}
    return tensors | {
        label: texts[0] if len(set(texts)) == 1 else " | ".join(texts)
        for label, texts in found.items()
    }
