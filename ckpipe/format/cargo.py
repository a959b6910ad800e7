"""What one rank brings to the store: its files, and the blocks that they are cut into.

The last stages of a save know of the state what is written here and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ckpipe.format.checksum import BlockCuts, SumTable, crc32c
from ckpipe.format.manifest import FileRow, Layout


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
class Span:
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
class BlockPlace:
    """Where one block belongs.

    Args:
        file: The number of the file.
        offset: Where the block begins in the file, in bytes.
        nbytes: Its size; the last of a file may be smaller than the others.
        spans: The parts of entries in it, to be checksummed.
    """

    file: int
    offset: int
    nbytes: int
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Cargo:
    """All that one rank stores in a save; the same for every save of one structure.

    What follows from it alone is worked out once, and kept for as long as the cargo is.

    Args:
        files: The data files.
        layout: Where tensors lie in them.
        blocks: What they are cut into.
    """

    files: tuple[FilePlan, ...]
    layout: Layout
    blocks: Sequence[BlockPlace]

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
        """Where the checksums of its entries stand."""
        return SumTable([entry.nbytes for entry in self.layout.entries])

    @cached_property
    def _cuts(self) -> dict[tuple[int, int], BlockCuts]:
        return {}

    def cuts(self, block: BlockPlace) -> BlockCuts:
        """How one of its blocks is checksummed; for any thread."""
        known = self._cuts.get((block.file, block.offset))
        if known is None:
            spans = ((span.entry, span.lo, span.hi, span.at) for span in block.spans)
            known = self._cuts[block.file, block.offset] = self.sum_table.cuts(spans)
        return known


def file_rows(files: Sequence[FilePlan], header_sums: list[int]) -> tuple[FileRow, ...]:
    """Data files as their manifest has them."""
    return tuple(
        FileRow(file.name, file.size, len(file.header), value)
        for file, value in zip(files, header_sums, strict=True)
    )
