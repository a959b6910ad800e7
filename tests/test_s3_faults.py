"""Whatever goes wrong between a pipeline and S3, a save succeeds in its budget or fails clearly.

The server is moto, behind a proxy that disturbs requests. After each run a second pipeline, which
nothing disturbs, finds the checkpoint absent or complete and right, and no upload is open.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import pytest
import torch
from fault_proxy import Fault, FaultProxy, Request, fault_proxy
from pipelines import same
from s3_servers import S3Server, moto, set_credentials

import ckpipe
from ckpipe import errors, registry
from ckpipe_s3 import S3Backend

EVERY = bool(os.environ.get("CKPIPE_TEST_ALL"))
BUCKET = "faults"
MIB = 1 << 20

_numbers = itertools.count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    set_credentials()
    if not metadata.entry_points(group=registry.ENTRY_POINT_GROUP, name="s3"):
        registry.register_backend("s3", S3Backend)  # this environment is older than the backend

    async def make_bucket() -> None:
        async with started.client() as client:
            await client.create_bucket(Bucket=BUCKET)

    with moto(tmp_path_factory.mktemp("moto")) as started:
        asyncio.run(make_bucket())
        yield started


@pytest.fixture
def proxy(server: S3Server) -> Iterator[FaultProxy]:
    with fault_proxy(server.port) as made:
        yield made


@pytest.fixture
def url() -> str:
    return f"s3://{BUCKET}/run-{next(_numbers)}"


def open_uploads(server: S3Server) -> list[str]:
    """The keys of uploads that are open in the bucket."""

    async def listed() -> list[str]:
        async with server.client() as client:
            page = await client.list_multipart_uploads(Bucket=BUCKET)
            return [entry["Key"] for entry in page.get("Uploads", ())]

    return asyncio.run(listed())


def state(seed: int = 0) -> dict[str, Any]:
    """A state of a bit more than two parts."""
    made = torch.Generator().manual_seed(seed)
    return {"weight": torch.randint(256, (11 * MIB,), generator=made, dtype=torch.uint8)}


def pipeline(url: str, endpoint: str, **upload: Any) -> ckpipe.SyncPipeline:
    """A pipeline that tries again at once, and does not wait long for anything."""
    return ckpipe.SyncPipeline(
        url,
        staging={"block_bytes": 5 * MIB},
        upload={"backoff_seconds": 0.01, "attempt_timeout_seconds": 1.5, "lanes": 2, **upload},
        backends={"s3": {"endpoint_url": endpoint, "request_timeout": 1.0}},
    )


def save(url: str, endpoint: str, **upload: Any) -> ckpipe.errors.CkpipeError | None:
    """Saves once, and returns the error if there was one."""
    try:
        with pipeline(url, endpoint, **upload) as opened:
            opened.save(state(), step=1, until="committed")
    except errors.CkpipeError as error:
        return error
    return None


def check(url: str, server: S3Server, *, complete: bool | None) -> None:
    """Looks what is left: the checkpoint complete and right, or none; and no open upload."""
    assert open_uploads(server) == []
    with pipeline(url, server.url) as opened:
        found = [info for info in opened.steps() if info.complete]
        if complete is not None:
            assert bool(found) is complete
        if found:
            opened.verify(1)
            loaded = opened.load()
            assert loaded is not None
            assert same(loaded.state, state())


class Once:
    """Disturbs the first requests of one operation."""

    def __init__(self, operation: str, fault: Fault, times: int = 1) -> None:
        self._operation, self._fault, self._left = operation, fault, times
        self._lock = threading.Lock()

    def __call__(self, request: Request) -> Fault | None:
        with self._lock:
            if request.operation != self._operation or not self._left:
                return None
            self._left -= 1
            return self._fault


def test_a_save_and_a_load_through_nothing_but_a_proxy(
    server: S3Server, proxy: FaultProxy, url: str
) -> None:
    assert save(url, proxy.url) is None
    operations = [operation for operation, _ in proxy.log]
    assert operations.count("UploadPart") == 3
    assert operations.count("CreateUpload") == operations.count("Complete") == 1
    check(url, server, complete=True)


WRITES = ("Put", "CreateUpload", "UploadPart", "Complete")
PASSING = (Fault.UNAVAILABLE, Fault.THROTTLED, Fault.RESET_BEFORE, Fault.LOST, Fault.HANG)
CASES = [
    *itertools.product(WRITES, PASSING),
    *itertools.product(("Head", "List"), (Fault.UNAVAILABLE, Fault.RESET_BEFORE)),
    ("UploadPart", Fault.RESET_WITHIN),
    ("Put", Fault.RESET_WITHIN),
    ("Complete", Fault.SHORT),
    ("CreateUpload", Fault.SHORT),
]


@pytest.mark.parametrize(("operation", "fault"), CASES if EVERY else CASES[1::5])
def test_a_save_survives_one_fault(
    server: S3Server, proxy: FaultProxy, url: str, operation: str, fault: Fault
) -> None:
    proxy.rule = Once(operation, fault)
    assert save(url, proxy.url) is None
    assert proxy.faults() == 1
    check(url, server, complete=True)


STORMS = [*itertools.product(WRITES, (Fault.UNAVAILABLE, Fault.THROTTLED, Fault.LOST))]


@pytest.mark.parametrize(("operation", "fault"), STORMS if EVERY else STORMS[2::5])
def test_a_save_survives_a_storm(
    server: S3Server, proxy: FaultProxy, url: str, operation: str, fault: Fault
) -> None:
    proxy.rule = Once(operation, fault, times=4)
    assert save(url, proxy.url) is None
    check(url, server, complete=True)
