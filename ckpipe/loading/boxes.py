"""Fill tensors with boxes of saved ones, for programs that plan a load by themselves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import add, itemgetter

import anyio.to_thread
import torch

from ckpipe.backend import Backend
from ckpipe.errors import ShapeMismatch, StructureMismatch, UsageError
from ckpipe.format.boxes import whole
from ckpipe.format.manifest import ManifestDocument, TensorRow
from ckpipe.loading.chunks import StoredTensors
from ckpipe.loading.load import located, read_rounds, telling_touched
from ckpipe.loading.reader import ReadTally
from ckpipe.loading.request import LoadRequest
from ckpipe.loading.targets import Targets
from ckpipe.memory.arena import Arena
from ckpipe.state.placements import HeldBox

TensorBox = tuple[str, Sequence[int], torch.Tensor]
"""The label of a saved tensor, the lower corner of a box in it, and the tensor that takes it."""


async def read_boxes(
    backend: Backend,
    bundle: ManifestDocument,
    boxes: Sequence[TensorBox],
    arena: Arena,
    *,
    lanes: int,
) -> None:
    """Fill tensors with boxes of saved ones, whichever ranks have written them.

    Args:
        backend: The store.
        bundle: The checkpoint's index, validated.
        boxes: The boxes; no two of them write to the same place.
        arena: Lends the read buffers.
        lanes: The number of concurrent reads.

    Raises:
        StructureMismatch: If there is no tensor of a label, or a target cannot be written.
        ShapeMismatch: If a box does not lie in its tensor.
        CorruptCheckpoint: If the checkpoint is damaged; no unverified byte reaches a tensor.
        StoreError: If the store failed.
    """
    with located(bundle.step, None):
        targets = await anyio.to_thread.run_sync(_matched_boxes, bundle, boxes)
        tally = ReadTally()
        with telling_touched(LoadRequest(begun=[(tally, targets.noted)])):
            await read_rounds(backend, bundle, targets, arena, lanes, tally)
            await anyio.to_thread.run_sync(targets.finish)


def boxes_of(boxes: Iterable[TensorBox]) -> list[TensorBox]:
    """Check the argument ``boxes``.

    Raises:
        UsageError: If it is no list of labels, lower corners and tensors.
    """
    found = list(boxes) if isinstance(boxes, Iterable) else [boxes]
    for each in found:
        fits = isinstance(each, tuple | list) and len(each) == 3
        fits = fits and isinstance(each[0], str) and isinstance(each[1], Iterable)
        if not fits or not isinstance(each[2], torch.Tensor):
            raise UsageError(
                f"boxes is a list of labels, lower corners and tensors, and {each!r:.100} is none",
                hint="Write [('model.w', (0, 0), tensor)]",
            )
    return found


def _matched_boxes(bundle: ManifestDocument, boxes: Sequence[TensorBox]) -> Targets:
    rows: dict[str, TensorRow] = {}
    homes: dict[str, tuple[int, int]] = {}
    firsts = {part.structure: number for number, part in reversed(list(enumerate(bundle.parts)))}
    for structure, first in sorted(firsts.items(), key=itemgetter(1)):
        for number, row in enumerate(bundle.structures[structure].tensors):
            rows.setdefault(row.label, row)
            homes.setdefault(row.label, (first, number))
    stored = StoredTensors(bundle, list(rows.values()), list(homes.values()))
    numbers = {label: number for number, label in enumerate(rows)}
    targets = Targets(stored, cast=True)
    for label, lower, into in boxes:
        if label not in numbers:
            raise StructureMismatch(
                "The checkpoint has no such tensor", key=label,
                hint="ckpipe.inspect lists the labels of all",
            )  # fmt: skip
        tensor = stored[numbers[label]]
        box = (tuple(lower), tuple(map(add, lower, into.shape)))
        ends = zip(*box, tensor.shape, strict=False)
        fits = len(lower) == into.dim() == len(tensor.shape)
        if not fits or not all(0 <= a <= b <= n for a, b, n in ends):
            raise ShapeMismatch(
                f"The box from {list(lower)} of the shape {list(into.shape)} does not lie in the "
                f"saved tensor of the shape {list(tensor.shape)}",
                key=label,
            )
        regions = None if box == whole(tensor.shape) else (HeldBox(box, (0,) * into.dim()),)
        if not targets.fill(tensor, into, label, regions):
            raise StructureMismatch(
                "The target is no plain tensor with memory of its own", key=label
            )
    targets.settle()
    return targets
