"""The plan of a save: which bytes of which tensors go where in which data file.

Pure: a plan depends on the structure of the state, the rank and the world size, and on nothing
else, so it serves every later save whose fingerprint is the same. A plan names tensors by their
number in the walk and holds none of them.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

from ckpipe import data_file
from ckpipe.checksum import chunk_count
from ckpipe.dtypes import DTYPES, stored_dtype
from ckpipe.errors import UnsupportedState
from ckpipe.manifest import ChunkRow, EntryRow, FileRow, Layout
from ckpipe.object_names import data_file_name
from ckpipe.structure import Captured
from ckpipe.tensors import TensorLeaf, alias_groups


@dataclass(frozen=True, slots=True)
class Source:
    """Bytes of a tensor that fill a part of an entry.

    Args:
        tensor: The number of the tensor.
        offset: Where they begin in the entry, in bytes.
        skip: For a window, how many bytes of the tensor's window to leave out; None if the
            tensor's elements are copied row by row, with its lazy bits resolved.
        nbytes: How many bytes they are.
    """

    tensor: int
    offset: int
    skip: int | None
    nbytes: int


@dataclass(frozen=True, slots=True)
class FilePlan:
    """One data file.

    Args:
        name: Its name below the checkpoint's prefix.
        header: The bytes that come before its data.
        entries: The first and behind the last of its entries.
        size: Its size in bytes.
    """

    name: str
    header: bytes
    entries: range
    size: int


@dataclass(frozen=True, slots=True)
class RankPlan:
    """What one rank writes.

    Args:
        rank: The rank.
        world_size: How many ranks there are.
        fingerprint: What the captured structure must be for the plan to fit.
        layout: The entries and chunks, as the manifest has them.
        sources: For each entry, what fills it, in the order of their offsets.
        files: The data files; none if the rank writes no bytes.
    """

    rank: int
    world_size: int
    fingerprint: Hashable
    layout: Layout
    sources: tuple[tuple[Source, ...], ...]
    files: tuple[FilePlan, ...]

    @property
    def size(self) -> int:
        """Bytes of all data files."""
        return sum(file.size for file in self.files)

    @property
    def checksums(self) -> int:
        """How many checksums its manifest has."""
        return sum(chunk_count(entry.nbytes) for entry in self.layout.entries)


class Planner(Protocol):
    """Makes the plan of a rank from the structure of its state."""

    def plan(self, captured: Captured, *, rank: int, world_size: int) -> RankPlan:
        """Plans a save; pure, and called in a worker thread.

        Args:
            captured: The structure; the bytes of its tensors may change meanwhile.
            rank: The rank to plan for, from 0.
            world_size: How many ranks save together.

        Raises:
            UnsupportedState: If a tensor cannot be saved.
            UnsupportedTopology: If the planner cannot serve this world size.
        """
        ...


def fingerprint(captured: Captured) -> Hashable:
    """All of a structure that a plan depends on: layouts of tensors, and who shares which bytes."""
    leaves = captured.tensors
    groups = []
    for group in alias_groups(leaves):
        low = min(leaves[number].address for number in group)
        # Alignment within a window depends on its address modulo the largest item.
        groups.append(
            (low % _MAX_ITEM, tuple((number, leaves[number].address - low) for number in group))
        )
    return (tuple(leaf.layout() for leaf in leaves), tuple(groups))


_MAX_ITEM = 16


class LocalPlanner:
    """Plans from what the rank knows by itself."""

    def plan(self, captured: Captured, *, rank: int, world_size: int) -> RankPlan:
        """See :class:`Planner`."""
        drafts = _drafts(captured.tensors)
        drafts.sort(key=lambda draft: -draft.item)
        files, entries = _lay_out(drafts, rank)
        chunks: dict[int, ChunkRow] = {}
        for number, draft in enumerate(drafts):
            for member in draft.members:
                chunks[member.tensor] = member.at(number)
        ordered = tuple(chunks[number] for number in range(len(captured.tensors)))
        return RankPlan(
            rank,
            world_size,
            fingerprint(captured),
            Layout(tuple(entries), ordered),
            tuple(draft.sources for draft in drafts),
            tuple(files),
        )


@dataclass(frozen=True, slots=True)
class _Member:
    tensor: int
    offset: int = 0
    stride: tuple[int, ...] | None = None
    original_stride: tuple[int, ...] | None = None

    def at(self, entry: int) -> ChunkRow:
        return ChunkRow(self.tensor, entry, self.offset, self.stride, self.original_stride)


@dataclass(frozen=True, slots=True)
class _Draft:
    """An entry that has no place yet; ``item`` is the alignment that it needs, in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    item: int
    members: tuple[_Member, ...]
    sources: tuple[Source, ...]


def _drafts(leaves: list[TensorLeaf]) -> list[_Draft]:
    groups = {group[0]: group for group in alias_groups(leaves)}
    grouped = {number for group in groups.values() for number in group}
    drafts = []
    for number, leaf in enumerate(leaves):
        if number in groups:
            drafts.append(_shared(leaves, groups[number]))
        elif number not in grouped:
            drafts.append(_alone(leaf, number))
    return drafts


def _alone(leaf: TensorLeaf, number: int) -> _Draft:
    stride = None if leaf.contiguous else leaf.stride
    nbytes = leaf.nbytes
    member = _Member(number, original_stride=stride)
    return _logical(leaf, nbytes, (member,), (Source(number, 0, None, nbytes),))


def _logical(
    leaf: TensorLeaf, nbytes: int, members: tuple[_Member, ...], sources: tuple[Source, ...]
) -> _Draft:
    stored = stored_dtype(DTYPES[leaf.dtype])
    shape = leaf.shape if stored else (nbytes,)
    item = DTYPES[leaf.dtype].itemsize
    return _Draft(leaf.label, stored or "U8", shape, nbytes, item, members, sources)


def _shared(leaves: list[TensorLeaf], group: list[int]) -> _Draft:
    low = min(leaves[number].address for number in group)
    high = max(leaves[number].address + leaves[number].window for number in group)
    cover = max(group, key=lambda number: (leaves[number].window, -number))
    view = leaves[cover]
    covered = (
        (view.address, view.window) == (low, high - low)
        and view.contiguous
        and not view.lazy
        and all(
            (leaves[number].address - low) % leaves[number].tensor.itemsize == 0 for number in group
        )
    )
    if covered:
        source = Source(cover, 0, None, view.window)
        return _logical(view, view.window, _members(leaves, group, low), (source,))
    largest = max(leaves[number].tensor.itemsize for number in group)
    start = low - low % largest
    return _Draft(
        f"{leaves[group[0]].label}~window",
        "U8",
        (high - start,),
        high - start,
        1,
        _members(leaves, group, start),
        _windows(leaves, group, start),
    )


def _members(leaves: list[TensorLeaf], group: list[int], start: int) -> tuple[_Member, ...]:
    members = []
    for number in group:
        leaf = leaves[number]
        offset = leaf.address - start
        if offset % leaf.tensor.itemsize:
            raise UnsupportedState(
                "This tensor shares bytes with others, at an offset unfit for its dtype",
                key=leaf.label,
                hint="Save a clone of it",
            )
        stride = None if leaf.contiguous else leaf.stride
        members.append(_Member(number, offset, stride))
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


def _lay_out(drafts: list[_Draft], rank: int) -> tuple[list[FilePlan], list[EntryRow]]:
    files: list[FilePlan] = []
    entries: list[EntryRow] = []
    empty = data_file.header_size_bound(())
    first, offset, header = 0, 0, empty
    for number, draft in enumerate(drafts):
        bound = data_file.entry_size_bound(draft.name, draft.shape)
        if header + bound > data_file.MAX_HEADER_BYTES and number > first:
            files.append(_file(entries, first, offset, rank, len(files)))
            first, offset, header = number, 0, empty
        header += bound
        entries.append(
            EntryRow(draft.name, draft.dtype, draft.shape, len(files), offset, draft.nbytes)
        )
        offset += draft.nbytes
    if drafts:
        files.append(_file(entries, first, offset, rank, len(files)))
    return files, entries


def _file(entries: list[EntryRow], first: int, nbytes: int, rank: int, number: int) -> FilePlan:
    header = data_file.encode_header(
        [(row.name, row.dtype, row.shape, row.offset, row.nbytes) for row in entries[first:]]
    )
    name = data_file_name(rank, number)
    return FilePlan(name, header, range(first, len(entries)), len(header) + nbytes)


def file_rows(plan: RankPlan, header_sums: list[int]) -> tuple[FileRow, ...]:
    """The files of a plan as its manifest has them."""
    return tuple(
        FileRow(file.name, file.size, len(file.header), value)
        for file, value in zip(plan.files, header_sums, strict=True)
    )
