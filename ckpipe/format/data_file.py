"""Data files: the header, the blocks into which a file is cut, and the size of elements.

A data file is 8 bytes with the length of the header (little-endian), the header (JSON, padded with
spaces so that the data begins on a page) and the data. It follows the README of the safetensors
repository (revision 0.5), which also demands that entries leave no holes and that nothing follows
the last one.

This module does not import torch: the worker process handles files and blocks, never a tensor. The
import would cost it more memory than all the rest, only for the sizes of dtypes.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from json.encoder import encode_basestring_ascii
from typing import NamedTuple

from ckpipe.errors import OversizedMetadata
from ckpipe.format.checksum import BlockCuts, SumTable, chunk_count
from ckpipe.format.labels import globs_filter
from ckpipe.format.manifest import FileRow, Layout
from ckpipe.memory.native import NAN_BITS

_DTYPES: dict[str, tuple[str | None, int]] = {
    "float64": ("F64", 8), "int64": ("I64", 8), "uint64": ("U64", 8),
    "float32": ("F32", 4), "int32": ("I32", 4), "uint32": ("U32", 4),
    "float16": ("F16", 2), "int16": ("I16", 2), "uint16": ("U16", 2), "bfloat16": ("BF16", 2),
    "int8": ("I8", 1), "uint8": ("U8", 1), "bool": ("BOOL", 1),
    "float8_e4m3fn": ("F8_E4M3", 1), "float8_e5m2": ("F8_E5M2", 1),
    "complex128": (None, 16), "complex64": (None, 8), "complex32": (None, 4),
}  # fmt: skip
"""By torch name: the safetensors name, if the format has one, and the bytes of one element.

The names are those of the README above, which the oldest readers in use understand.
"""

STORED_ITEM_BYTES = {stored: nbytes for stored, nbytes in _DTYPES.values() if stored}
"""Bytes of one element, by safetensors name."""


FOREIGN_DTYPES = {
    "complex64": "C64", "float8_e8m0fnu": "F8_E8M0", "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ", "float4_e2m1fn_x2": "F4",
}  # fmt: skip
"""Names of newer versions of safetensors, by torch name: only files of other programs have them.
An element of ``float4_e2m1fn_x2`` is two of theirs, in the last dimension."""

SCALARS = "~scalars"
"""The end of the name of an entry that gathers tensors of one element, which share no memory."""


def stored_dtype(dtype: str) -> str | None:
    """Return the safetensors name of a torch dtype, by its name without ``torch.``; None if none.

    Elements of a dtype without such a name are stored as bytes (``U8``).
    """
    return _DTYPES.get(dtype, (None, 0))[0]


def item_bytes(dtype: str) -> int | None:
    """Return the bytes of one element of a torch dtype, by its name without ``torch.``.

    None if there is no such dtype. Names outside the table are looked up in torch, since each of
    its versions has more.
    """
    if dtype in _DTYPES:
        return _DTYPES[dtype][1]
    from ckpipe.format.dtypes import DTYPES

    found = DTYPES.get(dtype)
    return None if found is None else found.itemsize


ALIGNMENT = 4096
"""Alignment of the start of a file's data, in bytes."""

MAX_HEADER_BYTES = 64 << 20
"""Bytes of the longest header that is written or read, with its length field and padding."""

LENGTH_BYTES = 8
_METADATA = '{"__metadata__":{"format":"pt","ckpipe":"1"}'
_FIXED_BYTES = LENGTH_BYTES + len(_METADATA) + len("}") + ALIGNMENT
_MAX_BYTES = 1 << 62

_quoted: Callable[[str], str] = encode_basestring_ascii


def encode_header(
    entries: Sequence[tuple[str, str, tuple[int, ...], int, int]],
) -> bytes:
    """Encode the header of a data file: all bytes before its data.

    Args:
        entries: Name, dtype, shape, offset and size of each entry, in bytes, without holes.

    Returns:
        A multiple of ``ALIGNMENT`` bytes that depends only on the entries.

    Raises:
        OversizedMetadata: If it would be longer than ``MAX_HEADER_BYTES``.
    """
    rows = [_METADATA]
    rows += [
        f'{_quoted(name)}:{{"dtype":"{dtype}","shape":[{",".join(map(str, shape))}],'
        f'"data_offsets":[{offset},{offset + nbytes}]}}'
        for name, dtype, shape, offset, nbytes in entries
    ]
    text = ",".join(rows) + "}"
    total = -(-(LENGTH_BYTES + len(text)) // ALIGNMENT) * ALIGNMENT
    if total > MAX_HEADER_BYTES:
        raise OversizedMetadata(
            f"The header of a data file would have {total} bytes",
            hint=f"A header holds at most {MAX_HEADER_BYTES} bytes; open another data file",
        )
    length = total - LENGTH_BYTES
    return length.to_bytes(LENGTH_BYTES, "little") + text.ljust(length).encode("ascii")


def entry_size_bound(name: str, shape: Sequence[int]) -> int:
    """Return the most bytes that one entry adds to a header, whatever its dtype and offset."""
    dims = sum(len(str(n)) + 1 for n in shape)
    return len(_quoted(name)) + dims + len(str(_MAX_BYTES)) * 2 + 60


def header_size_bound(entries: Iterable[tuple[str, Sequence[int]]]) -> int:
    """Return the most bytes of a header of entries with these names and shapes, with padding.

    A planner opens another data file before this would exceed ``MAX_HEADER_BYTES``.
    """
    return _FIXED_BYTES + sum(entry_size_bound(name, shape) for name, shape in entries)


@dataclass(frozen=True, slots=True)
class DataFile:
    """One data file.

    Args:
        row: Its row in the manifest.
        header: The bytes before its data.
        entries: The numbers of its entries.
    """

    row: FileRow
    header: bytes
    entries: range


class EntryRange(NamedTuple):
    """A range of an entry's bytes in a block.

    Args:
        entry: The number of the entry.
        lo: Its start in the entry, in bytes.
        hi: Its end in the entry, in bytes; exclusive.
        at: Its start in the block, in bytes.
    """

    entry: int
    lo: int
    hi: int
    at: int


@dataclass(frozen=True, slots=True)
class BlockRange:
    """The place of one block in its file.

    Args:
        file: The number of the file.
        offset: The start of the block in the file, in bytes.
        nbytes: Its size; the last block of a file may be smaller than the others.
        spans: The ranges of entries in it, to be checksummed.
    """

    file: int
    offset: int
    nbytes: int
    spans: tuple[EntryRange, ...]


class FloatRanges(NamedTuple):
    """The ranges of a block in which NaN are counted, column by column.

    Args:
        entries: The numbers of the entries.
        begins: The start of each range in the block, in bytes.
        sizes: Bytes of each range: whole elements.
        dtypes: The dtype of each, by its place in ``NAN_BITS``.
    """

    entries: array[int]
    begins: array[int]
    sizes: array[int]
    dtypes: array[int]


def sum_slices(layout: Layout, files: int) -> list[slice]:
    """Return for each of a part's files the slice of the part's checksums that is its own."""
    counts = [0] * files
    for file, nbytes in zip(layout.entries.file, layout.entries.nbytes, strict=True):
        counts[file] += chunk_count(nbytes)
    return [slice(end - count, end) for count, end in zip(counts, accumulate(counts), strict=True)]


@dataclass(frozen=True)
class DataFiles:
    """All data files that one rank stores in a save; the same for every save of one structure.

    Derived values are computed once, and kept for as long as this object lives.

    Args:
        files: The data files.
        layout: The places of tensors in them.
        blocks: Their blocks.
    """

    files: tuple[DataFile, ...]
    layout: Layout
    blocks: Sequence[BlockRange]

    @cached_property
    def size(self) -> int:
        """Bytes of all data files."""
        return sum(file.row.size for file in self.files)

    @cached_property
    def rows(self) -> tuple[FileRow, ...]:
        """The rows of its files in the manifest."""
        return tuple(file.row for file in self.files)

    @cached_property
    def sum_table(self) -> SumTable:
        """The places of the checksums of its entries."""
        return SumTable(self.layout.entries.nbytes)

    @cached_property
    def sum_slices(self) -> list[slice]:
        """For each file, the slice of all checksums that is its own."""
        return sum_slices(self.layout, len(self.files))

    @cached_property
    def _cuts(self) -> dict[tuple[int, int], BlockCuts]:
        return {}

    def cuts(self, block: BlockRange) -> BlockCuts:
        """Return the ranges of one block to checksum; may be called from any thread."""
        known = self._cuts.get((block.file, block.offset))
        if known is None:
            known = self._cuts[block.file, block.offset] = self.sum_table.cuts(block.spans)
        return known

    @cached_property
    def _floats(self) -> dict[tuple[int, int, tuple[str, ...]], FloatRanges]:
        return {}

    @cached_property
    def _nan_dtypes(self) -> dict[tuple[str, ...], list[int]]:
        return {}

    def floats(self, block: BlockRange, ignore: tuple[str, ...] = ()) -> FloatRanges:
        """Return the ranges of one block in which NaN are counted; may be called from any thread.

        Blocks and data begin at multiples of 4096 bytes, and ckpipe lays entries out with the
        widest elements first, so no element straddles two blocks. In files that another planner
        lays out otherwise, those that do are not counted.

        Args:
            block: The block.
            ignore: Globs of the labels of entries to leave out.
        """
        key = block.file, block.offset, ignore
        known = self._floats.get(key)
        if known is None:
            rows, dtypes = [], self._dtypes_with_nan(ignore)
            for entry, lo, hi, at in block.spans:
                if (dtype := dtypes[entry]) >= 0:
                    width = _NAN_WIDTHS[dtype]
                    skip = -lo % width
                    rows.append((entry, at + skip, max(0, hi - lo - skip) // width * width, dtype))
            columns = zip(*rows, strict=True) if rows else ((),) * 4
            known = self._floats[key] = FloatRanges(*(array("q", each) for each in columns))
        return known

    def _dtypes_with_nan(self, ignore: tuple[str, ...]) -> list[int]:
        """Return each entry's dtype by its place in ``NAN_BITS``; -1 for others and ignored."""
        if ignore not in self._nan_dtypes:
            entries, ignored = self.layout.entries, globs_filter("nan.ignore", ignore)
            places = {dtype: place for place, dtype in enumerate(NAN_BITS)}
            self._nan_dtypes[ignore] = [
                -1 if ignore and ignored(label_of(name)) else places.get(dtype, -1)
                for name, dtype in zip(entries.name, entries.dtype, strict=True)
            ]
        return self._nan_dtypes[ignore]


def label_of(name: str) -> str:
    """Return the label of the tensor of an entry; the first label of gathered scalars."""
    return name.partition("@")[0].removesuffix(SCALARS)


_NAN_WIDTHS = [width for width, _ in NAN_BITS.values()]
