"""Who leaves a call on an exception goes on: nothing of it is saved, or written, from then on."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import pytest
import torch
from lock_actors import PATIENCE
from pipelines import Stores, stores

import ckpipe
from ckpipe import events
from ckpipe.tasks.loop_thread import LoopThread


@pytest.fixture
def store() -> Iterator[Stores]:
    with stores() as made:
        yield made


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    made = LoopThread("loop of a test")
    yield made
    made.abandon()


class Gate:
    """An object whose state takes as long as a test likes."""

    def __init__(self) -> None:
        self.asked, self.opened = threading.Event(), threading.Event()

    def state_dict(self) -> dict[str, Any]:
        self.asked.set()
        assert self.opened.wait(PATIENCE)
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


def interrupt_once(happens: Callable[[], object], then: Callable[[], object]) -> threading.Thread:
    """Does what Ctrl-C does once something has happened, and something else after it."""

    def wait() -> None:
        happens()
        os.kill(os.getpid(), signal.SIGINT)
        then()

    made = threading.Thread(target=wait)
    made.start()
    return made


@pytest.mark.parametrize("until", ["staged", "committed"])
async def test_what_changes_after_a_cancelled_save_is_in_no_checkpoint(
    store: Stores, until: Any
) -> None:
    gate, weight = Gate(), torch.zeros(1000)
    async with ckpipe.Pipeline(store.url) as pipeline:
        call = asyncio.create_task(
            pipeline.save({"gate": gate, "weight": weight}, step=1, until=until)
        )
        assert await anyio.to_thread.run_sync(gate.asked.wait, PATIENCE)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        weight.fill_(1)
        gate.opened.set()
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


def test_an_interrupt_while_a_save_waits_for_memory(store: Stores) -> None:
    settings: dict[str, Any] = {"staging_bytes": "64KiB", "staging": {"block_bytes": 65536}}
    weight, started = torch.zeros(1000), threading.Event()
    with ckpipe.SyncPipeline(store.url, **settings) as pipeline:
        store.slow.hold("write")
        first = pipeline.save({"weight": weight}, step=0)

        def note(event: events.Event) -> None:
            if isinstance(event, events.SaveStarted):
                started.set()

        pipeline.events.add(note)
        ringing = interrupt_once(started.wait, lambda: None)
        with pytest.raises(KeyboardInterrupt):
            pipeline.save({"weight": weight}, step=1)
        ringing.join()
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
        loop: Any = pipeline._core._loop
        at_once = loop.at_once

        def interrupted(function: Callable[..., object], *args: Any) -> None:
            monkeypatch.undo()
            assert at_once(function, *args) is not None
            raise KeyboardInterrupt

        store.slow.hold("write")  # that it ends is not by chance
        monkeypatch.setattr(loop, "at_once", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pipeline.save({"gate": Gate(), "weight": weight}, step=1)
        store.slow.release()
        pipeline.save({"weight": weight}, step=2).wait()
        assert [info.step for info in pipeline.steps()] == [2]


def test_an_interrupted_call_is_over_when_it_raises(loop: LoopThread) -> None:
    began, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    async def work() -> None:
        try:
            began.set()
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(go_on.wait)
            ended.set()

    ringing = interrupt_once(began.wait, go_on.set)
    with pytest.raises(KeyboardInterrupt):
        loop.call(work)
    assert ended.is_set()
    ringing.join()


async def test_a_cancelled_call_is_over_when_it_raises(loop: LoopThread) -> None:
    began, go_on, ended = asyncio.Event(), threading.Event(), threading.Event()
    here = asyncio.get_running_loop()

    async def work() -> None:
        try:
            here.call_soon_threadsafe(began.set)
            await anyio.sleep_forever()
        finally:
            here.call_soon_threadsafe(go_on.set)
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(go_on.wait)
            ended.set()

    call = asyncio.create_task(loop.run(work))
    await began.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert ended.is_set()


def test_an_interrupt_before_a_caller_knows_of_its_call(
    loop: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened = []
    submit = loop.submit

    async def work() -> None:
        happened.append("began")
        try:
            await anyio.sleep_forever()
        finally:
            happened.append("ended")

    def interrupted(function: Callable[..., Any], *args: Any) -> Any:
        monkeypatch.undo()
        submit(function, *args)
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        loop.call(work)
    loop.call(anyio.lowlevel.checkpoint)
    assert happened in ([], ["began", "ended"])
