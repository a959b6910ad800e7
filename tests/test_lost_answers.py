"""A save succeeds although the answer to the write of a data file is lost, however that happens.

The store has done what it was asked, and the client does not hear of it: the connection is reset,
the answer comes after the try was given up, or the HTTP client has sent the request once more by
itself. A look at the object then tells whether this save has made it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import anyio
import pytest
import torch
from fault_proxy import Fault, FaultProxy, GcsDialect, Request, S3Dialect, fault_proxy
from gcs_servers import GcsServer
from pipelines import same
from s3_servers import S3Server

import ckpipe
from ckpipe import errors
from ckpipe.backend import Backend, PutMode
from ckpipe_gcs import GcsBackend
from ckpipe_s3 import S3Backend

BUCKET = "lost-answers"
MIB = 1 << 20

ONE_REQUEST = {"weight": torch.arange(100_000, dtype=torch.int32)}
IN_PARTS = {"weight": torch.arange(11 * MIB // 4, dtype=torch.int32)}
STATES = pytest.mark.parametrize("state", [ONE_REQUEST, IN_PARTS], ids=["one request", "in parts"])

MAKES = ("Put", "Complete", "Compose")
LOOKS = ("Head", "Look")

_numbers = itertools.count()
_data_file = re.compile(r"run-\d+/[^?&]*\.safetensors(?=$|[?&]|/compose)")


@dataclass
class Store:
    """A root on a server behind a proxy.

    Args:
        server: The server.
        proxy: The proxy.
        scheme: The scheme of URLs.
        options: Options of the backend besides the endpoint.
        root: The root in the bucket.
        log: The requests that make or look at a data file, as the proxy has seen them.
    """

    server: S3Server | GcsServer
    proxy: FaultProxy
    scheme: str
    options: dict[str, Any]
    root: str = field(default_factory=lambda: f"run-{next(_numbers)}")
    log: list[str] = field(default_factory=list)

    def disturb(
        self, fault: Fault, times: int = 1, first: Callable[[str], object] = lambda name: None
    ) -> None:
        """Disturbs the first requests that make a data file.

        Args:
            fault: How.
            times: How many of them.
            first: Called with the name of the data file before one is disturbed.
        """

        def rule(request: Request) -> Fault | None:
            named = _data_file.search(unquote(request.target))
            if named is None or request.operation not in MAKES + LOOKS:
                return None
            self.log.append(request.operation)
            if request.operation in LOOKS or self.made() > times:
                return None
            first(named[0])
            return fault

        self.proxy.rule = rule

    def pipeline(self, endpoint: str, worker: Any, **upload: Any) -> ckpipe.SyncPipeline:
        """A pipeline whose larger data files are made of parts."""
        return ckpipe.SyncPipeline(
            f"{self.scheme}://{BUCKET}/{self.root}",
            staging={"block_bytes": 5 * MIB},
            upload={"retries": 9, "backoff_seconds": 0.01, **upload},
            backends={self.scheme: {"endpoint_url": endpoint, **self.options}},
            worker=worker,
        )

    def save(self, state: dict[str, Any], worker: Any = "thread", **upload: Any) -> None:
        """Saves once through the proxy."""
        with self.pipeline(self.proxy.url, worker, **upload) as opened:
            opened.save(state, step=1, until="committed")

    def check(self, state: dict[str, Any]) -> None:
        """Checks that the checkpoint is complete and right, and nothing is left beside it."""
        assert len(self.data_files()) == 1
        assert self.server.open_uploads(BUCKET) == []
        with self.pipeline(self.server.url, "thread") as opened:
            opened.verify(1)
            loaded = opened.load()
        assert loaded is not None
        assert same(loaded.state, state)

    def made(self) -> int:
        """How many requests to make a data file the proxy has seen."""
        return sum(operation in MAKES for operation in self.log)

    def data_files(self) -> list[str]:
        """The names of all data files, and of parts of them."""
        below = f"{self.root}/"
        return [name for name in self.server.names(BUCKET, below) if ".safetensors" in name]

    def write(self, name: str, data: bytes) -> None:
        """Makes an object by another client, which nothing disturbs."""

        async def write() -> None:
            async with self._backend() as backend:
                await backend.put(name, data, PutMode.OVERWRITE)

        with ThreadPoolExecutor(1) as thread:
            thread.submit(anyio.run, write).result()

    def read(self, name: str) -> bytes:
        """Reads an object."""

        async def read() -> bytes:
            async with self._backend() as backend:
                return await backend.get(name, max_bytes=100 * MIB)

        return anyio.run(read)

    def _backend(self) -> Backend:
        kind: Any = S3Backend if self.scheme == "s3" else GcsBackend
        made: Backend = kind(
            f"{self.scheme}://{BUCKET}", endpoint_url=self.server.url, **self.options
        )
        return made


@pytest.fixture(params=["s3", "gs"])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    """A root of each kind."""
    scheme, of_s3 = request.param, request.param == "s3"
    server = request.getfixturevalue("moto_server" if of_s3 else "gcs_server")
    server.make_bucket(BUCKET)
    with fault_proxy(server.port, S3Dialect() if of_s3 else GcsDialect()) as proxy:
        yield Store(server, proxy, scheme, {} if of_s3 else {"anonymous": True})


@pytest.mark.parametrize("times", [1, 2])
@STATES
def test_the_connection_is_reset_after_the_write(
    store: Store, state: dict[str, Any], times: int
) -> None:
    # The client of S3 sends a PUT once more by itself, whose answer is then the first that comes.
    store.disturb(Fault.LOST, times)
    store.save(state)
    repeated = store.scheme == "s3" and state is ONE_REQUEST
    assert store.made() == 1 + repeated
    assert store.log[-1] in LOOKS
    store.check(state)


@pytest.mark.parametrize(
    ("fault", "worker"),
    [(Fault.UNANSWERED, "thread"), (Fault.UNANSWERED, "process"), (Fault.LATE, "thread")],
)
@STATES
def test_the_answer_comes_after_the_try_was_given_up(
    store: Store, state: dict[str, Any], fault: Fault, worker: Any
) -> None:
    store.disturb(fault)
    store.save(state, worker, attempt_timeout_seconds=1.5)
    if fault is Fault.UNANSWERED:
        assert store.log[-1] in LOOKS
    store.check(state)


@STATES
def test_the_answer_to_the_last_try_is_lost(store: Store, state: dict[str, Any]) -> None:
    store.disturb(Fault.LOST, times=2)
    store.save(state, retries=0)
    store.check(state)


@STATES
def test_an_object_of_the_same_size_that_another_has_made_is_not_ours(
    store: Store, state: dict[str, Any]
) -> None:
    store.save({"weight": state["weight"].flip(0)})
    [name] = store.data_files()
    foreign, taken = store.read(name), list[str]()

    def take(name: str) -> None:
        store.write(name, foreign)
        taken.append(name)

    store.disturb(Fault.RESET_BEFORE, first=take)
    with (
        store.pipeline(store.proxy.url, "thread") as opened,
        pytest.raises(errors.ObjectExists),
    ):
        opened.save(state, step=2, until="committed")
    assert store.read(taken[0]) == foreign


@STATES
def test_a_save_that_is_cancelled_before_the_answer_comes_leaves_nothing(
    store: Store, state: dict[str, Any]
) -> None:
    store.disturb(Fault.UNANSWERED)
    with store.pipeline(store.proxy.url, "thread") as opened:
        handle = opened.save(state, step=1)
        assert store.proxy.unanswered.wait(60)
        handle.cancel()
        with pytest.raises(errors.SaveCancelled):
            handle.wait()
    assert store.data_files() == []
    assert store.server.open_uploads(BUCKET) == []
