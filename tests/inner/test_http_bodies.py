"""Bodies that arrive straight in memory, from a server that answers as each test wants."""

from __future__ import annotations

import asyncio
import gzip
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpipe_http.requests import _Inflow, fill
from tests.stores.test_s3 import self_signed

MIB = 1 << 20
BODY = bytes(range(256)) * (3 * MIB // 256)

Writer = asyncio.StreamWriter
Answer = Callable[[Writer], Awaitable[None]]


class Server:
    """Answers each request with the next of some answers, and the last again and again."""

    def __init__(self, *answers: Answer) -> None:
        self._answers = list(answers)
        self.url, self.connections = "", 0

    async def serve(self, reader: asyncio.StreamReader, writer: Writer) -> None:
        self.connections += 1
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
                await answer(writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def serving(server: Server, tls: ssl.SSLContext | None = None) -> AsyncIterator[Server]:
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=tls)
    host, port = listener.sockets[0].getsockname()
    server.url = f"{'https' if tls else 'http'}://{host}:{port}/"
    try:
        yield server
    finally:
        listener.close()


def whole(body: bytes, *headers: str, length: int | None = None) -> Answer:
    """An answer with a body, whose length may be told otherwise."""
    told = f"Content-Length: {len(body) if length is None else length}"
    head = "\r\n".join(["HTTP/1.1 200 OK", told, *headers, "", ""]).encode()

    async def answer(writer: Writer) -> None:
        writer.write(head + body)
        await writer.drain()

    return answer


async def chunked(writer: Writer) -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    writer.write(head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY))
    await writer.drain()


async def read(session: aiohttp.ClientSession, server: Server, buffer: memoryview) -> int:
    async with session.get(server.url) as response:
        return await fill(response, buffer)


@pytest.fixture
def lent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes each connection that was lent was lent for."""
    sizes: list[int] = []

    class Counted(_Inflow):
        async def run(self) -> None:
            sizes.append(len(self._rest))
            await super().run()

    monkeypatch.setattr("ckpipe_http.requests._Inflow", Counted)
    return sizes


async def test_a_connection_serves_on_after_it_was_lent(lent: list[int]) -> None:
    async with serving(Server(whole(BODY))) as server, aiohttp.ClientSession() as session:
        for _ in range(4):
            buffer = bytearray(len(BODY))
            assert await read(session, server, memoryview(buffer)) == len(BODY)
            assert buffer == BODY
        async with session.get(server.url) as response:
            assert await response.read() == BODY
    assert server.connections == 1
    assert len(lent) == 4
    assert min(lent) > MIB


async def test_bodies_over_tls(lent: list[int], tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)
    shown = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    shown.load_cert_chain(certificate, key)
    trusting = aiohttp.TCPConnector(ssl=ssl.create_default_context(cafile=str(certificate)))
    async with (
        serving(Server(whole(BODY)), shown) as server,
        aiohttp.ClientSession(connector=trusting) as session,
    ):
        for _ in range(3):
            buffer = bytearray(len(BODY))
            assert await read(session, server, memoryview(buffer)) == len(BODY)
            assert buffer == BODY
        assert server.connections == 1
    assert len(lent) == 3


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 1500), st.lists(st.integers(1, 1 << 19), max_size=6))
def test_bodies_in_any_pieces(first: int, sizes: list[int]) -> None:
    body = BODY[: first + sum(sizes)]

    async def answer(writer: Writer) -> None:
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode())
        at = 0
        for size in (first, *sizes):
            writer.write(body[at : at + size])
            at += size
            await writer.drain()
            await asyncio.sleep(0)

    async def work() -> None:
        async with serving(Server(answer)) as server, aiohttp.ClientSession() as session:
            for _ in range(2):
                buffer = bytearray(len(body))
                assert await read(session, server, memoryview(buffer)) == len(body)
                assert buffer == body
            assert server.connections == 1

    asyncio.run(work())


async def test_what_is_encoded_takes_the_other_way(lent: list[int]) -> None:
    packed = whole(gzip.compress(BODY, 1), "Content-Encoding: gzip")
    async with serving(Server(chunked, packed)) as server, aiohttp.ClientSession() as session:
        for _ in range(2):
            buffer = bytearray(len(BODY))
            assert await read(session, server, memoryview(buffer)) == len(BODY)
            assert buffer == BODY
    assert lent == []


async def test_bodies_of_another_length() -> None:
    async with serving(Server(whole(BODY))) as server, aiohttp.ClientSession() as session:
        guarded = bytearray(len(BODY) + 8)
        view = memoryview(guarded)
        assert await read(session, server, view[: len(BODY) - 1]) > len(BODY) - 1
        assert await read(session, server, view) == len(BODY)
        assert bytes(view[len(BODY) :]) == bytes(8)


async def test_a_connection_that_breaks(lent: list[int]) -> None:
    async def broken(writer: Writer) -> None:
        await whole(BODY[: 2 * MIB], length=len(BODY))(writer)
        writer.close()

    async with serving(Server(broken, whole(BODY))) as server, aiohttp.ClientSession() as session:
        buffer = bytearray(len(BODY))
        with pytest.raises(aiohttp.ClientPayloadError):
            await read(session, server, memoryview(buffer))
        assert len(lent) == 1
        assert await read(session, server, memoryview(buffer)) == len(BODY)
        assert buffer == BODY


async def test_a_connection_that_goes_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    lent, heard, silence = asyncio.Event(), asyncio.Event(), asyncio.Event()

    class Impatient(_Inflow):
        """Takes the connection to be silent soon, once it has brought something."""

        async def run(self) -> None:
            lent.set()
            await super().run()

        def buffer_updated(self, nbytes: int) -> None:
            self._owner.read_timeout = 0.05
            super().buffer_updated(nbytes)
            heard.set()

    monkeypatch.setattr("ckpipe_http.requests._Inflow", Impatient)

    async def silent(writer: Writer) -> None:
        await whole(BODY[:MIB], length=len(BODY))(writer)
        await lent.wait()
        writer.write(BODY[MIB : 2 * MIB])
        await silence.wait()

    patience = aiohttp.ClientTimeout(sock_read=600)
    async with (
        serving(Server(silent)) as server,
        aiohttp.ClientSession(timeout=patience) as session,
        asyncio.timeout(60),
    ):
        with pytest.raises(aiohttp.SocketTimeoutError):
            await read(session, server, memoryview(bytearray(len(BODY))))
        silence.set()
    assert heard.is_set()


async def test_memory_is_let_go_when_a_read_is_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    more, sent, begun = asyncio.Event(), asyncio.Event(), asyncio.Event()

    class Telling(_Inflow):
        def buffer_updated(self, nbytes: int) -> None:
            super().buffer_updated(nbytes)
            begun.set()

    monkeypatch.setattr("ckpipe_http.requests._Inflow", Telling)

    async def slow(writer: Writer) -> None:
        await whole(BODY[: 2 * MIB], length=len(BODY))(writer)
        sent.set()
        await more.wait()
        writer.write(BODY[2 * MIB :])
        await writer.drain()

    async with serving(Server(slow, whole(BODY))) as server, aiohttp.ClientSession() as session:
        buffer = bytearray(len(BODY))
        reading = asyncio.ensure_future(read(session, server, memoryview(buffer)))
        await sent.wait()
        await begun.wait()
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        buffer[:] = bytes(len(BODY))
        more.set()
        again = bytearray(len(BODY))
        assert await read(session, server, memoryview(again)) == len(BODY)
        assert again == BODY
        assert buffer == bytes(len(BODY))
        assert server.connections == 2
