"""Steps that are recorded in a CUDA graph, whose replays call no hooks of the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ckpipe
from tests.support.pipelines import Stores, loaded_state

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Recorded:
    """Parameters of 256 MB that all hold the number of the step, and a step as a graph."""

    def __init__(self) -> None:
        self.parameters = [nn.Parameter(torch.zeros(1 << 22, device="cuda")) for _ in range(16)]
        self.optimizer = torch.optim.SGD(self.parameters, lr=1.0)
        for each in self.parameters:
            each.grad = torch.full_like(each, -1.0)
        self.graph = torch.cuda.CUDAGraph()

    def record(self, **options: Any) -> None:
        """Record one step, which does not run."""
        with torch.cuda.graph(self.graph, **options):
            self.optimizer.step()


def opened(store: Stores, recorded: Recorded) -> ckpipe.SyncPipeline:
    return ckpipe.SyncPipeline(store.url, guard=recorded.optimizer)


def bounds(pipeline: ckpipe.SyncPipeline, step: int) -> tuple[float, float]:
    """The least and the greatest value in a checkpoint's parameters."""
    found = [each.detach() for each in loaded_state(pipeline, step)["parameters"]]
    return min(float(each.min()) for each in found), max(float(each.max()) for each in found)


def test_recording_a_step_without_the_lock_warns(store: Stores) -> None:
    recorded = Recorded()
    with opened(store, recorded) as pipeline:
        with pytest.warns(RuntimeWarning, match="recorded in a CUDA graph"):
            recorded.record()
        recorded.graph.replay()
        recorded.optimizer.step()
        pipeline.save({"parameters": recorded.parameters}, step=0, until="committed")
        assert bounds(pipeline, 0) == (2.0, 2.0)


def test_replays_inside_the_lock_wait_for_copies(store: Stores) -> None:
    recorded = Recorded()
    state: dict[str, Any] = {"parameters": recorded.parameters, "optimizer": recorded.optimizer}
    with opened(store, recorded) as pipeline:
        with pipeline.lock.mutating():
            recorded.record()
        for number in range(4):
            handle = pipeline.save(state, step=number, until="captured")
            with pipeline.lock.mutating():
                recorded.graph.replay()
            handle.wait()
        for number in range(4):
            assert bounds(pipeline, number) == (number, number)


@pytest.mark.parametrize("until", ["staged", "captured"])
def test_a_save_goes_on_beside_a_recording_that_allows_other_threads(
    store: Stores, until: Any
) -> None:
    """In its default mode CUDA forbids other threads to wait for a copy: the recording fails."""
    recorded = Recorded()
    state: dict[str, Any] = {"parameters": recorded.parameters, "optimizer": recorded.optimizer}
    with opened(store, recorded) as pipeline:
        pipeline.save(state, step=0, until="committed")
        handle = pipeline.save(state, step=1, until=until)
        with pipeline.lock.mutating():
            recorded.record(capture_error_mode="thread_local")
        recorded.graph.replay()
        handle.wait()
        for number in range(2):
            assert bounds(pipeline, number) == (0.0, 0.0)
    assert {float(each.detach().min()) for each in recorded.parameters} == {1.0}


def test_compiled_steps_wait_for_copies(store: Stores) -> None:
    recorded = Recorded()
    state: dict[str, Any] = {"parameters": recorded.parameters, "optimizer": recorded.optimizer}
    step: Callable[[], object] = torch.compile(recorded.optimizer.step)
    with opened(store, recorded) as pipeline:
        for number in range(3):
            handle = pipeline.save(state, step=number, until="captured")
            step()
            handle.wait()
        for number in range(3):
            assert bounds(pipeline, number) == (number, number)
