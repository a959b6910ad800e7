"""Calls that are left or interrupted, and saves that are refused, save and hold nothing more."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from typing import Any

import anyio
import pytest
import torch

import ckpipe
from ckpipe.errors import UsageError
from tests.support.actors import PATIENCE, DaemonThreads, Held, is_free
from tests.support.actors import until as waiting
from tests.support.pipelines import Stateful, Stores, awaited_state


@pytest.mark.parametrize("until", ["staged", "committed"])
async def test_what_changes_after_a_cancelled_save_is_in_no_checkpoint(
    store: Stores, threads: DaemonThreads, until: Any
) -> None:
    weight = torch.zeros(1000)
    async with ckpipe.Pipeline(store.url) as pipeline:
        lock = pipeline.lock
        trainer = Held(threads, lock.mutating)
        call = asyncio.create_task(pipeline.save({"weight": weight}, step=1, until=until))
        await anyio.to_thread.run_sync(lambda: waiting(lock, waiters=1))
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await anyio.to_thread.run_sync(lambda: waiting(lock, waiters=0))
        weight.fill_(1)
        trainer.end()
        assert is_free(lock)
        await (await pipeline.save({"weight": weight}, step=2))
        assert [info.step for info in await pipeline.steps()] == [2]


async def test_a_save_that_is_copied_goes_on_without_its_caller(store: Stores) -> None:
    store.slow.hold("write")
    weight, staged = torch.zeros(1000), asyncio.Event()
    async with ckpipe.Pipeline(store.url) as pipeline:
        here = asyncio.get_running_loop()
        pipeline.on_staged(lambda _: here.call_soon_threadsafe(staged.set))
        call = asyncio.create_task(pipeline.save({"weight": weight}, step=1, until="committed"))
        with anyio.fail_after(PATIENCE):
            await staged.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        weight.fill_(1)
        store.slow.release()
    async with ckpipe.Pipeline(store.url) as pipeline:
        assert not (await awaited_state(pipeline, 1))["weight"].any()


def test_an_interrupt_while_a_save_waits_for_memory(
    store: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(caller: object, end: Future[Any]) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    settings: dict[str, Any] = {"staging_bytes": "64KiB", "staging": {"block_bytes": 65536}}
    weight = torch.zeros(1000)
    with ckpipe.SyncPipeline(store.url, **settings) as pipeline:
        store.slow.hold("write")
        first = pipeline.save({"weight": weight}, step=0)
        monkeypatch.setattr("ckpipe.loop_thread.Caller.serve_until", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pipeline.save({"weight": weight}, step=1)
        weight.fill_(1)
        store.slow.release()
        first.wait()
        pipeline.save({"weight": weight}, step=2).wait()
        assert [info.step for info in pipeline.steps()] == [0, 2]


def test_an_interrupt_before_the_caller_knows_of_its_save(
    store: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, gate = torch.zeros(1000), Stateful(lambda: threading.Event().wait(PATIENCE))
    with ckpipe.SyncPipeline(store.url) as pipeline:
        pipeline.save({"weight": weight}, step=0).wait()  # only later ones begin at once
        loop: Any = pipeline._loop
        call = loop.call

        def interrupted(*args: Any, **kwargs: Any) -> None:
            monkeypatch.undo()
            assert call(*args, **kwargs) is not None
            raise KeyboardInterrupt

        store.slow.hold("write")  # that it ends is not by chance
        monkeypatch.setattr(loop, "call", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pipeline.save({"gate": gate, "weight": weight}, step=1)
        store.slow.release()
        pipeline.save({"weight": weight}, step=2).wait()
        assert [info.step for info in pipeline.steps()] == [0, 2]


def ones() -> dict[str, Any]:
    return {"tensor": torch.ones(3)}


def interrupted() -> dict[str, Any]:
    raise KeyboardInterrupt


def test_a_save_within_a_save_does_not_wait_for_its_memory(store: Stores) -> None:
    def save_again() -> dict[str, Any]:
        """Save, as the handler of a signal does that arrives now."""
        with pytest.raises(UsageError, match="inside another"):
            pipeline.save(ones(), step=1)
        return ones()

    with ckpipe.SyncPipeline(store.url) as pipeline:
        pipeline.save({"object": Stateful(ones)}, step=2).wait()
        pipeline.save({"object": Stateful(save_again)}, step=3).wait()
        pipeline.save(ones(), step=4).wait()
        assert [info.step for info in pipeline.steps() if info.complete] == [2, 3, 4]


def test_a_save_whose_caller_is_interrupted_is_given_up(store: Stores) -> None:
    with ckpipe.SyncPipeline(store.url) as pipeline:
        pipeline.save({"object": Stateful(ones)}, step=0).wait()
        with pytest.raises(KeyboardInterrupt):
            pipeline.save({"object": Stateful(interrupted)}, step=1)
        pipeline.save({"object": Stateful(ones)}, step=2).wait()
        assert [info.step for info in pipeline.steps()] == [0, 2]
        assert pipeline.statistics().budget_used == 0
