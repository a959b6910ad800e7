"""Manifests of real states, of any rank, for tests of the format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ckpipe.format.checksum import CHUNK_BYTES, crc32c
from ckpipe.format.labels import LabelFilter
from ckpipe.format.manifest import (
    Chunk,
    Layout,
    ManifestDocument,
    RankManifest,
    Structure,
    TensorRow,
)
from ckpipe.format.tree import version_of
from ckpipe.plan.plan import LocalPlanner, RankPlan, Source
from ckpipe.state.flatten import Captured, OpenedState, flatten
from ckpipe.types import CheckpointId

ID = CheckpointId("20261121T034205123Z-golden", 500, 0)
WRITER = {"ckpipe": "0.1.0", "torch": "2.13.0", "python": "3.11.7"}
LIMIT = 1 << 30


@dataclass(frozen=True, slots=True)
class Foreign:
    """A tensor that a rank holds and another rank has written.

    Args:
        owner: The rank that wrote it.
        entry: The number of the entry among the owner's; None if this rank cannot know it.
    """

    owner: int
    entry: int | None = None


def capture(state: Any, select: LabelFilter | None = None) -> Captured:
    """What the walk finds in a state."""
    return flatten(OpenedState(state), select or LabelFilter(), pickling=False).captured


def structure_of(state: Any) -> tuple[Structure, Captured]:
    """The structure of a state as a manifest has it, and what the walk found."""
    captured = capture(state)
    rows = tuple(
        TensorRow(
            leaf.label, leaf.dtype, leaf.full_shape, leaf.device, leaf.kind, leaf.detail,
            leaf.requires_grad, leaf.lazy, leaf.attributes,
        )
        for leaf in captured.tensors
    )  # fmt: skip
    version = version_of(captured.tree, rows)
    return Structure(
        captured.tree, rows, len(captured.values), captured.optimizers, version
    ), captured


def manifest_of(
    state: dict[Any, Any],
    rank: int = 0,
    world_size: int = 1,
    *,
    foreign: dict[str, Foreign] | None = None,
    planned_for: int = 1,
    **fields: Any,
) -> tuple[ManifestDocument, dict[str, bytes]]:
    """The manifest of a rank, and its data files by name.

    Args:
        state: What the rank holds.
        rank: The rank.
        world_size: How many ranks there are.
        foreign: Which of the tensors at the state's top level others have written.
        planned_for: For how many ranks the plan is made that says what this one writes.
        fields: More fields of the part.
    """
    foreign = foreign or {}
    structure, held = structure_of(state)
    _, written = structure_of({key: item for key, item in state.items() if key not in foreign})
    plan = LocalPlanner().plan(written, rank=rank, world_size=planned_for)
    numbers = {row.label: number for number, row in enumerate(structure.tensors)}
    chunks = [
        chunk._replace(tensor=numbers[written.tensors[chunk.tensor].label])
        for chunk in plan.layout.chunks
    ]
    chunks += [
        Chunk(numbers[label], each.entry, owner=each.owner) for label, each in foreign.items()
    ]
    images = images_of(written, plan)
    part = RankManifest(
        rank=rank,
        structure=0,
        layout=0,
        values=tuple(held.values),
        files=tuple(file.row for file in plan.files),
        checksums=_checksums(plan, list(images.values())),
        token=f"{rank:032x}",
        started="2026-11-21T03:42:05.123+00:00",
        writer=WRITER,
        **fields,
    )
    layout = Layout(plan.layout.entries, chunks)
    return ManifestDocument("manifest", ID, world_size, (structure,), (layout,), (part,)), images


def images_of(captured: Captured, plan: RankPlan) -> dict[str, bytes]:
    """The data files of a plan by key, put together in the simplest way."""
    images = {}
    for file in plan.files:
        image = bytearray(file.row.size)
        image[: len(file.header)] = file.header
        for number in file.entries:
            begin = len(file.header) + plan.layout.entries[number].offset
            for source in plan.sources[number]:
                at = begin + source.offset
                data = _source_bytes(captured, source)
                image[at : at + source.nbytes] = data
        assert len(image) == file.row.size
        images[file.row.key(ID)] = bytes(image)
    return images


def _source_bytes(captured: Captured, source: Source) -> bytes:
    leaf, memory = captured.tensors[source.tensor], captured.memory[source.tensor]
    if source.skip is None:
        tensor = memory.resolve_conj().resolve_neg()
        if source.part is not None:
            tensor = tensor[tuple(map(slice, *source.part))]
        tensor = tensor.contiguous()
        return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    storage = memory.untyped_storage()
    begin = leaf.address - storage.data_ptr() + source.skip
    return bytes(storage[begin : begin + source.nbytes])


def _checksums(plan: RankPlan, images: list[bytes]) -> tuple[int, ...]:
    sums = []
    for row in plan.layout.entries:
        begin = len(plan.files[row.file].header) + row.offset
        data = images[row.file][begin : begin + row.nbytes]
        sums += [crc32c(data[lo : lo + CHUNK_BYTES]) for lo in range(0, len(data), CHUNK_BYTES)]
    return tuple(sums)
