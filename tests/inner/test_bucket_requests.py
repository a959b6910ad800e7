"""Requests to buckets: their parts, their answers, and the bodies that are read from sockets."""

from __future__ import annotations

import asyncio
import gzip
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import aiohttp
import botocore.exceptions as client_errors
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpipe import errors
from ckpipe_gcs import GcsBackend
from ckpipe_gcs.access import ENDPOINT, find_endpoint
from ckpipe_gcs.resources import received
from ckpipe_http.buckets import BucketBackend
from ckpipe_http.failures import MAX_RETRY_AFTER_SECONDS, Refused, retry_after
from ckpipe_http.requests import MemoryBody, _Inflow, fill, read_checksum
from ckpipe_s3 import S3Backend
from tests.stores.test_s3 import self_signed

# Errors

TEXT = "the store's own text,\n see https://me:secret@host/x?sig=secret \x1b[31m"


def answered(code: str, status: int, **headers: str) -> Exception:
    """What the client raises for an answer."""
    metadata = {"HTTPStatusCode": status, "RequestId": "REQ-1", "HTTPHeaders": headers}
    made: Exception = client_errors.ClientError(
        {"Error": {"Code": code, "Message": TEXT}, "ResponseMetadata": metadata}, "PutObject"
    )
    return made


def refused(status: int, reason: str = "", text: str = TEXT, **more: Any) -> Refused:
    """What an answer that refuses is made into."""
    return Refused(status, reason, text, "REQ-1", more.get("asked"))


def make(scheme: str) -> BucketBackend:
    """A backend that is not open."""
    return S3Backend("s3://bucket") if scheme == "s3" else GcsBackend("gs://bucket")


CASES: dict[str, list[tuple[Exception, type[errors.CkpipeError]]]] = {
    "s3": [
        (answered("NoSuchKey", 404), errors.ObjectNotFound),
        (answered("404", 404), errors.ObjectNotFound),
        (answered("NoSuchBucket", 404), errors.StoreError),
        (answered("PreconditionFailed", 412), errors.ObjectExists),
        (answered("ConditionalRequestConflict", 409), errors.StoreUnavailable),
        (answered("AccessDenied", 403), errors.PermissionDenied),
        (answered("SlowDown", 503), errors.Throttled),
        (answered("", 429), errors.Throttled),
        (answered("InternalError", 500), errors.StoreUnavailable),
        (answered("BadDigest", 400), errors.StoreUnavailable),
        (answered("EntityTooLarge", 400), errors.StoreError),
        (answered("Unknown", 409), errors.StoreUnavailable),
        (answered("RequestTimeTooSkewed", 403), errors.StoreUnavailable),
        (answered("ExpiredTokenException", 400), errors.PermissionDenied),
        (answered("NotImplemented", 501), errors.StoreError),
        (answered("KeyTooLongError", 400), errors.InvalidKey),
        (answered("XMinioStorageFull", 507), errors.StoreFull),
        (answered("301", 301), errors.StoreError),
        (client_errors.NoCredentialsError(), errors.PermissionDenied),
        (
            client_errors.CredentialRetrievalError(provider="iam-role", error_msg="secret"),
            errors.StoreUnavailable,
        ),
        (
            client_errors.EndpointConnectionError(endpoint_url="http://me:secret@x"),
            errors.StoreUnavailable,
        ),
        (
            client_errors.ProxyConnectionError(proxy_url="http://me:secret@x", error=OSError()),
            errors.StoreUnavailable,
        ),
        (client_errors.SSLError(endpoint_url="https://x", error=OSError()), errors.StoreError),
        (
            client_errors.ReadTimeoutError(endpoint_url="http://me:secret@x"),
            errors.StoreUnavailable,
        ),
        (client_errors.ParamValidationError(report="secret"), errors.StoreError),
        (TimeoutError(), errors.StoreUnavailable),
        (ConnectionResetError(), errors.StoreUnavailable),
    ],
    "gs": [
        (refused(404, "notFound"), errors.ObjectNotFound),
        (refused(412, "conditionNotMet"), errors.ObjectExists),
        (refused(401, "authError"), errors.PermissionDenied),
        (refused(403, "forbidden"), errors.PermissionDenied),
        (refused(403, "rateLimitExceeded"), errors.Throttled),
        (refused(400, "userProjectMissing"), errors.PermissionDenied),
        (refused(400, "invalid"), errors.StoreError),
        (
            refused(400, "invalid", f'{TEXT}. Provided CRC32C "a" doesn\'t match calculated "b"'),
            errors.StoreUnavailable,
        ),
        (refused(400, "invalid", f"{TEXT}. The header crc32c is unknown"), errors.StoreError),
        (refused(429), errors.Throttled),
        (refused(503), errors.StoreUnavailable),
        (refused(503, asked=3.0), errors.Throttled),
        (refused(501), errors.StoreError),
        (TimeoutError(), errors.StoreUnavailable),
        (ConnectionResetError("secret"), errors.StoreUnavailable),
        (aiohttp.ClientPayloadError("secret"), errors.StoreUnavailable),
        (aiohttp.ServerDisconnectedError("secret"), errors.StoreUnavailable),
        (KeyError("generation"), errors.StoreUnavailable),
    ],
}


@pytest.mark.parametrize(
    ("scheme", "error", "kind"), [(scheme, *case) for scheme in CASES for case in CASES[scheme]]
)
async def test_errors_are_translated(
    scheme: str, error: Exception, kind: type[errors.CkpipeError]
) -> None:
    bucket = make(scheme)
    with pytest.raises(errors.StoreError) as caught, bucket.attempt("write", "a"):
        raise error
    assert type(caught.value) is kind
    assert caught.value.key == "a"
    assert f"{scheme}://bucket/a" in str(caught.value)
    assert "secret" not in str(caught.value)
    assert str(caught.value).isprintable()
    answer = bucket.answer_to(caught.value)
    for shown in ("REQ-1", "the store's own text, see https://***@host"):
        assert (shown in str(caught.value)) == (answer.status > 0)
    if isinstance(caught.value, errors.Throttled):
        assert caught.value.retry_after == answer.asked


@pytest.mark.parametrize("scheme", CASES)
async def test_mistakes_of_the_program_are_not_translated(scheme: str) -> None:
    with pytest.raises(AttributeError), make(scheme).attempt("write", "a"):
        raise AttributeError("a mistake")


@pytest.mark.parametrize("code", ["404", "notFound"])
async def test_without_a_key_the_bucket_is_missing(code: str) -> None:
    with (
        pytest.raises(errors.StoreError, match="Create the bucket") as caught,
        make("gs").attempt("list"),
    ):
        raise refused(404, code)
    assert type(caught.value) is errors.StoreError


async def test_a_store_says_how_long_to_wait() -> None:
    error = answered("ServiceUnavailable", 503, **{"retry-after": "7"})
    with pytest.raises(errors.Throttled) as caught, make("s3").attempt("write"):
        raise error
    assert caught.value.retry_after == 7.0


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, None),
        ("3", 3.0),
        ("0.5", 0.5),
        ("soon", None),
        ("999999", MAX_RETRY_AFTER_SECONDS),
        ("Mon, 01 Jan 2001 00:00:00 GMT", 0.0),
        (format_datetime(datetime(2999, 1, 1, tzinfo=UTC)), MAX_RETRY_AFTER_SECONDS),
    ],
)
def test_retry_after(header: str | None, seconds: float | None) -> None:
    assert retry_after(header) == seconds


# Headers and bodies


@pytest.mark.parametrize("text", ["", "AAAA", "not base 64!", "AAAAAAAA"])
def test_checksums_that_are_none(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  the text is that of a library
        read_checksum(text)


@pytest.mark.parametrize("header", ["", "bytes=5-9", "bytes 0-9", "0-9"])
def test_what_no_session_has(header: str) -> None:
    with pytest.raises(ValueError, match="does not begin at 0"):
        received(header)


async def test_an_ended_body_never_touches_its_memory_again() -> None:
    class Sink:
        pieces: list[memoryview]

        async def write(self, piece: memoryview) -> None:
            self.pieces.append(piece)

    sink: Any = Sink()
    sink.pieces = []
    data = bytearray(10)
    with MemoryBody(b"head", memoryview(data)) as body:
        pass
    await body.write(sink)
    assert sink.pieces == []
    data.clear()  # impossible while a view of it is held


# Google Cloud Storage


@pytest.mark.parametrize(
    ("option", "variable", "endpoint", "emulated"),
    [
        (None, "", ENDPOINT, False),
        (None, "localhost:9023", "http://localhost:9023", True),
        (None, "https://here:1/", "https://here:1", True),
        ("http://there", "localhost:9023", "http://there", False),
    ],
)
def test_endpoints(option: str | None, variable: str, endpoint: str, emulated: bool) -> None:
    assert find_endpoint(option, {"STORAGE_EMULATOR_HOST": variable}) == (endpoint, emulated)


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


async def check_read(session: aiohttp.ClientSession, server: Server, body: bytes = BODY) -> None:
    """Check that a read brings a body."""
    buffer = bytearray(len(body))
    assert await read(session, server, memoryview(buffer)) == len(body)
    assert buffer == body


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


@pytest.mark.parametrize("tls", [False, True])
async def test_a_connection_serves_on_after_it_was_lent(
    lent: list[int], tmp_path: Path, tls: bool
) -> None:
    shown, trusting = None, None
    if tls:
        certificate, key = self_signed(tmp_path)
        shown = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        shown.load_cert_chain(certificate, key)
        trusting = aiohttp.TCPConnector(ssl=ssl.create_default_context(cafile=str(certificate)))
    async with (
        serving(Server(whole(BODY)), shown) as server,
        aiohttp.ClientSession(connector=trusting) as session,
    ):
        for _ in range(4):
            await check_read(session, server)
        async with session.get(server.url) as response:
            assert await response.read() == BODY
    assert server.connections == 1
    assert len(lent) == 4
    assert min(lent) > MIB


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
                await check_read(session, server, body)
            assert server.connections == 1

    asyncio.run(work())


async def test_what_is_encoded_takes_the_other_way(lent: list[int]) -> None:
    packed = whole(gzip.compress(BODY, 1), "Content-Encoding: gzip")
    async with serving(Server(chunked, packed)) as server, aiohttp.ClientSession() as session:
        for _ in range(2):
            await check_read(session, server)
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
        await check_read(session, server)
        assert buffer == bytes(len(BODY))
        assert server.connections == 2
