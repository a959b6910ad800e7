"""The entries of data files as columns, under the numbers of one table."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate

from ckpipe.format.checksum import chunk_count
from ckpipe.format.manifest import Entries, Entry, FileRow, ManifestDocument


class EntryTable:
    """Entries of data files and their checksums, of one part or of several.

    The entries of a part get their numbers at the first access to one of them: a load of one rank
    touches few of the parts, so the others cost nothing.

    Args:
        document: The document that has the parts.

    Attributes:
        verified: Whether the entries have checksums; those of foreign files have none.
        files: The data files.
        keys: For each file, its key in the store.
        ranks: For each file, the rank that wrote it.
        sizes: For each entry, its size in bytes.
        entry_files: For each entry, the number of its file.
        begins: For each entry, its start in the file, in bytes.
        checksums: CRC-32C of every mebibyte of every entry.
        first_sums: For each entry, the number of its first checksum; a last one for the end.
    """

    def __init__(self, document: ManifestDocument) -> None:
        self._document = document
        self.verified = document.source is None
        self.files: list[FileRow] = []
        self.keys: list[str] = []
        self.ranks: list[int] = []
        self.sizes: list[int] = []
        self.entry_files: list[int] = []
        self.begins: list[int] = []
        self.checksums: list[int] = []
        self.first_sums: list[int] = [0]
        self._bases: dict[int, int] = {}
        self._firsts: list[int] = []
        self._rows: list[Entries] = []

    def number(self, part: int, entry: int) -> int:
        """Return the table's number of an entry of a part; the entry must exist."""
        return self.join(part) + entry

    def entry(self, number: int) -> Entry:
        """Return the row of an entry as its part lists it, by the table's number."""
        part = bisect_right(self._firsts, number) - 1
        return self._rows[part][number - self._firsts[part]]

    def join(self, part: int) -> int:
        """Add the entries of a part, once; return the number of the first."""
        base = self._bases.get(part)
        if base is not None:
            return base
        base, file = len(self.sizes), len(self.files)
        manifest = self._document.parts[part]
        entries = self._document.layouts[manifest.layout].entries
        headers = [each.header_bytes for each in manifest.files]
        places = zip(entries.file, entries.offset, strict=True)
        self._bases[part] = base
        self._firsts.append(base)
        self._rows.append(entries)
        self.files += manifest.files
        self.keys += [each.key(self._document.id) for each in manifest.files]
        self.ranks += [manifest.rank] * len(manifest.files)
        self.sizes += entries.nbytes
        self.entry_files += [file + each for each in entries.file]
        self.begins += [headers[number] + offset for number, offset in places]
        self.checksums += manifest.checksums
        first = self.first_sums.pop()
        self.first_sums += accumulate(map(chunk_count, entries.nbytes), initial=first)
        return base
