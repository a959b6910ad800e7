"""The plan of a save: it maps bytes of tensors to offsets in data files.

Pure: a plan depends only on the structure of the state, the rank and the world size. So it serves
every later save of the same fingerprint. A plan names tensors by their number in the walk and
references none of them.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

from ckpipe.errors import UnsupportedState
from ckpipe.format import data_file
from ckpipe.format.boxes import Box, box_shape
from ckpipe.format.checksum import chunk_count, crc32c
from ckpipe.format.data_file import SCALARS, DataFile, stored_dtype
from ckpipe.format.labels import LabelFilter
from ckpipe.format.manifest import Chunk, Entry, FileRow, Layout
from ckpipe.format.names import data_file_name
from ckpipe.plan.division import Piece, Unit, units
from ckpipe.state.flatten import Captured
from ckpipe.state.kinds import ReplicaGroup
from ckpipe.state.tensors import MAX_ITEM, TensorLeaf, alias_groups
from ckpipe.types import JointPlanner as JointPlanner
from ckpipe.types import Planner as Planner


@dataclass(frozen=True, slots=True)
class RankPlan:
    """The files that one rank writes.

    Args:
        rank: The rank.
        world_size: Number of ranks.
        fingerprint: The fingerprint of the structures that the plan fits.
        layout: The entries and chunks, as the manifest has them.
        sources: For each entry the sources that fill it, in the order of their offsets.
        files: The data files; none if the rank writes no bytes.
    """

    rank: int
    world_size: int
    fingerprint: Hashable
    layout: Layout
    sources: tuple[tuple[SourceRange, ...], ...]
    files: tuple[DataFile, ...]

    @property
    def size(self) -> int:
        """Bytes of all data files."""
        return sum(file.row.size for file in self.files)

    @property
    def checksums(self) -> int:
        """The number of checksums in its manifest."""
        return sum(map(chunk_count, self.layout.entries.nbytes))


def fingerprint(captured: Captured) -> Hashable:
    """Return all facts of a structure that a plan depends on.

    These are the layouts of tensors, with mesh and placements; the shared bytes; and the tensors
    that are marked as replicated.
    """
    return captured.derived(_fingerprint)


def _fingerprint(captured: Captured) -> Hashable:
    leaves = captured.tensors
    groups = []
    for group in alias_groups(leaves):
        low = min(leaves[number].address for number in group)
        # Alignment within a window depends on its address modulo the largest item.
        groups.append(
            (low % MAX_ITEM, tuple((number, leaves[number].address - low) for number in group))
        )
    marks = frozenset(captured.replicated.items())
    return (captured.described(_layouts), tuple(groups), marks)


def _layouts(captured: Captured) -> tuple[Hashable, ...]:
    return tuple(leaf.layout() for leaf in captured.tensors)


class LocalPlanner:
    """Plans without communication between ranks; replicas are written once.

    Each rank writes its shards of DTensors. Of tensors that several ranks hold alike, it writes the
    pieces that all of them derive by the same rule; see :mod:`ckpipe.plan.division`. Plain tensors
    are the rank's own unless they are replicated. The plan names the writer of every shard, also on
    other ranks. Its cost grows with the number of tensors and pieces, not with the world size.

    Args:
        replicated: Plain tensors that several ranks hold alike: with ``"auto"`` those that an
            object in the state declares (see :mod:`ckpipe.state.kinds`), with ``"none"`` none, with
            a list of globs also the tensors whose labels match one, on all ranks. It must be the
            same on all ranks.
        max_file_bytes: The largest data file that the store takes, in bytes; the rest goes to
            further files. None for no limit.
    """

    def __init__(
        self, replicated: Replicated = "auto", *, max_file_bytes: int | None = None
    ) -> None:
        self._marked = ReplicatedMarks(replicated)
        self._max_file_bytes = max_file_bytes

    def plan(self, captured: Captured, *, rank: int, world_size: int) -> RankPlan:
        """See :class:`Planner`.

        Raises:
            UnsupportedState: If tensors overlap in a way that cannot be saved, or the shape of a
                DTensor's local tensor contradicts its placements, or a tensor fits no file.
            UnsupportedTopology: If a DTensor lies on ranks outside of this world.
        """
        marked = self._marked(captured) if world_size > 1 else {}
        divided = units(captured.tensors, marked, rank=rank, world_size=world_size)
        most = self._max_file_bytes
        return assemble(captured, divided, rank=rank, world_size=world_size, max_file_bytes=most)


class ReplicatedMarks:
    """Finds the tensors that are marked as the same on all their holders.

    Args:
        replicated: As for :class:`LocalPlanner`.
    """

    def __init__(self, replicated: Replicated) -> None:
        self._auto = replicated != "none"
        self._globs = None if isinstance(replicated, str) else LabelFilter(list(replicated))

    def __call__(self, captured: Captured) -> Mapping[int, ReplicaGroup]:
        """Return the numbers of those tensors, each with its ranks; DTensors are among them."""
        marked = captured.replicated if self._auto else {}
        if self._globs is None:
            return marked
        matches = self._globs
        named = [n for n, leaf in enumerate(captured.tensors) if matches(leaf.label)]
        return {**marked, **dict.fromkeys(named)}


def assemble(
    captured: Captured,
    divided: Iterable[Unit],
    *,
    rank: int,
    world_size: int,
    max_file_bytes: int | None = None,
) -> RankPlan:
    """Make the plan in which a rank writes those pieces of its divided state that it owns.

    Entries get their offsets in data files, and chunks name the writer of every piece. All planners
    share this function; they differ in the division.

    Args:
        captured: The state.
        divided: Its units, each tensor in one of them. The pieces of a unit together are all that
            the rank holds of it. Ranks that hold a piece must agree on its writer.
        rank: The rank.
        world_size: Number of ranks that save together.
        max_file_bytes: As for :class:`LocalPlanner`.

    Raises:
        UnsupportedState: If tensors overlap in a way that cannot be saved, or one fits no file.
    """
    leaves = captured.tensors
    drafts: list[_Draft] = []
    chunks: list[list[Chunk]] = [[] for _ in leaves]
    every = list(divided)
    gathered = _gathered(leaves, every) if world_size > 1 else []
    drafts += [_gather(leaves, numbers) for numbers in gathered]
    taken = set(chain.from_iterable(gathered))
    for unit in every:
        if not taken.isdisjoint(unit.members):
            continue
        for piece in unit.pieces:
            if piece.owner == rank:
                drafts.append(_draft_entry(leaves, unit, piece))
                continue
            # Another rank writes this piece, and its own chunks have the entry.
            box = None if piece.held is None else piece.held.box
            for number in unit.members:
                whole = box is None and not unit.overlapping
                stride = _fresh_stride(leaves[number]) if whole else None
                chunks[number].append(Chunk(number, None, 0, None, stride, box, piece.owner))
    drafts.sort(key=lambda draft: -draft[1])  # the widest items first, so that all are aligned
    files, entries = lay_out([entry for entry, *_ in drafts], rank, max_file_bytes)
    for number, (_, _, members, _) in enumerate(drafts):
        for member in members:
            chunks[member.tensor].append(member._replace(entry=number))
    for rows in chunks:
        rows.sort(key=lambda row: row.box or ())
    return RankPlan(
        rank,
        world_size,
        fingerprint(captured),
        Layout(entries, chain.from_iterable(chunks)),
        tuple(sources for *_, sources in drafts),
        tuple(files),
    )


Replicated = Literal["auto", "none"] | Sequence[str]
"""The replicated tensors: see :class:`LocalPlanner`."""


def lay_out(
    drafts: Iterable[Entry],
    rank: int,
    max_file_bytes: int | None,
    before: tuple[list[DataFile], list[Entry]] | None = None,
    most: int | None = None,
) -> tuple[list[DataFile], list[Entry]]:
    """Fill data files up to the limits of header and store, one after the other.

    Args:
        drafts: The entries, without places.
        rank: The rank.
        max_file_bytes: The largest file that the store takes, in bytes; None for no limit.
        before: Files and entries that come before these, and are extended.
        most: The size up to which a file gets a further entry, in bytes; None for no limit.

    Raises:
        UnsupportedState: If an entry fits no file.
    """
    files, entries = ([], []) if before is None else before
    limits = [each for each in (max_file_bytes, most) if each is not None]
    limit = min(limits, default=math.inf)
    empty = data_file.header_size_bound(())
    first, offset, header = len(entries), 0, empty
    for number, draft in enumerate(drafts, first):
        bound = data_file.entry_size_bound(draft.name, draft.shape)
        total = header + bound + offset + draft.nbytes
        if number > first and (total > limit or header + bound > data_file.MAX_HEADER_BYTES):
            files.append(_file(entries, first, offset, rank, len(files)))
            first, offset, header = number, 0, empty
        size = empty + bound + draft.nbytes  # of a file with only this entry
        if max_file_bytes is not None and size > max_file_bytes:
            raise UnsupportedState(
                f"The tensor has {draft.nbytes} bytes, and a file on this store at most "
                f"{max_file_bytes} with blocks of the present size",
                key=draft.name,
                hint=f"Raise staging.block_bytes at least {-(-size // max_file_bytes)}-fold",
            )
        header += bound
        entries.append(draft._replace(file=len(files), offset=offset))
        offset += draft.nbytes
    if len(entries) > first:
        files.append(_file(entries, first, offset, rank, len(files)))
    return files, entries


_LARGE_BYTES = 1 << 20
"""Size from which an entry shares files only with entries of the same size, in bytes."""

_LARGEST_SHARE, _WASTE, _HEADER_ROOM = 256, 6, 64 << 10
"""A file has at most one block, or this share of the rank's bytes; more only if else more than the
second share of its blocks' memory would stay empty. The third is room for a header, in bytes."""

_MOST_RARE = 16
"""Most sizes that may have a file each although they fill less than half a block."""


def files_by_size(plan: RankPlan, block_bytes: int, max_file_bytes: int | None) -> RankPlan:
    """Lay a plan's entries out anew, so that data files rest whole if some tensors do not change.

    Tensors of one role have one size. So an entry of a mebibyte or more shares a file only with
    entries of the same size, in the order of the plan. Smaller ones share files with each other,
    and so do sizes that fill less than half a block, if there are many. A pure function of the
    plan: ranks need not know of each other's.

    Args:
        plan: The plan.
        block_bytes: The size of a block, in bytes.
        max_file_bytes: The largest file that the store takes, in bytes; None for no limit.
    """
    entries = plan.layout.entries
    by_size: defaultdict[int, list[int]] = defaultdict(list)
    counts = Counter(nbytes for nbytes in entries.nbytes if nbytes >= _LARGE_BYTES)
    rare = {size for size, count in counts.items() if 2 * size * count < block_bytes}
    alone = counts.keys() - (rare if len(rare) > _MOST_RARE else ())
    for number, nbytes in enumerate(entries.nbytes):
        by_size[nbytes if nbytes in alone else 0].append(number)
    share = max(block_bytes, sum(entries.nbytes) // _LARGEST_SHARE)
    files: list[DataFile] = []
    laid: list[Entry] = []
    for size, numbers in by_size.items():
        most = _most_bytes(size, share, block_bytes)
        lay_out((entries[n] for n in numbers), plan.rank, max_file_bytes, (files, laid), most)
    order = list(chain.from_iterable(by_size.values()))
    places = {old: new for new, old in enumerate(order)}
    chunks = [
        each if each.entry is None else each._replace(entry=places[each.entry])
        for each in plan.layout.chunks
    ]
    return replace(
        plan,
        layout=Layout(laid, chunks),
        sources=tuple(plan.sources[number] for number in order),
        files=tuple(files),
    )


def _most_bytes(size: int, share: int, block_bytes: int) -> int:
    """Return the largest file of entries of one size; small entries have size 0."""
    if not size:
        return share
    most = size * max(1, (share - _HEADER_ROOM) // size) + _HEADER_ROOM
    while -most % block_bytes * _WASTE > most:
        most += size
    return most


def _file(entries: list[Entry], first: int, nbytes: int, rank: int, number: int) -> DataFile:
    header = header_of(entries[first:])
    size = len(header) + nbytes
    row = FileRow(data_file_name(rank, number), size, len(header), crc32c(header))
    return DataFile(row, header, range(first, len(entries)))


def header_of(entries: Iterable[Entry]) -> bytes:
    """Return the header of a data file with some entries."""
    return data_file.encode_header(
        [(row.name, row.dtype, row.shape, row.offset, row.nbytes) for row in entries]
    )


@dataclass(frozen=True, slots=True)
class SourceRange:
    """Bytes of a tensor that fill a range of an entry.

    Args:
        tensor: The number of the tensor.
        offset: Offset of the range in the entry, in bytes.
        skip: For a window, the number of bytes to skip at the start of the tensor's window; None if
            the tensor's elements are copied row by row, with its lazy bits resolved.
        nbytes: Size of the range, in bytes.
        part: The elements to copy, as a box of the tensor; None for all.
    """

    tensor: int
    offset: int
    skip: int | None
    nbytes: int
    part: Box | None = None


_Draft = tuple[Entry, int, tuple[Chunk, ...], tuple[SourceRange, ...]]
"""An entry without its offset, its alignment in bytes, its chunks, and its sources."""

_FEWEST_SCALARS = 8
"""Least number of tensors of one element that are gathered in one entry."""


_NUMBER = re.compile(r"\d+")


def _gathered(leaves: list[TensorLeaf], units: Iterable[Unit]) -> list[list[int]]:
    """Return the private tensors of one element that share an entry.

    An optimizer keeps a ``step`` for each parameter. An entry for each of them, on each rank, would
    be a third more entries. Ranks' copies are compared by entries, so those of other parameters,
    such as experts that only one rank has, are kept apart: labels may differ in numbers only.
    """
    kinds: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for unit in units:
        if unit.private and len(unit.members) == len(unit.pieces) == 1 and not unit.overlapping:
            leaf = leaves[unit.members[0]]
            if (
                leaf.sharding is None
                and leaf.nbytes == leaf.itemsize
                and not leaf.lazy
                and stored_dtype(leaf.dtype)
            ):
                kinds[_NUMBER.sub("0", leaf.label), leaf.dtype].append(unit.members[0])
    return [numbers for numbers in kinds.values() if len(numbers) >= _FEWEST_SCALARS]


def _gather(leaves: list[TensorLeaf], numbers: Sequence[int]) -> _Draft:
    first = leaves[numbers[0]]
    size, offsets = first.itemsize, [first.itemsize * n for n in range(len(numbers))]
    entry = Entry(
        f"{first.label}{SCALARS}", stored_dtype(first.dtype) or "U8", (len(numbers),), 0, 0,
        size * len(numbers),
    )  # fmt: skip
    places = list(zip(numbers, offsets, strict=True))
    members = tuple(Chunk(n, None, at, None, _fresh_stride(leaves[n])) for n, at in places)
    return entry, size, members, tuple(SourceRange(n, at, None, size) for n, at in places)


def _draft_entry(leaves: list[TensorLeaf], unit: Unit, piece: Piece) -> _Draft:
    """Return the entry of a piece that this rank writes.

    Raises:
        UnsupportedState: If tensors overlap in a way that no entry can hold.
    """
    if unit.overlapping:
        return _shared(leaves, list(unit.members))
    number, held = unit.members[0], piece.held
    leaf = leaves[number]
    if held is None:
        stride = _fresh_stride(leaf)
        whole = tuple(Chunk(each, None, original_stride=stride) for each in unit.members)
        source = SourceRange(number, 0, None, leaf.nbytes)
        return _logical(leaf.label, leaf, leaf.shape, whole, source)
    shape = box_shape(held.box)
    lower, upper = (",".join(map(str, corner)) for corner in held.box)
    part = None if shape == leaf.shape else held.local
    source = SourceRange(number, 0, None, math.prod(shape) * leaf.itemsize, part)
    members = tuple(Chunk(each, None, box=held.box) for each in unit.members)
    return _logical(f"{leaf.label}@{lower}:{upper}", leaf, shape, members, source)


def _fresh_stride(leaf: TensorLeaf) -> tuple[int, ...] | None:
    return None if leaf.contiguous else leaf.stride


def _logical(
    name: str,
    leaf: TensorLeaf,
    shape: tuple[int, ...],
    members: tuple[Chunk, ...],
    source: SourceRange,
) -> _Draft:
    stored = stored_dtype(leaf.dtype)
    stored_shape = shape if stored else (source.nbytes,)
    entry = Entry(name, stored or "U8", stored_shape, 0, 0, source.nbytes)
    return entry, leaf.itemsize, members, (source,)


def _shared(leaves: list[TensorLeaf], group: list[int]) -> _Draft:
    """Return the entry of overlapping tensors: the tensor that covers all, or a window of bytes."""
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
    start = low if covered else low - low % max(leaves[number].itemsize for number in group)
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
        members.append(Chunk(number, None, offset, _fresh_stride(leaf)))
    if covered:
        source = SourceRange(cover, 0, None, view.window)
        return _logical(view.label, view, view.shape, tuple(members), source)
    name, size = f"{leaves[group[0]].label}~window", high - start
    sources = _windows(leaves, group, start)
    return Entry(name, "U8", (size,), 0, 0, size), 1, tuple(members), sources


def _windows(leaves: list[TensorLeaf], group: list[int], start: int) -> tuple[SourceRange, ...]:
    """Return the fewest windows that together cover the group's bytes, each byte once."""
    sources, end = [], start
    for number in sorted(group, key=lambda each: (leaves[each].address, -leaves[each].window)):
        leaf = leaves[number]
        top = leaf.address + leaf.window
        if top > end:
            skip = max(0, end - leaf.address)
            begin = leaf.address + skip
            sources.append(SourceRange(number, begin - start, skip, top - begin))
            end = top
    return tuple(sources)
