"""Trainers that change everything at every step, beside saves: each checkpoint is one step.

Every tensor holds the number of the step that it belongs to. A checkpoint with two numbers in it
is a state that never was. ``CKPIPE_TEST_ALL=1`` runs each mode for half a minute.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import ckpipe
from ckpipe.errors import CaptureTooSlow
from ckpipe.settings import Lock
from tests.support.actors import PATIENCE, DaemonThreads
from tests.support.pipelines import Stores, load_existing
from tests.support.sampling import EVERY

SECONDS = 30.0 if EVERY else 0.5
BLOCK = 1 << 16
HURRIED = Lock(max_step_wait_seconds=0.01)

MODES: dict[str, dict[str, Any]] = {
    "staged": {"until": "staged"},
    "staged through little memory": {"until": "staged", "staging": {"bytes": 4 * BLOCK}},
    "captured": {"until": "captured"},
    "captured, and steps hardly wait": {"until": "captured", "lock": HURRIED},
}


class Counting(torch.optim.Optimizer):
    """Sets its parameters and its state to the number of its steps."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": torch.zeros(())})
        self.number = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["average"] = torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.number += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.fill_(self.number)
                self.state[parameter]["average"].fill_(self.number)


class Net(nn.Module):
    """Parameters and buffers of about three megabytes, many of them small."""

    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(width, 64) for width in widths)
        for number, width in enumerate(widths):
            self.register_buffer(f"seen{number}", torch.zeros(width))


class Training:
    """What is trained, and the state of it."""

    def __init__(self, seed: int) -> None:
        widths = [random.Random(seed + n).choice((1, 60, 900)) for n in range(24)]
        self.model = Net(widths)
        self.optimizer = Counting(self.model.parameters())
        self.ema = [torch.zeros_like(each) for each in self.model.parameters()]
        self.state = {"model": self.model, "optimizer": self.optimizer, "ema": self.ema}

    def forward(self, number: int) -> None:
        """Change the buffers, as normalization does."""
        for buffer in self.model.buffers():
            buffer.fill_(number)

    def after_step(self, number: int) -> None:
        """Change what is averaged, and what a scheduler sets."""
        for each in self.ema:
            each.fill_(number)
        self.optimizer.param_groups[0]["lr"].fill_(number)

    def step(self) -> None:
        number = self.optimizer.number + 1
        self.forward(number)
        self.optimizer.step()
        self.after_step(number)

    def hook(self, part: int) -> None:
        """Has step hooks change a half of what the step itself leaves alone."""
        buffers, ema = list(self.model.buffers())[part::2], self.ema[part::2]

        def before(optimizer: Any, args: Any, kwargs: Any) -> None:
            for buffer in buffers:
                buffer.fill_(optimizer.number + 1)

        def after(optimizer: Any, args: Any, kwargs: Any) -> None:
            for each in ema:
                each.fill_(optimizer.number)
            if part:
                optimizer.param_groups[0]["lr"].fill_(optimizer.number)

        self.optimizer.register_step_pre_hook(before)
        self.optimizer.register_step_post_hook(after)


def numbers_in(state: Any) -> set[float]:
    """Every number that stands in a tensor of a state."""
    if isinstance(state, torch.Tensor):
        return {state.min().item(), state.max().item()}
    if isinstance(state, dict):
        return set().union(*map(numbers_in, state.values()))
    if isinstance(state, list):
        return set().union(*map(numbers_in, state))
    return set()


class Checked:
    """Saves back to back, looks into every checkpoint, and counts."""

    def __init__(self, pipeline: ckpipe.SyncPipeline, training: Training, until: Any) -> None:
        self.pipeline, self.training, self.until = pipeline, training, until
        self.whole = self.too_slow = 0
        self._last: ckpipe.SyncSaveHandle | None = None

    def save(self, step: int) -> None:
        """Begin a save, and only then looks at the one before."""
        before, self._last = self._last, None
        try:
            self._last = self.pipeline.save(self.training.state, step=step, until=self.until)
        except CaptureTooSlow:
            self.too_slow += 1
        self.check(before)

    def check(self, handle: ckpipe.SyncSaveHandle | None) -> None:
        if handle is None:
            return
        try:
            handle.wait()
        except CaptureTooSlow:
            self.too_slow += 1
            return
        numbers = numbers_in(load_existing(self.pipeline, step=handle.id).state)
        assert len(numbers) == 1, f"step {handle.step} holds {sorted(numbers)}"
        self.whole += 1

    def finish(self) -> None:
        self.check(self._last)
        sys.stdout.write(f"{self.whole} checkpoints, {self.too_slow} too slow\n")
        assert self.whole > 0 or (self.too_slow and self.pipeline.settings.lock == HURRIED)


@pytest.fixture
def seed() -> int:
    drawn = random.SystemRandom().randrange(1 << 30)
    sys.stdout.write(f"seed {drawn}\n")
    return drawn


def opened(store: Stores, training: Training, mode: dict[str, Any]) -> ckpipe.SyncPipeline:
    staging = {"block_bytes": BLOCK, "bytes": 256 * BLOCK} | mode.get("staging", {})
    return ckpipe.SyncPipeline(
        store.url,
        guard=training.optimizer,
        staging=staging,
        lock=mode.get("lock", Lock()),
        keep_last=3,
    )


def trains_until(stop: threading.Event, step: Callable[[], None]) -> int:
    taken = 0
    while not stop.is_set():
        step()
        taken += 1
    return taken


def race(steps: list[Callable[[], None]], checked: Checked) -> None:
    """Threads each of which goes on taking steps, beside a pipeline that saves."""
    stop, threads = threading.Event(), DaemonThreads()
    training = [threads.submit(trains_until, stop, step) for step in steps]
    try:
        began, number = time.monotonic(), 0
        while not number or time.monotonic() < began + SECONDS:
            checked.save(number)
            number += 1
        checked.finish()
    finally:
        stop.set()
    assert all(each.result(PATIENCE) > 0 for each in training)


@pytest.mark.parametrize("name", MODES)
def test_threads_that_train_under_the_lock_beside_one_that_saves(
    name: str, store: Stores, seed: int
) -> None:
    training, mode = Training(seed), MODES[name]
    with opened(store, training, mode) as pipeline:

        def step() -> None:
            with pipeline.lock.mutating():
                training.step()

        race([step, step], Checked(pipeline, training, mode["until"]))


@pytest.mark.parametrize("name", MODES)
def test_a_guarded_step_whose_own_hooks_change_the_state_beside_one_that_saves(
    name: str, store: Stores, seed: int
) -> None:
    """Who trains takes no lock; its hooks are there before the guard's, and behind them."""
    training, mode = Training(seed), MODES[name]
    training.hook(0)
    with opened(store, training, mode) as pipeline:
        training.hook(1)
        race([training.optimizer.step], Checked(pipeline, training, mode["until"]))


@pytest.mark.parametrize("name", MODES)
def test_a_trainer_that_saves_its_own_state_and_trains_on(
    name: str, store: Stores, seed: int
) -> None:
    """Only the step is guarded: buffers and averages change as soon as ``save`` has returned."""
    training, mode = Training(seed), MODES[name]
    with opened(store, training, mode) as pipeline:
        checked = Checked(pipeline, training, mode["until"])
        began, number = time.monotonic(), 0
        while time.monotonic() < began + SECONDS:
            checked.save(number)
            for _ in range(3):
                training.step()
            number += 1
        checked.finish()
