"""Whatever goes wrong between a pipeline and GCS, a save succeeds in its budget or fails clearly.

The server is the strict emulator, behind a proxy that disturbs requests. After each run a second
pipeline, which nothing disturbs, finds the checkpoint absent or complete and right, and the store
has neither a temporary object nor an open session with bytes in it.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import gcs_servers
import pytest
import torch
from fault_proxy import Fault, FaultProxy, GcsDialect, Request, fault_proxy
from gcs_servers import GcsServer
from pipelines import same
from sampling import EVERY, SEED
from server_processes import free_ports

import ckpipe
from ckpipe import errors
from ckpipe.backend import PutMode
from ckpipe.catalog import sweep
from ckpipe.store.registry import is_registered_here
from ckpipe_gcs import GcsBackend

BUCKET = "faults"
MIB = 1 << 20
BLOCK = 3 * MIB

_numbers = itertools.count()
T = TypeVar("T")


def sampled(cases: Sequence[T], count: int) -> Sequence[T]:
    """So many of the cases, drawn at random; all of them in the long form of the tests."""
    return cases if EVERY else random.Random(SEED).sample(cases, count)


@pytest.fixture(scope="module")
def server(gcs_server: GcsServer) -> GcsServer:
    gcs_server.make_bucket(BUCKET)
    return gcs_server


@pytest.fixture
def proxy(server: GcsServer) -> Iterator[FaultProxy]:
    with fault_proxy(server.port, GcsDialect()) as made:
        yield made


@pytest.fixture
def url() -> str:
    return f"gs://{BUCKET}/run-{next(_numbers)}"


def state(seed: int = 0) -> dict[str, Any]:
    """A state of a bit more than two blocks."""
    made = torch.Generator().manual_seed(seed)
    return {"weight": torch.randint(256, (7 * MIB,), generator=made, dtype=torch.uint8)}


def pipeline(
    url: str,
    endpoint: str,
    retention: dict[str, Any] | None = None,
    worker: Any = "thread",
    fault: Fault | None = None,
    **upload: Any,
) -> ckpipe.SyncPipeline:
    """A pipeline that tries again at once, and gives up soon only requests that a fault hangs.

    Whole blocks go through sessions, and the last one, which is shorter, in one request.
    """
    timeout, limit = (0.7, 3.0) if fault is Fault.HANG else (60.0, 120.0)
    options = {"endpoint_url": endpoint, "anonymous": True, "request_timeout": timeout}
    return ckpipe.SyncPipeline(
        url,
        staging={"block_bytes": BLOCK},
        retention=retention or {},
        worker=worker,
        upload={"backoff_seconds": 0.01, "attempt_timeout_seconds": limit, "lanes": 2, **upload},
        backends={"gs": options | {"resumable_bytes": BLOCK}},
    )


def save(url: str, endpoint: str, **fields: Any) -> ckpipe.errors.CkpipeError | None:
    """Saves once, and returns the error if there was one."""
    try:
        with pipeline(url, endpoint, **fields) as opened:
            opened.save(state(), step=1, until="committed")
    except errors.CkpipeError as error:
        return error
    return None


def check(url: str, server: GcsServer, *, complete: bool | None) -> None:
    """Looks what is left: the checkpoint complete and right, or none; and nothing temporary."""
    below = url.removeprefix(f"gs://{BUCKET}/") + "/"
    names = [name for name in server.names(BUCKET) if name.startswith(below)]
    assert [name for name in names if name.endswith(".ckpipe-part")] == []
    # A session whose begin was never answered is open under a name that nobody knows. It holds
    # nothing, and ends by itself.
    held = [(name, had) for name, had in server.sessions(BUCKET) if below in name and had]
    assert held == []
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
    server: GcsServer, proxy: FaultProxy, url: str
) -> None:
    assert save(url, proxy.url) is None
    operations = [operation for operation, _ in proxy.log]
    assert min(operations.count("Begin"), operations.count("Send")) >= 2
    assert operations.count("Compose") == 1
    assert operations.count("Delete") >= 3
    check(url, server, complete=True)


WRITES = ("Put", "Begin", "Send", "Compose", "Delete")
PASSING = (Fault.UNAVAILABLE, Fault.THROTTLED, Fault.RESET_BEFORE, Fault.LOST, Fault.HANG)
CASES = [
    *itertools.product(WRITES, PASSING),
    *itertools.product(("List",), (Fault.UNAVAILABLE, Fault.RESET_BEFORE)),
    *itertools.product(("Send", "Put"), (Fault.RESET_WITHIN, Fault.HALF, Fault.FLIPPED)),
    *itertools.product(("Send", "Put", "Begin", "Compose"), (Fault.SHORT,)),
]


@pytest.mark.parametrize(("operation", "fault"), sampled(CASES, 3))
def test_a_save_survives_one_fault(
    server: GcsServer, proxy: FaultProxy, url: str, operation: str, fault: Fault
) -> None:
    proxy.rule = Once(operation, fault)
    assert save(url, proxy.url, fault=fault) is None
    assert proxy.faults() == 1
    check(url, server, complete=True)


STORMS = [*itertools.product(WRITES[:4], (Fault.UNAVAILABLE, Fault.THROTTLED, Fault.LOST))]


@pytest.mark.parametrize(("operation", "fault"), sampled(STORMS, 1))
def test_a_save_survives_a_storm(
    server: GcsServer, proxy: FaultProxy, url: str, operation: str, fault: Fault
) -> None:
    proxy.rule = Once(operation, fault, times=4)
    assert save(url, proxy.url) is None
    check(url, server, complete=True)


REQUESTS = 24
"""About how many requests a run has, from opening to closing."""
TURNS = [
    *itertools.product(
        range(REQUESTS), (Fault.LOST, Fault.UNAVAILABLE, Fault.RESET_WITHIN, Fault.HALF)
    )
]


@pytest.mark.parametrize(("turn", "fault"), sampled(TURNS, 3))
def test_each_request_of_a_save_in_turn(
    server: GcsServer, proxy: FaultProxy, url: str, turn: int, fault: Fault
) -> None:
    proxy.rule = Once(None, fault, behind=turn)
    assert save(url, proxy.url) is None
    assert proxy.faults() == (turn < len(proxy.log))
    check(url, server, complete=True)


GIVING_UP = [*itertools.product(("Begin", "Send", "Compose"), (Fault.UNAVAILABLE, Fault.LOST))]


@pytest.mark.parametrize(("operation", "fault"), sampled(GIVING_UP, 1))
def test_a_save_gives_up_clearly(
    server: GcsServer, proxy: FaultProxy, url: str, operation: str, fault: Fault
) -> None:
    proxy.rule = Once(operation, fault, times=10_000)
    error = save(url, proxy.url, retries=2)
    if (operation, fault) == ("Compose", Fault.LOST):
        assert error is None  # it was composed, and that is seen
        return check(url, server, complete=True)
    assert isinstance(error, errors.StoreUnavailable), error
    assert url in str(error)
    return check(url, server, complete=False)


def test_a_save_after_a_failed_one_succeeds(server: GcsServer, proxy: FaultProxy, url: str) -> None:
    with pipeline(url, proxy.url, retries=0) as opened:
        proxy.rule = Once("Send", Fault.UNAVAILABLE)
        with pytest.raises(errors.StoreUnavailable):
            opened.save(state(7), step=0, until="committed")
        opened.save(state(), step=1, until="committed")
    check(url, server, complete=True)


def test_a_block_goes_on_where_the_connection_broke(
    server: GcsServer, proxy: FaultProxy, url: str
) -> None:
    sizes: list[int] = []

    def half(request: Request) -> Fault | None:
        if request.operation != "Send":
            return None
        sizes.append(request.size)
        return Fault.HALF if len(sizes) == 1 else None

    proxy.rule = half
    assert save(url, proxy.url, lanes=1) is None
    # All of the first block, of which half arrives; a question; what is missing; the second.
    assert sizes == [BLOCK, 0, BLOCK - BLOCK // 2 // (256 * 1024) * (256 * 1024), BLOCK]
    check(url, server, complete=True)


def test_refused_credentials_are_told_and_not_tried_again(
    server: GcsServer, proxy: FaultProxy, url: str
) -> None:
    proxy.rule = Once("Send", Fault.EXPIRED, times=10_000)
    error = save(url, proxy.url)
    assert isinstance(error, errors.PermissionDenied)
    assert "authError" in str(error)
    assert "upload_id" not in str(error)
    assert proxy.faults() <= 3
    check(url, server, complete=False)


def test_who_may_not_delete_saves_and_leaves_what_a_sweep_removes(
    server: GcsServer,
    proxy: FaultProxy,
    url: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    proxy.rule = Once("Delete", Fault.FORBIDDEN, times=10_000)
    assert save(url, proxy.url) is None
    assert "were left behind" in caplog.text
    # By then the launch began long ago.
    monkeypatch.setattr(sweep, "LEASE_LIFE", timedelta(seconds=-1))
    with pipeline(url, server.url, retention={"sweep_after_seconds": 0}) as opened:
        assert opened.sweep().uploads == 1
    check(url, server, complete=True)


def test_a_cancelled_save_leaves_nothing(server: GcsServer, proxy: FaultProxy, url: str) -> None:
    hanging = threading.Event()

    def hang(request: Request) -> Fault | None:
        if request.operation != "Send":
            return None
        hanging.set()
        return Fault.HANG

    proxy.rule = hang
    with pipeline(url, proxy.url) as opened:
        handle = opened.save(state(), step=1)
        assert hanging.wait(30)
        handle.cancel()
        with pytest.raises(errors.SaveCancelled):
            handle.wait()
    check(url, server, complete=False)


LOAD_FAULTS = [*PASSING, Fault.SHORT]


@pytest.mark.parametrize("fault", sampled(LOAD_FAULTS, 2))
def test_a_load_survives_faults(
    server: GcsServer, proxy: FaultProxy, url: str, fault: Fault
) -> None:
    assert save(url, server.url) is None
    proxy.rule = Once("Get", fault, times=2)
    with pipeline(url, proxy.url, fault=fault) as opened:
        loaded = opened.load()
    assert proxy.faults() == 2
    assert loaded is not None
    assert same(loaded.state, state())


LOAD_REQUESTS = 14
"""About how many requests a load has, from opening to closing."""
LOAD_TURNS = [*itertools.product(range(LOAD_REQUESTS), LOAD_FAULTS)]


@pytest.mark.parametrize(("turn", "fault"), sampled(LOAD_TURNS, 2))
def test_each_request_of_a_load_in_turn(
    server: GcsServer, proxy: FaultProxy, url: str, turn: int, fault: Fault
) -> None:
    assert save(url, server.url) is None
    proxy.rule = Once(None, fault, behind=turn)
    with pipeline(url, proxy.url, fault=fault) as opened:
        loaded = opened.load()
    assert proxy.faults() == (turn < len(proxy.log))
    assert loaded is not None
    assert same(loaded.state, state())


def test_a_worker_process_saves(
    server: GcsServer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_registered_here(url):
        pytest.skip("This environment was made before the GCS backend: run make clean test")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"127.0.0.1:{server.port}")
    with ckpipe.SyncPipeline(url, worker="process") as opened:
        opened.save(state(), step=1, until="committed")
    check(url, server, complete=True)


def test_a_bit_flipped_in_a_small_object_is_read_again(
    server: GcsServer, proxy: FaultProxy, url: str
) -> None:
    assert save(url, server.url) is None
    with pipeline(url, proxy.url) as opened:
        proxy.rule = Once("Get", Fault.FLIPPED_BACK)
        assert opened.load(step=1) is not None
    assert proxy.faults() == 1


def test_a_bit_flipped_on_the_way_back_is_found(
    server: GcsServer, proxy: FaultProxy, url: str
) -> None:
    assert save(url, server.url) is None

    def flip(request: Request) -> Fault | None:
        ranged = request.operation == "Get" and "range" in request.headers
        return Fault.FLIPPED_BACK if ranged else None

    proxy.rule = flip
    with pipeline(url, proxy.url) as opened, pytest.raises(errors.CorruptCheckpoint):
        opened.load(step=1)


def test_a_bit_flipped_in_a_block_is_found_by_the_store(
    server: GcsServer, proxy: FaultProxy, url: str
) -> None:
    def flip(request: Request) -> Fault | None:
        large = request.operation in ("Put", "Send") and request.size > MIB
        return Fault.FLIPPED if large and proxy.faults() < 3 else None

    proxy.rule = flip
    assert save(url, proxy.url) is None
    assert proxy.faults() == 3
    check(url, server, complete=True)


@pytest.mark.skipif(not EVERY, reason="slow: make test-all runs it")
def test_a_server_is_killed_and_comes_back(url: str, tmp_path: Path) -> None:
    gcs_servers.set_up_process()
    [port], blocks = free_ports(1), threading.Semaphore(0)

    def count(request: Request) -> Fault | None:
        if request.operation == "Send":
            blocks.release()
        return None

    patience: dict[str, Any] = {"retries": 30, "backoff_seconds": 2, "backoff_max_seconds": 2}
    with contextlib.ExitStack() as servers, fault_proxy(port, GcsDialect()) as proxy:
        first = servers.enter_context(contextlib.ExitStack())
        server = first.enter_context(gcs_servers.emulator(tmp_path, port, keep=True))
        server.make_bucket(BUCKET)
        proxy.rule = count
        with pipeline(url, proxy.url, fault=Fault.HANG, **patience) as opened:
            handle = opened.save(state(), step=1)
            assert blocks.acquire(timeout=30)
            first.close()
            servers.enter_context(gcs_servers.emulator(tmp_path, port, keep=True))
            handle.wait()
        check(url, server, complete=True)


def test_a_store_that_overwrites_is_refused(server: GcsServer, proxy: FaultProxy, url: str) -> None:
    class Part:
        looked = False

        def state_dict(self) -> dict[str, Any]:
            self.looked = True
            return {}

    proxy.rule = lambda request: Fault.UNCONDITIONAL
    part = Part()
    with pipeline(url, proxy.url) as opened:
        assert opened.load() is None
        with pytest.raises(
            errors.StoreError, match=r"ignores ifGenerationMatch.*require_create_only=False"
        ):
            opened.save({"part": part}, step=1)
    assert not part.looked


async def test_a_store_that_overwrites_can_be_accepted(
    server: GcsServer, proxy: FaultProxy, url: str
) -> None:
    proxy.rule = lambda request: Fault.UNCONDITIONAL
    options: dict[str, Any] = {"endpoint_url": proxy.url, "require_create_only": False}
    async with GcsBackend(url, anonymous=True, **options) as backend:
        await backend.put("a", b"first", PutMode.CREATE)
        with pytest.raises(errors.ObjectExists):
            await backend.put("a", b"second", PutMode.CREATE)
        assert await backend.get("a", max_bytes=10) == b"first"
