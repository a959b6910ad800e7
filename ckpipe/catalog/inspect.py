"""Describe an index for display: names, shapes, sizes, sharing, ranks and inline values.

Pure: it uses validated documents, and no bytes of tensors.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

from ckpipe.errors import UsageError
from ckpipe.format.data_file import SCALARS, item_bytes
from ckpipe.format.labels import Json, LabelFilter, unique_label
from ckpipe.format.manifest import Layout, ManifestDocument, RankManifest, TensorRow
from ckpipe.format.merge import differ_privately
from ckpipe.format.tree import WRAPPERS, Node, children_of
from ckpipe.types import (
    CheckpointDescription,
    TensorDescription,
    ValueDescription,
    size_text,
)

_Kind = Literal["tensor", "value", "wrapper_tensor"]
_KINDS: tuple[_Kind, ...] = ("tensor", "value", "wrapper_tensor")
_LONGEST_PREVIEW = 60

Item = TypeVar("Item")


def describe(
    document: ManifestDocument, select: LabelFilter | None = None
) -> CheckpointDescription:
    """Describe an index, for people and for other programs.

    Args:
        document: The index, validated.
        select: Selects the tensors and values to include; None for all.
    """
    first = document.parts[0]
    wanted = select or LabelFilter()
    found = document.differences.found if document.differences else ()
    return CheckpointDescription(
        id=None if document.source else str(document.id),
        step=document.step,
        world_size=document.world_size,
        files=sum(len(part.files) for part in document.parts),
        bytes=data_bytes(document),
        linked_bytes=sum(
            each.size for part in document.parts for each in part.files if each.linked
        ),
        started=first.started,
        final=any(part.final for part in document.parts),
        resumed_from=first.resumed_from,
        line="" if document.source else document.line,
        writer=first.writer,
        metadata=first.metadata,
        metrics=first.metrics,
        tensors=tuple(each for each in _tensors(document) if wanted(each.label)),
        values=tuple(each for each in _values(document) if wanted(each.label)),
        wrappers={
            label: f"{facts['class'].rpartition(':')[2]} of {facts['dtype']}{facts['size']}"
            for structure in document.structures
            for label, _, facts in _leaves(structure.tree, "wrapper_tensor")
            if wanted(label)
        },
        source=document.source,
        nan=document.nan,
        differences=document.differences.count if document.differences else 0,
        differing=tuple(each for each in found if wanted(each.tensor)),
    )


def data_bytes(document: ManifestDocument) -> int:
    """Return the size of all data files of a document's parts."""
    return sum(file.size for part in document.parts for file in part.files)


def tensor_bytes(row: TensorRow) -> int:
    """Return the bytes of all elements of a tensor; 0 if its dtype is unknown."""
    return math.prod(row.shape) * (item_bytes(row.dtype) or 0)


_EXPANSION, _ALWAYS_BYTES = 4, 1 << 30
"""Largest ratio of bytes to write out or compare to stored bytes; bytes that are always allowed."""


def check_expansion(
    work: str,
    documents: Sequence[ManifestDocument],
    nbytes: int,
    sizes: Mapping[str, int],
    hint: str,
) -> None:
    """Refuse work on far more bytes than checkpoints store.

    The elements of a tensor that ``expand`` has made share one place, on the store too. A file of
    the tensor, or a comparison, takes each of them.

    Args:
        work: The name of the work, for the error.
        documents: The indexes of the checkpoints.
        nbytes: The bytes that the work takes.
        sizes: The bytes of its tensors, by their labels.
        hint: The remedy, for the error.

    Raises:
        UsageError: If these are far more bytes than the checkpoints store.
    """
    stored = sum(map(data_bytes, documents))
    if nbytes <= _EXPANSION * stored + _ALWAYS_BYTES:
        return
    label, largest = max(sizes.items(), key=lambda each: each[1])
    raise UsageError(
        f"{work} would take {size_text(nbytes)}, {size_text(largest)} of them for this tensor, "
        f"where {size_text(stored)} are stored",
        step=documents[0].id.step,
        key=label,
        hint=hint,
    )


def batches(
    items: Iterable[Item], nbytes: Callable[[Item], int], most: int
) -> Iterator[list[Item]]:
    """Group items, in their order, so that a group has at most ``most`` bytes or one item."""
    group: list[Item] = []
    filled = 0
    for each in items:
        size = nbytes(each)
        if group and filled + size > most:
            yield group
            group, filled = [], 0
        group.append(each)
        filled += size
    if group:
        yield group


def _tensors(document: ManifestDocument) -> Iterator[TensorDescription]:
    rows: dict[str, TensorRow] = {}
    ranks: defaultdict[str, list[int]] = defaultdict(list)
    boxes: defaultdict[str, set[Json]] = defaultdict(set)
    shared: defaultdict[str, dict[str, None]] = defaultdict(dict)
    nan: defaultdict[str, int] = defaultdict(int)
    also = _other_labels(document)
    for part in document.parts:
        structure, layout = document.structures[part.structure], document.layouts[part.layout]
        for row in structure.tensors:
            rows.setdefault(row.label, row)
            ranks[row.label].append(part.rank)
        labels = [row.label for row in structure.tensors]
        counts = dict(part.nan)
        for chunk in layout.chunks:
            boxes[labels[chunk.tensor]].add(chunk.box)
            if counts and chunk.owner is None and chunk.entry is not None:
                nan[labels[chunk.tensor]] += counts.get(chunk.entry, 0)
        for group in _sharing(layout, labels):
            for label in group:
                shared[label].update(dict.fromkeys(each for each in group if each != label))
    differing = labels_per_rank(document)
    for label, row in rows.items():
        yield TensorDescription(
            label, row.dtype, row.shape, tensor_bytes(row), row.kind, row.device,
            row.requires_grad, tuple(also[label]), tuple(shared[label]), tuple(ranks[label]),
            max(1, len(boxes[label])), label in differing, nan[label],
        )  # fmt: skip


def _other_labels(document: ManifestDocument) -> defaultdict[str, dict[str, None]]:
    found: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for structure in document.structures:
        seen: set[int] = set()
        for label, number in leaf_labels(structure.tree, "tensor"):
            if number in seen:
                found[structure.tensors[number].label][label] = None
            seen.add(number)
    return found


def _sharing(layout: Layout, labels: list[str]) -> Iterator[list[str]]:
    """Yield the labels of tensors that share bytes of their own rank, group by group."""
    names = layout.entries.name
    groups: defaultdict[Json, dict[str, None]] = defaultdict(dict)
    for chunk in layout.chunks:
        if chunk.owner is None and not names[chunk.entry or 0].endswith(SCALARS):
            groups[chunk.entry][labels[chunk.tensor]] = None
    yield from (list(group) for group in groups.values() if len(group) > 1)


def labels_per_rank(document: ManifestDocument) -> set[str]:
    """Return the labels of private tensors that differ between ranks."""
    found = {
        document.structures[number].tensors[tensor].label
        for number, each in enumerate(document.per_rank)
        for tensor in each.tensors
        if tensor < len(document.structures[number].tensors)
    }
    if len(document.structures) == 1:
        return found
    # per_rank compares the ranks of one structure. Now compare structures, by their first ranks.
    firsts: dict[int, int] = {}
    for number, part in enumerate(document.parts):
        firsts.setdefault(part.structure, number)
    holders: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for structure, number in firsts.items():
        private = document.layouts[document.parts[number].layout].private
        for tensor, row in enumerate(document.structures[structure].tensors):
            if tensor in private:
                holders[row.label].append((number, tensor))
    return found | {label for label, each in holders.items() if differ_privately(document, each)}


def _values(document: ManifestDocument) -> Iterator[ValueDescription]:
    found: dict[str, str] = {}
    ranks: defaultdict[str, list[int]] = defaultdict(list)
    differing: set[str] = set()
    paths = [list(leaf_labels(structure.tree, "value")) for structure in document.structures]
    for part in document.parts:
        for label, number in paths[part.structure]:
            text = _preview(part, number)
            if found.setdefault(label, text) != text:
                differing.add(label)
            ranks[label].append(part.rank)
    for label, text in found.items():
        yield ValueDescription(label, text, tuple(ranks[label]), label in differing)


def leaf_labels(tree: Node, kind: Literal["tensor", "value"]) -> Iterator[tuple[str, int]]:
    """Yield the labels of a tree's tensors or inline values, each once, with their numbers."""
    return ((label, number) for label, _, number in _leaves(tree, kind))


def key_paths(document: ManifestDocument) -> dict[str, tuple[str, ...]]:
    """Return the keys in the label of each tensor and value; a key may itself contain dots.

    If a tensor and a value have the same label, the keys are those of the value.
    """
    return {
        label: path
        for kind in _KINDS
        for structure in reversed(document.structures)
        for label, path, _ in _leaves(structure.tree, kind)
    }


def _leaves(tree: Node, kind: _Kind) -> Iterator[tuple[str, tuple[str, ...], Any]]:
    taken: set[str] = set()
    pending: list[tuple[Node, str, tuple[str, ...]]] = [(tree, "", ())]
    while pending:
        node, label, path = pending.pop()
        if node.kind == kind:
            unique = unique_label(label, taken)
            # The suffix that makes a label unique belongs to the last key.
            last = (unique[len(label) - len(path[-1]) :],) if path else (unique,)
            yield unique, (*path[:-1], *last), node.head
        elif node.kind in WRAPPERS:
            pending.append((node.inner, label, path))
        else:
            start = len(label) + 1 if label else 0
            inner = [
                (child, where, (*path, where[start:]))
                for _, child, where in children_of(node, label)
            ]
            pending += reversed(inner)


def _preview(part: RankManifest, number: int) -> str:
    text = json.dumps(part.values[number], ensure_ascii=True)
    return text if len(text) <= _LONGEST_PREVIEW else f"{text[: _LONGEST_PREVIEW - 1]}…"
