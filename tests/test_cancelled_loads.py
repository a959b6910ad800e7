"""Loads that are cancelled, by a scope or by asyncio itself, leave no thread behind that waits."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Literal

import anyio
import pytest
import torch
from stored_states import load, store, verified

from ckpipe.errors import StoreError
from ckpipe.testing import MemoryBackend

How = Literal["scope", "task"]


class Hanging(MemoryBackend):
    """A store that never answers one kind of request.

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

    async def cached(self, key: str, offset: int, size: int) -> None:
        await self._hang("cached")
        return

    def read_here(self, key: str, offset: int, buffer: memoryview) -> bool:
        if self.verb != "read_here":
            return False
        self.asked.set()
        time.sleep(0.05)
        anyio.run(MemoryBackend.read_into, self, key, offset, buffer)
        return True

    async def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        await self._hang("read_into")
        await super().read_into(key, offset, buffer)


def state() -> dict[str, torch.Tensor]:
    return {"big": torch.ones(4 << 20), "small": torch.ones(3)}


@pytest.mark.parametrize("how", ["scope", "task"])
@pytest.mark.parametrize("verb", ["cached", "read_here", "read_into"])
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


async def test_a_read_that_nobody_has_cancelled_is_not_lost_in_silence() -> None:
    backend = Interrupted("")
    await store(state(), backend)
    with pytest.raises(StoreError, match="cancelled a read"):
        await load(backend, {key: value * 0 for key, value in state().items()})
