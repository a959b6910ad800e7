"""What a bundle says of the tensors of one rank, checked as far as a load leans on it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from ckpipe.boxes import Box, box_shape, covers_exactly
from ckpipe.dtypes import DTYPES
from ckpipe.errors import InvalidExtent, InvalidManifest
from ckpipe.load_planning import Need, PartData
from ckpipe.manifest import ChunkRow, Layout, Structure, TensorRow
from ckpipe.tensors import overlaps_itself


@dataclass(eq=False, slots=True)
class StoredChunk:
    """A box of a tensor and where its bytes are.

    Args:
        entry: The number of the entry.
        start: Its first byte, from the entry's start.
        stop: Behind its last byte.
        stride: Strides in elements; None if it lies row by row.
        box: Which part of the tensor it is; None for all of it.
    """

    entry: int
    start: int
    stop: int
    stride: tuple[int, ...] | None
    box: Box | None

    @property
    def need(self) -> Need:
        """Its bytes."""
        return Need(self.entry, self.start, self.stop)


@dataclass(eq=False, slots=True)
class StoredTensor:
    """One tensor of a checkpoint, proved to have bytes for every element.

    Args:
        number: Its number in the structure.
        row: What the structure says of it.
        dtype: Its dtype.
        chunks: Where its elements are, each of them once.
        window: Whether the entry is memory that several tensors share, so that its bytes are
            those of the tensors as they lay, lazy bits unresolved.
        fresh_stride: The strides that a fresh tensor gets; None for contiguous.
    """

    number: int
    row: TensorRow
    dtype: torch.dtype
    chunks: tuple[StoredChunk, ...]
    window: bool
    fresh_stride: tuple[int, ...] | None

    @property
    def label(self) -> str:
        """Its label."""
        return self.row.label

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.row.shape


class StoredTensors:
    """The tensors of one part, looked up and proved covered when they are asked for.

    Args:
        structure: The part's structure.
        layout: The part's layout.
        data: Where the part's entries are.
    """

    def __init__(self, structure: Structure, layout: Layout, data: PartData) -> None:
        self._rows, self.data = structure.tensors, data
        self._chunks: defaultdict[int, list[ChunkRow]] = defaultdict(list)
        self._windows: set[int] = set()
        holder: dict[int, int] = {}
        for chunk in layout.chunks:
            self._chunks[chunk.tensor].append(chunk)
            if chunk.entry is not None and (
                chunk.stride is not None
                or holder.setdefault(chunk.entry, chunk.tensor) != chunk.tensor
            ):
                self._windows.add(chunk.entry)
        self._known: dict[int, StoredTensor] = {}

    def __getitem__(self, number: int) -> StoredTensor:
        """The tensor of a number.

        Raises:
            InvalidManifest: If there is no such tensor, or an element of it is not covered.
            InvalidExtent: If its bytes do not lie in their entry.
        """
        known = self._known.get(number)
        if known is None:
            known = self._known[number] = self._look_up(number)
        return known

    def _look_up(self, number: int) -> StoredTensor:
        if not 0 <= number < len(self._rows):
            raise InvalidManifest(f"The structure names tensor {number}, which does not exist")
        row, rows = self._rows[number], self._chunks[number]
        dtype = DTYPES.get(row.dtype)
        if dtype is None:
            raise InvalidManifest(f"This dtype is unknown: {row.dtype!r:.100}", key=row.label)
        if len(rows) != 1 or rows[0].box is not None:
            _prove_covered(row, rows)
        chunks = tuple(self._chunk(row, dtype.itemsize, chunk) for chunk in rows)
        stride = rows[0].original_stride if len(rows) == 1 else None
        if stride is not None and (
            len(stride) != len(row.shape) or overlaps_itself(row.shape, stride)
        ):
            raise InvalidExtent(f"No tensor of this shape has the strides {stride}", key=row.label)
        window = any(chunk.entry in self._windows for chunk in rows)
        return StoredTensor(number, row, dtype, chunks, window, stride)

    def _chunk(self, row: TensorRow, itemsize: int, chunk: ChunkRow) -> StoredChunk:
        if chunk.entry is None or (chunk.owner is not None and chunk.owner != self.data.rank):
            raise InvalidManifest(f"Its bytes are with rank {chunk.owner}", key=row.label)
        shape = row.shape if chunk.box is None else box_shape(chunk.box)
        reach = _reach(shape, chunk.stride, row.label) * itemsize
        start, stop = chunk.offset, chunk.offset + reach
        entries = self.data.entries
        if not 0 <= chunk.entry < len(entries):
            raise InvalidExtent(f"Its entry {chunk.entry} does not exist", key=row.label)
        if start < 0 or stop > entries[chunk.entry].nbytes:
            raise InvalidExtent(f"Bytes {start} to {stop} are not in its entry", key=row.label)
        return StoredChunk(chunk.entry, start, stop, chunk.stride, chunk.box)


def _prove_covered(row: TensorRow, chunks: list[ChunkRow]) -> None:
    whole = (tuple(0 for _ in row.shape), row.shape)
    if not covers_exactly(row.shape, [chunk.box or whole for chunk in chunks]):
        raise InvalidManifest(
            f"The {len(chunks)} chunks that the checkpoint has of this tensor do not cover "
            f"its shape {list(row.shape)} exactly",
            key=row.label,
        )


def _reach(shape: tuple[int, ...], stride: tuple[int, ...] | None, label: str) -> int:
    """How many elements lie between the first and behind the last."""
    if stride is None:
        return math.prod(shape)
    if len(stride) != len(shape) or min(stride, default=0) < 0:
        raise InvalidExtent(f"No tensor of this shape has the strides {stride}", key=label)
    return 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))


def needs_of(tensors: Iterable[StoredTensor]) -> Iterator[Need]:
    """The bytes of tensors."""
    for tensor in tensors:
        for chunk in tensor.chunks:
            yield chunk.need
