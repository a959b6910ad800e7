"""Who leaves a call on an exception goes on: nothing of it is saved, or written, from then on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import anyio
import pytest
import torch
from lock_actors import PATIENCE, DaemonThreads, Held
from lock_actors import until as waiting
from pipelines import Stores, stores

import ckpipe
from ckpipe.loop_thread import Caller, LoopThread


@pytest.fixture
def store() -> Iterator[Stores]:
    with stores() as made:
        yield made


@pytest.fixture
def threads() -> DaemonThreads:
    return DaemonThreads()


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    made = LoopThread("loop of a test")
    yield made
    made.abandon()


class Gate:
    """An object whose state takes as long as a test likes."""

    def __init__(self) -> None:
        self.asked, self.opened, self.told = (threading.Event() for _ in range(3))
        self.value = 0

    def state_dict(self) -> dict[str, Any]:
        self.asked.set()
        assert self.opened.wait(PATIENCE)
        self.told.set()
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


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
        weight.fill_(1)
        trainer.end()
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
        result = await pipeline.load(step=1)
    assert result is not None
    assert not result.state["weight"].any()


def test_an_interrupt_while_a_save_waits_for_memory(
    store: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(caller: Caller, end: Future[Any]) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    settings: dict[str, Any] = {"staging_bytes": "64KiB", "staging": {"block_bytes": 65536}}
    weight = torch.zeros(1000)
    with ckpipe.SyncPipeline(store.url, **settings) as pipeline:
        store.slow.hold("write")
        first = pipeline.save({"weight": weight}, step=0)
        monkeypatch.setattr(Caller, "serve_until", interrupted)
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
    weight = torch.zeros(1000)
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
            pipeline.save({"gate": Gate(), "weight": weight}, step=1)
        store.slow.release()
        pipeline.save({"weight": weight}, step=2).wait()
        assert [info.step for info in pipeline.steps()] == [0, 2]


async def test_a_call_that_is_cancelled_twice_is_over_when_it_raises(loop: LoopThread) -> None:
    began, ending, go_on, ended = asyncio.Event(), asyncio.Event(), threading.Event(), []
    here = asyncio.get_running_loop()

    async def work() -> None:
        try:
            here.call_soon_threadsafe(began.set)
            await anyio.sleep_forever()
        finally:
            here.call_soon_threadsafe(ending.set)
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(go_on.wait)
            ended.append(True)

    call = asyncio.create_task(loop.run(work))
    await began.wait()
    call.cancel()
    await ending.wait()
    call.cancel()
    await anyio.wait_all_tasks_blocked()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert ended


def test_an_interrupted_call_is_over_when_it_raises(
    loop: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go_on, ended = threading.Event(), threading.Event(), threading.Event()
    submit = loop.submit

    async def work() -> None:
        try:
            began.set()
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(go_on.wait)
            ended.set()

    def interrupted(function: Callable[..., Any], *args: Any) -> Any:
        monkeypatch.setattr(loop, "submit", letting_go)
        submit(function, *args)
        assert began.wait(PATIENCE)
        raise KeyboardInterrupt  # before the caller has anything that names the call

    def letting_go(function: Callable[..., Any], *args: Any) -> Any:
        future = submit(function, *args)
        go_on.set()
        return future

    monkeypatch.setattr(loop, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        loop.call(work)
    assert ended.is_set()
