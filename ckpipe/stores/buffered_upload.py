"""An upload that is small enough to be kept in memory until it is complete."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from ckpipe.backend import Upload
from ckpipe.errors import UsageError


class BufferedUpload(Upload):
    """An object that is kept in memory, and written whole when it is complete.

    Args:
        create: Creates the object from its bytes.
        key: Its key.
        size: Its size in bytes.
    """

    def __init__(self, create: Callable[[bytes], Awaitable[None]], key: str, size: int) -> None:
        self._create, self._key, self._data = create, key, bytearray(size)

    def __repr__(self) -> str:
        return f"<BufferedUpload {self._key} {len(self._data)} bytes>"

    async def write(self, offset: int, data: memoryview) -> None:
        if offset < 0 or offset + len(data) > len(self._data):
            message = f"A block of {len(data)} bytes at {offset} leaves the {len(self._data)} bytes"
            raise UsageError(message, key=self._key)
        memoryview(self._data)[offset : offset + len(data)] = data

    async def complete(self) -> None:
        await self._create(bytes(self._data))

    async def abort(self) -> None:
        self._data.clear()


__all__ = ["BufferedUpload"]
