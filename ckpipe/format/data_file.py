"""Data files: the header, the blocks that a file is cut into, and the size of elements.

A data file is 8 bytes with the length of the header (little-endian), the header (JSON, padded with
spaces so that the data begins on a page) and the data. It follows the README of the safetensors
repository (revision 0.5), which also demands that entries leave no holes and that nothing follows
the last one.

A process that brings checkpoints to a store sees files and blocks, and never a tensor; importing
torch for the sizes of its dtypes would cost more memory than all the rest of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from json.encoder import encode_basestring_ascii

from ckpipe.errors import OversizedMetadata
from ckpipe.format.checksum import BlockCuts, SumTable, crc32c
from ckpipe.format.manifest import FileRow, Layout

_DTYPES: dict[str, tuple[str | None, int]] = {
    "float64": ("F64", 8), "int64": ("I64", 8), "uint64": ("U64", 8),
    "float32": ("F32", 4), "int32": ("I32", 4), "uint32": ("U32", 4),
    "float16": ("F16", 2), "int16": ("I16", 2), "uint16": ("U16", 2), "bfloat16": ("BF16", 2),
    "int8": ("I8", 1), "uint8": ("U8", 1), "bool": ("BOOL", 1),
    "float8_e4m3fn": ("F8_E4M3", 1), "float8_e5m2": ("F8_E5M2", 1),
    "complex128": (None, 16), "complex64": (None, 8), "complex32": (None, 4),
}  # fmt: skip
"""By torch name: the safetensors name, if the format has one, and the bytes of one element.

The names are those of the README above, which is what the oldest readers in use understand.
"""

STORED_ITEM_BYTES = {stored: nbytes for stored, nbytes in _DTYPES.values() if stored}
"""Bytes of one element, by safetensors name."""


def stored_dtype(dtype: str) -> str | None:
    """The safetensors name of a torch dtype, by its name without ``torch.``; None without one.

    The elements of a dtype that has none are stored as bytes (``U8``).
    """
    return _DTYPES.get(dtype, (None, 0))[0]


def item_bytes(dtype: str) -> int | None:
    """Bytes of one element of a torch dtype, by its name without ``torch.``; None if there is none.

    Asks torch about a name that is in no table here: each of its versions has more.
    """
    if dtype in _DTYPES:
        return _DTYPES[dtype][1]
    from ckpipe.format.dtypes import DTYPES

    found = DTYPES.get(dtype)
    return None if found is None else found.itemsize


ALIGNMENT = 4096
"""The data of a file begins at a multiple of this many bytes."""

MAX_HEADER_BYTES = 64 << 20
"""The longest header that is written or read, with its length and padding."""

LENGTH_BYTES = 8
_METADATA = '{"__metadata__":{"format":"pt","ckpipe":"1"}'
_FIXED_BYTES = LENGTH_BYTES + len(_METADATA) + len("}") + ALIGNMENT
_MAX_BYTES = 1 << 62

_quoted: Callable[[str], str] = encode_basestring_ascii


def encode_header(
    entries: Sequence[tuple[str, str, tuple[int, ...], int, int]],
) -> bytes:
    """The first bytes of a data file, up to where its data begins.

    Args:
        entries: Name, dtype, shape, offset and size of each entry, in bytes, without holes.

    Returns:
        A multiple of ``ALIGNMENT`` bytes that depends on nothing but the entries.

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
    """The most bytes that one entry adds to a header, whatever its dtype and offset."""
    dims = sum(len(str(n)) + 1 for n in shape)
    return len(_quoted(name)) + dims + len(str(_MAX_BYTES)) * 2 + 60


def header_size_bound(entries: Iterable[tuple[str, Sequence[int]]]) -> int:
    """The most bytes that a header of entries with these names and shapes has, padding included.

    A planner opens another data file before this would pass ``MAX_HEADER_BYTES``.
    """
    return _FIXED_BYTES + sum(entry_size_bound(name, shape) for name, shape in entries)


@dataclass(frozen=True, slots=True)
class DataFile:
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
class EntryRange:
    """A part of an entry that lies in a block.

    Args:
        entry: The number of the entry.
        lo: Its first byte, from the entry's start.
        hi: Behind its last byte.
        at: Where it is in the block, in bytes.
    """

    entry: int
    lo: int
    hi: int
    at: int


@dataclass(frozen=True, slots=True)
class BlockRange:
    """The place of one block.

    Args:
        file: The number of the file.
        offset: Where the block begins in the file, in bytes.
        nbytes: Its size; the last of a file may be smaller than the others.
        spans: The parts of entries in it, to be checksummed.
    """

    file: int
    offset: int
    nbytes: int
    spans: tuple[EntryRange, ...]


@dataclass(frozen=True)
class DataFiles:
    """All that one rank stores in a save; the same for every save of one structure.

    What follows from it alone is worked out once, and kept for as long as this object lives.

    Args:
        files: The data files.
        layout: Where tensors lie in them.
        blocks: What they are cut into.
    """

    files: tuple[DataFile, ...]
    layout: Layout
    blocks: Sequence[BlockRange]

    @cached_property
    def size(self) -> int:
        """Bytes of all data files."""
        return sum(file.size for file in self.files)

    @cached_property
    def header_sums(self) -> list[int]:
        """CRC-32C of each file's header."""
        return [crc32c(file.header) for file in self.files]

    @cached_property
    def sum_table(self) -> SumTable:
        """The places of the checksums of its entries."""
        return SumTable(self.layout.entries.nbytes)

    @cached_property
    def _cuts(self) -> dict[tuple[int, int], BlockCuts]:
        return {}

    def cuts(self, block: BlockRange) -> BlockCuts:
        """Describe how one of its blocks is checksummed; for any thread."""
        known = self._cuts.get((block.file, block.offset))
        if known is None:
            spans = ((span.entry, span.lo, span.hi, span.at) for span in block.spans)
            known = self._cuts[block.file, block.offset] = self.sum_table.cuts(spans)
        return known


def file_rows(files: Sequence[DataFile], header_sums: list[int]) -> tuple[FileRow, ...]:
    """Data files as their manifest has them."""
    return tuple(
        FileRow(file.name, file.size, len(file.header), value)
        for file, value in zip(files, header_sums, strict=True)
    )
