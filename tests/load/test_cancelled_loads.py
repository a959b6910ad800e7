"""Loads that are cancelled, by a scope or by asyncio itself, leave no thread behind that waits."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Literal

import anyio
import pytest
import torch

from ckpipe.backend import ObjectReader
from ckpipe.errors import StoreError
from ckpipe.testing import MemoryBackend
from tests.support.stored_states import load, store, verified

How = Literal["scope", "task"]


class Hanging(MemoryBackend):
    """A store that never answers one kind of request, or slowly if that blocks a thread.

    Args:
        verb: Which.
    """

    def __init__(self, verb: str) -> None:
        super().__init__()
        self.verb, self.asked = verb, threading.Event()

    async def _hang(self, verb: str) -> None:
        if verb == self.verb:
            self.asked.set()
            await anyio.sleep_forever()

    def open_object(self, key: str) -> ObjectReader | None:
        if self.verb == "open_object":
            self.asked.set()
            time.sleep(0.05)
        opened = super().open_object(key)
        assert opened is not None
        return None if self.verb == "read_into" else SlowObject(self, opened)

    async def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        await self._hang("read_into")
        await super().read_into(key, offset, buffer)


class SlowObject:
    """An object of this store, which a thread reads slowly."""

    def __init__(self, backend: Hanging, opened: ObjectReader) -> None:
        self.backend, self.opened, self.size = backend, opened, opened.size

    def is_cached(self, offset: int, size: int) -> bool:
        return False

    def read_into(self, offset: int, buffer: memoryview, *, cached: bool) -> None:
        if self.backend.verb == "blocking read":
            self.backend.asked.set()
        time.sleep(0.05)
        self.opened.read_into(offset, buffer, cached=cached)


def state() -> dict[str, torch.Tensor]:
    return {"big": torch.ones(4 << 20), "small": torch.ones(3)}


@pytest.mark.parametrize("how", ["scope", "task"])
@pytest.mark.parametrize("verb", ["open_object", "blocking read", "read_into"])
@pytest.mark.parametrize("checks", [False, True])
async def test_a_load_or_check_ends_when_it_is_cancelled(
    verb: str, how: How, *, checks: bool
) -> None:
    backend = Hanging(verb)
    await store(state(), backend)
    scope = anyio.CancelScope()

    async def work() -> None:
        with scope:
            if checks:
                await verified(backend)
            else:
                await load(backend, {key: value * 0 for key, value in state().items()})

    task = asyncio.create_task(work())
    assert await anyio.to_thread.run_sync(backend.asked.wait, 20)
    if how == "task":
        task.cancel()
    else:
        scope.cancel()
    done, _ = await asyncio.wait([task], timeout=20)
    assert done
    assert task.cancelled() if how == "task" else scope.cancelled_caught


class Interrupted(Hanging):
    """A store whose client cancels one of its own reads."""

    async def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        if not self.asked.is_set():
            self.asked.set()
            raise asyncio.CancelledError
        await super().read_into(key, offset, buffer)


async def test_a_read_that_was_not_cancelled_is_not_lost_in_silence() -> None:
    backend = Interrupted("")
    await store(state(), backend)
    with pytest.raises(StoreError, match="cancelled a read"):
        await load(backend, {key: value * 0 for key, value in state().items()})
