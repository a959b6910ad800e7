"""Processes that work on one root, each of which can be stopped at one request to the store."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import anyio

import ckpipe
from ckpipe.testing import FaultyBackend, Landing, SlowBackend
from tests.support.actors import PATIENCE, DaemonThreads
from tests.support.pipelines import Stores, small_state

T = TypeVar("T")


def another(store: Stores) -> Stores:
    """The same objects behind another URL, with requests and faults of its own."""
    made = Stores()
    made.memory = store.memory
    made.faulty = FaultyBackend(made.memory)
    made.slow = SlowBackend(made.faulty)
    ckpipe.register_backend(made.scheme, made.backend)
    return made


def keys_of(store: Stores) -> set[str]:
    """The keys of all objects of a store."""

    async def listed() -> set[str]:
        return {each.key async for each in store.memory.list()}

    return anyio.run(listed)


def with_steps(store: Stores, *steps: int) -> Stores:
    """Save small states as steps; return another way to the store."""
    with ckpipe.SyncPipeline(store.url) as pipeline:
        for step in steps:
            pipeline.save(small_state(step), step=step).wait()
    return another(store)


class Stopped(Generic[T]):
    """A call that has been stopped at one of its requests, or has ended before that.

    On leaving the block it goes on.

    Args:
        store: The store; nothing but the call uses it by this URL meanwhile.
        call: The call.
        where: The number of the request among those of the call, or its verb.
        landing: Whether to stop it before or after the request has landed.
    """

    def __init__(
        self,
        store: Stores,
        call: Callable[[], T],
        where: int | str,
        landing: Landing = Landing.BEFORE,
    ) -> None:
        if isinstance(where, int):
            where += len(store.faulty.operations)
        stopped_or_over = threading.Event()
        store.faulty.call(lambda _: stopped_or_over.set(), where, landing)
        self._gate = store.faulty.pause(where, landing)
        self._future = DaemonThreads().submit(call)
        self._future.add_done_callback(lambda _: stopped_or_over.set())
        assert stopped_or_over.wait(PATIENCE)
        self.is_over = self._future.done()

    def __enter__(self) -> Stopped[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self._gate.release()

    def go_on(self) -> BaseException | None:
        """Let the call go on; return what it raises."""
        self._gate.release()
        return self._future.exception(PATIENCE)

    def result(self) -> T:
        """The result of a call that has gone on and raised nothing."""
        return self._future.result(PATIENCE)
