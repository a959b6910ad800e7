"""Whatever goes wrong between a pipeline and S3, a save succeeds in its budget or fails clearly.

The server is moto, behind a proxy that disturbs requests. After each run a second pipeline, which
nothing disturbs, finds the checkpoint absent or complete and right, and no upload is open.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from botocore.exceptions import ClientError
from fault_proxy import Fault, FaultProxy, Request, fault_proxy
from pipelines import same
from s3_servers import SECRET, S3Server, seaweedfs, set_up_process, weed
from sampling import EVERY
from server_processes import free_ports

import ckpipe
from ckpipe import errors
from ckpipe.backend import PutMode
from ckpipe_s3 import S3Backend

BUCKET = "faults"
MIB = 1 << 20

_numbers = itertools.count()


@pytest.fixture(scope="module")
def server(moto_server: S3Server) -> S3Server:
    moto_server.make_bucket(BUCKET)
    return moto_server


@pytest.fixture
def proxy(server: S3Server) -> Iterator[FaultProxy]:
    with fault_proxy(server.port) as made:
        yield made


@pytest.fixture
def url() -> str:
    return f"s3://{BUCKET}/run-{next(_numbers)}"


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
    assert server.open_uploads(BUCKET) == []
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
    """Disturbs the first requests of one operation, or of any, behind so many that pass."""

    def __init__(
        self, operation: str | None, fault: Fault, times: int = 1, *, behind: int = 0
    ) -> None:
        self._operation, self._fault = operation, fault
        self._turns = range(behind, behind + times)
        self._seen = itertools.count()

    def __call__(self, request: Request) -> Fault | None:
        if self._operation not in (None, request.operation):
            return None
        return self._fault if next(self._seen) in self._turns else None


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


@pytest.mark.parametrize(("operation", "fault"), CASES if EVERY else CASES[1::9])
def test_a_save_survives_one_fault(
    server: S3Server, proxy: FaultProxy, url: str, operation: str, fault: Fault
) -> None:
    proxy.rule = Once(operation, fault)
    assert save(url, proxy.url) is None
    assert proxy.faults() == 1
    check(url, server, complete=True)


STORMS = [*itertools.product(WRITES, (Fault.UNAVAILABLE, Fault.THROTTLED, Fault.LOST))]


@pytest.mark.parametrize(("operation", "fault"), STORMS if EVERY else STORMS[2::7])
def test_a_save_survives_a_storm(
    server: S3Server, proxy: FaultProxy, url: str, operation: str, fault: Fault
) -> None:
    proxy.rule = Once(operation, fault, times=4)
    assert save(url, proxy.url) is None
    check(url, server, complete=True)


REQUESTS = 16
"""About how many requests a run has, from opening to closing."""
TURNS = [*itertools.product(range(REQUESTS), (Fault.LOST, Fault.UNAVAILABLE, Fault.RESET_WITHIN))]


@pytest.mark.parametrize(("turn", "fault"), TURNS if EVERY else TURNS[4::17])
def test_each_request_of_a_save_in_turn(
    server: S3Server, proxy: FaultProxy, url: str, turn: int, fault: Fault
) -> None:
    proxy.rule = Once(None, fault, behind=turn)
    assert save(url, proxy.url) is None
    assert proxy.faults() == (turn < len(proxy.log))
    check(url, server, complete=True)


@pytest.mark.parametrize("operation", ["CreateUpload", "UploadPart", "Complete"])
@pytest.mark.parametrize("fault", [Fault.UNAVAILABLE, Fault.LOST] if EVERY else [Fault.UNAVAILABLE])
def test_a_save_gives_up_clearly(
    server: S3Server, proxy: FaultProxy, url: str, operation: str, fault: Fault
) -> None:
    proxy.rule = Once(operation, fault, times=10_000)
    error = save(url, proxy.url, retries=2)
    if (operation, fault) == ("Complete", Fault.LOST):
        assert error is None  # it did complete, and that is seen
        return check(url, server, complete=True)
    assert isinstance(error, errors.StoreUnavailable)
    assert url in str(error)
    return check(url, server, complete=False)


def test_a_save_after_a_failed_one_succeeds(server: S3Server, proxy: FaultProxy, url: str) -> None:
    with pipeline(url, proxy.url, retries=0) as opened:
        proxy.rule = Once("UploadPart", Fault.UNAVAILABLE, times=2)
        with pytest.raises(errors.Throttled):
            opened.save(state(7), step=0, until="committed")
        opened.save(state(), step=1, until="committed")
    check(url, server, complete=True)


def test_expired_credentials_are_told_and_not_tried_again(
    server: S3Server, proxy: FaultProxy, url: str
) -> None:
    proxy.rule = Once("UploadPart", Fault.EXPIRED, times=10_000)
    error = save(url, proxy.url)
    assert isinstance(error, errors.PermissionDenied)
    assert "ExpiredToken" in str(error)
    assert "REQ-42" in str(error)
    assert SECRET not in repr(error) + str(error)
    assert proxy.faults() <= 3
    check(url, server, complete=False)


def test_a_cancelled_save_leaves_no_upload_open(
    server: S3Server, proxy: FaultProxy, url: str
) -> None:
    hanging = threading.Event()

    def hang(request: Request) -> Fault | None:
        if request.operation != "UploadPart":
            return None
        hanging.set()
        return Fault.HANG

    proxy.rule = hang
    with pipeline(url, proxy.url, attempt_timeout_seconds=60) as opened:
        handle = opened.save(state(), step=1)
        assert hanging.wait(30)
        handle.cancel()
        with pytest.raises(errors.SaveCancelled):
            handle.wait()
    check(url, server, complete=False)


LOAD_FAULTS = [Fault.SHORT, Fault.HANG, *(PASSING[:4] if EVERY else ())]


@pytest.mark.parametrize("fault", LOAD_FAULTS)
def test_a_load_survives_faults(
    server: S3Server, proxy: FaultProxy, url: str, fault: Fault
) -> None:
    assert save(url, server.url) is None
    proxy.rule = Once("Get", fault, times=2)
    with pipeline(url, proxy.url) as opened:
        loaded = opened.load()
    assert proxy.faults() == 2
    assert loaded is not None
    assert same(loaded.state, state())


def test_a_bit_flipped_on_the_way_back_is_found(
    server: S3Server, proxy: FaultProxy, url: str
) -> None:
    assert save(url, server.url) is None
    proxy.rule = Once("Get", Fault.FLIPPED_BACK, times=10_000)
    with pipeline(url, proxy.url) as opened, pytest.raises(errors.CorruptCheckpoint):
        opened.load(step=1)


@pytest.mark.parametrize("operation", ["UploadPart", "Put"])
def test_a_bit_flipped_on_the_way_is_found_by_the_store(
    weed_server: S3Server, url: str, operation: str
) -> None:
    with contextlib.suppress(ClientError):
        weed_server.make_bucket(BUCKET)
    with fault_proxy(weed_server.port) as proxy:
        proxy.rule = Once(operation, Fault.FLIPPED)
        assert save(url, proxy.url) is None
        assert proxy.faults() == 1
    check(url, weed_server, complete=True)


@pytest.mark.skipif(not EVERY or weed() is None, reason="slow: make test-all runs it")
def test_a_server_is_killed_and_comes_back(url: str, tmp_path: Path) -> None:
    set_up_process()
    ports, parts = free_ports(4), threading.Semaphore(0)

    def count(request: Request) -> Fault | None:
        if request.operation == "UploadPart":
            parts.release()
        return None

    patience: dict[str, Any] = {"retries": 30, "backoff_seconds": 2, "backoff_max_seconds": 2}
    with contextlib.ExitStack() as servers, fault_proxy(ports[-1]) as proxy:
        first = servers.enter_context(contextlib.ExitStack())
        server = first.enter_context(seaweedfs(tmp_path, ports))
        server.make_bucket(BUCKET)
        proxy.rule = count
        with pipeline(url, proxy.url, **patience) as opened:
            handle = opened.save(state(), step=1)
            assert parts.acquire(timeout=30)
            first.close()
            servers.enter_context(seaweedfs(tmp_path, ports))
            handle.wait()
        check(url, server, complete=True)


def test_a_store_that_overwrites_is_refused(server: S3Server, proxy: FaultProxy, url: str) -> None:
    proxy.rule = lambda request: Fault.UNCONDITIONAL
    error = save(url, proxy.url)
    assert isinstance(error, errors.StoreError)
    assert "ignores If-None-Match" in str(error)
    assert "require_create_only=False" in str(error)


async def test_a_store_that_overwrites_can_be_accepted(
    server: S3Server, proxy: FaultProxy, url: str
) -> None:
    proxy.rule = lambda request: Fault.UNCONDITIONAL
    options: dict[str, Any] = {"endpoint_url": proxy.url, "require_create_only": False}
    async with S3Backend(url, **options) as backend:
        await backend.put("a", b"first", PutMode.CREATE)
        with pytest.raises(errors.ObjectExists):
            await backend.put("a", b"second", PutMode.CREATE)
        assert await backend.get("a", max_bytes=10) == b"first"
