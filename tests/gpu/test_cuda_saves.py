"""Saves of tensors on a GPU: what is copied, when, through which memory, and who waits for it.

Skipped without CUDA; the same logic runs on the CPU in ``test_late_copies.py``, with a
device that is made up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ckpipe
from tests.support.pipelines import Stores, loaded_state
from tests.support.staging import staging_memory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BLOCK = 1 << 20
LONG = 1_000_000_000
"""Cycles of a kernel that runs for about half a second."""


class Training:
    """A few parameters on the GPU, all of which hold the number of the step."""

    def __init__(self) -> None:
        self.parameters = [nn.Parameter(torch.zeros(1 << 20, device="cuda")) for _ in range(8)]
        self.optimizer = torch.optim.SGD(self.parameters, lr=1.0)
        self.average = torch.zeros(1000, device="cuda")
        for each in self.parameters:
            each.grad = torch.full_like(each, -1.0)

    @property
    def state(self) -> dict[str, Any]:
        return {
            "parameters": self.parameters,
            "optimizer": self.optimizer,
            "average": self.average,
        }

    def step(self) -> None:
        """Add one to everything, after a kernel that keeps the device busy for long."""
        busy()
        self.average.add_(1)
        self.optimizer.step()


def busy() -> None:
    """Queue a long kernel on the current stream; nothing waits for it here."""
    torch.cuda._sleep(LONG)  # type: ignore[no-untyped-call]


def opened(store: Stores, training: Training, **fields: Any) -> ckpipe.SyncPipeline:
    staging = {"block_bytes": BLOCK} | fields
    return ckpipe.SyncPipeline(store.url, guard=training.optimizer, staging=staging)


def numbers(pipeline: ckpipe.SyncPipeline, step: int) -> set[float]:
    """What the tensors of a checkpoint hold."""
    loaded = loaded_state(pipeline, step)
    tensors = [*loaded["parameters"], loaded["average"]]
    return {value for each in tensors for value in each.unique().tolist()}


def allocations() -> int:
    """How many blocks of device memory have ever been asked for."""
    count: int = torch.cuda.memory_stats()["allocation.all.allocated"]
    return count


LOOKS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda each: each,
    "turned": lambda each: each.view(300, 200).t(),
    "steps": lambda each: each[::3],
    "scalar": lambda each: each[7],
    "spread": lambda each: each[:5].expand(3, 5),
    "conjugated": lambda each: each.to(torch.complex64).conj(),
    "half": lambda each: each.bfloat16(),
}


@pytest.mark.parametrize("name", LOOKS)
def test_every_look_at_device_memory_comes_back(store: Stores, name: str) -> None:
    memory = torch.randn(60_000, device="cuda")
    state = {"look": LOOKS[name](memory), "all": memory}
    with ckpipe.SyncPipeline(store.url, staging={"block_bytes": 1 << 16}) as pipeline:
        pipeline.save(state, step=0, until="committed")
        target = {key: torch.zeros_like(each) for key, each in state.items()}
        pipeline.load(target, step=0)
    for key, each in state.items():
        assert target[key].device == each.device
        assert torch.equal(target[key], each)


@pytest.mark.parametrize("until", ["staged", "captured"])
def test_a_copy_comes_after_what_was_queued_and_before_what_follows(
    store: Stores, until: Any
) -> None:
    training = Training()
    with opened(store, training) as pipeline:
        for number in range(3):
            handle = pipeline.save(training.state, step=number, until=until)
            training.step()
            handle.wait()
        for number in range(3):
            assert numbers(pipeline, number) == {float(number)}


def test_a_step_is_queued_while_copies_are_still_to_come(store: Stores) -> None:
    """The host does not wait for the device: neither the save nor the step does."""
    training = Training()
    with opened(store, training) as pipeline:
        for number in range(2):  # with a plan and memory that are there
            pipeline.save(training.state, step=number, until="captured").wait()
        torch.cuda.synchronize()
        state = {"parameters": training.parameters, "optimizer": training.optimizer}
        pipeline.save(state, step=2, until="captured").wait()
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        busy()
        done.record()
        handle = pipeline.save(state, step=3, until="captured")
        training.optimizer.step()
        assert not done.query()  # type: ignore[no-untyped-call]
        handle.wait()
        loaded = loaded_state(pipeline, 3)
    assert {each.unique().item() for each in loaded["parameters"]} == {0.0}
    assert {float(each.detach().mean()) for each in training.parameters} == {1.0}


def test_nothing_is_allocated_on_the_device(store: Stores) -> None:
    training = Training()
    with opened(store, training) as pipeline:
        pipeline.save(training.state, step=0, until="captured").wait()
        before = allocations()
        for number in range(1, 4):
            pipeline.save(training.state, step=number, until="captured").wait()
            pipeline.save(training.state, step=number, until="staged").wait()
        assert allocations() == before


def test_staging_memory_is_registered_once_and_given_back(store: Stores) -> None:
    training = Training()
    with opened(store, training) as pipeline:
        handle = pipeline.save(training.state, step=0, until="committed")
        with handle.staged_state() as lent:
            staged = lent["parameters"]
        assert staged
        assert all(each.is_pinned() for each in staged)
        before = staging_memory()
        for number in range(1, 5):
            pipeline.save(training.state, step=number, until="committed")
        assert staging_memory() == before
        assert all(each.is_pinned() for each in staged)
    assert not any(each.is_pinned() for each in staged)


def test_pageable_memory_serves_as_well(store: Stores) -> None:
    training = Training()
    with opened(store, training, pinned="never") as pipeline:
        handle = pipeline.save(training.state, step=0, until="captured")
        training.step()
        handle.wait()
        with handle.staged_state() as lent:
            assert not any(each.is_pinned() for each in lent["parameters"])
        assert numbers(pipeline, 0) == {0.0}
