"""Saves and loads through a store that refuses more than a few requests at a time."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest
import torch

import ckpipe
from ckpipe import events
from ckpipe.errors import Throttled
from ckpipe.testing import MemoryBackend
from ckpipe.testing.wrappers import Operation, Result, WrappedBackend
from tests.support.pipelines import loaded_state, same

_numbers = itertools.count()
BULK = ("write", "read_into")


class CrowdedBackend(WrappedBackend):
    """Serves at most so many reads and writes of blocks at a time, and refuses the others.

    Args:
        capacity: How many.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(MemoryBackend())
        self.capacity = capacity
        self.under_way = self.most = 0
        self.served = dict.fromkeys(BULK, 0)
        self.refused = dict.fromkeys(BULK, 0)

    async def around(self, operation: Operation, call: Callable[[], Awaitable[Result]]) -> Result:
        if operation.verb not in BULK or operation.size < 1000:
            return await call()
        if self.under_way >= self.capacity:
            self.refused[operation.verb] += 1
            raise Throttled("Too many requests")
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            await anyio.sleep(0.01)
            return await call()
        finally:
            self.under_way -= 1
            self.served[operation.verb] += 1


def state() -> dict[str, Any]:
    return {"w": torch.arange(4_000_000.0)}  # 62 blocks to write, and 16 ranges to read


@pytest.mark.parametrize("capacity", [1, 3])
def test_a_crowded_store_gets_fewer_requests_at_a_time(capacity: int) -> None:
    backend, scheme = CrowdedBackend(100), f"crowded{next(_numbers)}"
    ckpipe.register_backend(scheme, lambda url: backend)
    with ckpipe.SyncPipeline(
        f"{scheme}://",
        staging={"block_bytes": 1 << 18, "overlap": False},
        upload={"lanes": 12, "backoff_seconds": 0.001, "retries": 12},
        load={"lanes": 12},
    ) as pipeline:
        seen: list[events.Event] = []
        pipeline.events.add(seen.append)
        pipeline.save(state(), step=1).wait()
        backend.capacity, backend.most = capacity, 0
        backend.served = dict.fromkeys(BULK, 0)
        pipeline.save(state(), step=2).wait()
        assert same(loaded_state(pipeline), state())
        assert backend.most == capacity
        # Twelve lanes that come again and again would be refused far more often than served.
        assert 1 <= backend.refused["write"] < backend.served["write"] * 0.7
        assert 1 <= backend.refused["read_into"] < backend.served["read_into"] * 2
        told = [event for event in seen if isinstance(event, events.Retrying)]
        assert len(told) == backend.refused["write"]
        # A store with room again is used by more lanes again.
        backend.capacity, backend.most = 100, 0
        pipeline.save(state(), step=3).wait()
        pipeline.save(state(), step=4).wait()
        assert backend.most > capacity
