"""Layouts as columns and as text, and the checks of one layout.

An index of many ranks has a million chunks. They are checked as columns, without a row being made
of them, and what merging and checking the whole bundle need is noted on the way: the *facts* of a
layout. Then rows are made of it, or, where there are very many, its text is kept, which is a tenth
of the size: merging needs no more, and a load looks at the rows of few ranks.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import accumulate
from operator import le
from typing import Any, Generic, NamedTuple, TypeVar, overload

from ckpipe.errors import DuplicateName, InvalidExtent, InvalidManifest
from ckpipe.format.boxes import Box
from ckpipe.format.checksum import chunk_count
from ckpipe.format.data_file import STORED_ITEM_BYTES, item_bytes
from ckpipe.format.keys import Json
from ckpipe.format.manifest import (
    CHUNKS,
    ENTRIES,
    MAX_NUMBER,
    Chunk,
    Entry,
    Layout,
    TensorRow,
    make_rows,
)

Place = tuple[tuple[Any, ...], slice]
"""How a tensor lies in its entry, and which of its part's checksums are those of the entry."""


class EntryColumns(NamedTuple):
    """The entries of a layout, column by column; see :class:`ckpipe.format.manifest.Entry`."""

    name: Sequence[str]
    dtype: Sequence[str]
    shape: Sequence[tuple[int, ...]]
    file: Sequence[int]
    offset: Sequence[int]
    nbytes: Sequence[int]


class ChunkColumns(NamedTuple):
    """The chunks of a layout, column by column; see :class:`ckpipe.format.manifest.Chunk`."""

    tensor: Sequence[int]
    entry: Sequence[int | None]
    offset: Sequence[int]
    stride: Sequence[tuple[int, ...] | None]
    original_stride: Sequence[tuple[int, ...] | None]
    box: Sequence[Box | None]
    owner: Sequence[int | None]


class Foreign(NamedTuple):
    """The chunks that other ranks wrote, column by column.

    Args:
        owner: Who wrote it.
        entry: The entry there; -1 if this rank cannot know it.
        end: Behind the last byte of the entry that it touches.
        number: The number of the chunk.
        identity: What tells it from other chunks; see :func:`identity_of`.
    """

    owner: array[int]
    entry: array[int]
    end: array[int]
    number: array[int]
    identity: array[int]


@dataclass(slots=True)
class LayoutFacts:
    """The facts of a layout that checking and merging a bundle need.

    Args:
        sizes: Bytes of each entry.
        data_bytes: Bytes of each data file behind its header.
        checksums: How many checksums the entries have.
        foreign: The chunks that other ranks wrote.
        own: The identities of those that this one wrote; None if it wrote all.
    """

    sizes: array[int]
    data_bytes: tuple[int, ...]
    checksums: int
    foreign: Foreign
    own: array[int] | None
    _columns: tuple[EntryColumns, ChunkColumns, Sequence[int]] | None
    _private: dict[int, Place] = field(default_factory=dict)

    @property
    def private(self) -> dict[int, Place]:
        """The tensors that the rank holds whole and wrote itself; a load has no use for them."""
        columns = self._columns
        if columns is not None:
            self._private = private_tensors(*columns)
            self._columns = None  # last, as other threads may ask
        return self._private

    def forget_columns(self) -> None:
        """Finds out now what would be found out later, of columns that are kept until then."""
        self._private = self.private


def check_layout(
    entries: EntryColumns, chunks: ChunkColumns, tensors: Sequence[TensorRow]
) -> LayoutFacts:
    """Checks that a layout agrees with itself and with a structure.

    What lies in the entries of another rank is not looked for there.

    Raises:
        InvalidExtent: If extents overlap, leave holes or lie outside of what holds them.
        DuplicateName: If a name stands twice in a data file.
        InvalidManifest: If anything else contradicts itself.
    """
    data_bytes = _check_entries(entries)
    counts = [chunk_count(nbytes) for nbytes in entries.nbytes]
    foreign = _check_chunks(chunks, entries.nbytes, tensors)
    own = array("q", own_identities(chunks, tensors)) if foreign.owner else None
    sizes = array("q", entries.nbytes)
    return LayoutFacts(sizes, data_bytes, sum(counts), foreign, own, (entries, chunks, counts))


def identity_of(tensor: TensorRow, box: Box | None) -> int:
    """By this a rank finds among another's chunks what it holds too: label, dtype, shape and box.

    It is a hash, valid in this process. Two things may have the same, which lets a contradiction
    pass that a load then refuses.
    """
    return hash((tensor.label, tensor.dtype, tensor.shape, box))


def own_identities(chunks: ChunkColumns, tensors: Sequence[TensorRow]) -> Iterable[int]:
    """The identities of the chunks that the rank wrote itself."""
    return [
        identity_of(tensors[tensor], box)
        for tensor, box, owner in zip(chunks.tensor, chunks.box, chunks.owner, strict=True)
        if owner is None
    ]


def _check_entries(entries: EntryColumns) -> tuple[int, ...]:
    """Checks that the entries fill their files one after another; returns the files' data bytes."""
    if entries.file and not any(entries.file):
        *begins, end = accumulate(entries.nbytes, initial=0)
        distinct = {"__metadata__", *entries.name}
        if list(entries.offset) == begins and len(distinct) > len(begins):
            return (end,)  # All in one file, as nearly always. What is wrong is told below.
    ends: list[int] = []
    names: set[str] = set()
    last, end = -1, 0
    for name, file, offset, nbytes in zip(
        entries.name, entries.file, entries.offset, entries.nbytes, strict=True
    ):
        if file != last:
            if file != last + 1:
                raise InvalidManifest(f"The entry {name!r:.200} is not in the order of files")
            if last >= 0:
                ends.append(end)
            last, end, names = file, 0, set()
        if offset != end:
            what = "overlaps" if offset < end else "leaves a hole behind"
            raise InvalidExtent(f"The entry {name!r:.200} {what} the one before it")
        if name in names or name == "__metadata__":
            raise DuplicateName(f"The name {name!r:.200} stands twice in a data file")
        names.add(name)
        end += nbytes
    return (*ends, end) if last >= 0 else ()


def _check_chunks(
    chunks: ChunkColumns, sizes: Sequence[int], tensors: Sequence[TensorRow]
) -> Foreign:
    """Checks all chunks; returns those that other ranks wrote."""
    if chunks.tensor and max(chunks.tensor) >= len(tensors):
        raise InvalidManifest("A chunk is of a tensor that is not there")
    shapes = [row.shape for row in tensors]
    items = {dtype: item_bytes(dtype) or 1 for dtype in {row.dtype for row in tensors}}
    wholes = [math.prod(row.shape) * items[row.dtype] for row in tensors]
    entries = len(sizes)
    if _are_plain(chunks, wholes, sizes):
        return Foreign(*(array("q") for _ in Foreign._fields))
    foreign = Foreign(*(array("q") for _ in Foreign._fields))
    for number, (tensor, entry, offset, stride, original, box, owner) in enumerate(
        zip(*chunks, strict=True)
    ):
        if box is None and original is None and stride is None and not offset:
            end = wholes[tensor]
            if owner is None and entry is not None and entry < entries and end <= sizes[entry]:
                continue  # All of a tensor in an entry of its own, as nearly all are.
        else:
            shape = (
                shapes[tensor] if box is None else _box_shape(box, shapes[tensor], tensors[tensor])
            )
            end = _end(offset, stride, original, shape, tensors[tensor])
        if owner is not None:
            known = -1 if entry is None else entry
            identity = identity_of(tensors[tensor], box)
            for column, cell in zip(foreign, (owner, known, end, number, identity), strict=True):
                column.append(cell)
        elif entry is None:
            raise InvalidManifest(
                f"A chunk of {tensors[tensor].label!r:.200} does not tell which entry it is in"
            )
        else:
            check_in_entry(entry, end, sizes, tensors[tensor].label)
        if entry is None and (offset or stride is not None):
            label = tensors[tensor].label
            raise InvalidManifest(f"A chunk of {label!r:.200} lies in an unknown entry")
    return foreign


def _are_plain(chunks: ChunkColumns, wholes: Sequence[int], sizes: Sequence[int]) -> bool:
    """Tell of each whether it is all of a tensor, from the start of an entry of this rank that it
    fits.

    Nearly always so. What other chunks there are, and what is wrong with them, is found out one
    by one.
    """
    tensor, entry, offset, *others = chunks
    if any(offset) or any(each.count(None) < len(each) for each in others):
        return False
    places = [place for place in entry if place is not None]
    if len(places) < len(entry) or max(places, default=-1) >= len(sizes):
        return False
    return all(map(le, map(wholes.__getitem__, tensor), map(sizes.__getitem__, places)))


def check_in_entry(entry: int, end: int, sizes: Sequence[int], label: str) -> None:
    """Checks that a chunk which ends at a byte of an entry lies in it.

    Raises:
        InvalidManifest: If there is no such entry.
        InvalidExtent: If it ends before.
    """
    if entry >= len(sizes):
        raise InvalidManifest(f"A chunk of {label!r:.200} is in an entry that is not there")
    if end > sizes[entry]:
        raise InvalidExtent(f"A chunk of {label!r:.200} ends behind its entry")


def _end(
    offset: int,
    stride: tuple[int, ...] | None,
    original: tuple[int, ...] | None,
    shape: tuple[int, ...],
    tensor: TensorRow,
) -> int:
    """Behind the last byte of its entry that a chunk touches."""
    item = item_bytes(tensor.dtype) or 1
    if offset % item or (original is not None and len(original) != len(shape)):
        raise InvalidExtent(f"The offset or strides of a chunk of {tensor.label!r:.200} do not fit")
    if stride is None:
        return offset + math.prod(shape) * item
    if len(stride) != len(shape):
        raise InvalidExtent(f"A chunk of {tensor.label!r:.200} has a wrong number of strides")
    if 0 in shape:
        return offset
    last = sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    return offset + (last + 1) * item


def _box_shape(box: Box, shape: tuple[int, ...], tensor: TensorRow) -> tuple[int, ...]:
    lower, upper = box
    if len(lower) != len(shape) or len(upper) != len(shape):
        raise InvalidExtent(f"A box of {tensor.label!r:.200} has a wrong number of dimensions")
    sizes = []
    for lo, hi, n in zip(lower, upper, shape, strict=True):
        # No bound is below zero; that was checked when the column was read.
        if not lo <= hi <= n:
            raise InvalidExtent(f"A box of {tensor.label!r:.200} leaves its shape")
        sizes.append(hi - lo)
    return tuple(sizes)


def private_tensors(
    entries: EntryColumns, chunks: ChunkColumns, counts: Sequence[int]
) -> dict[int, Place]:
    """Find the tensors that the rank of a layout holds whole and wrote itself.

    Args:
        entries: The layout's entries.
        chunks: Its chunks.
        counts: How many checksums each entry has.
    """
    if None not in chunks.box:
        return {}
    ends: list[int] = []
    end = 0
    for count in counts:
        end += count
        ends.append(end)
    found: dict[int, Place] = {}
    for tensor, entry, offset, stride, box, owner in zip(
        chunks.tensor, chunks.entry, chunks.offset, chunks.stride, chunks.box, chunks.owner,
        strict=True,
    ):  # fmt: skip
        if box is None and owner is None and entry is not None:
            place = (entries.dtype[entry], entries.shape[entry], offset, stride)
            found[tensor] = (place, slice(ends[entry] - counts[entry], ends[entry]))
    return found


_WINDOW = "~window"
_STRUCTURE = '{"structure":'
_ENTRY_ATTRIBUTES = EntryColumns._fields
_CHUNK_ATTRIBUTES = ChunkColumns._fields

Row = TypeVar("Row")
Columns = TypeVar("Columns")


@dataclass(frozen=True, slots=True, eq=False)
class LayoutText:
    """A checked layout as it stood in a bundle.

    Args:
        text: Its JSON from behind the number of its structure on, which other bundles count
            otherwise.
        tensors: The tensors of the structure that it was checked with.
        labels: Their labels, which the names of its entries stand for.
        facts: What is known of it.
    """

    text: str
    tensors: Sequence[TensorRow]
    labels: tuple[str, ...]
    facts: LayoutFacts

    def parsed(self) -> dict[str, Json]:
        """The JSON object, without its structure."""
        found: dict[str, Json] = json.loads("{" + self.text[1:])
        return found

    def entries(self) -> tuple[Entry, ...]:
        """Its entries."""
        columns = read_entries(self.parsed()["entries"])
        return entry_rows(with_names(columns, self.labels))

    def chunks(self) -> tuple[Chunk, ...]:
        """Its chunks."""
        return chunk_rows(ChunkColumns(*CHUNKS.columns_of(self.parsed()["chunks"])))


class MadeRows(Sequence[Row], Generic[Row]):
    """Rows that are made when they are asked for."""

    __slots__ = ("_count", "_made")

    def __init__(self, count: int) -> None:
        self._count = count
        self._made: tuple[Row, ...] | None = None

    def rows(self) -> tuple[Row, ...]:
        """All of them, which are kept from now on."""
        made = self._made
        if made is None:
            made = self._made = self._make()
        return made

    def _make(self) -> tuple[Row, ...]:
        raise NotImplementedError

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        return self.rows()[index]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, tuple | MadeRows) and self.rows() == tuple(other)

    def __hash__(self) -> int:
        return hash(self.rows())

    def __repr__(self) -> str:
        return repr(self.rows())


class LazyRows(MadeRows[Row]):
    """Rows that are made of a text.

    Args:
        source: The text.
        read: Makes the rows.
        count: How many there are.
    """

    __slots__ = ("_read", "source")

    def __init__(self, source: LayoutText, read: Callable[[], tuple[Row, ...]], count: int) -> None:
        super().__init__(count)
        self.source, self._read = source, read

    def _make(self) -> tuple[Row, ...]:
        return self._read()


class ColumnRows(MadeRows[Row], Generic[Columns, Row]):
    """Rows that are made of columns, which are all that a load looks at.

    Args:
        columns: The columns; None once there are rows, so that memory has one of the two.
        make: Makes the rows.
        count: How many there are.
    """

    __slots__ = ("_rows_of", "columns")

    def __init__(
        self, columns: Columns, make: Callable[[Columns], tuple[Row, ...]], count: int
    ) -> None:
        super().__init__(count)
        self.columns: Columns | None = columns
        self._rows_of = make

    def _make(self) -> tuple[Row, ...]:
        columns = self.columns
        if columns is None:  # another thread has just made them
            return self.rows()
        rows = self._made = self._rows_of(columns)
        self.columns = None
        return rows


def layout_of_columns(entries: EntryColumns, chunks: ChunkColumns) -> Layout:
    """A layout whose rows are made when they are asked for."""
    return Layout(
        ColumnRows(entries, entry_rows, len(entries.name)),
        ColumnRows(chunks, chunk_rows, len(chunks.tensor)),
    )


def lazy_layout(source: LayoutText, chunks: int) -> Layout:
    """A layout whose rows are made when they are asked for."""
    return Layout(
        LazyRows(source, source.entries, len(source.facts.sizes)),
        LazyRows(source, source.chunks, chunks),
    )


def text_of(layout: Layout) -> LayoutText | None:
    """The text that a layout is kept as; None if it has rows only."""
    if isinstance(layout.entries, LazyRows) and isinstance(layout.chunks, LazyRows):
        source = layout.entries.source
        return source if layout.chunks.source is source else None
    return None


def facts_of(layout: Layout, tensors: Sequence[TensorRow]) -> LayoutFacts:
    """The facts of a layout whose structure has some tensors.

    Raises:
        As :func:`ckpipe.format.layouts.check_layout` does.
    """
    source = text_of(layout)
    if source is not None and (source.tensors is tensors or source.tensors == tensors):
        return source.facts
    return check_layout(entry_columns(layout), chunk_columns(layout), tensors)


def private_of(layout: Layout) -> Mapping[int, Place]:
    """The tensors of a layout that was checked which its rank holds whole and wrote itself."""
    source = text_of(layout)
    if source is not None:
        return source.facts.private
    entries = entry_columns(layout)
    counts = [chunk_count(nbytes) for nbytes in entries.nbytes]
    return private_tensors(entries, chunk_columns(layout), counts)


def entry_columns(layout: Layout) -> EntryColumns:
    """The entries of a layout, column by column."""
    known: EntryColumns | None = _columns_at_hand(layout.entries)
    if known is not None:
        return known
    return EntryColumns(
        *([getattr(row, each) for row in layout.entries] for each in _ENTRY_ATTRIBUTES)
    )


def chunk_columns(layout: Layout) -> ChunkColumns:
    """The chunks of a layout, column by column."""
    known: ChunkColumns | None = _columns_at_hand(layout.chunks)
    if known is not None:
        return known
    return ChunkColumns(
        *([getattr(row, each) for row in layout.chunks] for each in _CHUNK_ATTRIBUTES)
    )


def _columns_at_hand(rows: Sequence[Any]) -> Any:
    return rows.columns if isinstance(rows, ColumnRows) else None


def entry_rows(columns: EntryColumns) -> tuple[Entry, ...]:
    """The entries that columns are of."""
    return make_rows(Entry, _ENTRY_ATTRIBUTES, [list(each) for each in columns])


def chunk_rows(columns: ChunkColumns) -> tuple[Chunk, ...]:
    """The chunks that columns are of."""
    return make_rows(Chunk, _CHUNK_ATTRIBUTES, [list(each) for each in columns])


def read_entries(data: Json) -> list[list[Any]]:
    """The columns of a table of entries, with their sizes; names are still as they were written.

    Raises:
        InvalidManifest: If it is no such table.
    """
    names, dtypes, shapes, files, offsets = ENTRIES.columns_of(data)
    if not set(dtypes) <= STORED_ITEM_BYTES.keys():
        unknown = next(dtype for dtype in dtypes if dtype not in STORED_ITEM_BYTES)
        raise InvalidManifest(f"An entry has the unknown dtype {unknown!r:.100}")
    nbytes = [
        math.prod(shape) * STORED_ITEM_BYTES[dtype]
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    if nbytes and max(nbytes) > MAX_NUMBER:
        raise InvalidManifest("The shape of an entry has more elements than any store can hold")
    return [names, dtypes, shapes, files, offsets, nbytes]


def with_names(columns: list[list[Any]], labels: Sequence[str]) -> EntryColumns:
    """The columns with their names in full.

    Raises:
        InvalidManifest: If a name is of a tensor that is not there.
    """
    names, *others = columns
    if set(map(type, names)) == {int} and min(names) >= 0 and max(names) < len(labels):
        return EntryColumns([labels[number] for number in names], *others)
    return EntryColumns(list(_decode_names(names, labels)), *others)


def _decode_names(names: Sequence[Json], labels: Sequence[str]) -> Iterator[str]:
    for name in names:
        if type(name) is str:
            yield name
            continue
        number, suffix = (
            name if type(name) is list and list(map(type, name)) == [int, str] else (name, "")
        )
        if type(number) is not int or not 0 <= number < len(labels):
            raise InvalidManifest(f"An entry has the name {name!r:.100}, which names no tensor")
        yield labels[number] + suffix if suffix else labels[number]


def layout_text(layout: Layout, numbers: Mapping[str, int], labels: tuple[str, ...]) -> str:
    """The JSON of a layout from behind the number of its structure on.

    Args:
        layout: The layout.
        numbers: The number of each label of the structure.
        labels: The labels of the structure, in order.
    """
    source = text_of(layout)
    if source is not None and source.labels == labels:
        return source.text
    entries = ENTRIES.encode(layout.entries)
    entries["name"] = [_encode_name(name, numbers) for name in entries["name"]]
    form = {"entries": entries, "chunks": CHUNKS.encode(layout.chunks)}
    text = json.dumps(form, separators=(",", ":"), allow_nan=False, check_circular=False)
    return "," + text[1:]


def with_structure(text: str, structure: int) -> str:
    """The JSON of a layout, of what :func:`layout_text` made and the number of its structure."""
    return f"{_STRUCTURE}{structure}{text}"


def without_structure(text: str, structure: int) -> str | None:
    """The same back; None if the text is not as ckpipe writes it."""
    head = f"{_STRUCTURE}{structure},"
    return text[len(head) - 1 :] if text.startswith(head) else None


def digest(*texts: str) -> bytes:
    """Hash texts to tell them apart safely in few bytes."""
    state = blake2b(digest_size=16)
    for text in texts:
        state.update(len(text).to_bytes(8, "big"))
        state.update(text.encode())
    return state.digest()


def _encode_name(name: str, labels: Mapping[str, int]) -> Json:
    number = labels.get(name)
    if number is not None:
        return number
    head, at, tail = name.partition("@")
    if not at and name.endswith(_WINDOW):
        head, tail = name.removesuffix(_WINDOW), _WINDOW
    number = labels.get(head)
    return name if number is None else [number, at + tail]
