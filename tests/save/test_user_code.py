"""User code, ``state_dict`` and ``load_state_dict``, runs on the thread that called."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable
from typing import Any

import anyio
import numpy as np
import pytest
import torch

import ckpipe
from ckpipe.errors import SaveCancelled, StateLockTimeout, UsageError
from tests.support.actors import PATIENCE, DaemonThreads, Held, is_free, until
from tests.support.pipelines import Stores, awaited_state, same, small_state

Modes = tuple[int, str, bool, bool]


def modes() -> Modes:
    """What torch does differently on each thread, and the thread."""
    return (
        threading.get_ident(),
        str(torch.get_default_device()),
        torch.is_autocast_enabled("cpu"),
        torch.is_inference_mode_enabled(),
    )


class Noting:
    """An object that notes the thread and the modes of torch that its methods run in."""

    def __init__(self) -> None:
        self.value = torch.zeros(3, device="cpu")
        self.count = 0
        self.found: dict[str, set[Modes]] = {}

    def _note(self, name: str) -> None:
        self.found.setdefault(name, set()).add(modes())

    def state_dict(self) -> dict[str, Any]:
        self._note("state_dict")
        return {"value": self.value, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._note("load_state_dict")
        self.value, self.count = state["value"], state["count"]


async def saved_and_loaded(pipeline: Any, noting: Noting) -> set[Modes]:
    """Save and load in modes that a thread of its own does not have; return these."""
    with torch.device("meta"), torch.autocast("cpu"), torch.inference_mode():
        for step in range(3):  # with a plan to make, and with one that is known
            noting.count = step
            await done(pipeline.save({"noting": noting}, step=step))
        noting.count = -1
        assert await done(pipeline.load({"noting": noting}, step=2))
        assert noting.count == 2
        return {modes()}


async def done(call: Any) -> Any:
    return await call if isinstance(call, Awaitable) else call


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_user_code_runs_in_the_modes_of_the_coroutine_that_awaits(
    store: Stores, backend: str
) -> None:
    pytest.importorskip(backend)
    noting = Noting()

    async def train() -> set[Modes]:
        async with ckpipe.Pipeline(store.url) as pipeline:
            return await saved_and_loaded(pipeline, noting)

    found = anyio.run(train, backend=backend)
    assert noting.found == {"state_dict": found, "load_state_dict": found}


async def test_user_code_runs_in_the_modes_of_the_thread_that_blocks(store: Stores) -> None:
    noting = Noting()
    with ckpipe.SyncPipeline(store.url) as pipeline:
        found = await saved_and_loaded(pipeline, noting)
    assert noting.found == {"state_dict": found, "load_state_dict": found}


@pytest.mark.parametrize("fresh", [True, False])
def test_a_state_is_loaded_alike_in_all_modes(store: Stores, *, fresh: bool) -> None:
    saved = {
        **small_state(1),
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "names": np.empty(0, "U3"),
        "odd": np.ones(3, np.float16),
    }
    with ckpipe.SyncPipeline(store.url) as pipeline:
        with torch.device("meta"), torch.autocast("cpu"), torch.inference_mode():
            pipeline.save(saved, step=1).wait()
        target = None if fresh else {**saved, **small_state(2)}
        with torch.device("meta"), torch.autocast("cpu"), torch.inference_mode():
            result = pipeline.load(target)
    assert result is not None
    assert result.state["odd"].tolist() == [1, 1, 1]
    assert result.state["names"].dtype == saved["names"].dtype
    assert same({**result.state, "odd": 0, "names": 0}, {**saved, "odd": 0, "names": 0})
    assert result.state["parameter"].requires_grad
    tensors = [each for each in result.state.values() if isinstance(each, torch.Tensor)]
    assert not any(map(torch.Tensor.is_inference, tensors))


class Slow(Noting):
    """An object whose state takes as much Python as threads need to change places often."""

    def state_dict(self) -> dict[str, Any]:
        sum(range(1_000_000))
        return super().state_dict()


async def test_a_task_saves_while_the_trainer_changes_containers(store: Stores) -> None:
    before, after = {"step": 0}, {"step": 0}
    state = {"before": before, "slow": Slow(), "after": after}
    async with ckpipe.Pipeline(store.url) as pipeline:
        for step in range(3):
            saving = asyncio.create_task(pipeline.save(state, step=step))
            while not saving.done():
                before["step"] += 1
                before[f"of {step}"] = before.pop(f"of {step - 1}", 0)
                after["step"] += 1
                await asyncio.sleep(0)
            await saving.result()
            found = await awaited_state(pipeline, step)
            assert found["before"]["step"] == found["after"]["step"]


@pytest.fixture
def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=1.0)


def capturing(pipeline: ckpipe.Pipeline) -> None:
    """Return once a save is about to look at the state; blocks, and any event loop with it."""
    while pipeline.statistics().saves != {"capturing": 1}:
        threading.Event().wait(0.001)


async def test_a_loop_that_never_yields_keeps_no_trainer_from_stepping(
    store: Stores, threads: DaemonThreads, optimizer: torch.optim.Optimizer
) -> None:
    noting = Noting()
    async with ckpipe.Pipeline(store.url, guard=optimizer) as pipeline:
        saving = asyncio.create_task(pipeline.save({"noting": noting}, step=1))
        await asyncio.sleep(0)
        capturing(pipeline)
        for noting.count in range(3):
            optimizer.step()
            threads.submit(optimizer.step).result(PATIENCE)  # as autograd's threads do
        assert not noting.found
        await (await saving)
        assert (await awaited_state(pipeline))["noting"]["count"] == 2


async def test_a_pipeline_is_left_on_an_exception_while_the_loop_of_a_save_never_yields(
    store: Stores, threads: DaemonThreads
) -> None:
    noting = Noting()
    pipeline = await ckpipe.Pipeline(store.url).open()
    saving = asyncio.create_task(pipeline.save({"noting": noting}, step=1))
    await asyncio.sleep(0)
    capturing(pipeline)
    leaving = threads.submit(anyio.run, pipeline.__aexit__, ValueError, ValueError(), None)
    leaving.result(PATIENCE)
    with pytest.raises(SaveCancelled):
        await saving
    assert not noting.found


async def test_a_thread_that_waits_for_the_lock_walks_for_the_save_of_its_coroutine(
    store: Stores, threads: DaemonThreads
) -> None:
    noting = Noting()
    async with ckpipe.Pipeline(store.url) as pipeline:
        lock = pipeline.lock
        trainer = Held(threads, lock.mutating)
        saving = asyncio.create_task(pipeline.save({"noting": noting}, step=1))
        await anyio.to_thread.run_sync(lambda: until(lock, waiters=1))
        trainer.end()  # the lock is the save's, and this loop does not come to it
        with lock.mutating():
            assert noting.found
        await (await saving)


async def test_a_save_whose_loop_comes_too_late_lets_trainers_go_first(
    store: Stores, threads: DaemonThreads
) -> None:
    noting = Noting()
    settings: dict[str, Any] = {"lock": {"max_step_wait_seconds": 0.01}}
    async with ckpipe.Pipeline(store.url, **settings) as pipeline:
        lock = pipeline.lock

        async def come_too_late() -> None:
            trainer = Held(threads, lock.mutating)
            await anyio.to_thread.run_sync(lambda: until(lock, waiters=1))
            trainer.end()
            Held(threads, lock.mutating).end()  # this thread waits for a trainer

        saving = asyncio.create_task(pipeline.save({"noting": noting}, step=1))
        await come_too_late()
        await (await saving)
        noting.found.clear()
        saving = asyncio.create_task(pipeline.save({"noting": noting}, step=2))
        for _ in range(3):
            await come_too_late()
        trainer = Held(threads, lock.mutating)
        with pytest.raises(StateLockTimeout, match="did not run within"):
            await saving
        trainer.end()
        assert not noting.found
        assert is_free(lock)


async def test_a_trainer_that_lets_go_of_the_lock_for_an_instant_only_is_saved(
    store: Stores, threads: DaemonThreads
) -> None:
    noting, stop = Noting(), threading.Event()
    async with ckpipe.Pipeline(store.url) as pipeline:

        def train() -> None:
            while not stop.is_set():
                with pipeline.lock.mutating():
                    noting.count += 1
                    sum(range(10_000))
                    noting.value += 1

        training = threads.submit(train)
        try:
            for step in range(5):
                await (await pipeline.save({"noting": noting}, step=step))
                found = (await awaited_state(pipeline, step))["noting"]
                assert found["value"].tolist() == [found["count"]] * 3
        finally:
            stop.set()
            training.result(PATIENCE)


@pytest.mark.parametrize("when", ["it claims the launch", "it needs the state"])
def test_a_loop_that_is_closed_fails_its_save_and_keeps_nothing(store: Stores, when: str) -> None:
    noting, pipeline, loop = Noting(), ckpipe.Pipeline(store.url), asyncio.new_event_loop()
    loop.set_exception_handler(lambda loop, context: None)  # which tells of the task that is left

    async def begin() -> asyncio.Task[Any]:
        await pipeline.open()
        if when == "it claims the launch":
            store.slow.hold("put")
        saving = asyncio.create_task(pipeline.save({"noting": noting}, step=1))
        await asyncio.sleep(0)
        if when == "it claims the launch":
            store.slow.gate.wait_until_held()
        else:
            capturing(pipeline)
        return saving

    saving = loop.run_until_complete(begin())
    loop.close()
    store.slow.release()
    with pytest.raises(UsageError, match="ended before state_dict"):
        asyncio.run(pipeline.aclose())
    assert not noting.found
    saving.get_coro().close()


def test_a_loop_that_is_closed_ends_its_load_and_frees_the_lock(store: Stores) -> None:
    noting, loop = Noting(), asyncio.new_event_loop()
    loop.set_exception_handler(lambda loop, context: None)
    pipeline = ckpipe.Pipeline(store.url)

    async def begin() -> asyncio.Task[Any]:
        await pipeline.open()
        await (await pipeline.save({"noting": noting}, step=1))
        loading = asyncio.create_task(pipeline.load({"noting": noting}))
        await asyncio.sleep(0)
        return loading

    loading = loop.run_until_complete(begin())
    loop.close()
    asyncio.run(pipeline.aclose())
    assert is_free(pipeline.lock)
    assert "load_state_dict" not in noting.found
    loading.get_coro().close()


async def test_a_hook_on_the_loop_of_the_pipeline_does_not_stop_it_by_its_state(
    store: Stores,
) -> None:
    noting, ended = Noting(), anyio.Event()
    here = asyncio.get_running_loop()
    async with ckpipe.Pipeline(store.url) as pipeline:
        loops: list[int] = []

        @pipeline.on_complete
        async def save_again(event: ckpipe.events.Completed) -> None:
            if event.step == 1:
                loops.append(threading.get_ident())
                await (await pipeline.save({"noting": noting}, step=2))
                await pipeline.load({"noting": noting})
                here.call_soon_threadsafe(ended.set)

        await pipeline.save({"tensor": torch.ones(3)}, step=1)
        with anyio.fail_after(PATIENCE):
            await ended.wait()
    threads = {thread for found in noting.found.values() for thread, *_ in found}
    assert threads.isdisjoint(loops)
