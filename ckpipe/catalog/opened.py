"""A checkpoint that is open to be read: one of ckpipe, or one that another program wrote.

Note 81 of ``docs/design.md`` tells why it is one value.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckpipe.backend import Backend, ObjectInfo, for_each
from ckpipe.errors import CorruptCheckpoint, MissingObject, ObjectNotFound
from ckpipe.format.manifest import FileRow, ManifestDocument
from ckpipe.types import CheckpointId

_AT_ONCE = 16
"""Files of a foreign checkpoint that are looked at at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignFile(FileRow):
    """A file of another program, whose name is its key below the root of the source.

    Args:
        info: The object when its metadata was read.
    """

    info: ObjectInfo

    def key(self, id: CheckpointId) -> str:
        """Return the key of the file in the store of the source."""
        return self.name


@dataclass(frozen=True, slots=True)
class Opened:
    """A checkpoint whose metadata are read.

    Args:
        store: Its store, with retries.
        document: Its index, or some of its parts; or the description of a foreign one.
    """

    store: Backend
    document: ManifestDocument

    @property
    def id(self) -> str | None:
        """Its id; None if another program wrote it."""
        return None if self.unverified else str(self.document.id)

    @property
    def unverified(self) -> bool:
        """True if another program wrote it: its files have no checksums."""
        return self.document.source is not None

    async def check_unchanged(self) -> None:
        """Check that no file of another program was replaced since its metadata was read.

        Raises:
            CorruptCheckpoint: If one was.
            StoreError: If the store failed.
        """
        files = [each for part in self.document.parts for each in part.files]
        foreign = [each for each in files if isinstance(each, ForeignFile)]
        await for_each(foreign, self._check_unchanged, at_once=_AT_ONCE)

    async def _check_unchanged(self, file: ForeignFile) -> None:
        before = file.info
        try:
            now = await self.store.stat(before.key)
        except ObjectNotFound as error:
            raise MissingObject("The file is gone", key=before.key) from error
        if now != before or now.etag != before.etag:
            raise CorruptCheckpoint(
                "The file was replaced or changed while it was loaded",
                key=before.key,
                hint="Load again once its writer has finished",
            )
