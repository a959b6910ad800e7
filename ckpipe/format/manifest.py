"""What a manifest, group object or index says, as data.

All three are a *bundle*: tables that its parts share, and one part for each rank. A manifest has
one part, a group object those of its group, an index all. ``docs/format.md`` is the authority on
how a bundle is written; :mod:`ckpipe.format.manifest_codec` writes, reads and validates it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ckpipe.format.keys import Json
from ckpipe.types import CheckpointId

FORMAT_VERSION = 1

BundleKind = Literal["manifest", "group", "index"]


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One tensor of a structure, equal on all ranks that share the structure.

    Args:
        label: Its unique label.
        dtype: Its torch dtype's name, ``float32``.
        shape: Its global shape.
        device: The device it was on, without an index: ``cpu``, ``cuda``.
        kind: ``tensor``, ``parameter``, ``buffer``, ``subclass`` or ``numpy``.
        detail: What the kind needs besides: class, numpy dtype, whether a buffer persists.
        requires_grad: Whether it collects gradients.
        lazy: Its lazy bits: any of ``c`` (conjugate) and ``n`` (negative).
        attributes: The node of the attributes set on it.
    """

    label: str
    dtype: str
    shape: tuple[int, ...]
    device: str = "cpu"
    kind: str = "tensor"
    detail: str | None = None
    requires_grad: bool = False
    lazy: str = ""
    attributes: list[Any] | None = None


@dataclass(frozen=True, slots=True)
class Structure:
    """What a state looks like without its values.

    Args:
        tree: The root node; see :mod:`ckpipe.state.flatten`.
        tensors: The tensor table that the tree's numbers point into.
        values: How many inline values the tree points to.
    """

    tree: list[Any]
    tensors: tuple[TensorRow, ...]
    values: int


@dataclass(frozen=True, slots=True)
class EntryRow:
    """One entry of a data file.

    Args:
        name: Its name in the safetensors header.
        dtype: Its safetensors dtype.
        shape: Its shape.
        file: Which of the part's files it is in.
        offset: Where it begins, in bytes from the start of the file's data.
        nbytes: Its size, which dtype and shape give.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ChunkRow:
    """Where the bytes of one box of one tensor are.

    Args:
        tensor: The number of the tensor.
        entry: The number of the entry, in the owner's entries. None where another rank wrote it
            and this one cannot know the number: the owner's own chunk of the same label and the
            same box tells it, with offset and strides.
        offset: Where it begins in the entry, in bytes.
        stride: None if the entry holds the box row by row (``offset`` may then cut out a part);
            else strides in elements of a window of memory that several tensors share.
        original_stride: Strides in elements that a fresh tensor gets; None for contiguous.
        box: Lower and upper bounds in the global shape; None for all of it.
        owner: The rank whose data file holds it; None for the part's own rank.
    """

    tensor: int
    entry: int | None
    offset: int = 0
    stride: tuple[int, ...] | None = None
    original_stride: tuple[int, ...] | None = None
    box: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    owner: int | None = None


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the bytes of a rank's tensors are: what it wrote, and what it holds.

    Args:
        entries: What the rank wrote, in the order of files and offsets.
        chunks: What the rank holds, whoever wrote it.
    """

    entries: Sequence[EntryRow]
    chunks: Sequence[ChunkRow]


@dataclass(frozen=True, slots=True)
class FileRow:
    """One data file.

    Args:
        name: Its name below the checkpoint's prefix, ``rank-00000.safetensors``.
        size: Its size in bytes.
        header_bytes: Where its data begins.
        header_crc32c: The CRC-32C of its first ``header_bytes`` bytes.
    """

    name: str
    size: int
    header_bytes: int
    header_crc32c: int


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank committed.

    Args:
        rank: The rank.
        structure: The number of its structure in the bundle.
        layout: The number of its layout in the bundle.
        values: Its inline values, encoded.
        files: Its data files.
        checksums: CRC-32C of every mebibyte of every entry, counted from the entry's start.
        token: A random text by which the writer knows its own manifest again.
        started: When its save began, ISO 8601 in UTC.
        writer: Versions of ckpipe, torch and Python, and the class of the planner.
        metadata: What the user gave to ``save``.
        metrics: What the user gave to ``save``; non-finite floats encoded.
        resumed_from: Id of the checkpoint that the run had loaded.
        final: Whether it was saved with ``final=True``.
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


@dataclass(frozen=True, slots=True)
class PerRank:
    """What differs between the ranks of one structure, in an index.

    Args:
        tensors: Numbers of whole tensors that the ranks hold privately and with other bytes.
        values: Numbers of inline values that differ.
    """

    tensors: tuple[int, ...] = ()
    values: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Bundle:
    """A manifest, group object or index.

    Args:
        kind: Which of them.
        id: The checkpoint.
        world_size: How many ranks the checkpoint has.
        structures: The distinct structures of its parts.
        layouts: The distinct layouts of its parts.
        parts: One for each rank, in the order of ranks.
        group: Level and number of a group object; None for others.
        per_rank: In an index, for each structure what is not common to its ranks.
        report: In what a single rank wrote, how its save spent its time, if that is kept: as
            :meth:`ckpipe.reports.SaveReport.to_data` makes it, and not validated.
    """

    kind: BundleKind
    id: CheckpointId
    world_size: int
    structures: tuple[Structure, ...]
    layouts: tuple[Layout, ...]
    parts: tuple[Part, ...]
    group: tuple[int, int] | None = None
    per_rank: tuple[PerRank, ...] = ()
    report: Mapping[str, Any] | None = None

    @property
    def whole(self) -> bool:
        """Whether it has the parts of all ranks."""
        return len(self.parts) == self.world_size

    def number_of(self, rank: int) -> int | None:
        """The number of a rank's part; None if it is not here."""
        if self.whole:
            return rank if 0 <= rank < self.world_size else None
        number = bisect_left(self.parts, rank, key=lambda part: part.rank)
        return number if number < len(self.parts) and self.parts[number].rank == rank else None
