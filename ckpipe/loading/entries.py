"""The entries of data files, as a load looks at them: columns, by numbers of one table's own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

from ckpipe.format.checksum import chunk_count
from ckpipe.format.layouts import entry_columns
from ckpipe.format.manifest import Entry, FileRow, Layout, ManifestDocument, RankManifest


class Need(NamedTuple):
    """Bytes that a load wants.

    Args:
        entry: The number of the entry.
        lo: The first byte, from the entry's start.
        hi: Behind the last byte.
    """

    entry: int
    lo: int
    hi: int


# Tens of thousands are made for a load, for which the class's own constructor is slow.
new_need = partial(tuple.__new__, Need)


class EntryTable:
    """Entries of data files and their checksums, by numbers of the table's own.

    Attributes:
        files: The data files.
        ranks: For each file, the rank that wrote it.
        entries: The entries.
        sizes: For each entry, how many bytes it has.
        entry_files: For each entry, the number of its file.
        begins: For each entry, where it begins in its file, in bytes.
        checksums: CRC-32C of every mebibyte of every entry.
        first_sums: For each entry, the number of its first checksum.
    """

    files: Sequence[FileRow]
    ranks: Sequence[int]
    entries: Sequence[Entry]
    sizes: Sequence[int]
    entry_files: Sequence[int]
    begins: Sequence[int]
    checksums: Sequence[int]
    first_sums: Sequence[int]

    def number(self, part: int, entry: int) -> int:
        """The number in the table of an entry of a part, which exists."""
        raise NotImplementedError


class PartData(EntryTable):
    """One part's entries, by their own numbers.

    Args:
        part: The part.
        layout: Its layout.
    """

    def __init__(self, part: RankManifest, layout: Layout) -> None:
        self.files = part.files
        self.ranks = [part.rank] * len(part.files)
        self.entries = layout.entries
        columns = entry_columns(layout)
        self.sizes, self.entry_files = columns.nbytes, columns.file
        self.checksums = part.checksums
        headers = [file.header_bytes for file in part.files]
        self.begins = [
            headers[file] + offset
            for file, offset in zip(columns.file, columns.offset, strict=True)
        ]
        self.first_sums = list(accumulate(map(chunk_count, self.sizes), initial=0))

    def number(self, part: int, entry: int) -> int:
        """See :meth:`EntryTable.number`."""
        return entry

    def all_needs(self) -> list[Need]:
        """Every byte of every entry."""
        return [Need(n, 0, entry.nbytes) for n, entry in enumerate(self.entries)]


class JoinedData(EntryTable):
    """Entries of several parts; those of a part are numbered when the first is asked for.

    A load of one rank touches few of the parts, so nothing is done for the rest.

    Args:
        bundle: The bundle that has the parts.
    """

    def __init__(self, bundle: ManifestDocument) -> None:
        self._bundle = bundle
        self.files: list[FileRow] = []
        self.ranks: list[int] = []
        self.entries: list[Entry] = []
        self.sizes: list[int] = []
        self.entry_files: list[int] = []
        self.begins: list[int] = []
        self.checksums: list[int] = []
        self.first_sums: list[int] = []
        self._bases: dict[int, int] = {}

    def number(self, part: int, entry: int) -> int:
        """See :meth:`EntryTable.number`."""
        base = self._bases.get(part)
        return (self._join(part) if base is None else base) + entry

    def _join(self, number: int) -> int:
        part = self._bundle.parts[number]
        base = self._bases[number] = len(self.entries)
        data = PartData(part, self._bundle.layouts[part.layout])
        file, checksum = len(self.files), len(self.checksums)
        self.files += data.files
        self.ranks += data.ranks
        self.entries += data.entries
        self.sizes += data.sizes
        self.entry_files += [file + each for each in data.entry_files]
        self.begins += data.begins
        self.checksums += data.checksums
        self.first_sums += [checksum + each for each in data.first_sums[:-1]]
        return base


def entry_table(bundle: ManifestDocument) -> EntryTable:
    """The entries of all parts of a bundle."""
    if len(bundle.parts) > 1:
        return JoinedData(bundle)
    (part,) = bundle.parts
    return PartData(part, bundle.layouts[part.layout])
