"""Incremental saves: find the blocks that rest, and the committed files that can be linked.

A block *rests* if its checksums and its 128-bit digest equal those of the same place in the *base*:
the newest save that this rank had committed when the blocks of this one began to arrive. The digest
is XXH3 (xxhash.com, specification 0.2.0). Blocks whose checksums differ are never digested. So a
first save has no digests, a second one digests the blocks that rest, and a third one links them.

**Why no lease is needed.** A base is the rank's newest commit, so it is the newest complete
checkpoint or a newer one: retention keeps the former, and a sweep removes nothing of a launch that
runs. If another checkpoint becomes the newest complete one meanwhile, this rank has committed that
too, and it is the better source for all that rests in both. For bytes that have changed and changed
back, the prunes of this process keep the base until the save is committed
(:attr:`ckpipe.catalog.catalog.Catalog.linked_from`); if another rank prunes it, the save fails.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ckpipe import threads
from ckpipe.catalog.find import read_document
from ckpipe.errors import CkpipeError
from ckpipe.format.data_file import BlockRange, DataFiles, sum_slices
from ckpipe.format.manifest import FileRow, Layout
from ckpipe.format.names import index_key, manifest_key
from ckpipe.types import CheckpointId

if TYPE_CHECKING:
    from ckpipe.catalog.catalog import Catalog
    from ckpipe.save.context import StoreContext
    from ckpipe.save.record import FilledBlock, SaveRecord

logger = logging.getLogger("ckpipe")


def digest_of(data: bytes | memoryview) -> str:
    """Compute the digest of a block, as hexadecimal text; releases the GIL."""
    import xxhash

    return xxhash.xxh3_128(data).hexdigest()


class CommittedFiles:
    """The data files that this rank has in a committed checkpoint.

    Args:
        id: The checkpoint.
        rows: The rows of the files in the manifest.
        slices: For each file, the slice of all checksums that is its own.
        checksums: The checksums of all entries.
        block_bytes: The size of a block; digests of other blocks are of no use.
    """

    def __init__(
        self,
        id: CheckpointId,
        rows: Sequence[FileRow],
        slices: Sequence[slice],
        checksums: Sequence[int],
        block_bytes: int,
    ) -> None:
        import numpy as np

        self.id = id
        sums = np.asarray(checksums, np.int64)
        self._files = {
            _identity(row): (row, sums[at]) for row, at in zip(rows, slices, strict=True)
        }
        self._block_bytes = block_bytes

    def file_like(self, row: FileRow) -> FileRow | None:
        """Return the row of the file with the same header, and so the same entries."""
        found = self._files.get(_identity(row))
        return None if found is None else found[0]

    def digest(self, row: FileRow, offset: int) -> str | None:
        """Return the digest of a block of such a file, if it is known."""
        found, block_bytes = self.file_like(row), self._block_bytes
        if found is None or found.block_bytes != block_bytes:
            return None
        number = offset // block_bytes
        return found.digests[number] if number < len(found.digests) else None

    def has_checksums(self, files: DataFiles, filled: FilledBlock) -> bool:
        """Tell whether the checksums of a block equal those of its place here.

        Parts of a mebibyte at the ends of the block are not compared.
        """
        import numpy as np

        number = filled.plan.file
        found = self._files.get(_identity(files.rows[number]))
        if found is None:
            return False
        cuts = files.cuts(filled.plan)
        slots = np.asarray(cuts.slots, np.int64) - files.sum_slices[number].start
        same = found[1][slots] == filled.sums
        same[list(cuts.parts)] = True
        return bool(same.all())


def _identity(row: FileRow) -> tuple[int, int, int]:
    return row.size, row.header_bytes, row.header_crc32c


@dataclass(slots=True)
class LinkState:
    """The knowledge of a process of the files to which its saves can link.

    Args:
        full_every: Every so-manieth save writes all; None for none.
        committed: The files of the last commit, and of those before it back to the oldest one that
            is the base of a save under way; the newest checkpoint first.
        begun: Number of saves so far.
        trusted_from: Number of the first save whose files may be linked.
        loaded: The checkpoint from which the run resumed, if its files were looked for.
        unavailable: True if the store has linked nothing since it refused a link.
        refused_base: The base of the save whose link was refused last.
        off: True if the store refuses links: all saves write all.
    """

    full_every: int | None
    committed: list[CommittedFiles] = field(default_factory=list)
    begun: int = 0
    trusted_from: int = 0
    loaded: str | None = None
    unavailable: bool = True
    refused_base: CheckpointId | None = None
    off: bool = False

    def commit(self, save: SaveRecord, rows: Sequence[FileRow], context: StoreContext) -> None:
        """Record the files of a committed save."""
        catalog, files = context.catalog, save.files
        assert files is not None
        catalog.linked_from.pop(save.name, None)
        if save.link_number >= self.trusted_from:
            found = CommittedFiles(
                save.id, rows, files.sum_slices, save.checksums, context.block_bytes
            )
            self.committed.append(found)
            self.committed.sort(key=lambda each: each.id, reverse=True)
        used = set(catalog.linked_from.values())
        last = [n for n, each in enumerate(self.committed) if not n or str(each.id) in used]
        del self.committed[max(last, default=0) + 1 :]

    def refused(self, save: SaveRecord) -> None:
        """Write all from now on, unless the store has linked since its last refusal for a base.

        All files of one base may have too many links at once; those that are written have none.
        """
        assert save.base is not None
        self.off = self.off or (self.unavailable and save.base.id != self.refused_base)
        self.unavailable, self.refused_base = True, save.base.id

    def distrust(self, catalog: Catalog) -> None:
        """Link to no file of earlier saves, since one was gone or damaged."""
        self.committed.clear()
        self.trusted_from, self.loaded = self.begun + 1, catalog.resumed_from

    def sources(self, save: SaveRecord, plans: Collection[BlockRange]) -> Iterator[str]:
        """Yield the keys of files whose blocks have the digests of a save's, the newest first.

        Args:
            save: The save; it has a base.
            plans: Blocks of one of its files that rest.
        """
        assert save.files is not None
        assert save.base is not None
        bases = [*self.committed, *(() if save.base in self.committed else (save.base,))]
        for each in bases:
            for plan in plans:
                row = save.files.rows[plan.file]
                if each.digest(row, plan.offset) != save.digests[plan.file, plan.offset]:
                    break
            else:
                found = each.file_like(row)
                assert found is not None
                yield found.key(each.id)


@contextlib.asynccontextmanager
async def based(save: SaveRecord, context: StoreContext) -> AsyncIterator[None]:
    """Choose the base of a save, and keep it from the prunes of this process."""
    links, catalog = context.links, context.catalog
    if links is None or links.off:
        yield
        return
    links.begun += 1
    save.link_number = links.begun
    if catalog.resumed_from != links.loaded:
        # The run may have gone back, and later checkpoints be deleted.
        links.loaded = catalog.resumed_from
        known = links.loaded in {str(each.id) for each in links.committed}
        if not known and links.begun != links.trusted_from:  # else it writes all after a loss
            links.committed = await _resumed(context) or links.committed
    if links.committed:
        save.base = links.committed[0]
        save.may_link = not (links.full_every and links.begun % links.full_every == 0)
        catalog.linked_from[save.name] = str(save.base.id)
    try:
        yield
    finally:
        catalog.linked_from.pop(save.name, None)


async def _resumed(context: StoreContext) -> list[CommittedFiles]:
    """Read the files that this rank has in the checkpoint from which the run resumed."""
    id, rank = CheckpointId.parse(context.catalog.resumed_from or ""), context.rank
    if id is None:
        return []
    alone = context.world_size == 1
    key = index_key(id) if alone else manifest_key(id, rank)
    try:
        document, _ = await read_document(
            context.retrying, id, key, "index" if alone else "manifest"
        )
        if document.world_size != context.world_size:
            return []
        (part,) = document.parts
        layout: Layout = document.layouts[part.layout]
        slices = await threads.run_sync(sum_slices, layout, len(part.files))
    except CkpipeError as error:
        logger.info("The next save writes all: the files of %s are unknown: %s", id, error)
        return []
    return [CommittedFiles(id, part.files, slices, part.checksums, context.block_bytes)]


def stored_rows(save: SaveRecord, block_bytes: int) -> tuple[FileRow, ...]:
    """Return the rows of a save's files with the digests of their blocks."""
    assert save.files is not None
    rows = list(save.files.rows)
    for number in {file for file, _ in save.digests}:
        row = rows[number]
        offsets = range(0, row.size, block_bytes)
        digests = tuple(save.digests.get((number, offset)) for offset in offsets)
        rows[number] = replace(
            row, block_bytes=block_bytes, digests=digests, linked=number in save.linked
        )
    return tuple(rows)
