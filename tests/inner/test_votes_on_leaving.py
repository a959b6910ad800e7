"""The time that a vote on a last save may take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import anyio

from ckpipe.preemption import StopRequest
from ckpipe.ranks.launch import Launch
from ckpipe.ranks.schedule import SaveSchedule, SaveStepAgreement
from ckpipe.ranks.world import Topology
from ckpipe.running.coordinated_saves import CoordinatedSaves
from ckpipe.testing import MemoryBackend


async def test_votes_take_a_quarter_of_the_time_that_is_left() -> None:
    times = iter([0.0])
    request = StopRequest(lambda: next(times, 98.0))
    request.tell()
    backend, attempt = MemoryBackend(), "20260101T000000000Z-run"
    context: Any = SimpleNamespace(
        store=SimpleNamespace(retrying=backend),
        settings=SimpleNamespace(
            look_every_seconds=0.1, preemption=SimpleNamespace(grace_seconds=100.0)
        ),
        attempt=attempt,
        rank=0,
        world_size=2,
    )
    schedule = SaveSchedule(None, None)
    launch = Launch(backend, attempt, Topology(0, 2))
    calls = CoordinatedSaves(context, launch, SaveStepAgreement(1.0), schedule, request)
    with anyio.fail_after(10):
        assert not await calls.leave_at(3)
