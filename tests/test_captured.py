"""Saves that return before all is copied: what they wait for, and who waits for them."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from lock_actors import PATIENCE, DaemonThreads, is_free, until
from pipelines import Stores, stores
from torch import nn

import ckpipe
from ckpipe import errors
from ckpipe.block_copiers import BlockCopiers

BLOCK = 1 << 16


@pytest.fixture
def store() -> Any:
    with stores() as made:
        yield made


@pytest.fixture
def threads() -> DaemonThreads:
    return DaemonThreads()


class Training:
    """A small model in which everything holds the number of the step."""

    def __init__(self, width: int = 200) -> None:
        self.model = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0, momentum=0.5)
        self.average = torch.zeros(width, width)
        self.fill(0)
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, -1.0)
        self.optimizer.step()
        self.fill(0)

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "average": self.average}

    @torch.no_grad()
    def fill(self, value: float) -> None:
        for tensor in (*self.model.parameters(), self.average):
            tensor.fill_(value)
        for buffer in self.model.buffers():
            buffer.fill_(value)

    @torch.no_grad()
    def forward(self) -> None:
        """Changes what a forward pass and an average may change: all that no optimizer owns."""
        for tensor in (*self.model.buffers(), self.average):
            tensor.add_(1)


class SlowCopies:
    """Stops deferred copies in front of a piece, as a machine out of breath would."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        begin = BlockCopiers.defer
        held = self

        def deferring(copiers: BlockCopiers, *args: Any) -> None:
            begin(copiers, *args)
            work = copiers._work_off

            def slow(launched: Any) -> None:
                held.reached.set()
                assert held.go_on.wait(PATIENCE)
                work(launched)

            copiers._work_off = slow  # type: ignore[method-assign]

        monkeypatch.setattr(BlockCopiers, "defer", deferring)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> SlowCopies:
    return SlowCopies(monkeypatch)


def open_pipeline(store: Stores, training: Training, **fields: Any) -> ckpipe.SyncPipeline:
    return ckpipe.SyncPipeline(
        store.url, guard=training.optimizer, staging={"block_bytes": BLOCK}, **fields
    )


def saved_numbers(state: Any) -> set[float]:
    """The values of all tensors that hold the number of a step."""
    tensors = [*state["model"].values(), state["average"]]
    return {value for tensor in tensors for value in tensor.float().unique().tolist()}


def load(pipeline: ckpipe.SyncPipeline, step: int) -> Any:
    result = pipeline.load(step=step)
    assert result is not None
    return result.state


def test_returns_before_what_the_optimizer_owns_is_copied(store: Stores, slow: SlowCopies) -> None:
    training = Training()
    with open_pipeline(store, training) as pipeline:
        handle = pipeline.save(training.state, step=0, until="captured")
        assert slow.reached.wait(PATIENCE)
        assert handle.status == "capturing"
        assert handle.report.captured_seconds is not None
        assert handle.report.staged_seconds is None
        training.forward()
        with pytest.raises(TimeoutError):
            handle.wait_staged(0)
        slow.go_on.set()
        handle.wait()
        assert saved_numbers(load(pipeline, 0)) == {0.0}


def test_a_guarded_step_waits_for_the_rest(
    store: Stores, slow: SlowCopies, threads: DaemonThreads
) -> None:
    training = Training()
    with open_pipeline(store, training, lock={"max_step_wait_seconds": PATIENCE}) as pipeline:
        handle = pipeline.save(training.state, step=0, until="captured")
        assert slow.reached.wait(PATIENCE)
        step = threads.submit(training.optimizer.step)
        until(pipeline.lock, waiters=1)
        assert not step.done()
        slow.go_on.set()
        step.result(PATIENCE)
        handle.wait()
        assert saved_numbers(load(pipeline, 0)) == {0.0}
        pipeline.save(training.state, step=1, until="committed")
        assert len(saved_numbers(load(pipeline, 1))) > 1


def test_a_step_that_would_wait_too_long_goes_on_and_the_save_fails(
    store: Stores, slow: SlowCopies
) -> None:
    training = Training()
    with open_pipeline(store, training, lock={"max_step_wait_seconds": 0.05}) as pipeline:
        handle = pipeline.save(training.state, step=3, until="captured")
        assert slow.reached.wait(PATIENCE)
        training.optimizer.step()
        slow.go_on.set()
        with pytest.raises(errors.CaptureTooSlow, match=r"0\.05 s.*step 3"):
            handle.wait()
        assert handle.status == "failed"
        assert [each for each in pipeline.steps() if each.complete] == []
        assert is_free(pipeline.lock)
        pipeline.save(training.state, step=4, until="captured").wait()
        assert [each.step for each in pipeline.steps()] == [4]


def test_mutating_waits_and_presses_like_a_step(store: Stores, slow: SlowCopies) -> None:
    training = Training()
    with open_pipeline(store, training, lock={"max_step_wait_seconds": 0.05}) as pipeline:
        handle = pipeline.save(training.state, step=0, until="captured")
        assert slow.reached.wait(PATIENCE)
        with pipeline.lock.mutating():
            training.fill(9)
        slow.go_on.set()
        with pytest.raises(errors.CaptureTooSlow):
            handle.wait()


async def test_a_coroutine_that_never_awaits_trains_on(store: Stores) -> None:
    training = Training()
    async with ckpipe.Pipeline(store.url, guard=training.optimizer) as pipeline:
        handles = []
        for number in range(5):
            handle = await pipeline.save(training.state, step=number, until="captured")
            handles.append(handle)
            training.forward()
            training.optimizer.step()  # blocks this loop, on which nothing of the save depends
            with pipeline.lock.mutating():
                training.fill(number + 1)
        for number, handle in enumerate(handles):
            await handle
            result = await pipeline.load(step=number)
            assert result is not None
            assert saved_numbers(result.state) == {float(number)}


async def test_handles_wait_for_it_too(store: Stores) -> None:
    training = Training()
    async with ckpipe.Pipeline(store.url, guard=training.optimizer) as pipeline:
        handle = await pipeline.save(training.state, until="captured")
        await asyncio.gather(handle.captured(), handle.staged(), handle.committed())
        assert handle.report.captured_seconds is not None
        plain = await pipeline.save(training.state)
        await plain.captured()
        assert plain.report.captured_seconds is None


def test_is_refused_without_a_guard_and_by_a_small_budget(store: Stores) -> None:
    training = Training()
    with (
        ckpipe.SyncPipeline(store.url) as pipeline,
        pytest.raises(errors.UsageError, match="guarded optimizer"),
    ):
        pipeline.save(training.state, until="captured")
    staging = {"bytes": 2 * BLOCK, "block_bytes": BLOCK}
    with ckpipe.SyncPipeline(store.url, guard=training.optimizer, staging=staging) as pipeline:
        for _ in range(2):  # with a plan to be made, and with one that is there
            with pytest.raises(errors.UsageError, match="staging"):
                pipeline.save(training.state, until="captured")
        pipeline.save(training.state, until="committed")
        with pytest.raises(errors.UsageError, match="captured"):
            pipeline.save(training.state, until="later")  # type: ignore[arg-type]


def test_a_state_that_no_optimizer_owns_is_copied_before_it_returns(store: Stores) -> None:
    training = Training()
    with open_pipeline(store, training) as pipeline:
        tensor = torch.zeros(50_000)
        handle = pipeline.save({"mine": tensor, "empty": torch.empty(0)}, step=0, until="captured")
        tensor.fill_(1)
        handle.wait()
        assert torch.equal(load(pipeline, 0)["mine"], torch.zeros(50_000))


def test_a_parameter_changed_outside_of_the_step_fails_the_save(
    store: Stores, slow: SlowCopies
) -> None:
    training = Training()
    with open_pipeline(store, training) as pipeline:
        handle = pipeline.save(training.state, step=0, until="captured")
        assert slow.reached.wait(PATIENCE)
        with torch.no_grad():
            training.model[0].weight.clamp_(-1, 1)  # type: ignore[operator]
        slow.go_on.set()
        with pytest.raises(errors.StateChanged, match=r"0\.weight"):
            handle.wait()
        assert is_free(pipeline.lock)


def test_a_cancelled_save_lets_the_trainer_go(store: Stores, slow: SlowCopies) -> None:
    training = Training()
    with open_pipeline(store, training) as pipeline:
        handle = pipeline.save(training.state, step=0, until="captured")
        assert slow.reached.wait(PATIENCE)
        slow.go_on.set()
        handle.cancel()
        training.optimizer.step()
        assert is_free(pipeline.lock)
        assert handle.status in ("cancelled", "committed")


def test_leaving_on_an_exception_finishes_a_save_that_was_captured(
    store: Stores, slow: SlowCopies
) -> None:
    training = Training()
    handles: list[ckpipe.SyncSaveHandle] = []

    def train() -> None:
        with open_pipeline(store, training) as pipeline:
            handles.append(pipeline.save(training.state, step=0, until="captured"))
            slow.go_on.set()
            raise KeyError

    with pytest.raises(KeyError):
        train()
    assert handles[0].status == "committed"


def test_a_load_waits_until_all_is_copied(store: Stores, tmp_path: Path) -> None:
    training = Training()
    with open_pipeline(store, training) as pipeline:
        pipeline.save(training.state, step=0).wait()
        with pipeline.lock.mutating():
            training.fill(1)
        handle = pipeline.save(training.state, step=1, until="captured")
        pipeline.load(training.state, step=0)
        handle.wait()
        assert saved_numbers(load(pipeline, 1)) == {1.0}
