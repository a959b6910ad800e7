"""A bucket's answers of 4xx: permanent ones are told at once, and passing ones are retried."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
import torch

import ckpipe
from ckpipe import errors
from ckpipe.backend import Backend, PutMode
from ckpipe_s3 import S3Backend
from tests.support.bucket_stores import BLOCK, Root, Seen, behind_proxy, written
from tests.support.fault_proxy import Fault, FaultProxy, Request, refuse_checksums
from tests.support.pipelines import same
from tests.support.s3_servers import S3Server

BUCKET = "refusals"

CHECKSUM = "Unsupported header 'x-amz-checksum-crc32c' received for this API call"
PERMANENT = {
    "s3": [
        (400, "InvalidRequest", CHECKSUM),
        (400, "InvalidArgument", "The crc32c checksum is not known"),
        (400, "InvalidRequest", "It was created with crc32c. The checksum is missing for part 1"),
        (400, "InvalidRequest", "This checksum algorithm is unknown, use a different one"),
        (400, "InvalidRequest", "Checksum Type mismatch occurred, expected checksum Type: sha1"),
        (400, "NoSuchCode", "no reason"),
        (400, "ExpiredToken", "The token has expired"),
        (403, "AccessDenied", "No rights"),
        (403, "SignatureDoesNotMatch", "The signature does not match the one that was calculated"),
        (405, "MethodNotAllowed", "Not allowed here"),
        (411, "MissingContentLength", "A length is needed"),
        (413, "EntityTooLarge", "Too large"),
        (501, "NotImplemented", "A header implies functionality that is not implemented"),
    ],
    "gs": [
        (400, "invalid", "Invalid value for crc32c"),
        (400, "invalidParameter", "no reason"),
        (401, "authError", "Invalid credentials"),
        (403, "forbidden", "No rights"),
        (405, "methodNotAllowed", "Not allowed here"),
        (411, "contentLengthRequired", "A length is needed"),
        (413, "uploadTooLarge", "Too large"),
        (501, "notImplemented", "Not implemented"),
    ],
}
PASSING = {
    "s3": [
        (400, "RequestTimeout", "Your socket was idle"),
        (400, "BadDigest", "The CRC32C that you sent is another"),
        (400, "Odd", "The crc32c that you sent does not match what was computed"),
        (400, "Odd", "crc32c mismatch"),
        (400, "Throttling", "Rate exceeded"),
        (403, "RequestTimeTooSkewed", "The clocks differ"),
        (408, "RequestTimeout", "Too slow"),
        (409, "OperationAborted", "A conflict"),
        (409, "ConditionalRequestConflict", "A conflict"),
        (409, "NoSuchCode", "A conflict"),
        (429, "TooManyRequests", "Slower"),
        (500, "InternalError", "An error"),
        (503, "SlowDown", "Slower"),
    ],
    "gs": [
        (400, "invalid", 'Provided CRC32C "a" doesn\'t match calculated CRC32C "b"'),
        (403, "rateLimitExceeded", "Slower"),
        (408, "requestTimeout", "Too slow"),
        (409, "conflict", "A conflict"),
        (429, "rateLimitExceeded", "Slower"),
        (500, "internalError", "An error"),
        (503, "backendError", "An error"),
    ],
}
OPERATIONS = {
    "s3": ("Put", "CreateUpload", "UploadPart", "Complete", "Get", "Head", "List", "Delete"),
    "gs": ("Put", "Begin", "Send", "Compose", "Get", "Look", "List", "Delete"),
}

Answer = tuple[int, str, str]
_names = itertools.count()


@pytest.fixture(params=["moto_server", "gcs_server"])
def seen(request: pytest.FixtureRequest) -> Iterator[Seen]:
    server = request.getfixturevalue(request.param)
    with behind_proxy(server, BUCKET) as proxy:
        yield Seen(server, proxy, BUCKET)


async def attempts(seen: Seen, operation: str, answer: Answer, times: int) -> list[Exception]:
    """Do what needs an operation, whose first requests get an answer; return the retried errors."""
    retried: list[Exception] = []
    key, left = f"key-{next(_names)}", iter(range(times))

    def rule(request: Request) -> bytes | None:
        if request.operation != operation or next(left, None) is None:
            return None
        return seen.proxy.dialect.refusal(*answer)

    async with seen.backend() as backend:
        call = await _call(backend, operation, key)
        seen.proxy.rule = rule
        try:
            await _repeated(call, retried)
        finally:
            seen.proxy.rule = lambda request: None
    return retried


async def _repeated(call: Callable[[], Awaitable[Any]], failures: list[Exception]) -> None:
    """Call until it succeeds, at most four times; note the errors that may pass."""
    while True:
        try:
            await call()
            return
        except errors.CkpipeError as error:
            if not error.transient or len(failures) == 3:
                raise
            failures.append(error)


async def _call(backend: Backend, operation: str, key: str) -> Callable[[], Awaitable[Any]]:
    """Prepare what an operation needs; return a call that sends it."""
    await backend.put(key, b"x", PutMode.CREATE)
    data = memoryview(bytes(BLOCK))
    large = f"{key}-large"
    if operation in ("UploadPart", "Begin", "Send"):
        upload = await backend.open_upload(large, size=2 * BLOCK, block_bytes=BLOCK)
        return lambda: upload.write(0, data)
    if operation in ("Complete", "Compose"):
        return (await written(backend, large)).complete
    calls: dict[str, Callable[[], Awaitable[Any]]] = {
        "Put": lambda: backend.put(f"{key}-new", b"x", PutMode.CREATE),
        "CreateUpload": lambda: backend.open_upload(large, size=2 * BLOCK, block_bytes=BLOCK),
        "Get": lambda: backend.get(key, max_bytes=1),
        "Head": lambda: backend.stat(key),
        "Look": lambda: backend.stat(key),
        "List": backend.children,
        "Delete": lambda: backend.delete([key]),
    }
    return calls[operation]


@pytest.mark.sample(2)
@pytest.mark.parametrize("number", range(8))
async def test_permanent_refusals_are_told_at_once(seen: Seen, number: int) -> None:
    operation = OPERATIONS[seen.scheme][number]
    for answer in PERMANENT[seen.scheme]:
        status, code, text = answer
        with pytest.raises(errors.StoreError) as caught:
            assert await attempts(seen, operation, answer, 100) == []
        error = caught.value
        assert not error.transient, answer
        denied = status in (401, 403) or code == "ExpiredToken"
        if operation == "Head":  # its answer has no body
            continue
        assert isinstance(error, errors.PermissionDenied) == denied, answer
        assert f"{code} (status {status}" in str(error)
        assert f"): {text}" in str(error)
        if text == CHECKSUM and operation in ("Put", "CreateUpload", "UploadPart"):
            assert "set the option 'checksum' to 'md5' or 'none'" in str(error)


@pytest.mark.sample(2)
@pytest.mark.parametrize("number", range(8))
async def test_passing_refusals_are_retried(seen: Seen, number: int) -> None:
    operation = OPERATIONS[seen.scheme][number]
    for answer in PASSING[seen.scheme]:
        status, _, text = answer
        if operation == "Head" and status < 404:  # its answer has no body, and so no code
            continue
        [error] = await attempts(seen, operation, answer, 1)
        assert isinstance(error, errors.StoreUnavailable), answer
        assert operation == "Head" or text in str(error)


# A store that refuses checksums


def settings(proxy: FaultProxy, **options: Any) -> dict[str, Any]:
    return {
        "staging": {"block_bytes": BLOCK},
        "backends": {"s3": {"endpoint_url": proxy.url, **options}},
        "worker": "thread",
        "keep_last": 1,
    }


def state(number: int) -> dict[str, Any]:
    return {"weight": torch.arange(2 * BLOCK, dtype=torch.uint8) + number, "bias": torch.ones(3)}


def test_a_store_that_refuses_checksums_is_told_at_once(moto_server: S3Server) -> None:
    with behind_proxy(moto_server, BUCKET) as proxy:
        proxy.rule = refuse_checksums
        root = Root(moto_server, proxy, BUCKET)
        with (
            pytest.raises(errors.StoreError, match=r"Unsupported header.*'checksum' to 'md5' or"),
            ckpipe.SyncPipeline(root.url, **settings(proxy)) as pipeline,
        ):
            pipeline.save(state(1), step=1, until="committed")
        assert proxy.faults() == 1


@pytest.mark.sample(1)
@pytest.mark.parametrize("checksum", ["md5", "none"])
def test_a_run_on_a_store_that_refuses_checksums(moto_server: S3Server, checksum: str) -> None:
    seen: list[Request] = []

    def rule(request: Request) -> bytes | None:
        seen.append(request)
        return refuse_checksums(request)

    with behind_proxy(moto_server, BUCKET) as proxy:
        proxy.rule = rule
        root = Root(moto_server, proxy, BUCKET)
        with ckpipe.SyncPipeline(root.url, **settings(proxy, checksum=checksum)) as pipeline:
            for step in (1, 2):
                pipeline.save(state(step), step=step, until="committed")
            pipeline.prune()
            loaded = pipeline.load()
            assert loaded is not None
            assert same(loaded.state, state(2))
            assert [info.step for info in pipeline.steps()] == [2]
        assert proxy.faults() == 0
    assert root.leftovers() == []
    for request in seen:
        body = request.operation in ("Put", "UploadPart")
        told = request.operation == "Delete" or (body and checksum == "md5")
        assert ("content-md5" in request.headers) == told, request


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("checksum", "operation"),
    list(itertools.product(["crc32c", "md5", "none"], ["UploadPart", "Put"])),
)
def test_a_bit_that_flips_on_the_way_is_found_by_the_store_or_by_the_load(
    weed_server: S3Server, checksum: str, operation: str
) -> None:
    turns = itertools.count()

    def once(request: Request) -> Fault | None:
        of_save = request.operation == operation and "/step-" in request.target
        return Fault.FLIPPED if of_save and next(turns) == 0 else None

    with behind_proxy(weed_server, BUCKET) as proxy:
        proxy.rule = once
        root = Root(weed_server, proxy, BUCKET)
        with ckpipe.SyncPipeline(root.url, **settings(proxy, checksum=checksum)) as pipeline:
            pipeline.save(state(1), step=1, until="committed")
            assert proxy.faults() == 1
            if checksum == "none":
                with pytest.raises(errors.CorruptCheckpoint):
                    pipeline.load(step=1)
            else:
                loaded = pipeline.load(step=1)
                assert loaded is not None
                assert same(loaded.state, state(1))


def test_an_unknown_checksum_is_refused() -> None:
    with pytest.raises(errors.UsageError, match="'crc32c', 'md5' or 'none', not 'sha1'"):
        S3Backend("s3://bucket/run", checksum="sha1")  # type: ignore[arg-type]
