"""Receive bodies of answers straight into the memory where they belong.

aiohttp copies a body three times: from the socket, out of the parser, and to the caller. A body
that is neither encoded nor chunked, and whose length is known, needs no parsing. So until its end
the connection is lent: its transport gets a :class:`asyncio.BufferedProtocol` whose buffer is the
caller's memory, and the kernel copies into it. Then aiohttp gets the connection back, is told that
the body has ended, and keeps it for the next request. All other bodies go through aiohttp.
``docs/experiments.md`` has what it brings.
"""

from __future__ import annotations

import asyncio
from typing import Any


async def fill(response: Any, buffer: memoryview) -> int:
    """Fill memory with the body of an answer; the memory is not touched afterwards.

    Args:
        response: An :class:`aiohttp.ClientResponse` of whose body nothing was read.
        buffer: Flat writable bytes, as many as are expected.

    Returns:
        The number of bytes that came; once they are more than the memory has, reading stops.

    Raises:
        aiohttp.ClientError: If the connection broke, or was silent for too long.
    """
    content, at = response.content, 0
    async for piece in content.iter_any():
        end = at + len(piece)
        if end > len(buffer):
            return end
        buffer[at:end] = piece
        at = end
        if at < len(buffer) and _may_be_lent(response, at, len(buffer)):
            await _Inflow(response, buffer[at:]).run()
            return len(buffer)
    return at


def _may_be_lent(response: Any, taken: int, size: int) -> bool:
    """Tell whether the connection brings just the missing bytes of the body next.

    While a transport reads, the parser holds nothing back, as it does only when it is paused.
    """
    connection = response.connection
    if connection is None or connection.transport is None or not connection.transport.is_reading():
        return False
    headers = response.headers
    plain = "Content-Encoding" not in headers and "Transfer-Encoding" not in headers
    known = headers.get("Content-Length") == str(size)
    return plain and known and bool(response.content.total_bytes == taken)


class _Inflow(asyncio.BufferedProtocol):
    """Hold the connection of an answer while the rest of its body arrives.

    Args:
        response: The answer.
        rest: The memory for the rest, which is not empty.
    """

    def __init__(self, response: Any, rest: memoryview) -> None:
        self._response, self._content, self._rest = response, response.content, rest
        self._transport = response.connection.transport
        self._owner = self._transport.get_protocol()

    async def run(self) -> None:
        """Wait until all has arrived; close the connection if that fails."""
        self._transport.set_protocol(self)
        try:
            await self._content.wait_eof()  # which also tells of a lost or silent connection
        except BaseException:
            self._hand_back()
            self._response.close()
            raise

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._rest

    def buffer_updated(self, nbytes: int) -> None:
        self._rest = self._rest[nbytes:]
        if self._rest:
            self._owner.start_timeout()
        else:
            self._hand_back()
            self._content.feed_eof()

    def eof_received(self) -> bool | None:
        answer: bool | None = self._owner.eof_received()
        return answer

    def connection_lost(self, exc: Exception | None) -> None:
        self._hand_back()
        self._owner.connection_lost(exc)

    def pause_writing(self) -> None:
        self._owner.pause_writing()

    def resume_writing(self) -> None:
        self._owner.resume_writing()

    def _hand_back(self) -> None:
        self._rest = memoryview(b"")
        if self._transport.get_protocol() is self:
            self._transport.set_protocol(self._owner)


__all__ = ["fill"]
