"""An HTTP proxy that misbehaves on demand, between a client and a server on this machine.

It serves from a thread of its own, one request for each connection, and reads a whole request
before it does anything else, so that what a fault does is the same in every run.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, urlsplit


class Fault(enum.Enum):
    """What can go wrong with a request."""

    UNAVAILABLE = "503 with SlowDown, not forwarded"
    THROTTLED = "429 with Retry-After, not forwarded"
    EXPIRED = "400 with ExpiredToken, not forwarded"
    RESET_BEFORE = "the connection is reset once the request was read, not forwarded"
    RESET_WITHIN = "the connection is reset in the middle of the request's body"
    LOST = "the server does it all, and the answer is lost"
    HANG = "no answer ever, not forwarded"
    SHORT = "the answer's body ends in the middle"
    FLIPPED = "one bit of the request's body is flipped on the way"
    FLIPPED_BACK = "one bit of the answer's body is flipped on the way"
    UNCONDITIONAL = "If-None-Match never reaches the server"


@dataclass(frozen=True)
class Request:
    """A request as rules see it.

    Args:
        method: The method.
        target: Path and query.
        headers: Names in lower case.
        size: Bytes of its body.
    """

    method: str
    target: str
    headers: dict[str, str]
    size: int

    @property
    def operation(self) -> str:
        """What S3 calls the request."""
        query = parse_qs(urlsplit(self.target).query, keep_blank_values=True)
        if "uploads" in query:
            return "CreateUpload" if self.method == "POST" else "ListUploads"
        if "uploadId" in query:
            return {"PUT": "UploadPart", "POST": "Complete", "DELETE": "Abort"}[self.method]
        if "delete" in query:
            return "Delete"
        if "list-type" in query:
            return "List"
        return self.method.capitalize()


Rule = Callable[[Request], Fault | None]
ERROR = (
    b"HTTP/1.1 %d Refused\r\nContent-Type: application/xml\r\nx-amz-request-id: REQ-42\r\n"
    b"%sContent-Length: %d\r\nConnection: close\r\n\r\n%s"
)


class FaultProxy:
    """The proxy, from :func:`fault_proxy`.

    Args:
        port: The server's port.
    """

    def __init__(self, port: int) -> None:
        self._upstream = port
        self.port = 0
        self.rule: Rule = lambda request: None
        self.log: list[tuple[str, Fault | None]] = []

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.port}"

    def faults(self) -> int:
        """How many requests were disturbed."""
        return sum(fault is not None for _, fault in self.log)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves one connection."""
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await self._serve(reader, writer)
        writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin1")
        first, *lines = head.strip().split("\r\n")
        method, target, _ = first.split(" ")
        named = dict(line.split(": ", 1) for line in lines)
        headers = {name.lower(): value for name, value in named.items()}
        request = Request(method, target, headers, int(headers.get("content-length", 0)))
        fault = self.rule(request)
        self.log.append((request.operation, fault))
        if "expect" in headers:
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if fault is Fault.RESET_WITHIN:
            await reader.readexactly(request.size // 2)
            return reset(writer)
        body = await reader.readexactly(request.size)
        if fault is Fault.HANG:
            await reader.read()  # until the client gives up
        elif fault in _REFUSALS:
            writer.write(_REFUSALS[fault])
        elif fault is Fault.RESET_BEFORE:
            reset(writer)
        else:
            await self._forward(request, first, body, fault, writer)
        return None

    async def _forward(
        self,
        request: Request,
        first: str,
        body: bytes,
        fault: Fault | None,
        writer: asyncio.StreamWriter,
    ) -> None:
        dropped = {"expect", "connection"}
        dropped |= {"if-none-match"} if fault is Fault.UNCONDITIONAL else set()
        kept = [f"{k}: {v}" for k, v in request.headers.items() if k not in dropped]
        head = "\r\n".join([first, *kept, "connection: close", "", ""]).encode("latin1")
        body = flipped(body) if fault is Fault.FLIPPED else body
        answer = await self._answer(head + body)
        if fault is Fault.LOST:
            return reset(writer)
        head, separator, body = answer.partition(b"\r\n\r\n")
        body = flipped(body) if fault is Fault.FLIPPED_BACK else body
        body = body[: len(body) // 2] if fault is Fault.SHORT else body
        writer.write(head + separator + body)
        await writer.drain()
        return None

    async def _answer(self, request: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._upstream)
        try:
            writer.write(request)
            return await reader.read()
        finally:
            writer.close()


def refusal(status: int, code: bytes, header: bytes = b"") -> bytes:
    """An answer as S3 gives it."""
    text = b"<Error><Code>%s</Code><Message>no</Message></Error>" % code
    return ERROR % (status, header, len(text), text)


_REFUSALS: dict[Fault | None, bytes] = {
    Fault.UNAVAILABLE: refusal(503, b"SlowDown"),
    Fault.THROTTLED: refusal(429, b"TooManyRequests", b"Retry-After: 0.1\r\n"),
    Fault.EXPIRED: refusal(400, b"ExpiredToken"),
}


def flipped(body: bytes) -> bytes:
    """A body with one bit flipped in its middle."""
    changed = bytearray(body)
    if changed:
        changed[len(changed) // 2] ^= 1
    return bytes(changed)


def reset(writer: asyncio.StreamWriter) -> None:
    """Resets a connection, so that the other end sees an error and no end."""
    raw = writer.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@contextlib.contextmanager
def fault_proxy(port: int) -> Iterator[FaultProxy]:
    """A proxy before a server's port, until the end of the block."""
    proxy, ready, stop = FaultProxy(port), threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def main() -> None:
        server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0, limit=1 << 20)
        proxy.port = server.sockets[0].getsockname()[1]
        ready.set()
        await stop.wait()
        server.close()
        # A connection that was accepted a moment ago gets its task only in the next turn.
        while connections := await others():
            for task in connections:
                task.cancel()
            await asyncio.gather(*connections, return_exceptions=True)

    async def others() -> set[asyncio.Task[Any]]:
        for _ in range(3):
            await asyncio.sleep(0)
        return {task for task in asyncio.all_tasks() if task is not asyncio.current_task()}

    thread = threading.Thread(target=loop.run_until_complete, args=[main()], name="fault proxy")
    thread.start()
    ready.wait()
    try:
        yield proxy
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
