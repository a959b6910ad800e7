"""Options, checksums and bodies of requests to stores behind HTTP, and bodies of their answers.

aiohttp copies a body three times: from the socket, out of the parser, and to the caller. A body
that is neither encoded nor chunked, and whose length is known, needs no parsing. So until its end
the connection is lent: its transport gets a :class:`asyncio.BufferedProtocol` whose buffer is the
caller's memory, and the kernel copies into it. Then aiohttp gets the connection back with the end
of the body, and keeps it for the next request. All other bodies go through aiohttp.
``benchmarks/experiments.md`` has the measurement.
"""

from __future__ import annotations

import asyncio
import base64
import ssl
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

from aiohttp.abc import AbstractStreamWriter
from aiohttp.payload import Payload
from awscrt.checksums import crc32c

from ckpipe.backend import run_in_thread
from ckpipe.errors import StoreError, UsageError

CONNECT_SECONDS = 10.0
"""The most seconds for making a connection."""

PIECE_BYTES = 1 << 20
"""The bytes of a body that the socket gets at a time; after each write the loop may wait."""

_ON_LOOP_BYTES = 1 << 18

Number = TypeVar("Number", int, float)

# Options


def positive(name: str, value: Number) -> Number:
    """Return an option that is a number of more than 0.

    Raises:
        UsageError: If it is something else.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"{name} must be a number, not {value!r:.40}")
    if not value > 0:
        raise UsageError(f"{name} must be more than 0, not {value}")
    return value


def flag(name: str, value: bool) -> bool:
    """Return an option that is true or false.

    Raises:
        UsageError: If it is something else, such as the text ``"false"``, which counts as true.
    """
    if not isinstance(value, bool):
        raise UsageError(f"{name} must be True or False, not {value!r:.40}")
    return value


def check_endpoint(url: str, option: str = "endpoint_url") -> str:
    """Return the address of a store, if it is valid.

    Errors do not repeat it, since it may hold credentials.

    Args:
        url: The address.
        option: The name of the option, for the hint.

    Raises:
        UsageError: If it is invalid.
    """
    if not _is_address(url) or "@" in url or "?" in url or "#" in url:
        message = "The address of the store's API is wrong"
        raise UsageError(message, hint=f"Write http://host:port as {option}")
    return url


def check_proxy(url: str | None, option: str = "as proxy") -> str | None:
    """Return the URL of a proxy, if it is valid; it may hold a name and a password.

    Args:
        url: The URL; None for no proxy.
        option: The source of the URL, for the hint.

    Raises:
        UsageError: If it is invalid.
    """
    if url is not None and not _is_address(url):
        raise UsageError("The URL of the proxy is wrong", hint=f"Write http://host:port {option}")
    return url


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return False
    plain = url.isprintable() and " " not in url
    return parts.scheme in ("http", "https") and bool(parts.hostname) and port != 0 and plain


def trust(bundle: str | None, source: str = "the option 'ca_bundle'") -> ssl.SSLContext:
    """Make the context of secure connections; block while it reads the certificates.

    Args:
        bundle: A file of certificates to trust; None for the system's.
        source: The place that names the file, for the hint.

    Raises:
        StoreError: If the file cannot be used.
    """
    try:
        return ssl.create_default_context(cafile=bundle)
    except (OSError, ValueError) as error:
        message = f"The file of certificates {bundle!r:.300} cannot be used"
        message += f" ({type(error).__name__})"
        raise StoreError(message, hint=f"Check {source}") from error


# Checksums. These stores take a CRC-32C, big endian, in base 64


async def checksum_of(data: bytes | memoryview) -> int:
    """Compute the CRC-32C of a body, in a worker thread if the body is large."""
    if len(data) > _ON_LOOP_BYTES:
        return await run_in_thread(crc32c, data)
    value: int = crc32c(data)
    return value


def checksum_text(value: int) -> str:
    """Write a CRC-32C in the form of headers."""
    return base64.b64encode(value.to_bytes(4, "big")).decode()


def read_checksum(text: str) -> int:
    """Read a CRC-32C of a header.

    Raises:
        ValueError: If it is invalid.
    """
    data = base64.b64decode(text, validate=True)
    if len(data) != 4:
        raise ValueError("a CRC-32C has four bytes")
    return int.from_bytes(data, "big")


# Bodies


class MemoryBody(Payload):
    """Send buffers one after the other, without copying them.

    The socket gets slices of the caller's memory. The body may be sent with another request, from
    its beginning. It is a context manager. After its end the body sends nothing more: a cancelled
    request may still be sending, and must not touch memory that is reused by then.

    Args:
        pieces: Flat bytes.
        content_type: Their type.
    """

    _autoclose = True

    def __init__(
        self, *pieces: bytes | memoryview, content_type: str = "application/octet-stream"
    ) -> None:
        super().__init__(None, content_type=content_type)
        self._pieces = [memoryview(piece) for piece in pieces]
        self._size = sum(map(len, pieces))
        self._begun = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self._pieces = []

    @property
    def consumed(self) -> bool:
        """Forbid the client to resend the body by itself after a reset: the backend decides."""
        return self._begun

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        raise TypeError("a body is bytes, not text")

    def read(self) -> bytes:
        """Make the client of S3 take it for a file; the HTTP client below sends it unchanged."""
        raise TypeError("a body is sent, not read")

    def seek(self, offset: int) -> None:
        """Let the client of S3 send it again; sending always begins anew."""

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


async def fill(response: Any, buffer: memoryview) -> int:
    """Fill memory with the body of an answer; the memory is not touched afterwards.

    Args:
        response: An :class:`aiohttp.ClientResponse` with an unread body.
        buffer: Flat writable bytes, as many as are expected.

    Returns:
        The number of bytes that arrived; reading stops once they exceed the memory.

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
    """Tell whether the next bytes of the connection are exactly the missing bytes of the body.

    The parser holds bytes back only while its transport is paused.
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
            await self._content.wait_eof()  # also raises for a lost or silent connection
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
