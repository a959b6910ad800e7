"""Requests to S3 on plain sockets, signed by botocore: the limit for any client.

It writes and parses heads itself, and bodies go straight from memory to the kernel and back. It
speaks plain HTTP to one correct server, retries nothing, and has no deadlines; a backend could not
leave all that out.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import anyio
import anyio.to_thread

from ckpipe_s3 import S3Backend

HEAD_BYTES = 1 << 16


class Lanes(NamedTuple):
    """The number of concurrent requests.

    Args:
        writing: Of parts.
        reading: Of ranges.
    """

    writing: int
    reading: int


class Connection:
    """A connection for one request after the other."""

    def __init__(self, host: str, port: int) -> None:
        self._address = host, port
        self._loop = asyncio.get_running_loop()
        self._socket = socket.socket()
        self._socket.setblocking(False)

    async def __aenter__(self) -> Connection:
        await self._loop.sock_connect(self._socket, self._address)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._socket.close()

    async def _received(self) -> bytes:
        found = await self._loop.sock_recv(self._socket, HEAD_BYTES)
        if not found:
            raise SystemExit("The server closed the connection")
        return found

    async def ask(self, head: bytes, body: memoryview, into: memoryview) -> Mapping[str, str]:
        """Send a request and receive the answer's body; return its headers in lower case."""
        await self._loop.sock_sendall(self._socket, head)
        if body:
            await self._loop.sock_sendall(self._socket, body)
        came = bytearray()
        while (end := came.find(b"\r\n\r\n")) < 0:
            came += await self._received()
        status, *lines = came[:end].decode().split("\r\n")
        if not status.startswith("HTTP/1.1 20"):
            raise SystemExit(f"The server said {status}")
        headers = {
            name.lower(): value for name, _, value in (each.partition(": ") for each in lines)
        }
        at = len(rest := came[end + 4 :])
        into[:at] = rest
        while at < int(headers.get("content-length", "0")):
            at += await self._loop.sock_recv_into(self._socket, into[at:])
        return headers


class Sockets:
    """Send parts and read ranges on plain sockets; boto3 begins and ends uploads.

    Args:
        url: The URL of the root.
        endpoint: The URL of the store; None for AWS.
        data: The bytes.
        part: Bytes of a part.
        lanes: The number of concurrent requests.
    """

    def __init__(
        self, url: str, endpoint: str | None, data: memoryview, part: int, lanes: Lanes
    ) -> None:
        import boto3
        from botocore.auth import S3SigV4Auth

        self._client = boto3.client("s3", endpoint_url=endpoint)
        address = S3Backend(url)
        self._where = {"Bucket": address.bucket, "Key": f"{address.prefix}sockets"}
        self._url = f"{endpoint}/{address.bucket}/{address.prefix}sockets"
        self._data, self._part, self._lanes = data, part, lanes
        session: Any = boto3.Session()
        found = session.get_credentials().get_frozen_credentials()
        region = os.environ.get("AWS_REGION", "us-east-1")
        self._signer = S3SigV4Auth(found, "s3", region)

    def _head(self, method: str, query: str, headers: Mapping[str, str]) -> bytes:
        from botocore.awsrequest import AWSRequest
        from botocore.config import Config

        request = AWSRequest(method, self._url + query, headers=dict(headers))
        request.context["client_config"] = Config(s3={"payload_signing_enabled": False})
        self._signer.add_auth(request)
        parts = urlsplit(self._url + query)
        target = f"{parts.path}?{parts.query}" if parts.query else parts.path
        lines = [f"{method} {target} HTTP/1.1", f"Host: {parts.netloc}"]
        lines += [f"{name}: {value}" for name, value in request.headers.items()]
        return "\r\n".join([*lines, "", ""]).encode()

    async def _in_lanes(self, lanes: int, work: Any) -> None:
        offsets = iter(range(0, len(self._data), self._part))
        parts = urlsplit(self._url)

        async def lane(mine: Iterator[int]) -> None:
            async with Connection(parts.hostname or "", parts.port or 80) as connection:
                for offset in mine:
                    await work(connection, offset, self._data[offset : offset + self._part])

        async with anyio.create_task_group() as tasks:
            for _ in range(lanes):
                tasks.start_soon(lane, offsets)

    async def write(self) -> None:
        begun = await anyio.to_thread.run_sync(
            lambda: self._client.create_multipart_upload(**self._where)
        )
        upload, etags = begun["UploadId"], dict[int, str]()
        scratch = [memoryview(bytearray(HEAD_BYTES)) for _ in range(self._lanes.writing)]

        async def send(connection: Connection, offset: int, data: memoryview) -> None:
            number, into = offset // self._part + 1, scratch.pop()
            query = f"?partNumber={number}&uploadId={upload}"
            head = self._head("PUT", query, {"Content-Length": str(len(data))})
            etags[number] = (await connection.ask(head, data, into))["etag"]
            scratch.append(into)

        await self._in_lanes(self._lanes.writing, send)
        parts = [{"PartNumber": number, "ETag": etags[number]} for number in sorted(etags)]
        await anyio.to_thread.run_sync(
            lambda: self._client.complete_multipart_upload(
                **self._where, UploadId=upload, MultipartUpload={"Parts": parts}
            )
        )

    async def read(self) -> None:
        async def fetch(connection: Connection, offset: int, into: memoryview) -> None:
            span = f"bytes={offset}-{offset + len(into) - 1}"
            await connection.ask(self._head("GET", "", {"Range": span}), memoryview(b""), into)

        await self._in_lanes(self._lanes.reading, fetch)

    async def remove(self) -> None:
        await anyio.to_thread.run_sync(lambda: self._client.delete_object(**self._where))
