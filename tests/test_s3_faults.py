"""Whatever goes wrong between a pipeline and S3, a save succeeds in its budget or fails clearly.

The server is moto, behind a proxy that disturbs requests. After each run a second pipeline, which
nothing disturbs, finds the checkpoint absent or complete and right, and no upload is open. The
plain run takes a few cases of each matrix.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from botocore.exceptions import ClientError
from fault_proxy import Fault, FaultProxy, Request, fault_proxy
from pipelines import same
from s3_servers import SECRET, S3Server, seaweedfs, set_up_process, weed
from sampling import EVERY, SEED
from server_processes import free_ports

import ckpipe
from ckpipe import errors
from ckpipe.backend import PutMode
from ckpipe.cli.app import run
from ckpipe_s3 import S3Backend

BUCKET = "faults"
MIB = 1 << 20

_numbers = itertools.count()


def sample(cases: Iterable[tuple[Any, ...]], count: int) -> list[Any]:
    """So many of the cases, chosen by the seed, or all of them in the long form."""
    every = list(cases)
    chosen = every if EVERY else random.Random(SEED).sample(every, count)
    return [pytest.param(*case, id="-".join(map(name_of, case))) for case in chosen]


def name_of(value: object) -> str:
    """How a parameter is called in the name of a test."""
    return value.name if isinstance(value, Fault) else str(value)


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


def pipeline(
    url: str,
    endpoint: str,
    profile: str | None = None,
    worker: Any = "thread",
    fault: Fault | None = None,
    **upload: Any,
) -> ckpipe.SyncPipeline:
    """A pipeline that tries again at once, and gives up soon only requests that a fault hangs."""
    hangs = fault is Fault.HANG
    timeout = 1.0 if hangs else 60.0
    options = {"endpoint_url": endpoint, "request_timeout": timeout, "profile": profile}
    return ckpipe.SyncPipeline(
        url,
        staging={"block_bytes": 5 * MIB},
        upload={
            "retries": 9,  # on a busy machine some that do not hang are given up, too
            "backoff_seconds": 0.01,
            "attempt_timeout_seconds": 1.5 if hangs else 120.0,
            "lanes": 2,
            **upload,
        },
        backends={"s3": options},
        worker=worker,
    )


def save(url: str, endpoint: str, **fields: Any) -> ckpipe.errors.CkpipeError | None:
    """Saves once, and returns the error if there was one."""
    try:
        with pipeline(url, endpoint, **fields) as opened:
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


@pytest.mark.parametrize("worker", ["thread", "process"])
def test_a_save_and_a_load_through_nothing_but_a_proxy(
    server: S3Server, proxy: FaultProxy, url: str, worker: Any
) -> None:
    assert save(url, proxy.url, worker=worker) is None
    operations = [operation for operation, _ in proxy.log]
    assert operations.count("UploadPart") >= 3  # more if this machine is slow
    assert operations.count("CreateUpload") == operations.count("Complete") == 1
    check(url, server, complete=True)


WRITES = ("Put", "CreateUpload", "UploadPart", "Complete")
PASSING = (
    Fault.UNAVAILABLE,
    Fault.THROTTLED,
    Fault.RESET_AT_ONCE,
    Fault.RESET_BEFORE,
    Fault.RESET_WITHIN,
    Fault.LOST,
    Fault.RESET_BACK,
    Fault.SHORT,
    Fault.HANG,
)
"""What a request that is sent again gets over."""

SAVE_TURNS, LOAD_TURNS = 18, 16
"""About how many requests a save has, and a load, from opening to closing."""


@pytest.mark.parametrize(
    ("turn", "fault"), sample(itertools.product(range(SAVE_TURNS), PASSING), 5)
)
def test_each_request_of_a_save_in_turn(
    server: S3Server, proxy: FaultProxy, url: str, turn: int, fault: Fault
) -> None:
    proxy.rule = Once(None, fault, behind=turn)
    assert save(url, proxy.url, fault=fault) is None
    assert proxy.faults() == (turn < len(proxy.log))
    check(url, server, complete=True)


@pytest.mark.parametrize(
    ("turn", "fault"), sample(itertools.product(range(LOAD_TURNS), PASSING), 4)
)
def test_each_request_of_a_load_in_turn(
    server: S3Server, proxy: FaultProxy, url: str, turn: int, fault: Fault
) -> None:
    assert save(url, server.url) is None
    proxy.rule = Once(None, fault, behind=turn)
    with pipeline(url, proxy.url, fault=fault) as opened:
        loaded = opened.load()
    assert proxy.faults() == (turn < len(proxy.log))
    assert loaded is not None
    assert same(loaded.state, state())


@pytest.mark.parametrize(
    ("operation", "fault"),
    sample(itertools.product((*WRITES, "Head", "List"), PASSING[:-1]), 3),
)
def test_a_save_survives_a_storm(
    server: S3Server, proxy: FaultProxy, url: str, operation: str, fault: Fault
) -> None:
    proxy.rule = Once(operation, fault, times=4)
    assert save(url, proxy.url) is None
    check(url, server, complete=True)


@pytest.mark.parametrize(
    ("operation", "fault"), sample(itertools.product(("UploadPart", "Complete"), PASSING), 1)
)
def test_a_worker_process_survives_faults(
    server: S3Server, proxy: FaultProxy, url: str, operation: str, fault: Fault
) -> None:
    proxy.rule = Once(operation, fault, times=2)
    assert save(url, proxy.url, worker="process", fault=fault) is None
    assert proxy.faults() >= 1
    check(url, server, complete=True)


@pytest.mark.parametrize(
    ("operation", "fault"), sample(itertools.product(("Get", "Put", "List"), PASSING[:-1]), 2)
)
def test_a_load_survives_a_storm(
    server: S3Server, proxy: FaultProxy, url: str, operation: str, fault: Fault
) -> None:
    assert save(url, server.url) is None
    proxy.rule = Once(operation, fault, times=4)
    with pipeline(url, proxy.url) as opened:
        loaded = opened.load()
    assert loaded is not None
    assert same(loaded.state, state())


FOR_EVER = (Fault.UNAVAILABLE, Fault.THROTTLED, Fault.RESET_WITHIN, Fault.LOST, Fault.HANG)


@pytest.mark.parametrize(("operation", "fault"), sample(itertools.product(WRITES, FOR_EVER), 2))
def test_a_save_gives_up_clearly(
    server: S3Server, proxy: FaultProxy, url: str, operation: str, fault: Fault
) -> None:
    def of_a_save(request: Request) -> Fault | None:  # those of opening pass
        hit = operation == request.operation and (operation != "Put" or "/step-" in request.target)
        return fault if hit else None

    proxy.rule = of_a_save
    began = time.monotonic()
    error = save(url, proxy.url, fault=fault, retries=2, lanes=1)
    assert time.monotonic() - began < 60
    if fault is Fault.LOST and operation in ("Complete", "Put"):
        assert error is None  # it did take place, and that is seen
        return check(url, server, complete=True)
    assert isinstance(error, errors.StoreUnavailable)
    assert url in str(error) or fault is Fault.HANG
    return check(url, server, complete=False)


@pytest.mark.parametrize(("operation", "fault"), sample(itertools.product(["Get"], FOR_EVER), 1))
def test_a_load_gives_up_clearly(
    server: S3Server, proxy: FaultProxy, url: str, operation: str, fault: Fault
) -> None:
    assert save(url, server.url) is None
    proxy.rule = Once(operation, fault, times=10_000, behind=1)
    with pipeline(url, proxy.url, fault=fault, retries=2) as opened:
        with pytest.raises(errors.StoreUnavailable):
            opened.load(step=1)
        proxy.rule = lambda request: None
        assert opened.load(step=1) is not None  # and the pipeline goes on


def test_a_save_after_a_failed_one_succeeds(server: S3Server, proxy: FaultProxy, url: str) -> None:
    with pipeline(url, proxy.url, retries=0) as opened:
        proxy.rule = Once("UploadPart", Fault.UNAVAILABLE, times=2)
        with pytest.raises(errors.Throttled):
            opened.save(state(7), step=0, until="committed")
        proxy.rule = lambda request: None  # the first refusal may have kept the second from coming
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


def test_a_run_without_the_right_to_delete(server: S3Server, proxy: FaultProxy, url: str) -> None:
    proxy.rule = lambda request: Fault.FORBIDDEN if request.operation == "Delete" else None
    with pipeline(url, proxy.url) as opened:
        opened.save(state(), step=1, until="committed")
        assert opened.load(step=1) is not None
        with pytest.raises(errors.PermissionDenied, match=r"docs/tutorials/s3\.md"):
            opened.delete(1, force=True)
    assert proxy.faults() > 1


def test_looking_needs_no_right_to_write(
    server: S3Server, proxy: FaultProxy, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert save(url, server.url) is None
    monkeypatch.setenv("CKPIPE_BACKENDS__S3__ENDPOINT_URL", proxy.url)
    writes = ("PUT", "POST", "DELETE")
    proxy.rule = lambda request: Fault.FORBIDDEN if request.method in writes else None
    for command in ("ls", "info", "verify"):
        assert run([command, url]) == 0
    with pipeline(url, proxy.url) as opened:
        loaded = opened.load()
        assert loaded is not None
        assert same(loaded.state, state())
        with pytest.raises(errors.PermissionDenied):
            opened.save(state(), step=2)


PROCESS = """
import datetime, json, pathlib, sys
counter = pathlib.Path(sys.argv[1])
number = int(counter.read_text()) + 1 if counter.exists() else 1
counter.write_text(str(number))
# They run out so soon that the client fetches new ones for every request.
until = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(minutes=2)
print(json.dumps({
    "Version": 1, "AccessKeyId": f"KEY{number}", "SecretAccessKey": "secret",
    "SessionToken": f"token-{number}", "Expiration": until.isoformat(),
}))
"""


def test_credentials_are_refreshed_in_the_middle_of_a_save(
    server: S3Server,
    proxy: FaultProxy,
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program, counter = tmp_path / "credentials.py", tmp_path / "counter"
    program.write_text(PROCESS)
    config = tmp_path / "config"
    command = f"{sys.executable} {program} {counter}"
    config.write_text(f"[profile refreshed]\ncredential_process = {command}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    seen: list[str] = []

    def expired(request: Request) -> Fault | None:
        """Refuses credentials that others have followed."""
        token = request.headers["x-amz-security-token"]
        if token not in seen:
            seen.append(token)
        return Fault.EXPIRED if token in seen[:-4] else None

    proxy.rule = expired
    with pipeline(url, proxy.url, profile="refreshed") as opened:
        opened.save(state(), step=1, until="committed")
    assert len(seen) > 5
    assert proxy.faults() == 0
    check(url, server, complete=True)


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
    with pipeline(url, proxy.url) as opened:
        handle = opened.save(state(), step=1)
        assert hanging.wait(30)
        handle.cancel()
        with pytest.raises(errors.SaveCancelled):
            handle.wait()
    check(url, server, complete=False)


def of_data_files(fault: Fault) -> Callable[[Request], Fault | None]:
    """Disturbs every read of a data file."""
    return lambda request: fault if "range" in request.headers else None


def test_a_bit_flipped_once_on_the_way_back_is_read_again(
    server: S3Server, proxy: FaultProxy, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    small = {str(n): torch.rand(1000) for n in range(300)}  # so many that they are taken together
    saved = state() | small
    with pipeline(url, server.url) as opened:
        opened.save(state(1), step=1, until="committed")
        opened.save(saved, step=2, until="committed")
    for turn in itertools.count():
        proxy.rule = Once("Get", Fault.FLIPPED_BACK, behind=turn)
        proxy.log.clear()
        with pipeline(url, proxy.url) as opened:
            loaded = opened.load(fallback=True)
        assert loaded is not None
        assert loaded.step == 2
        assert same(loaded.state, saved)
        if not proxy.faults():
            break
        assert "came damaged and was right when it was read again" in caplog.text
        caplog.clear()
    assert turn > 2


def test_a_copy_reads_a_flipped_bit_again(
    server: S3Server,
    proxy: FaultProxy,
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert save(url, server.url) is None
    monkeypatch.setenv("CKPIPE_BACKENDS__S3__ENDPOINT_URL", proxy.url)
    for turn in itertools.count():
        proxy.rule = Once("Get", Fault.FLIPPED_BACK, behind=turn)
        proxy.log.clear()
        target = tmp_path / str(turn)
        assert run(["cp", url, str(target)]) == 0
        with ckpipe.SyncPipeline(target) as opened:
            loaded = opened.load()
        assert loaded is not None
        assert same(loaded.state, state())
        if not proxy.faults():
            break
    assert turn > 2


def test_bits_flipped_on_the_way_back_each_time_are_told_from_damage_on_the_store(
    server: S3Server, proxy: FaultProxy, url: str
) -> None:
    assert save(url, server.url) is None
    proxy.rule = of_data_files(Fault.FLIPPED_BACK)
    with (
        pipeline(url, proxy.url) as opened,
        pytest.raises(
            errors.CorruptCheckpoint,
            match=r"Chunk .* came differently.* damaged on the way.*network",
        ),
    ):
        opened.load(step=1)


@pytest.mark.parametrize("suffix", [".safetensors", ".json"])
def test_damage_on_the_store_is_told_as_that(server: S3Server, url: str, suffix: str) -> None:
    assert save(url, server.url) is None
    root = url.removeprefix(f"s3://{BUCKET}/")
    [name] = [each for each in server.names(BUCKET, f"{root}/step-") if each.endswith(suffix)]
    server.flip_bit(BUCKET, name)
    with pipeline(url, server.url) as opened:
        for look in (opened.load, opened.verify):
            with pytest.raises(errors.CorruptCheckpoint, match=r"twice .* the store has it"):
                look(step=1)


@pytest.mark.parametrize("turn", sample(zip(range(LOAD_TURNS), strict=True), 1))
def test_a_bit_flipped_in_any_answer_of_a_load_is_found(
    server: S3Server, proxy: FaultProxy, url: str, turn: int
) -> None:
    assert save(url, server.url) is None
    proxy.rule = Once(None, Fault.FLIPPED_BACK, behind=turn)
    try:
        with pipeline(url, proxy.url) as opened:
            loaded = opened.load(step=1)
    except errors.CkpipeError:
        return
    assert loaded is not None
    assert same(loaded.state, state())


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
@pytest.mark.parametrize("operation", ["CreateUpload", "UploadPart", "Complete", "Get"])
def test_a_server_is_killed_and_comes_back(url: str, tmp_path: Path, operation: str) -> None:
    set_up_process()
    ports, reached = free_ports(4), threading.Semaphore(0)

    def count(request: Request) -> Fault | None:
        if request.operation == operation:
            reached.release()
        return None

    patience: dict[str, Any] = {"retries": 30, "backoff_seconds": 2, "backoff_max_seconds": 2}
    with contextlib.ExitStack() as servers, fault_proxy(ports[-1]) as proxy:
        first = servers.enter_context(contextlib.ExitStack())
        server = first.enter_context(seaweedfs(tmp_path, ports))
        server.make_bucket(BUCKET)
        if operation == "Get":
            assert save(url, server.url) is None
        proxy.rule = count
        fields = {"fault": Fault.HANG} | patience
        with pipeline(url, proxy.url, **fields) as opened, ThreadPoolExecutor(1) as thread:
            work = (
                thread.submit(opened.load) if operation == "Get" else opened.save(state(), step=1)
            )
            assert reached.acquire(timeout=30)
            first.close()
            servers.enter_context(seaweedfs(tmp_path, ports))
            if isinstance(work, Future):
                loaded = work.result()
                assert loaded is not None
                assert same(loaded.state, state())
            else:
                work.wait()
        check(url, server, complete=True)


def test_a_store_that_overwrites_is_refused(server: S3Server, proxy: FaultProxy, url: str) -> None:
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
            errors.StoreError, match=r"ignores If-None-Match.*require_create_only=False"
        ):
            opened.save({"part": part}, step=1)
    assert not part.looked


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
