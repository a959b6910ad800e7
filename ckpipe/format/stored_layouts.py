"""Layouts as text: what many ranks hold, in as little memory as on the store.

A layout that was read is checked once, as columns. Then rows are made of it, or, where there are
very many, its text is kept, which is a tenth of the size: merging needs no more, and a load looks
at the rows of few ranks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Generic, TypeVar, overload

from ckpipe.errors import InvalidManifest
from ckpipe.format.checksum import chunk_count
from ckpipe.format.columns import MAX_NUMBER, make_rows
from ckpipe.format.item_sizes import STORED_ITEM_BYTES
from ckpipe.format.keys import Json
from ckpipe.format.layout_checks import (
    ChunkColumns,
    EntryColumns,
    LayoutFacts,
    Place,
    check_layout,
    private_tensors,
)
from ckpipe.format.manifest import ChunkRow, EntryRow, Layout, TensorRow
from ckpipe.format.manifest_tables import CHUNKS, ENTRIES

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

    def entries(self) -> tuple[EntryRow, ...]:
        """Its entries."""
        columns = read_entries(self.parsed()["entries"])
        return entry_rows(with_names(columns, self.labels))

    def chunks(self) -> tuple[ChunkRow, ...]:
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
    """What is known of a layout whose structure has some tensors.

    Raises:
        As :func:`ckpipe.format.layout_checks.check_layout` does.
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
    known = chunk_columns_at_hand(layout)
    if known is not None:
        return known
    return ChunkColumns(
        *([getattr(row, each) for row in layout.chunks] for each in _CHUNK_ATTRIBUTES)
    )


def chunk_columns_at_hand(layout: Layout) -> ChunkColumns | None:
    """The same if they need not be made; None if they must."""
    found: ChunkColumns | None = _columns_at_hand(layout.chunks)
    return found


def _columns_at_hand(rows: Sequence[Any]) -> Any:
    return rows.columns if isinstance(rows, ColumnRows) else None


def entry_rows(columns: EntryColumns) -> tuple[EntryRow, ...]:
    """The entries that columns are of."""
    return make_rows(EntryRow, _ENTRY_ATTRIBUTES, [list(each) for each in columns])


def chunk_rows(columns: ChunkColumns) -> tuple[ChunkRow, ...]:
    """The chunks that columns are of."""
    return make_rows(ChunkRow, _CHUNK_ATTRIBUTES, [list(each) for each in columns])


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
    """What tells texts apart, in as few bytes as do that safely."""
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
