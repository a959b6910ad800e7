"""An HTTP proxy that misbehaves on demand, between a client and a server on this machine.

It serves from a thread of its own, one request for each connection, and reads a whole request
before it does anything else, so that what a fault does is the same in every run.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import json
import re
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, urlsplit


class Fault(enum.Enum):
    """What can go wrong with a request."""

    UNAVAILABLE = "503, not forwarded"
    THROTTLED = "429 with Retry-After, not forwarded"
    EXPIRED = "the credentials have expired, not forwarded"
    RESET_AT_ONCE = "the connection is reset before the request's body is read"
    FORBIDDEN = "403, not forwarded"
    RESET_BEFORE = "the connection is reset once the request was read, not forwarded"
    RESET_WITHIN = "the connection is reset in the middle of the request's body"
    HALF = "the server gets half of the request's body, and both connections are reset"
    LOST = "the server does it all, and the answer is lost"
    LATE = "the server does it all once the client has given up"
    UNANSWERED = "the server does it all, and no answer comes until the client gives up"
    HANG = "no answer ever, not forwarded"
    RESET_BACK = "the connection is reset in the middle of the answer's body"
    SHORT = "the answer's body ends in the middle"
    FLIPPED = "one bit of the request's body is flipped on the way"
    FLIPPED_BACK = "one bit of the answer's body is flipped on the way"
    UNCONDITIONAL = "the condition of a create-only put never reaches the server"


@dataclass(frozen=True)
class Request:
    """A request as rules see it.

    Args:
        method: The method.
        target: Path and query.
        headers: Names in lower case.
        size: Bytes of its body.
        operation: What the store's API calls it.
    """

    method: str
    target: str
    headers: dict[str, str]
    size: int
    operation: str


Rule = Callable[[Request], Fault | bytes | None]
"""Decides what becomes of a request; bytes are an answer in place of the server's."""


def refuse_checksums(request: Request) -> bytes | None:
    """Refuse each request that carries a checksum in a header of S3's, as some stores do."""
    for name in request.headers:
        if name.startswith(("x-amz-checksum", "x-amz-sdk-checksum", "x-amz-trailer")):
            text = f"Unsupported header '{name}' received for this API call."
            return S3Dialect().refusal(400, "InvalidArgument", text)
    return None


class S3Dialect:
    """The API of S3."""

    def __init__(self) -> None:
        self.refusals: dict[Fault | None, bytes] = {
            Fault.UNAVAILABLE: self.refusal(503, "SlowDown"),
            Fault.THROTTLED: self.refusal(429, "TooManyRequests", "no", "Retry-After: 0.1"),
            Fault.EXPIRED: self.refusal(400, "ExpiredToken"),
            Fault.FORBIDDEN: self.refusal(403, "AccessDenied"),
        }

    def refusal(self, status: int, code: str, text: str = "no", *headers: str) -> bytes:
        """An answer that refuses."""
        body = f"<Error><Code>{code}</Code><Message>{text}</Message></Error>".encode()
        return answer(status, body, "application/xml", "x-amz-request-id: REQ-42", *headers)

    def operation(self, method: str, target: str) -> str:
        """What the API calls a request."""
        query = parse_qs(urlsplit(target).query, keep_blank_values=True)
        if "uploads" in query:
            return "CreateUpload" if method == "POST" else "ListUploads"
        if "uploadId" in query:
            return {"PUT": "UploadPart", "POST": "Complete", "DELETE": "Abort"}[method]
        if "delete" in query:
            return "Delete"
        if "list-type" in query:
            return "List"
        return method.capitalize()

    def unconditional(self, first: str, headers: dict[str, str]) -> str:
        """The first line of a request without its condition, which headers lose too."""
        headers.pop("if-none-match", None)
        return first


class GcsDialect:
    """The JSON API of Google Cloud Storage."""

    def __init__(self) -> None:
        self.refusals: dict[Fault | None, bytes] = {
            Fault.UNAVAILABLE: self.refusal(503, "backendError"),
            Fault.THROTTLED: self.refusal(429, "rateLimitExceeded", "no", "Retry-After: 0.1"),
            Fault.EXPIRED: self.refusal(401, "authError"),
            Fault.FORBIDDEN: self.refusal(403, "forbidden"),
        }

    def refusal(self, status: int, reason: str, text: str = "no", *headers: str) -> bytes:
        """An answer that refuses."""
        error = {"code": status, "message": text, "errors": [{"reason": reason}]}
        body = json.dumps({"error": error}).encode()
        id = "X-GUploader-UploadID: REQ-42"
        return answer(status, body, "application/json", id, *headers)

    def operation(self, method: str, target: str) -> str:
        path, query = urlsplit(target).path, parse_qs(urlsplit(target).query)
        if "upload_id" in query:
            return {"PUT": "Send", "DELETE": "Cancel"}[method]
        if path.startswith("/upload/"):
            return "Begin" if query["uploadType"] == ["resumable"] else "Put"
        if path.endswith("/compose"):
            return "Compose"
        if "/rewriteTo/" in path:
            return "Copy"
        if path.endswith("/o"):
            return "List"
        if query.get("alt") == ["media"]:
            return "Get"
        return {"GET": "Look", "DELETE": "Delete"}.get(method, method)

    def unconditional(self, first: str, headers: dict[str, str]) -> str:
        return re.sub(r"&?ifGenerationMatch=\d+", "", first)


Dialect = S3Dialect | GcsDialect
"""What the proxy must know of a store's API."""


def answer(status: int, text: bytes, content_type: str, *headers: str) -> bytes:
    """An answer that refuses, as it is sent."""
    lines = [f"HTTP/1.1 {status} Refused", f"Content-Type: {content_type}", *headers]
    lines += [f"Content-Length: {len(text)}", "Connection: close", "", ""]
    return "\r\n".join(lines).encode() + text


class FaultProxy:
    """The proxy, from :func:`fault_proxy`.

    Args:
        port: The server's port.
        dialect: What the server speaks.
    """

    def __init__(self, port: int, dialect: Dialect) -> None:
        self._upstream, self.dialect = port, dialect
        self.port = 0
        self.rule: Rule = lambda request: None
        self.log: list[tuple[str, Fault | bytes | None]] = []
        self.unanswered = threading.Event()
        """Set once the server has done what the client is not told."""
        self._serving: set[asyncio.Task[Any] | None] = set()

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.port}"

    def faults(self) -> int:
        """How many requests were disturbed."""
        return sum(fault is not None for _, fault in self.log)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        # A loop alone does not keep a task that waits for a connection which is being given up.
        task = asyncio.current_task()
        self._serving.add(task)
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                await self._serve(reader, writer)
            writer.close()
        except asyncio.CancelledError:
            writer.transport.abort()  # what waits to be sent would keep it open
            raise
        finally:
            self._serving.discard(task)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin1")
        first, *lines = head.strip().split("\r\n")
        method, target, version = first.split(" ")
        # To a proxy that it knows of, a client sends whole URLs.
        first = f"{method} {re.sub('^http://[^/]*', '', target)} {version}"
        named = dict(line.split(": ", 1) for line in lines)
        headers = {name.lower(): value for name, value in named.items()}
        copies = "x-amz-copy-source" in headers
        operation = "Copy" if copies else self.dialect.operation(method, target)
        size = int(headers.get("content-length", 0))
        request = Request(method, target, headers, size, operation)
        fault = self.rule(request)
        self.log.append((request.operation, fault))
        if fault is Fault.RESET_AT_ONCE:
            return reset(writer)
        if "expect" in headers:
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if fault in (Fault.RESET_WITHIN, Fault.HALF):
            half = await reader.readexactly(request.size // 2)
            if fault is Fault.HALF:
                await self._leave_half(first, headers, half)
            return reset(writer)
        body = await reader.readexactly(request.size)
        if fault is Fault.HANG:
            await reader.read()  # until the client gives up
        elif isinstance(fault, bytes) or fault in self.dialect.refusals:
            made = fault if isinstance(fault, bytes) else self.dialect.refusals[fault]
            start, separator, text = made.partition(b"\r\n\r\n")
            writer.write(start + separator + (b"" if method == "HEAD" else text))
        elif fault is Fault.RESET_BEFORE:
            reset(writer)
        else:
            if fault is Fault.LATE:
                await reader.read()  # until the client gives up
            await self._forward(request, first, body, fault, reader, writer)
        return None

    async def _forward(
        self,
        request: Request,
        first: str,
        body: bytes,
        fault: Fault | None,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        headers = dict(request.headers)
        if fault is Fault.UNCONDITIONAL:
            first = self.dialect.unconditional(first, headers)
        head = upstream_head(first, headers)
        body = flipped(body) if fault is Fault.FLIPPED else body
        answer = await self._answer(head + body)
        if fault is Fault.UNANSWERED:
            self.unanswered.set()
            await reader.read()  # until the client gives up
            return None
        if fault is Fault.LOST:
            return reset(writer)
        head, separator, body = answer.partition(b"\r\n\r\n")
        body = flipped(body) if fault is Fault.FLIPPED_BACK else body
        body = body[: len(body) // 2] if fault in (Fault.SHORT, Fault.RESET_BACK) else body
        writer.write(head + separator + body)
        await writer.drain()
        return reset(writer) if fault is Fault.RESET_BACK else None

    async def _leave_half(self, first: str, headers: dict[str, str], half: bytes) -> None:
        """Give the server half of a body, and wait until it has taken note of the end."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._upstream)
        writer.write(upstream_head(first, headers) + half)
        await writer.drain()
        writer.write_eof()
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()

    async def _answer(self, request: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._upstream)
        try:
            writer.write(request)
            return await reader.read()
        finally:
            writer.transport.abort()  # the answer is whole, or nobody wants it any more


def upstream_head(first: str, headers: Mapping[str, str]) -> bytes:
    """The head of a request as it is handed on."""
    kept = [f"{k}: {v}" for k, v in headers.items() if k not in ("expect", "connection")]
    return "\r\n".join([first, *kept, "connection: close", "", ""]).encode("latin1")


def flipped(body: bytes) -> bytes:
    """A body with one bit flipped in its middle."""
    changed = bytearray(body)
    if changed:
        changed[len(changed) // 2] ^= 1
    return bytes(changed)


def reset(writer: asyncio.StreamWriter) -> None:
    """Reset a connection, so that the other end sees an error and no end."""
    raw = writer.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


_used_ports: set[int] = set()
"""Ports of earlier proxies: backends remember by its address whether a store honours conditions."""


@contextlib.contextmanager
def fault_proxy(
    port: int, dialect: Dialect | None = None, *, tls: ssl.SSLContext | None = None
) -> Iterator[FaultProxy]:
    """A proxy before a server's port, until the end of the block.

    Args:
        port: The server's port.
        dialect: What the server speaks; that of S3 if it is None.
        tls: What the proxy shows to clients, if they are to speak TLS to it.
    """
    proxy = FaultProxy(port, dialect or S3Dialect())
    ready, stop = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def main() -> None:
        while True:
            server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0, limit=1 << 20, ssl=tls)
            proxy.port = server.sockets[0].getsockname()[1]
            if proxy.port not in _used_ports:
                break
            server.close()
        _used_ports.add(proxy.port)
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
