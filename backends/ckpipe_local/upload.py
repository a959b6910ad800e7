"""Large objects on their way to the local disk."""

from __future__ import annotations

from collections.abc import Sequence

import anyio

from ckpipe.backend import Upload
from ckpipe.errors import UsageError
from ckpipe.tasks.awaited_threads import in_thread
from ckpipe_local.failures import writing
from ckpipe_local.partial import PartialFile


class LocalUpload(Upload):
    """An upload into a preallocated temporary file, by parallel positional writes.

    Completing syncs the file, links it to its name and syncs the directory, in this order. Every
    call ends only when its worker thread is through with the caller's memory, cancelled or not.
    """

    # Each turn of a thread takes the interpreter from a trainer several times, and a write of this
    # many blocks is still a small part of a save.
    most_blocks = 16

    def __init__(
        self, key: str, size: int, path: str, file: PartialFile, unfinished: set[PartialFile]
    ) -> None:
        self._key = key
        self._size = size
        self._path = path
        self._file = file
        self._unfinished = unfinished

    def __repr__(self) -> str:
        return f"<LocalUpload {self._key} {self._size} bytes>"

    async def write(self, offset: int, data: memoryview) -> None:
        await self.write_all([(offset, data)])

    async def write_all(self, blocks: Sequence[tuple[int, memoryview]]) -> None:
        for offset, data in blocks:
            if offset < 0 or offset + len(data) > self._size:
                message = f"A block of {len(data)} bytes at {offset} leaves the {self._size} bytes"
                raise UsageError(message, key=self._key)
        with writing(f"write {self._path}", self._key):
            await in_thread(self._file.write, blocks)

    async def complete(self) -> None:
        with writing(f"complete {self._path}", self._key):
            await in_thread(self._file.publish)
        self._unfinished.discard(self._file)

    async def abort(self) -> None:
        with anyio.CancelScope(shield=True), writing(f"abort {self._path}", self._key):
            await in_thread(self._file.discard)
        self._unfinished.discard(self._file)
