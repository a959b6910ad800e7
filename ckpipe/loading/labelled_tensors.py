"""Read tensors of a checkpoint by their labels, for programs that plan a load by themselves.

There is no target to match: exports, comparisons and DCP name the tensors, or boxes of them. What
follows from the metadata is derived once, however often tensors are read.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Sequence
from dataclasses import replace
from operator import add

import anyio.to_thread
import torch

from ckpipe.catalog.opened import Opened
from ckpipe.errors import ShapeMismatch, StructureMismatch, UsageError
from ckpipe.format.boxes import whole
from ckpipe.format.manifest import Structure
from ckpipe.format.tree import Node, mapping, shared_containers, wrappers_in
from ckpipe.interpreter import gc_paused
from ckpipe.loading.factories import Factory
from ckpipe.loading.load import located, read_rounds, telling_touched
from ckpipe.loading.match import Matching
from ckpipe.loading.match_record import MatchRecord
from ckpipe.loading.request import LoadRequest, Unwrap
from ckpipe.memory.arena import Arena
from ckpipe.reading.chunks import StoredTensors
from ckpipe.reading.reader import ReadTally
from ckpipe.reading.saved_state import state_for
from ckpipe.reading.targets import Targets
from ckpipe.state.placements import HeldBox
from ckpipe.transforms.scales import refuse_codes

TensorBox = tuple[str, Sequence[int], torch.Tensor]
"""The label of a saved tensor, the lower corner of a box in it, and the tensor that takes it."""


class LabelledTensors:
    """The tensors of a checkpoint as plain ones by label; making it takes time.

    Args:
        opened: The checkpoint, with its whole index.
        rank: The rank whose tensors to take, if ranks hold different ones; None assembles tensors
            of all ranks, and takes private ones from the lowest rank.
        first_wins: Whether the lowest rank's values are taken where ranks saved different ones.
        labels: The labels of tensors that are asked for; None for all.

    Attributes:
        wrappers: The labels of wrapper tensors.
    """

    @gc_paused()
    def __init__(
        self,
        opened: Opened,
        rank: int | None = None,
        *,
        first_wins: bool = True,
        labels: Container[str] | None = None,
    ) -> None:
        self._opened, document = opened, opened.document
        flat = replace(
            document, structures=tuple(_flat(each, labels) for each in document.structures)
        )
        place = (0, 1) if rank is None else (rank, document.world_size)
        self._saved = state_for(flat, *place, "rank0")
        self._nodes = dict(self._saved.tree.items())
        self.wrappers = {label for label, node in self._nodes.items() if node.kind != "tensor"}
        rows, homes = self._saved.rows, self._saved.homes
        self._stored = StoredTensors(flat, rows, homes, first_wins=first_wins)

    @gc_paused()
    def fresh(self, labels: Iterable[str], unwrap: Unwrap | None = None) -> tuple[Targets, Factory]:
        """Make new tensors; tensors that shared memory when they were saved do so again.

        Args:
            labels: The labels of tensors and of wrapper tensors.
            unwrap: Makes plain tensors of wrapper tensors.

        Returns:
            The targets to read, and a factory that returns the tensors by label.
        """
        targets = Targets(self._stored, cast=False)
        nodes = {label: self._nodes[label] for label in labels}
        containers = shared_containers(nodes.values())
        record = MatchRecord(self._saved, targets, containers, LoadRequest(unwrap=unwrap))
        matching = Matching(record)
        make = matching.plan(mapping(nodes), "")

        def made() -> dict[str, torch.Tensor]:
            try:
                found: dict[str, torch.Tensor] = make()
                return found
            finally:
                matching.forget()

        for stored in [self._stored[nodes[each].head] for each in nodes.keys() - self.wrappers]:
            refuse_codes(stored.row, stored.row.cast or stored.row.dtype, stored.label)
        targets.settle()
        return targets, made

    async def read(
        self, labels: Collection[str], arena: Arena, lanes: int, unwrap: Unwrap | None = None
    ) -> dict[str, torch.Tensor]:
        """Read tensors whole; tensors that shared memory when they were saved do so again.

        Args:
            labels: Their labels; those that the checkpoint lacks are skipped.
            arena: Lends the read buffers; used on the caller's thread only.
            lanes: The number of concurrent reads.
            unwrap: As for :meth:`fresh`.

        Raises:
            CorruptCheckpoint: If the checkpoint is damaged; no unverified byte reaches a tensor.
            StoreError: If the store failed.
        """
        labels = [each for each in labels if each in self._nodes]
        with located(self._opened.document.step, None):
            targets, make = await anyio.to_thread.run_sync(self.fresh, labels, unwrap)
            await self._read(targets, arena, lanes, ReadTally())
            found: dict[str, torch.Tensor] = await anyio.to_thread.run_sync(make)
            return found

    async def fill(self, boxes: Sequence[TensorBox], arena: Arena, lanes: int) -> None:
        """Fill tensors with boxes of saved ones, whichever ranks have written them.

        Args:
            boxes: The boxes; no two of them write to the same place.
            arena: As for :meth:`read`.
            lanes: As for :meth:`read`.

        Raises:
            StructureMismatch: If there is no tensor of a label, or a target cannot be written.
            ShapeMismatch: If a box does not lie in its tensor.
            CorruptCheckpoint: If the checkpoint is damaged; no unverified byte reaches a tensor.
            StoreError: If the store failed.
        """
        with located(self._opened.document.step, None):
            targets = await anyio.to_thread.run_sync(self._to_fill, boxes)
            tally = ReadTally()
            with telling_touched(LoadRequest(begun=[(tally, targets.noted)])):
                await self._read(targets, arena, lanes, tally)

    async def _read(self, targets: Targets, arena: Arena, lanes: int, tally: ReadTally) -> None:
        await read_rounds(self._opened, targets, arena, lanes, tally)
        await anyio.to_thread.run_sync(targets.finish)

    @gc_paused()
    def _to_fill(self, boxes: Iterable[TensorBox]) -> Targets:
        targets = Targets(self._stored, cast=True)
        for label, lower, into in boxes:
            if label not in self._nodes or label in self.wrappers:
                raise StructureMismatch(
                    "The checkpoint has no such tensor", key=label,
                    hint="ckpipe.inspect lists the labels of all",
                )  # fmt: skip
            tensor = self._stored[self._nodes[label].head]
            box = (tuple(lower), tuple(map(add, lower, into.shape)))
            ends = zip(*box, tensor.shape, strict=False)
            fits = len(lower) == into.dim() == len(tensor.shape)
            if not fits or not all(0 <= a <= b <= n for a, b, n in ends):
                raise ShapeMismatch(
                    f"The box from {list(lower)} of the shape {list(into.shape)} does not lie in "
                    f"the saved tensor of the shape {list(tensor.shape)}",
                    key=label,
                )
            regions = None if box == whole(tensor.shape) else (HeldBox(box, (0,) * into.dim()),)
            if not targets.fill(tensor, into, label, regions):
                raise StructureMismatch(
                    "The target is no plain tensor with memory of its own", key=label
                )
        targets.settle()
        return targets


def _flat(structure: Structure, labels: Container[str] | None) -> Structure:
    rows = tuple(
        replace(row, kind="tensor", detail=None, requires_grad=False, attributes=None)
        for row in structure.tensors
    )
    nodes = {row.label: Node("tensor", number) for number, row in enumerate(rows)}
    nodes |= dict(wrappers_in(structure.tree))
    if labels is not None:
        nodes = {label: node for label, node in nodes.items() if label in labels}
    return replace(structure, tree=mapping(nodes), tensors=rows)


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
