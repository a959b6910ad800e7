"""Manifests, group objects and indexes as data, and the tables in which they are written.

All three are a *document*: tables that its parts share, and one part for each rank. A manifest has
one part, a group object the parts of its group, an index all parts. ``docs/format.md`` defines the
written form of a document and explains every column; :mod:`ckpipe.format.codec` writes, reads and
validates it.

A table is a JSON object with one array for each column. A column in which every row has the
default is left out, so that rare features cost nothing. All checks of types happen here, over
whole columns, before a row is made.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain
from operator import attrgetter
from typing import Any, Generic, Literal, NamedTuple, Self, TypeVar, cast, overload

from ckpipe.errors import InvalidManifest
from ckpipe.format.boxes import Box
from ckpipe.format.checksum import chunk_count
from ckpipe.format.labels import Json
from ckpipe.format.names import launch_id, prefix
from ckpipe.format.tree import Node, decoded, tree_json
from ckpipe.types import CheckpointId, DifferingCopy

FORMAT_VERSION = 2
"""The newest version that is read. Each object has the least version that describes it."""

DocumentKind = Literal["manifest", "group", "index"]


@dataclass(slots=True, unsafe_hash=True)  # a frozen one takes ten times as long to make
class TensorRow:
    """One tensor of a structure, equal on all ranks that share the structure.

    Args:
        label: Its unique label.
        dtype: Its torch dtype's name, ``float32``.
        shape: Its global shape.
        device: The device it was on, without an index: ``cpu``, ``cuda``.
        kind: ``tensor``, ``parameter``, ``buffer``, ``subclass`` or ``numpy``.
        detail: Further data of the kind: class, numpy dtype, whether a buffer persists.
        requires_grad: Whether it collects gradients.
        lazy: Its lazy bits: any of ``c`` (conjugate) and ``n`` (negative).
        attributes: The node of the attributes set on it.
        cast: The dtype to which a load converts it; None for its own. It is never written.
        scale: The label of the scale of its values, if these are known to be codes. It is never
            written.
    """

    label: str
    dtype: str
    shape: tuple[int, ...]
    device: str = "cpu"
    kind: str = "tensor"
    detail: str | None = None
    requires_grad: bool = False
    lazy: str = ""
    attributes: Node | None = None
    cast: str | None = None
    scale: str | None = None


@dataclass(frozen=True, slots=True)
class OptimizerRow:
    """The facts of an optimizer that its ``state_dict`` lacks.

    Args:
        label: Its label in the state.
        kind: Its class; see :func:`ckpipe.state.values.optimizer_kind`.
        shapes: The shapes of its parameters, in the order of its groups; None for a parameter
            whose shape is unknown or changes.
    """

    label: str
    kind: str
    shapes: tuple[tuple[int, ...] | None, ...]


@dataclass(frozen=True)
class Structure:
    """The form of a state without its values.

    Args:
        tree: The root node; see :mod:`ckpipe.state.flatten`.
        tensors: The tensor table that the tree's numbers point into.
        values: The number of inline values that the tree points to.
        optimizers: The optimizers that are in the state as they are.
        version: The version of the format that it needs, or that its object had.
    """

    tree: Node
    tensors: tuple[TensorRow, ...]
    values: int
    optimizers: tuple[OptimizerRow, ...] = ()
    version: int = 1

    @cached_property
    def tree_text(self) -> str:
        """The JSON of the tree, kept for later saves of the structure."""
        return tree_json(self.tree)


def trees_of(tree: Node, tensors: Iterable[TensorRow]) -> list[Node]:
    """Return the root node of a state, and the nodes of the attributes of its tensors."""
    return [tree, *(row.attributes for row in tensors if row.attributes is not None)]


class Entry(NamedTuple):
    """One entry of a data file.

    Args:
        name: Its name in the safetensors header.
        dtype: Its safetensors dtype.
        shape: Its shape.
        file: The number of its file in the part.
        offset: Its start in the file's data, in bytes.
        nbytes: Its size in bytes, which follows from dtype and shape.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: int
    offset: int
    nbytes: int


class Chunk(NamedTuple):
    """The place of the bytes of one box of one tensor.

    Args:
        tensor: The number of the tensor.
        entry: The number of the entry, in the owner's entries. None if another rank wrote it and
            this one cannot know the number: the owner's own chunk with the same label and box has
            it, with offset and strides.
        offset: Its start in the entry, in bytes.
        stride: None if the entry holds the box row by row (``offset`` may then cut out a part);
            else strides in elements of a window of memory that several tensors share.
        original_stride: Strides in elements for a fresh tensor; None for contiguous.
        box: Lower and upper bounds in the global shape; None for all of it.
        owner: The rank whose data file holds it; None for the part's own rank.
        cut: Whether an edit has made the chunk: ``stride`` is then that of the box, whose memory no
            other tensor shares. It is never written.
    """

    tensor: int
    entry: int | None
    offset: int = 0
    stride: tuple[int, ...] | None = None
    original_stride: tuple[int, ...] | None = None
    box: Box | None = None
    owner: int | None = None
    cut: bool = False


Row = TypeVar("Row")


class Columns(Sequence[Row]):
    """Rows of one kind as columns, which are attributes; rows are made on access."""

    __slots__ = ()
    _names: tuple[str, ...]
    _row: Callable[[Iterable[Any]], Row]

    def __init__(self, *columns: Sequence[Any]) -> None:
        for name, column in zip(self._names, columns, strict=True):
            setattr(self, name, column)

    @classmethod
    def of(cls, rows: Iterable[Row]) -> Self:
        """Transpose rows, unless they are columns already."""
        if isinstance(rows, cls):
            return rows
        columns = tuple(zip(*cast(Iterable[tuple[Any, ...]], rows), strict=True))
        return cls(*(columns or ((),) * len(cls._names)))

    @property
    def columns(self) -> tuple[Sequence[Any], ...]:
        """All columns, in order."""
        return tuple(getattr(self, name) for name in self._names)

    def __len__(self) -> int:
        return len(getattr(self, self._names[0]))

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        if isinstance(index, slice):
            return type(self)(*(column[index] for column in self.columns))
        return self._row(column[index] for column in self.columns)

    def __iter__(self) -> Iterator[Row]:
        return map(self._row, zip(*self.columns, strict=True))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __repr__(self) -> str:
        return repr(tuple(self))


class Entries(Columns[Entry]):
    """Entries of data files; see :class:`Entry`."""

    __slots__ = _names = Entry._fields
    _row = Entry._make
    name: Sequence[str]
    dtype: Sequence[str]
    shape: Sequence[tuple[int, ...]]
    file: Sequence[int]
    offset: Sequence[int]
    nbytes: Sequence[int]


class Chunks(Columns[Chunk]):
    """The chunks that a rank holds; see :class:`Chunk`."""

    __slots__ = _names = Chunk._fields
    _row = Chunk._make
    tensor: Sequence[int]
    entry: Sequence[int | None]
    offset: Sequence[int]
    stride: Sequence[tuple[int, ...] | None]
    original_stride: Sequence[tuple[int, ...] | None]
    box: Sequence[Box | None]
    owner: Sequence[int | None]
    cut: Sequence[bool]

    def __init__(self, *columns: Sequence[Any]) -> None:
        unwritten = () if len(columns) == len(self._names) else ([False] * len(columns[0]),)
        super().__init__(*columns, *unwritten)


Place = tuple[tuple[Any, ...], slice]
"""The dtype and shape of a tensor's entry with the tensor's offset and strides in it, and the slice
of its part's checksums that are the entry's."""


class Layout:
    """The places of the bytes of a rank's tensors: the entries it wrote, the chunks it holds.

    Args:
        entries: The entries that the rank wrote, in the order of files and offsets.
        chunks: The chunks that the rank holds, whichever rank wrote them.

    Attributes:
        checked: The tensors of the layout's last check, and the result.
    """

    def __init__(self, entries: Iterable[Entry], chunks: Iterable[Chunk]) -> None:
        self._entries, self._chunks = Entries.of(entries), Chunks.of(chunks)
        self.checked: tuple[Sequence[TensorRow], LayoutFacts] | None = None

    @property
    def entries(self) -> Entries:
        """The entries that the rank wrote."""
        return self._entries

    @property
    def chunks(self) -> Chunks:
        """The chunks that the rank holds."""
        return self._chunks

    @cached_property
    def private(self) -> Mapping[int, Place]:
        """The tensors that the rank holds whole and wrote itself, by number."""
        chunks = self.chunks
        if None not in chunks.box:
            return {}
        entries = self.entries
        ends = [0, *accumulate(map(chunk_count, entries.nbytes))]
        return {
            tensor: (
                (entries.dtype[entry], entries.shape[entry], offset, stride),
                slice(ends[entry], ends[entry + 1]),
            )
            for tensor, entry, offset, stride, _, box, owner, _ in zip(*chunks.columns, strict=True)
            if box is None and owner is None and entry is not None
        }

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Layout):
            return NotImplemented
        return self.entries == other.entries and self.chunks == other.chunks

    def __repr__(self) -> str:
        return f"Layout({self.entries!r}, {self.chunks!r})"


class Borrowed(NamedTuple):
    """The chunks of a layout that other ranks wrote, column by column.

    Args:
        owner: The rank that wrote it.
        entry: The number of the owner's entry; -1 if this rank cannot know it.
        end: Its end in the entry, in bytes; exclusive.
        tensor: The number of the tensor.
        identity: A hash of label, dtype, shape and box, which identifies it.
    """

    owner: array[int]
    entry: array[int]
    end: array[int]
    tensor: array[int]
    identity: array[int]


@dataclass(frozen=True, slots=True)
class LayoutFacts:
    """The facts of a layout that the check of a document needs.

    Args:
        sizes: Bytes of each entry.
        data_bytes: Bytes of each data file behind its header.
        checksums: The number of checksums of the entries.
        borrowed: The chunks that other ranks wrote.
        own: The identities of the chunks that this rank wrote; None if it wrote all.
    """

    sizes: array[int]
    data_bytes: tuple[int, ...]
    checksums: int
    borrowed: Borrowed
    own: array[int] | None


@dataclass(frozen=True, slots=True)
class FileRow:
    """One data file.

    Args:
        name: Its name below the checkpoint's prefix, ``rank-00000.safetensors``.
        size: Its size in bytes.
        header_bytes: The size of its header: the offset of its data.
        header_crc32c: The CRC-32C of its first ``header_bytes`` bytes.
        block_bytes: The size of the blocks that were digested, in bytes; 0 if none was.
        digests: The XXH3 (128 bits, hexadecimal) of each block of the file; None for a block that
            was not digested.
        linked: Whether the save linked the file to that of an earlier checkpoint.
    """

    name: str
    size: int
    header_bytes: int
    header_crc32c: int
    block_bytes: int = 0
    digests: tuple[str | None, ...] = ()
    linked: bool = False

    def key(self, id: CheckpointId) -> str:
        """Return the key of the file in the store of its checkpoint."""
        return prefix(id) + self.name


@dataclass(frozen=True, slots=True)
class RankManifest:
    """The manifest of one rank.

    Args:
        rank: The rank.
        structure: The number of its structure in the document.
        layout: The number of its layout in the document.
        values: Its inline values, encoded.
        files: Its data files.
        checksums: CRC-32C of every mebibyte of every entry, counted from the entry's start.
        token: A random text by which the writer recognizes its own manifest.
        started: The start time of its save, ISO 8601 in UTC.
        writer: Versions of ckpipe, torch and Python, and the class of the planner.
        metadata: The metadata that the user passed to ``save``.
        metrics: The metrics that the user passed to ``save``; non-finite floats encoded.
        resumed_from: Id of the checkpoint that the run had loaded.
        final: Whether it was saved with ``final=True``.
        line: The line of launches that its writer belongs to; empty in checkpoints of writers that
            knew no lines, which are one line.
        nan: The entries that have NaN, ascending, each with their number.
        witnesses: Checksums of copies that other ranks write: the number of the chunk among those
            of the layout that have an owner, the number of a mebibyte in it, and the CRC-32C of
            that one and of those after it. An index has none.
    """

    rank: int
    structure: int
    layout: int
    values: tuple[Json, ...]
    files: tuple[FileRow, ...]
    checksums: tuple[int, ...]
    token: str
    started: str
    writer: Mapping[str, str]
    metadata: Mapping[str, Json] = field(default_factory=dict)
    metrics: Mapping[str, Json] = field(default_factory=dict)
    resumed_from: str | None = None
    final: bool = False
    line: str = ""
    nan: tuple[tuple[int, int], ...] = ()
    witnesses: tuple[tuple[int, ...], ...] = ()


MOST_DIFFERENCES = 100
"""Number of differences that an index names."""


@dataclass(frozen=True, slots=True)
class Differences:
    """The differences between copies of one checkpoint.

    Args:
        count: Number of chunks that differ.
        found: The first of them, by tensor, box and owner.
    """

    count: int
    found: tuple[DifferingCopy, ...]


@dataclass(frozen=True, slots=True)
class PerRank:
    """The differences between the ranks of one structure, in an index.

    Args:
        tensors: Numbers of whole tensors that the ranks hold privately and with other bytes.
        values: Numbers of inline values that differ.
    """

    tensors: tuple[int, ...] = ()
    values: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ManifestDocument:
    """A manifest, group object or index.

    Args:
        kind: Its kind.
        id: The checkpoint.
        world_size: The number of ranks of the checkpoint.
        structures: The distinct structures of its parts.
        layouts: The distinct layouts of its parts.
        parts: One for each rank, in the order of ranks.
        group: Level and number of a group object; None for others.
        per_rank: In an index, the differences between the ranks of each structure.
        differences: In an index, the copies that differ though they were declared equal; None if
            none was found.
        report: In the manifest or index of a single rank, the report of its save, if it is kept: as
            :meth:`ckpipe.types.SaveReport.to_data` makes it, and not validated.
        source: The place of a checkpoint that another program wrote: its files have no checksums,
            and ``id`` is no name of a checkpoint. None for all that ckpipe has written.
    """

    kind: DocumentKind
    id: CheckpointId
    world_size: int
    structures: tuple[Structure, ...]
    layouts: tuple[Layout, ...]
    parts: tuple[RankManifest, ...]
    group: tuple[int, int] | None = None
    per_rank: tuple[PerRank, ...] = ()
    report: Mapping[str, Any] | None = None
    source: str | None = None
    differences: Differences | None = None

    @property
    def name(self) -> str:
        """The name of the checkpoint, or the place of a foreign one."""
        return self.source or str(self.id)

    @property
    def step(self) -> int | None:
        """The step of the checkpoint; None for a foreign one."""
        return None if self.source else self.id.step

    @property
    def line(self) -> str:
        """The line of launches: that of the first rank that had loaded, else its own launch's."""
        own = launch_id(self.id.attempt)
        return next((part.line for part in self.parts if part.line != own), own)

    @property
    def nan(self) -> int:
        """The number of NaN that were counted in its parts."""
        return sum(count for part in self.parts for _, count in part.nan)

    @property
    def whole(self) -> bool:
        """Tell whether it has the parts of all ranks."""
        return len(self.parts) == self.world_size

    def number_of(self, rank: int) -> int | None:
        """Return the number of a rank's part; None if it is not here."""
        if self.whole:
            return rank if 0 <= rank < self.world_size else None
        number = bisect_left(self.parts, rank, key=lambda part: part.rank)
        return number if number < len(self.parts) and self.parts[number].rank == rank else None


MAX_NUMBER = 1 << 62
MAX_DIMENSIONS = 256

Reader = Callable[[list[Any]], list[Any]]
"""A function that checks a read column and converts its cells; ValueError if it is malformed."""

REQUIRED: Any = object()


@dataclass(frozen=True, slots=True)
class Column:
    """One column.

    Args:
        name: Its name, in JSON and as an attribute of a row.
        read: Checks and converts it.
        default: The value of its cells if it is left out; ``REQUIRED`` if it must be there.
    """

    name: str
    read: Reader
    default: Any = REQUIRED


@dataclass(frozen=True, slots=True)
class Table(Generic[Row]):
    """The columns in which rows of one kind are written.

    Args:
        name: The table's name in errors.
        columns: The columns, the first of them required.
        row: Makes a row of its cells, in the order of the columns.
    """

    name: str
    columns: tuple[Column, ...]
    row: Callable[..., Row]

    def encode(self, rows: Sequence[Any]) -> dict[str, Json]:
        """Return the JSON form of rows."""
        data = {}
        for column in self.columns:
            cells = _cells(rows, column.name)
            if column.default is REQUIRED or cells.count(column.default) < len(cells):
                data[column.name] = cells
        return data

    def columns_of(self, data: Json) -> list[list[Any]]:
        """Return the checked and converted columns of a read table, all of one length.

        Raises:
            InvalidManifest: If it is no such table.
        """
        first = data.get(self.columns[0].name) if isinstance(data, dict) else None
        if not isinstance(first, list):
            raise InvalidManifest(f"The table of {self.name} is missing or lacks a column")
        return [self._column(column, data, len(first)) for column in self.columns]

    def decode(self, data: Json) -> tuple[Row, ...]:
        """Return the rows of a read table.

        Raises:
            InvalidManifest: If it is no such table.
        """
        return tuple(map(self.row, *self.columns_of(data)))

    def _column(self, column: Column, data: dict[str, Json], rows: int) -> list[Any]:
        cells = data.get(column.name)
        if cells is None and column.default is not REQUIRED:
            return [column.default] * rows
        if not isinstance(cells, list) or len(cells) != rows:
            raise InvalidManifest(
                f"The column {column.name} of the {self.name} has not one cell for each of {rows}"
            )
        try:
            return column.read(cells)
        except ValueError as error:
            raise InvalidManifest(
                f"The column {column.name} of the {self.name} is malformed: {error}"
            ) from None


def _cells(rows: Sequence[Any], name: str) -> list[Any]:
    found = getattr(rows, name) if isinstance(rows, Columns) else map(attrgetter(name), rows)
    return list(found)


def texts(cells: list[Any]) -> list[Any]:
    """Read cells that are texts."""
    return _all(cells, str)


def flags(cells: list[Any]) -> list[Any]:
    """Read cells that are true or false."""
    return _all(cells, bool)


def nodes(cells: list[Any]) -> list[Any]:
    """Read cells that are arrays of any values."""
    return _all(cells, list)


def trees(cells: list[Any]) -> list[Any]:
    """Read cells that are trees."""
    return list(map(decoded, cells))


def numbers(cells: list[Any]) -> list[Any]:
    """Read cells that are integers from 0 to ``MAX_NUMBER``."""
    _all(cells, int)
    if cells and not (min(cells) >= 0 and max(cells) <= MAX_NUMBER):
        raise ValueError("a number is out of range")
    return cells


def number_lists(cells: list[Any]) -> list[Any]:
    """Read cells that are lists of integers from 0 to ``MAX_NUMBER`` as tuples."""
    numbers(list(chain.from_iterable(_all(cells, list))))
    tuples = list(map(tuple, cells))
    # Most shapes of a state are equal; keeping one tuple of each saves memory.
    one_of_each: dict[tuple[int, ...], tuple[int, ...]] = {}
    return list(map(one_of_each.setdefault, tuples, tuples))


def digest_lists(cells: list[Any]) -> list[Any]:
    """Read cells that are lists of texts and nulls as tuples."""
    optional(texts)(list(chain.from_iterable(_all(cells, list))))
    return list(map(tuple, cells))


def sizes(cells: list[Any]) -> list[Any]:
    """Read cells that are shapes or strides as tuples."""
    shapes = number_lists(cells)
    if max(map(len, shapes), default=0) > MAX_DIMENSIONS:
        raise ValueError(f"there are more than {MAX_DIMENSIONS} dimensions")
    return shapes


def boxes(cells: list[Any]) -> list[Any]:
    """Read cells that are pairs of a lower and an upper corner as tuples of tuples."""
    if not set(map(len, _all(cells, list))) <= {2}:
        raise ValueError("a box has not two corners")
    corners = iter(sizes(list(chain.from_iterable(cells))))
    return list(zip(corners, corners, strict=True))


def pairs(cells: list[Any]) -> list[Any]:
    """Read cells that are lists of pairs of numbers as tuples of tuples."""
    read = [tuple(number_lists(cell)) for cell in _all(cells, list)]
    if any(len(pair) != 2 for cell in read for pair in cell):
        raise ValueError("a pair has not two numbers")
    return read


def optional(read: Reader) -> Reader:
    """Return a reader of cells that are null or cells of another reader."""

    def read_optional(cells: list[Any]) -> list[Any]:
        present = [cell for cell in cells if cell is not None]
        if len(present) == len(cells):
            return read(cells)
        converted = iter(read(present))
        return [None if cell is None else next(converted) for cell in cells]

    return read_optional


def _all(cells: list[Any], kind: type) -> list[Any]:
    # Compared by exact type, since a bool is an int to isinstance.
    if not set(map(type, cells)) <= {kind}:
        raise ValueError(f"not every cell is of type {kind.__name__}")
    return cells


TENSORS = Table(
    "tensors",
    (
        Column("label", texts),
        Column("dtype", texts),
        Column("shape", sizes),
        Column("device", texts, "cpu"),
        Column("kind", texts, "tensor"),
        Column("detail", optional(texts), None),
        Column("requires_grad", flags, False),
        Column("lazy", texts, ""),
        Column("attributes", optional(trees), None),
    ),
    TensorRow,
)

OPTIMIZERS = Table(
    "optimizers",
    (
        Column("label", texts),
        Column("kind", texts),
        Column("shapes", lambda cells: [tuple(optional(sizes)(each)) for each in nodes(cells)]),
    ),
    OptimizerRow,
)

ENTRIES = Table(
    "entries",
    (
        Column("name", list),
        Column("dtype", texts),
        Column("shape", sizes),
        Column("file", numbers, 0),
        Column("offset", numbers),
    ),
    Entry,
)

CHUNKS = Table(
    "chunks",
    (
        Column("tensor", numbers),
        Column("entry", optional(numbers)),
        Column("offset", numbers, 0),
        Column("stride", optional(sizes), None),
        Column("original_stride", optional(sizes), None),
        Column("box", optional(boxes), None),
        Column("owner", optional(numbers), None),
    ),
    Chunk,
)

FILES = Table(
    "files",
    (
        Column("name", texts),
        Column("size", numbers),
        Column("header_bytes", numbers),
        Column("header_crc32c", numbers),
        Column("block_bytes", numbers, 0),
        Column("digests", digest_lists, ()),
        Column("linked", flags, False),
    ),
    FileRow,
)

PARTS = Table(
    "parts",
    (
        Column("rank", numbers),
        Column("structure", numbers, 0),
        Column("layout", numbers, 0),
        Column("values", numbers, 0),
        Column("files", lambda cells: [FILES.decode(cell) for cell in cells]),
        Column("checksums", number_lists),
        Column("token", texts),
        Column("started", texts),
        Column("writer", numbers, 0),
        Column("metadata", numbers, 0),
        Column("metrics", numbers, 0),
        Column("resumed_from", optional(texts), None),
        Column("final", flags, False),
        Column("line", texts, ""),
        Column("nan", pairs, ()),
        Column("witnesses", lambda cells: [tuple(number_lists(cell)) for cell in nodes(cells)], ()),
    ),
    RankManifest,
)

DIFFERENCES = Table(
    "differences",
    (
        Column("tensor", texts),
        Column("box", optional(boxes), None),
        Column("owner", numbers),
        Column("witnesses", number_lists),
        Column("mebibytes", number_lists),
    ),
    DifferingCopy,
)

SHARED = ("values", "writer", "metadata", "metrics")
"""The members of a part that are written once for all parts with equal values."""


def structure_text(structure: Structure) -> str:
    """Return the JSON of a structure."""
    form = {"values": structure.values, "tensors": TENSORS.encode(structure.tensors)}
    if structure.optimizers:
        form["optimizers"] = OPTIMIZERS.encode(structure.optimizers)
    return f'{{"tree":{structure.tree_text},{tree_json(form)[1:]}'
