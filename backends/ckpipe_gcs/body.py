"""Request bodies: the caller's own memory."""

from __future__ import annotations

import aiohttp
from aiohttp.abc import AbstractStreamWriter

PIECE_BYTES = 1 << 18
"""How much of a body is handed to the socket at a time."""


class MemoryBody(aiohttp.payload.Payload):
    """Sends pieces of memory one after the other, without copying them.

    What goes to the socket are slices of the caller's memory. It may be sent with another
    request, from its beginning. Once ended it sends nothing more, so that a request that was
    cancelled while it still sends never touches memory that has another use by then.

    Args:
        pieces: Flat bytes.
        content_type: What they are.
    """

    _autoclose = True

    def __init__(
        self, *pieces: bytes | memoryview, content_type: str = "application/octet-stream"
    ) -> None:
        super().__init__(None, content_type=content_type)
        self._pieces = [memoryview(piece) for piece in pieces]
        self._size = sum(map(len, pieces))
        self._begun = False

    @property
    def consumed(self) -> bool:
        """Whether the client may not send it again by itself, as it would after a reset; what
        has arrived is asked for first."""
        return self._begun

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        raise TypeError("a body is bytes, not text")

    async def write(self, writer: AbstractStreamWriter) -> None:
        await self.write_with_length(writer, None)

    async def write_with_length(
        self, writer: AbstractStreamWriter, content_length: int | None
    ) -> None:
        self._begun = True
        for piece in tuple(self._pieces):
            for at in range(0, len(piece), PIECE_BYTES):
                if not self._pieces:
                    return
                await writer.write(piece[at : at + PIECE_BYTES])

    def end(self) -> None:
        """Forgets the memory."""
        self._pieces = []
