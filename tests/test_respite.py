"""Retention waits a moment after a save, and not where somebody waits for it."""

from __future__ import annotations

import queue
from pathlib import Path

import anyio
import pytest
import torch

import ckpipe
from ckpipe.events import Event, Pruned
from ckpipe.running import site_making
from ckpipe.saves.respite import Respite

HUNG = 60.0
STATE = {"w": torch.ones(3)}


async def test_it_ends_when_somebody_ends_it_or_waits_for_what_comes_after_it() -> None:
    respite = Respite(3600.0)
    with anyio.fail_after(HUNG):
        for _ in range(2):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(respite.take)
                await anyio.wait_all_tasks_blocked()
                respite.end()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(respite.take)
            await anyio.wait_all_tasks_blocked()
            with respite.skipped():
                await respite.take()
        await Respite().take()
    with anyio.move_on_after(0) as scope:
        await respite.take()
    assert scope.cancelled_caught, "nobody waits for it any more"


@pytest.fixture
def long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A respite that ends by itself after all tests."""
    monkeypatch.setattr(site_making, "RESPITE_SECONDS", 3600.0)


@pytest.mark.usefixtures("long")
def test_old_checkpoints_are_removed_when_the_next_save_begins_and_when_leaving(
    tmp_path: Path,
) -> None:
    removed: queue.Queue[str] = queue.Queue()

    def note(event: Event) -> None:
        if isinstance(event, Pruned):
            removed.put(event.removed)

    with ckpipe.SyncPipeline(tmp_path, keep_last=1, drain_timeout_seconds=HUNG / 2) as pipeline:
        pipeline.events.add(note)
        first, second = (pipeline.save(STATE, step=step, until="committed").id for step in (1, 2))
        assert removed.empty()
        third = pipeline.save(STATE, step=3, until="committed").id
        assert removed.get(timeout=HUNG) == str(first)
        assert removed.empty()
    assert removed.get_nowait() == str(second)
    with ckpipe.SyncPipeline(tmp_path, read_only=True) as pipeline:
        assert [each.id for each in pipeline.steps()] == [third]


@pytest.mark.usefixtures("long")
async def test_a_load_does_not_wait_for_it(tmp_path: Path) -> None:
    async with ckpipe.Pipeline(tmp_path, keep_last=1) as pipeline:
        for step in (1, 2):
            await pipeline.save(STATE, step=step, until="committed")
        with anyio.fail_after(HUNG):
            assert await pipeline.load(step=2) is not None
        assert [each.step for each in await pipeline.steps()] == [2]
