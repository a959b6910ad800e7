"""A save succeeds although the answer to the write of a data file is lost, however that happens.

The store has done what it was asked, and the client does not hear of it: the connection is reset,
the answer comes after the try was given up, or the HTTP client has sent the request once more by
itself. A look at the object then tells whether this save has made it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import unquote

import anyio
import pytest
import torch

from ckpipe import errors
from ckpipe.backend import PutMode
from ckpipe_gcs import GcsBackend
from ckpipe_s3 import S3Backend
from tests.support.bucket_stores import Store, behind_proxy
from tests.support.fault_proxy import Fault, Request

BUCKET = "lost-answers"
MIB = 1 << 20

ONE_REQUEST = {"weight": torch.arange(100_000, dtype=torch.int32)}
IN_PARTS = {"weight": torch.arange(11 * MIB // 4, dtype=torch.int32)}
STATES = pytest.mark.parametrize("state", [ONE_REQUEST, IN_PARTS], ids=["one request", "in parts"])

MAKES = ("Put", "Complete", "Compose")
LOOKS = ("Head", "Look")

_data_file = re.compile(r"run-\d+/[^?&]*\.safetensors(?=$|[?&]|/compose)")


class LossyStore(Store):
    """A root whose writes of data files are disturbed."""

    log: list[str]

    def disturb(
        self, fault: Fault, times: int = 1, first: Callable[[str], object] = lambda name: None
    ) -> None:
        """Disturb the first requests that make a data file.

        Args:
            fault: How.
            times: How many of them.
            first: Called with the name of the data file before one is disturbed.
        """
        self.log = []

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

    def save(self, state: dict[str, Any], **fields: Any) -> None:
        """Save once through the proxy."""
        with self.pipeline(**fields) as opened:
            opened.save(state, step=1, until="committed")

    def made(self) -> int:
        """How many requests to make a data file the proxy has seen."""
        return sum(operation in MAKES for operation in self.log)

    def data_files(self) -> list[str]:
        """The names of all data files, and of parts of them."""
        return [name for name in self.names() if ".safetensors" in name]

    def ask(self, name: str, data: bytes | None = None) -> bytes:
        """Read an object, or make it, by another client, which nothing disturbs."""
        kind: Any = S3Backend if self.scheme == "s3" else GcsBackend
        options = {} if self.scheme == "s3" else {"anonymous": True}

        async def ask() -> bytes:
            root = f"{self.scheme}://{BUCKET}"
            async with kind(root, endpoint_url=self.server.url, **options) as backend:
                if data is not None:
                    await backend.put(name, data, PutMode.OVERWRITE)
                found: bytes = await backend.get(name, max_bytes=100 * MIB)
                return found

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(anyio.run, ask).result()


@pytest.fixture(params=["moto_server", "gcs_server"])
def store(request: pytest.FixtureRequest) -> Iterator[LossyStore]:
    """A root of each kind."""
    server = request.getfixturevalue(request.param)
    with behind_proxy(server, BUCKET) as proxy:
        yield LossyStore(server, proxy, BUCKET)


@pytest.mark.sample(3)
@pytest.mark.parametrize("times", [1, 2])
@STATES
def test_the_connection_is_reset_after_the_write(
    store: LossyStore, state: dict[str, Any], times: int
) -> None:
    # The client of S3 sends a PUT once more by itself, whose answer is then the first that comes.
    store.disturb(Fault.LOST, times)
    store.save(state)
    repeated = store.scheme == "s3" and state is ONE_REQUEST
    assert store.made() == 1 + repeated
    assert store.log[-1] in LOOKS
    store.check(state)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("fault", "worker"),
    [(Fault.UNANSWERED, "thread"), (Fault.UNANSWERED, "process"), (Fault.LATE, "thread")],
)
@STATES
def test_the_answer_comes_after_the_try_was_given_up(
    store: LossyStore, state: dict[str, Any], fault: Fault, worker: Any
) -> None:
    store.disturb(fault)
    store.save(state, worker=worker, attempt_timeout_seconds=1.5)
    if fault is Fault.UNANSWERED:
        assert store.log[-1] in LOOKS
    store.check(state)


@pytest.mark.sample(2)
@STATES
def test_the_answer_to_the_last_try_is_lost(store: LossyStore, state: dict[str, Any]) -> None:
    store.disturb(Fault.LOST, times=2)
    store.save(state, retries=0)
    store.check(state)


@pytest.mark.sample(2)
@STATES
def test_an_object_of_the_same_size_that_another_has_made_is_not_ours(
    store: LossyStore, state: dict[str, Any]
) -> None:
    store.save({"weight": state["weight"].flip(0)})
    [name] = store.data_files()
    foreign, taken = store.ask(name), list[str]()

    def take(name: str) -> None:
        store.ask(name, foreign)
        taken.append(name)

    store.disturb(Fault.RESET_BEFORE, first=take)
    with (
        store.pipeline() as opened,
        pytest.raises(errors.ObjectExists),
    ):
        opened.save(state, step=2, until="committed")
    assert store.ask(taken[0]) == foreign


@STATES
def test_a_save_that_is_cancelled_before_the_answer_comes_leaves_nothing(
    store: LossyStore, state: dict[str, Any]
) -> None:
    store.disturb(Fault.UNANSWERED)
    with store.pipeline() as opened:
        handle = opened.save(state, step=1)
        assert store.proxy.unanswered.wait(60)
        handle.cancel()
        with pytest.raises(errors.SaveCancelled):
            handle.wait()
    assert store.data_files() == []
    assert store.leftovers() == []
