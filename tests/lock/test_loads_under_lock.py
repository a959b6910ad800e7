"""Loads that fill a state: saves, steps and other loads of it wait for them, and they for those."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest
import torch

import ckpipe
from ckpipe.errors import LockMisuse, PipelineClosed
from tests.support.actors import PATIENCE, DaemonThreads, Held, is_free, until
from tests.support.pipelines import loaded_state, newest_of


class Slow:
    """An object that gets its state when a test lets it."""

    def __init__(self) -> None:
        self.value = torch.zeros(3)
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.inside: Callable[[], object] = bool
        self.asked: Callable[[], object] = bool

    def state_dict(self) -> dict[str, Any]:
        self.asked()
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.reached.set()
        assert self.go_on.wait(PATIENCE)
        self.inside()
        self.value = state["value"]


class Training:
    """A state in which everything holds one number."""

    def __init__(self, size: int = 30_000) -> None:
        self.weights = [torch.nn.Parameter(torch.zeros(size)) for _ in range(8)]
        self.optimizer = torch.optim.SGD(self.weights, lr=1.0)
        self.slow = Slow()
        self.state = {"weights": self.weights, "slow": self.slow}

    @torch.no_grad()
    def fill(self, value: float) -> None:
        for each in (*self.weights, self.slow.value):
            each.fill_(value)

    @property
    def numbers(self) -> set[float]:
        return numbers({"weights": self.weights, "slow": {"value": self.slow.value}})


def numbers(state: Any) -> set[float]:
    """The numbers in a state."""
    found = [*state["weights"], state["slow"]["value"]]
    return {value.item() for each in found for value in (each.min(), each.max())}


def saved(pipeline: ckpipe.SyncPipeline, step: int) -> set[float]:
    return numbers(loaded_state(pipeline, step))


@pytest.fixture
def training() -> Training:
    return Training()


@pytest.fixture
def pipeline(tmp_path: Path, training: Training) -> Iterator[ckpipe.SyncPipeline]:
    """One with checkpoints of the steps 1 and 2, and a lock that nobody stops waiting for."""
    settings: Any = {"guard": training.optimizer, "lock": {"timeout_seconds": 10 * PATIENCE}}
    with ckpipe.SyncPipeline(tmp_path / "one", **settings) as opened:
        for step in (1, 2):
            training.fill(step)
            opened.save(training.state, step=step).wait()
        yield opened


@pytest.mark.parametrize("shared", [False, True])
def test_a_save_waits_for_a_load(
    pipeline: ckpipe.SyncPipeline,
    training: Training,
    threads: DaemonThreads,
    tmp_path: Path,
    *,
    shared: bool,
) -> None:
    lock = pipeline.lock
    with ckpipe.SyncPipeline(tmp_path / "two", state_lock=lock) as other:
        saver = other if shared else pipeline
        loading = threads.submit(pipeline.load, training.state, step=1)
        assert training.slow.reached.wait(PATIENCE)
        (holder,) = lock.statistics().holders
        assert (holder.side, holder.thread, holder.purpose) == ("mutating", "trainer_0", "load()")
        saving = threads.waiting(lock, saver.save, training.state, step=3)
        training.slow.go_on.set()
        loading.result(PATIENCE)
        saving.result(PATIENCE).wait()
        assert saved(saver, 3) == {1.0}
    assert is_free(lock)


def test_a_load_fills_what_the_state_is_when_it_has_the_lock(
    pipeline: ckpipe.SyncPipeline, training: Training, threads: DaemonThreads
) -> None:
    training.slow.go_on.set()
    averaged = [torch.full_like(each, 9.0) for each in training.weights]

    def swap() -> None:
        for each, other in zip(training.weights, averaged, strict=True):
            each.data, other.data = other.data, each.data

    with pipeline.lock.mutating():
        swap()
        loading = threads.waiting(pipeline.lock, pipeline.load, training.state, step=1)
        swap()
    loading.result(PATIENCE)
    assert training.numbers == {1.0}
    assert set(averaged[0].tolist()) == {9.0}


def test_a_state_that_takes_the_lock_is_loaded_while_its_thread_changes_it(
    pipeline: ckpipe.SyncPipeline, training: Training, threads: DaemonThreads
) -> None:
    lock, sides = pipeline.lock, list[str]()
    training.slow.go_on.set()

    def asked() -> None:
        with lock.mutating():
            sides.append("mutating")
        with lock.capturing():
            sides.append("capturing")

    def change() -> None:
        with lock.mutating():
            pipeline.load(training.state, step=1)

    training.slow.asked = asked
    threads.submit(change).result(PATIENCE)
    assert training.numbers == {1.0}
    assert sides[:2] == ["mutating", "capturing"]
    assert is_free(lock)


@pytest.mark.parametrize("bracket", ["mutating", "disallow"])
def test_who_changes_the_state_loads_into_it_past_a_save_that_waits(
    pipeline: ckpipe.SyncPipeline, training: Training, threads: DaemonThreads, bracket: str
) -> None:
    training.slow.go_on.set()
    lock = pipeline.lock

    def change() -> Any:
        if bracket == "disallow":
            lock.disallow_state_dict_read()
            saving = half_done()
            lock.allow_state_dict_read()
            return saving
        with lock.mutating():
            return half_done()

    def half_done() -> Any:
        training.weights[0].data.fill_(7)
        saving = threads.waiting(lock, pipeline.save, training.state, step=3)
        pipeline.load(training.state, step=1)
        assert lock.statistics().waiters
        return saving

    saving = threads.submit(change).result(PATIENCE)
    saving.result(PATIENCE).wait()
    assert saved(pipeline, 3) == {1.0}


async def test_a_coroutine_and_others_of_its_thread_wait_for_one_another(
    pipeline: ckpipe.SyncPipeline, training: Training, tmp_path: Path
) -> None:
    lock = pipeline.lock
    for each in training.weights:
        each.grad = torch.full_like(each, -5.0)
    async with ckpipe.Pipeline(tmp_path / "one", state_lock=lock) as loader:
        first = asyncio.create_task(loader.load(training.state, step=1))
        await asyncio.sleep(0)
        until(lock, waiters=0, holders=1)
        second = asyncio.create_task(loader.load(training.state, step=2))
        saving = asyncio.create_task(loader.save(training.state, step=3))
        await asyncio.sleep(0)
        until(lock, waiters=1)
        training.slow.go_on.set()
        training.optimizer.step()  # blocks this loop, and does there what the loads want of it
        assert training.numbers == {2.0, 7.0}
        await asyncio.gather(first, second, saving)
        await saving.result()
    assert training.numbers == saved(pipeline, 3) == {2.0, 7.0}


async def test_a_coroutine_that_left_its_mutation_waits_for_the_load_that_it_began_there(
    pipeline: ckpipe.SyncPipeline, training: Training, tmp_path: Path
) -> None:
    lock = pipeline.lock
    async with ckpipe.Pipeline(tmp_path / "one", state_lock=lock) as loader:
        training.slow.go_on.set()
        with lock.mutating():
            loading = asyncio.create_task(loader.load(training.state, step=1))
            await asyncio.sleep(0)
            until(lock, waiters=0, holders=2)
        saving = asyncio.create_task(loader.save(training.state, step=3))
        await asyncio.gather(loading, saving)
        await saving.result()
    assert training.numbers == saved(pipeline, 3) == {1.0}


def test_a_state_that_loads_while_it_is_captured_is_refused(
    pipeline: ckpipe.SyncPipeline, training: Training
) -> None:
    training.slow.asked = lambda: pipeline.load(training.state, step=1)
    with pytest.raises(LockMisuse, match=r"load\(\)"):
        pipeline.save(training.state, step=3)
    training.slow.asked = lambda: pipeline.load(step=1)  # as a fresh state
    pipeline.save(training.state, step=4).wait()
    assert saved(pipeline, 4) == {2.0}


async def test_who_keeps_a_capture_cannot_wait_for_a_load(
    pipeline: ckpipe.SyncPipeline, training: Training, threads: DaemonThreads, tmp_path: Path
) -> None:
    lock = pipeline.lock
    async with ckpipe.Pipeline(tmp_path / "one", state_lock=lock) as loader:
        with lock.capturing():
            with pytest.raises(LockMisuse):
                await loader.load(training.state)
            with pytest.raises(LockMisuse):
                pipeline.load(training.state)
        reader = Held(threads, lock.capturing)
        task = asyncio.create_task(loader.load(training.state, step=1))
        await anyio.to_thread.run_sync(lambda: until(lock, waiters=1))
        reader.end()
        training.slow.go_on.set()
        await task
    assert training.numbers == {1.0}


async def test_a_load_that_is_cancelled_while_it_waits_waits_no_more(
    pipeline: ckpipe.SyncPipeline, training: Training, threads: DaemonThreads, tmp_path: Path
) -> None:
    lock = pipeline.lock
    reader = Held(threads, lock.capturing)
    async with ckpipe.Pipeline(tmp_path / "one", state_lock=lock) as loader:
        task = asyncio.create_task(loader.load(training.state, step=1))
        await anyio.to_thread.run_sync(lambda: until(lock, waiters=1))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not lock.statistics().waiters
        reader.end()
    assert training.numbers == {2.0}
    assert is_free(lock)


def test_a_load_that_waits_for_who_leaves_the_pipeline_is_given_up(
    pipeline: ckpipe.SyncPipeline, training: Training, threads: DaemonThreads, tmp_path: Path
) -> None:
    lock = pipeline.lock

    def leave() -> Any:
        with lock.mutating(), ckpipe.SyncPipeline(tmp_path / "one", state_lock=lock) as loader:
            return threads.waiting(lock, loader.load, training.state, step=1)

    loading = threads.submit(leave).result(PATIENCE)
    with pytest.raises(PipelineClosed, match="state lock"):
        loading.result(PATIENCE)
    assert training.numbers == {2.0}
    assert is_free(lock)


async def test_a_load_that_is_cancelled_while_it_fills_keeps_the_lock_to_its_end(
    pipeline: ckpipe.SyncPipeline, training: Training, tmp_path: Path
) -> None:
    lock, holders = pipeline.lock, list[list[str]]()
    training.slow.go_on.set()
    async with ckpipe.Pipeline(tmp_path / "one", state_lock=lock) as loader:
        task = asyncio.create_task(loader.load(training.state, step=1))

        def cancel() -> None:
            task.cancel()
            holders.append([use.purpose for use in lock.statistics().holders])

        training.slow.inside = cancel
        with pytest.raises(asyncio.CancelledError):
            await task
        assert holders == [["load()"]]
        assert is_free(lock)
    assert training.numbers == {1.0}


def test_what_a_state_does_as_it_is_loaded_is_part_of_the_load(
    pipeline: ckpipe.SyncPipeline, training: Training, threads: DaemonThreads
) -> None:
    slow, lock = training.slow, pipeline.lock
    slow.go_on.set()
    nested = Training()
    nested.slow.go_on.set()

    def inside() -> None:
        with lock.mutating():
            training.optimizer.step()
        pipeline.load(nested.state, step=1)
        with pytest.raises(LockMisuse):
            pipeline.save(nested.state, step=9)

    slow.inside = inside
    threads.submit(pipeline.load, training.state, step=2).result(PATIENCE)
    assert nested.numbers == {1.0}
    assert is_free(lock)


def test_a_load_that_falls_back_keeps_the_lock_and_asks_the_state_again(
    pipeline: ckpipe.SyncPipeline, training: Training, threads: DaemonThreads, tmp_path: Path
) -> None:
    slow, lock = training.slow, pipeline.lock
    slow.go_on.set()
    (file,) = (tmp_path / "one").glob(f"{newest_of(pipeline).id}*/*.safetensors")
    damaged = bytearray(file.read_bytes())
    damaged[-1] ^= 1
    file.write_bytes(damaged)
    purposes: list[list[str]] = []

    def asked() -> None:
        with lock.mutating():
            purposes.append([use.purpose for use in lock.statistics().holders])

    slow.asked = asked
    with pytest.warns(RuntimeWarning, match="damaged"):
        result = threads.submit(pipeline.load, training.state, fallback=True).result(PATIENCE)
    assert result is not None
    assert result.step == 1
    assert training.numbers == {1.0}
    assert len(purposes) > 1
    assert all(each == ["load()", "mutating()"] for each in purposes)
    assert is_free(lock)
