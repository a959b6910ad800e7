"""One file of an export on its way: created, never replaced, and compared if it is there already.

Whoever finds that a file of this name is there already compares every byte: names of files say
nothing of the part of a state, or the version of torch, that they were made from.
"""

from __future__ import annotations

from dataclasses import dataclass

import anyio

from ckpipe.backend import Backend, PutMode, Upload
from ckpipe.errors import CommitConflict, ObjectExists
from ckpipe.format.checksum import crc32c
from ckpipe.stores.retrying import RetryPolicy, retrying
from ckpipe.tasks import to_thread


@dataclass(frozen=True, slots=True)
class ExportPlace:
    """Where a file of an export goes.

    Args:
        backend: The store, whose requests are tried again.
        key: The key of the file there.
        step: The step of the checkpoint, for errors.
        policy: How often to try the writing of blocks.
    """

    backend: Backend
    key: str
    step: int
    policy: RetryPolicy

    async def put(self, body: bytes) -> None:
        """Creates a small file.

        Raises:
            CommitConflict: If another one is there.
            StoreError: If the store failed.
        """
        try:
            await self.backend.put(self.key, body, PutMode.CREATE)
        except ObjectExists:
            await self.check(len(body), await to_thread.run_sync(crc32c, body), 1 << 20)

    async def check(self, size: int, sum: int, block_bytes: int) -> None:
        """Compares what is there with what would have been written.

        Args:
            size: Its size in bytes.
            sum: Its CRC-32C.
            block_bytes: How much is read at once.

        Raises:
            CommitConflict: If it is something else.
            StoreError: If the store failed.
        """
        if (await self.backend.stat(self.key)).size == size:
            found, buffer = 0, memoryview(bytearray(min(size, block_bytes)))
            for offset in range(0, size, block_bytes):
                block = buffer[: size - offset]
                await self.backend.read_into(self.key, offset, block)
                found = await to_thread.run_sync(crc32c, block, found)
            if found == sum:
                return
        raise CommitConflict(
            "Something else lies where this export belongs",
            step=self.step,
            key=self.key,
            hint="Delete its folder and export again, or export to another place",
        )


class ExportFile:
    """A file on its way, written from its beginning to its end.

    Leaving it as a context manager makes the file visible, or leaves nothing after an error.

    Args:
        upload: The upload that was opened for it.
        place: Where it goes.
        size: Its size in bytes.
        block_bytes: The size of all blocks but the last.
    """

    def __init__(self, upload: Upload, place: ExportPlace, size: int, block_bytes: int) -> None:
        self._upload, self._place, self._size = upload, place, size
        self._block = memoryview(bytearray(min(size, block_bytes)))
        self._offset = self._filled = self._sum = 0

    async def __aenter__(self) -> ExportFile:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *error: object) -> None:
        try:
            if kind is None:
                await self._flush()
                await self._complete()
                return
        except BaseException:
            await self._abort()
            raise
        await self._abort()

    async def _complete(self) -> None:
        try:
            await retrying(self._place.policy, self._upload.complete)
        except ObjectExists:
            await self._place.check(self._size, self._sum, max(1, len(self._block)))
            await self._upload.abort()

    async def _abort(self) -> None:
        with anyio.CancelScope(shield=True):
            await self._upload.abort()

    async def write(self, data: memoryview) -> None:
        """Writes what comes next.

        Raises:
            StoreError: If the store failed.
        """
        while data:
            take = min(len(data), len(self._block) - self._filled)
            self._block[self._filled : self._filled + take] = data[:take]
            self._filled += take
            data = data[take:]
            if self._filled == len(self._block):
                await self._flush()

    async def _flush(self) -> None:
        if not self._filled:
            return
        block, offset = self._block[: self._filled], self._offset
        self._sum = await to_thread.run_sync(crc32c, block, self._sum)
        await retrying(self._place.policy, lambda: self._upload.write(offset, block))
        self._offset += self._filled
        self._filled = 0


__all__ = ["ExportFile", "ExportPlace"]
