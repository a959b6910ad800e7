"""Entries of data files before they have a place: what is in them and what they are filled from."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ckpipe.errors import UnsupportedState
from ckpipe.format.boxes import Box, box_shape
from ckpipe.format.dtypes import DTYPES, stored_dtype
from ckpipe.format.manifest import ChunkRow
from ckpipe.plans.division import Piece, Unit
from ckpipe.state.placements import HeldBox
from ckpipe.state.tensors import TensorLeaf


@dataclass(frozen=True, slots=True)
class Source:
    """Bytes of a tensor that fill a part of an entry.

    Args:
        tensor: The number of the tensor.
        offset: Where they begin in the entry, in bytes.
        skip: For a window, how many bytes of the tensor's window to leave out; None if the
            tensor's elements are copied row by row, with its lazy bits resolved.
        nbytes: How many bytes they are.
        part: Which of the tensor's elements are copied, as a box of it; None for all.
    """

    tensor: int
    offset: int
    skip: int | None
    nbytes: int
    part: Box | None = None


@dataclass(frozen=True, slots=True)
class Member:
    """A tensor in an entry: what its chunk says, but for the number of the entry."""

    tensor: int
    offset: int = 0
    stride: tuple[int, ...] | None = None
    original_stride: tuple[int, ...] | None = None
    box: Box | None = None

    def at(self, entry: int) -> ChunkRow:
        """The chunk, once the entry has its number."""
        return ChunkRow(
            self.tensor, entry, self.offset, self.stride, self.original_stride, self.box
        )


@dataclass(frozen=True, slots=True)
class Draft:
    """An entry that has no place yet; ``item`` is the alignment that it needs, in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    item: int
    members: tuple[Member, ...]
    sources: tuple[Source, ...]


def draft_entry(leaves: list[TensorLeaf], unit: Unit, piece: Piece) -> Draft:
    """The entry of a piece that this rank writes.

    Raises:
        UnsupportedState: If tensors overlap in a way that no entry can hold.
    """
    if unit.overlapping:
        return _shared(leaves, list(unit.members))
    number = unit.members[0]
    leaf, held = leaves[number], piece.held
    if held is None:
        members = tuple(_whole(each, leaf) for each in unit.members)
        source = Source(number, 0, None, leaf.nbytes)
        return _logical(leaf.label, leaf, leaf.shape, members, source)
    shape = box_shape(held.box)
    members = tuple(Member(each, box=held.box) for each in unit.members)
    nbytes = math.prod(shape) * DTYPES[leaf.dtype].itemsize
    source = Source(number, 0, None, nbytes, _part(held, leaf))
    return _logical(f"{leaf.label}@{_bounds(held.box)}", leaf, shape, members, source)


def foreign_chunks(leaves: list[TensorLeaf], unit: Unit, piece: Piece) -> Iterator[ChunkRow]:
    """The chunks of a piece that another rank writes, whose own chunks say where it lies."""
    box = None if piece.held is None else piece.held.box
    for number in unit.members:
        whole = piece.held is None and not unit.overlapping
        stride = _whole(number, leaves[number]).original_stride if whole else None
        yield ChunkRow(number, None, 0, None, stride, box, piece.owner)


def _whole(number: int, leaf: TensorLeaf) -> Member:
    return Member(number, original_stride=None if leaf.contiguous else leaf.stride)


def _part(held: HeldBox, leaf: TensorLeaf) -> Box | None:
    return None if box_shape(held.box) == leaf.shape else held.local


def _bounds(box: Box) -> str:
    lower, upper = box
    return f"{','.join(map(str, lower))}:{','.join(map(str, upper))}"


def _logical(
    name: str,
    leaf: TensorLeaf,
    shape: tuple[int, ...],
    members: tuple[Member, ...],
    source: Source,
) -> Draft:
    dtype = DTYPES[leaf.dtype]
    stored = stored_dtype(dtype)
    stored_shape = shape if stored else (source.nbytes,)
    return Draft(
        name, stored or "U8", stored_shape, source.nbytes, dtype.itemsize, members, (source,)
    )


def _shared(leaves: list[TensorLeaf], group: list[int]) -> Draft:
    low = min(leaves[number].address for number in group)
    high = max(leaves[number].address + leaves[number].window for number in group)
    cover = max(group, key=lambda number: (leaves[number].window, -number))
    view = leaves[cover]
    covered = (
        (view.address, view.window) == (low, high - low)
        and view.contiguous
        and not view.lazy
        and all((leaves[number].address - low) % leaves[number].itemsize == 0 for number in group)
    )
    if covered:
        source = Source(cover, 0, None, view.window)
        return _logical(view.label, view, view.shape, _members(leaves, group, low), source)
    largest = max(leaves[number].itemsize for number in group)
    start = low - low % largest
    return Draft(
        f"{leaves[group[0]].label}~window",
        "U8",
        (high - start,),
        high - start,
        1,
        _members(leaves, group, start),
        _windows(leaves, group, start),
    )


def _members(leaves: list[TensorLeaf], group: list[int], start: int) -> tuple[Member, ...]:
    members = []
    for number in group:
        leaf = leaves[number]
        offset = leaf.address - start
        if offset % leaf.itemsize:
            raise UnsupportedState(
                "This tensor shares bytes with others, at an offset unfit for its dtype",
                key=leaf.label,
                hint="Save a clone of it",
            )
        stride = None if leaf.contiguous else leaf.stride
        members.append(Member(number, offset, stride))
    return tuple(members)


def _windows(leaves: list[TensorLeaf], group: list[int], start: int) -> tuple[Source, ...]:
    """The fewest windows that together cover the group's bytes, each byte once."""
    sources, end = [], start
    for number in sorted(group, key=lambda each: (leaves[each].address, -leaves[each].window)):
        leaf = leaves[number]
        top = leaf.address + leaf.window
        if top > end:
            skip = max(0, end - leaf.address)
            begin = leaf.address + skip
            sources.append(Source(number, begin - start, skip, top - begin))
            end = top
    return tuple(sources)
