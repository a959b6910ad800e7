"""Find the elements of a tensor in the chunks of all parts of a checkpoint.

Theory. A rank's own part lists the chunks that the rank wrote, as chunks without an owner. Together
these are all elements of a tensor in the checkpoint, so a rank that loads finds any element by
label, shape and dtype among them. A chunk with an owner refers to a chunk that another rank wrote
and this rank shares. These references are followed first: a rank that loads its own save then needs
no other part.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import floordiv
from typing import NamedTuple

import torch

from ckpipe.errors import InvalidExtent, InvalidManifest, PerRankValue
from ckpipe.format.box_cover import BoxIndex
from ckpipe.format.boxes import Box, box_shape, box_volume, flat_ranges, moved, whole
from ckpipe.format.checksum import CHUNK_BYTES, chunk_count
from ckpipe.format.data_file import SCALARS
from ckpipe.format.dtypes import DTYPES, dtype_of
from ckpipe.format.entry_table import EntryTable
from ckpipe.format.manifest import Chunk, Layout, ManifestDocument, TensorRow
from ckpipe.reading.read_plan import Need
from ckpipe.state.placements import HeldBox
from ckpipe.state.tensors import overlaps_itself

ChunkRef = tuple[int, Chunk]
"""A chunk, and the number of the part into whose entries it points."""

_Key = tuple[str, tuple[int, ...], str]


class NeedsFullIndex(Exception):
    """Raised if parts that were not read may be needed: the index has all."""


class RankChunks:
    """The chunks of a layout by tensor.

    Args:
        layout: The layout.

    Attributes:
        entry_count: The number of the layout's entries.
        shared: The layout's own entries that are memory of several tensors, or of one with strides.
        by_tensor: The chunks by tensor.
    """

    def __init__(self, layout: Layout) -> None:
        self.entry_count = len(layout.entries)
        self.shared: set[int] = set()
        self.by_tensor: defaultdict[int, list[Chunk]] = defaultdict(list)
        holder: dict[int, int] = {}
        for chunk in layout.chunks:
            self.by_tensor[chunk.tensor].append(chunk)
            if chunk.owner is None and chunk.entry is not None:
                first = holder.setdefault(chunk.entry, chunk.tensor)
                scalars = layout.entries.name[chunk.entry].endswith(SCALARS)
                several = first != chunk.tensor and not scalars
                if not chunk.cut and (chunk.stride is not None or several):
                    self.shared.add(chunk.entry)


def chunk_box(chunk: Chunk, shape: Sequence[int]) -> Box:
    """Return the box of a chunk in its tensor."""
    return whole(shape) if chunk.box is None else chunk.box


def _key(row: TensorRow) -> _Key:
    return row.label, row.shape, row.dtype


Regions = tuple[HeldBox, ...] | None
"""Parts of a tensor; None for the whole, in its own shape."""


class HeldElements(NamedTuple):
    """The share of a target tensor's elements that a checkpoint has.

    Args:
        some: Whether it has any of them.
        all: Whether it has all of them.
        without: The ranks that did not save the tensor.
    """

    some: bool
    all: bool
    without: Sequence[int]


class ChunkCopy(NamedTuple):
    """Elements of one chunk that go to one place.

    Args:
        entry: The number of the entry in the table of entries.
        start: The start of the chunk in the entry, in bytes.
        stop: Its end in the entry, in bytes; exclusive.
        stride: The chunk's strides in elements; None if it is stored row by row.
        shape: The chunk's shape.
        inside: The part of the chunk to copy; None for all of it.
        target: The part of the tensor to fill; None for all of it.
        shared: Whether the entry is memory that several tensors shared: an image of that memory,
            with lazy bits unresolved.
        order: For a chunk that an edit has made, the order of the chunk's dimensions among those of
            ``target`` with more than one index; its last dimension has one. None for the same ones.
    """

    entry: int
    start: int
    stop: int
    stride: tuple[int, ...] | None
    shape: tuple[int, ...]
    inside: Box | None
    target: Box | None
    shared: bool
    order: tuple[int, ...] | None = None

    def needs(self, itemsize: int) -> Iterator[Need]:
        """Yield its needs; rows that share a checksum chunk anyway are one need."""
        if self.inside is None:
            yield Need(self.entry, self.start, self.stop)
            return
        for lo, hi in flat_ranges(self.shape, self.inside, CHUNK_BYTES // itemsize):
            yield Need(self.entry, self.start + lo * itemsize, self.start + hi * itemsize)


@dataclass(eq=False, slots=True)
class StoredTensor:
    """One tensor of a checkpoint.

    Args:
        number: Its number in the saved state.
        row: Its row in the structure.
        dtype: The dtype of its bytes.
        fresh_stride: The strides of a fresh tensor; None for contiguous.
        near: The chunks that the load's first part lists.
        copies: The chunks of its regions, as far as they are known.
    """

    number: int
    row: TensorRow
    dtype: torch.dtype
    fresh_stride: tuple[int, ...] | None
    near: list[ChunkRef]
    copies: dict[Regions, tuple[ChunkCopy, ...]] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Its label."""
        return self.row.label

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.row.shape

    @property
    def loaded_dtype(self) -> torch.dtype:
        """The dtype that it is loaded as."""
        return self.dtype if self.row.cast is None else DTYPES[self.row.cast]


class StoredTensors:
    """The tensors of a saved state, looked up and proved covered on access.

    Args:
        document: The checkpoint, or some of its parts. In an index, a part's number is its rank.
        rows: The rows of the state's tensors.
        homes: For each of them, a part that lists it, and its number there.
        first_wins: Whether the lowest rank's values are taken where ranks saved different ones.

    Attributes:
        data: The entries of its data files.
    """

    def __init__(
        self,
        document: ManifestDocument,
        rows: Sequence[TensorRow],
        homes: Sequence[tuple[int, int]],
        *,
        first_wins: bool = False,
    ) -> None:
        self._document, self._rows, self._homes = document, rows, homes
        self.data = EntryTable(document)
        self._first_wins = first_wins
        self._known: dict[int, StoredTensor] = {}
        self._held: dict[int, RankChunks] = {}
        self._numbers: dict[int, dict[str, int]] = {}
        self._everything: dict[_Key, list[ChunkRef]] | None = None

    def __getitem__(self, number: int) -> StoredTensor:
        """Return the tensor of a number.

        Raises:
            InvalidManifest: If there is no such tensor.
            InvalidExtent: If its strides fit no tensor of its shape.
        """
        known = self._known.get(number)
        if known is None:
            if not 0 <= number < len(self._rows):
                raise InvalidManifest(f"The structure names tensor {number}, which does not exist")
            part, inner = self._homes[number]
            known = self._known[number] = self._look_up(number, part, inner, self._rows[number])
        return known

    def of_part(self, part: int, number: int) -> StoredTensor:
        """Return the tensor as one part has it, under its number there.

        Raises:
            As subscription does.
        """
        return self._look_up(number, part, number, self._row(part, number))

    def rank_of(self, number: int) -> int:
        """Return the rank whose tensor has a number."""
        return self._document.parts[self._homes[number][0]].rank

    def _look_up(self, number: int, part: int, inner: int, row: TensorRow) -> StoredTensor:
        dtype = dtype_of(row.dtype, row.label)
        near = self._listed(part, inner)
        if len(near) != 1 or near[0][1].box is not None:
            return StoredTensor(number, row, dtype, None, near)
        # The common case, which must cost little.
        ((owner, chunk),) = near
        stride = chunk.original_stride
        if stride is not None and (
            len(stride) != len(row.shape) or overlaps_itself(row.shape, stride)
        ):
            raise InvalidExtent(f"No tensor of this shape has the strides {stride}", key=row.label)
        stored = StoredTensor(number, row, dtype, stride, near)
        stored.copies[None] = (self._copy(stored, owner, chunk, row.shape, None, None),)
        return stored

    def copies(self, stored: StoredTensor, regions: Regions = None) -> tuple[ChunkCopy, ...]:
        """Return the chunks from which regions of a tensor are assembled, each element once.

        Raises:
            InvalidManifest: If an element is nowhere in the checkpoint.
            InvalidExtent: If bytes do not lie in their entry.
            PerRankValue: If the load's first part lacks elements, and other parts have different
                values of them.
        """
        found = stored.copies.get(regions)
        if found is None:
            wanted = (_all_of(stored.shape),) if regions is None else regions
            found = stored.copies[regions] = self._find(stored, wanted)
        return found

    def is_whole(self, stored: StoredTensor) -> bool:
        """Tell whether the load's first part holds all of a tensor."""
        return not self._covered(stored, stored.near, (_all_of(stored.shape),))[1]

    def held(self, stored: StoredTensor, regions: Regions) -> HeldElements:
        """Tell how much of regions of a tensor the checkpoint has.

        Raises:
            InvalidExtent: If a chunk does not fit the tensor.
            NeedsFullIndex: If parts that are not here may have more.
        """
        wanted = (_all_of(stored.shape),) if regions is None else regions
        found, missing = self._covered(stored, stored.near, wanted)
        if missing:
            found, missing = self._covered(stored, self._everywhere(stored.row), wanted)
        known = [
            any(row.label == stored.label for row in each.tensors)
            for each in self._document.structures
        ]
        without = [part.rank for part in self._document.parts if not known[part.structure]]
        return HeldElements(
            any(box_volume(box) for _, box, _ in found),
            not any(box_volume(box) for box in missing),
            without,
        )

    def _find(self, stored: StoredTensor, regions: tuple[HeldBox, ...]) -> tuple[ChunkCopy, ...]:
        near = stored.near
        found, missing = self._covered(stored, near, regions)
        if missing:
            others = self._everywhere(stored.row)
            if not self._first_wins:
                self._check_copies(stored, others)
            everywhere = [*near, *(each for each in others if each not in near)]
            found, missing = self._covered(stored, everywhere, regions)
        if missing:
            lower, upper = missing[0]
            raise InvalidManifest(
                f"No part of the checkpoint has the elements {list(lower)} to {list(upper)} of "
                f"this tensor of shape {list(stored.shape)}",
                key=stored.label,
            )
        return self._copies(stored, found)

    def _check_copies(self, stored: StoredTensor, candidates: list[ChunkRef]) -> None:
        """Prove that chunks of one box that several ranks wrote have the same values.

        A chunk that a transform has cut from an entry counts with all of it.

        One name on several meshes may mean copies of one tensor, or a separate tensor of each mesh.
        """
        first: dict[Box | None, ChunkRef] = {}
        for candidate in candidates:
            if candidate[1].owner is None:
                other = first.setdefault(candidate[1].box, candidate)
                if other is not candidate and self._differ(other, candidate):
                    raise PerRankValue(
                        f"Ranks {other[0]} and {candidate[0]} saved different values of the same "
                        "part of this tensor, and this rank needs more of it than it saved itself",
                        key=stored.label,
                        hint="Load with the ranks and meshes that saved, leave it out with "
                        'exclude, or pass per_rank="rank0" to take that of the lowest rank',
                    )

    def _differ(self, *candidates: ChunkRef) -> bool:
        """Tell whether chunks are known to have different bytes: each must fill its own entry."""
        contents = []
        for part, chunk in candidates:
            entry, held = chunk.entry, self._held_by(part)
            if entry is None or entry in held.shared or entry >= held.entry_count:
                return False
            place = self.data.number(part, entry)
            row, start = self.data.entry(place), self.data.first_sums[place]
            if row.name.endswith(SCALARS) if chunk.cut else chunk.offset:
                return False
            sums = self.data.checksums[start : start + chunk_count(row.nbytes)]
            contents.append((row.dtype, row.shape, chunk.offset, chunk.stride, tuple(sums)))
        return len(set(contents)) > 1

    def _covered(
        self, stored: StoredTensor, candidates: list[ChunkRef], regions: tuple[HeldBox, ...]
    ) -> tuple[list[tuple[ChunkRef, Box, Box]], list[Box]]:
        """Return chunks, each with its wanted part and target box; and the missing boxes."""
        dims = len(stored.shape)
        everything = whole(stored.shape)
        boxes = [chunk.box or everything for _, chunk in candidates]
        if not set(map(len, chain.from_iterable(boxes))) <= {dims}:
            raise InvalidExtent("A box of it has a wrong number of dimensions", key=stored.label)
        index = BoxIndex(boxes)
        found: list[tuple[ChunkRef, Box, Box]] = []
        missing: list[Box] = []
        for region in regions:
            parts, holes = index.cover(region.box)
            missing += holes
            shift = [low - at for low, at in zip(region.box[0], region.at, strict=True)]
            found += [(candidates[n], part, moved(part, shift)) for n, part in parts]
        return found, missing

    def _copies(
        self, stored: StoredTensor, found: list[tuple[ChunkRef, Box, Box]]
    ) -> tuple[ChunkCopy, ...]:
        """Return copies of parts of chunks, by their boxes in the global and the local tensor."""
        everything = whole(stored.row.shape)
        copies = []
        for (number, chunk), part, target in found:
            box = chunk.box or everything
            if chunk.cut:
                copies.append(self._cut_copy(stored, number, chunk, part, target))
                continue
            inside = None if part == box else moved(part, box[0])
            fills = None if inside is None and target == everything else target
            copies.append(self._copy(stored, number, chunk, box_shape(box), inside, fills))
        return tuple(copies)

    def _copy(
        self,
        stored: StoredTensor,
        part: int,
        chunk: Chunk,
        shape: tuple[int, ...],
        inside: Box | None,
        target: Box | None,
    ) -> ChunkCopy:
        stride = chunk.stride
        reach = math.prod(shape) if stride is None else _reach(shape, stride, stored)
        entry, stop = self._extent(stored, part, chunk, chunk.offset, reach)
        shared = stride is not None or chunk.entry in self._held_by(part).shared
        return ChunkCopy(entry, chunk.offset, stop, stride, shape, inside, target, shared)

    def _cut_copy(
        self, stored: StoredTensor, part: int, chunk: Chunk, box: Box, target: Box
    ) -> ChunkCopy:
        """Return the copy of a box of a chunk that an edit has made, as a part of whole rows.

        Each stride is a multiple of all of the next dimension, so the box is a part of the rows
        whose lengths are the quotients of strides.
        """
        assert chunk.stride is not None
        assert chunk.box is not None
        lows = zip(box[0], chunk.box[0], chunk.stride, strict=True)
        start = chunk.offset + stored.dtype.itemsize * sum((n - at) * by for n, at, by in lows)
        dims = [each for each in zip(chunk.stride, box_shape(box), strict=True) if each[1] > 1]
        order = tuple(sorted(range(len(dims)), key=lambda dim: -dims[dim][0]))
        steps = [dims[dim][0] for dim in order]
        counts = (*(dims[dim][1] for dim in order), 1)
        shape = (counts[0], *map(floordiv, steps, [*steps[1:], 1]))
        reach = 1 + sum((n - 1) * step for step, n in dims)
        entry, stop = self._extent(stored, part, chunk, start, reach)
        inside = None if shape == counts else whole(counts)
        return ChunkCopy(entry, start, stop, None, shape, inside, target, False, order)

    def _extent(
        self, stored: StoredTensor, part: int, chunk: Chunk, start: int, reach: int
    ) -> tuple[int, int]:
        """Return the number of a chunk's entry, and the end of its elements there, in bytes."""
        stop = start + reach * stored.dtype.itemsize
        if chunk.entry is None or not 0 <= chunk.entry < self._held_by(part).entry_count:
            raise InvalidExtent(f"Its entry {chunk.entry} does not exist", key=stored.row.label)
        entry = self.data.number(part, chunk.entry)
        if start < 0 or stop > self.data.sizes[entry]:
            raise InvalidExtent(f"Bytes {start} to {stop} are not in its entry", key=stored.label)
        return entry, stop

    # Chunks by tensor

    def _listed(self, part: int, tensor: int) -> list[ChunkRef]:
        """Return the chunks that a part lists of a tensor, with references followed to owners.

        References that cannot be followed are skipped, so that their elements are missing.

        Args:
            part: The number of the part.
            tensor: The number of the tensor in its structure.

        Raises:
            NeedsFullIndex: If a reference leads to another rank's part, which is not here.
        """
        found: list[ChunkRef] = []
        for chunk in self._held_by(part).by_tensor.get(tensor, ()):
            if chunk.owner is None:
                found.append((part, chunk))
            else:
                found += self._written(chunk.owner, chunk, self._row(part, tensor))
        return found

    def _everywhere(self, row: TensorRow) -> list[ChunkRef]:
        """Return the chunks of all ranks of the tensor with a label, shape and dtype.

        Raises:
            NeedsFullIndex: If not all parts are here.
        """
        if not self._document.whole:
            raise NeedsFullIndex
        if self._everything is None:
            self._everything = self._gathered()
        return self._everything.get(_key(row), [])

    def _held_by(self, part: int) -> RankChunks:
        """Return the chunks of a part, by tensor."""
        layout = self._document.parts[part].layout
        found = self._held.get(layout)
        if found is None:
            found = self._held[layout] = RankChunks(self._document.layouts[layout])
        return found

    def _row(self, part: int, tensor: int) -> TensorRow:
        """Return the row of a tensor in a part's structure."""
        return self._document.structures[self._document.parts[part].structure].tensors[tensor]

    def _written(self, owner: int, chunk: Chunk, row: TensorRow) -> list[ChunkRef]:
        """Return the owner's chunk to which another rank's chunk refers, if there is one."""
        part = self._document.number_of(owner)
        if part is None:
            if self._document.whole:
                return []
            raise NeedsFullIndex
        if chunk.entry is not None:
            return [(part, chunk)]
        structure = self._document.parts[part].structure
        known = self._document.structures[structure].tensors
        if structure not in self._numbers:
            self._numbers[structure] = {each.label: n for n, each in enumerate(known)}
        number = self._numbers[structure].get(row.label)
        if number is None or _key(known[number]) != _key(row):
            return []
        rows = self._held_by(part).by_tensor.get(number, ())
        wanted = chunk_box(chunk, row.shape)
        own = (each for each in rows if each.owner is None)
        return [(part, each) for each in own if chunk_box(each, row.shape) == wanted][:1]

    def _gathered(self) -> dict[_Key, list[ChunkRef]]:
        found: defaultdict[_Key, list[ChunkRef]] = defaultdict(list)
        told: list[tuple[Callable[[ChunkRef], object], ChunkRef]] = []
        lists = [[found[_key(row)] for row in each.tensors] for each in self._document.structures]
        for number, part in enumerate(self._document.parts):
            by_tensor = lists[part.structure]
            for chunk in self._document.layouts[part.layout].chunks:
                if chunk.owner is None:
                    by_tensor[chunk.tensor].append((number, chunk))
                elif chunk.entry is not None and chunk.owner < len(self._document.parts):
                    told.append((by_tensor[chunk.tensor].append, (chunk.owner, chunk)))
        # Behind the ranks' own chunks, of which they are nearly always duplicates.
        for append, candidate in told:
            append(candidate)
        return found


def _reach(shape: tuple[int, ...], stride: tuple[int, ...], stored: StoredTensor) -> int:
    """Return the number of elements of memory from the first to the last element."""
    if len(stride) != len(shape) or min(stride, default=0) < 0:
        raise InvalidExtent(f"No tensor of this shape has the strides {stride}", key=stored.label)
    return 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))


def _all_of(shape: tuple[int, ...]) -> HeldBox:
    box = whole(shape)
    return HeldBox(box, box[0])
