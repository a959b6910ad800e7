"""Pure logic of the backends of buckets: translated errors, headers, bodies."""

from __future__ import annotations

from datetime import UTC, datetime
from email.utils import format_datetime
from typing import Any

import aiohttp
import botocore.exceptions as client_errors
import pytest

from ckpipe import errors
from ckpipe_gcs import GcsBackend
from ckpipe_gcs.access import ENDPOINT, find_endpoint
from ckpipe_gcs.resources import received
from ckpipe_http.buckets import BucketBackend
from ckpipe_http.failures import MAX_RETRY_AFTER_SECONDS, Refused, retry_after
from ckpipe_http.requests import MemoryBody, read_checksum
from ckpipe_s3 import S3Backend

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
