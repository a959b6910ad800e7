"""A save between accumulated gradients is told of, once it is proven, and no other save is."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, SGD, AdamW, Optimizer
from torch.utils.data import DataLoader, TensorDataset

import ckpipe
from ckpipe import SyncPipeline

Save = Callable[[], None]
Loop = Callable[["Training", int], None]


class Training:
    """A model, its guarded optimizer, and a pipeline that saves both."""

    def __init__(
        self,
        pipeline: SyncPipeline,
        optimizer: Callable[..., Optimizer] = AdamW,
        wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
    ) -> None:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        self.model = wrap(layers)
        groups = [{"params": [*each.parameters()]} for each in layers]
        self.optimizer = optimizer(groups if optimizer is not LBFGS else self.model.parameters())
        pipeline.guard(self.optimizer)
        self._pipeline = pipeline
        self.saves = 0

    def backward(self) -> None:
        self.model(torch.randn(2, 4)).square().mean().backward()

    def save(self) -> None:
        state = {"model": self.model, "optimizer": self.optimizer}
        self._pipeline.save(state, step=self.saves)
        self.saves += 1


# Loops that lose gradients: a save lies between two batches of one step


def accumulating(clear: Callable[[Training], None], at: int) -> Loop:
    def loop(training: Training, number: int) -> None:
        for batch in range(4):
            training.backward()
            if batch == at:
                training.save()
        training.optimizer.step()
        clear(training)

    return loop


def new(training: Training) -> None:
    training.optimizer.zero_grad()


def new_by_model(training: Training) -> None:
    training.model.zero_grad()


def zeros(training: Training) -> None:
    training.optimizer.zero_grad(set_to_none=False)


def zeros_by_model(training: Training) -> None:
    training.model.zero_grad(set_to_none=False)


def cleared_first(training: Training, number: int) -> None:
    training.optimizer.zero_grad()
    accumulating(lambda _: None, 1)(training, number)


def clipped(training: Training, number: int) -> None:
    training.backward()
    training.save()
    training.backward()
    nn.utils.clip_grad_norm_(training.model.parameters(), 0.1)
    training.optimizer.step()
    training.optimizer.zero_grad()


def before_the_step(training: Training, number: int) -> None:
    training.backward()
    training.save()
    training.optimizer.step()
    training.optimizer.zero_grad()


def across_steps(training: Training, number: int) -> None:
    """Saves of a step number that counts batches, as every fifth of groups of four."""
    for batch in range(4 * number, 4 * number + 4):
        training.backward()
        if batch % 5 == 0:
            training.save()
    training.optimizer.step()
    training.optimizer.zero_grad()


def some_parameters(training: Training, number: int) -> None:
    """The first layer is frozen, and has no gradients."""
    next(training.model.children()).requires_grad_(False)
    accumulating(new, 2)(training, number)


LOSING: dict[str, Loop] = {
    "new, after the first": accumulating(new, 0),
    "new, before the last": accumulating(new, 2),
    "new by the model": accumulating(new_by_model, 1),
    "zeros, before the last": accumulating(zeros, 2),
    "zeros by the model": accumulating(zeros_by_model, 2),
    "cleared first": cleared_first,
    "clipped": clipped,
    "before the step": before_the_step,
    "across steps": across_steps,
    "some parameters": some_parameters,
}


def run(root: Path, loop: Loop, times: int, **how: Any) -> None:
    """Go through a loop so many times."""
    with SyncPipeline(root, solo=True) as pipeline:
        training = Training(pipeline, **how)
        for number in range(times):
            loop(training, number)


@pytest.mark.parametrize("name", LOSING)
def test_gradients_that_a_save_lost_are_told_of_once(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, LOSING[name], 5)
    (told,) = [each.getMessage() for each in caplog.records]
    assert "between accumulated gradients" in told
    assert "AdamW" in told
    assert "after optimizer.step()" in told


# Loops that lose none


def readme(training: Training, number: int) -> None:
    training.optimizer.zero_grad()
    training.backward()
    training.optimizer.step()
    training.save()


def saved_after(clear: Callable[[Training], None], *, twice: bool = False) -> Loop:
    def loop(training: Training, number: int) -> None:
        for _ in range(1 + twice):
            training.backward()
        training.optimizer.step()
        clear(training)
        training.save()

    return loop


def thrown_away(clear: Callable[[Training], None]) -> Loop:
    """As in a GAN: gradients of another loss are there at the save, and are thrown away."""

    def loop(training: Training, number: int) -> None:
        training.backward()
        training.save()
        clear(training)
        training.backward()
        training.optimizer.step()

    return loop


def cleared_after_each_use(clear: Callable[[Training], None]) -> Loop:
    """A GAN that clears after the step as well."""

    def loop(training: Training, number: int) -> None:
        thrown_away(clear)(training, number)
        clear(training)

    return loop


def skipped(training: Training, number: int) -> None:
    """As a scaler of gradients does after an overflow: no step is taken, but each third."""
    training.optimizer.zero_grad()
    training.backward()
    if number % 3 == 2:
        training.optimizer.step()
    training.save()


def scaled(training: Training, number: int) -> None:
    training.optimizer.zero_grad(set_to_none=False)
    training.backward()
    with torch.no_grad():
        for each in training.model.parameters():
            each.grad.mul_(0.5)  # type: ignore[union-attr]
    training.optimizer.step()
    training.save()


def skipped_and_zeroed(training: Training, number: int) -> None:
    """Each second batch is thrown away, and the save finds zeros."""
    training.backward()
    if number % 2 == 0:
        training.optimizer.step()
    zeros(training)
    zeros_by_model(training)
    training.save()


def two_saves(training: Training, number: int) -> None:
    training.save()
    readme(training, number)


def assigned(training: Training, number: int) -> None:
    """As masters in float32, whose gradients are assigned before each step."""
    for each in training.model.parameters():
        each.grad = torch.ones_like(each)
    training.optimizer.step()
    training.save()


KEEPING: dict[str, Loop] = {
    "readme": readme,
    "after new": saved_after(new),
    "after zeros": saved_after(zeros),
    "after zeros by the model": saved_after(zeros_by_model),
    "after zeros of two batches": saved_after(zeros, twice=True),
    "after new of two batches": saved_after(new, twice=True),
    "thrown away, new": thrown_away(new),
    "thrown away, zeros": thrown_away(zeros),
    "thrown away and cleared, new": cleared_after_each_use(new),
    "thrown away and cleared, zeros": cleared_after_each_use(zeros),
    "skipped": skipped,
    "scaled": scaled,
    "skipped and zeroed": skipped_and_zeroed,
    "two saves": two_saves,
    "assigned": assigned,
}


@pytest.mark.parametrize("name", KEEPING)
def test_no_other_save_is_told_of(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, KEEPING[name], 6)
    assert not caplog.records


# Wrapped models, whose gradients are DTensors, or views of buckets


def ddp_with_views(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def sharded(model: nn.Module) -> nn.Module:
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    return model


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("wrap", [DistributedDataParallel, ddp_with_views, sharded])
@pytest.mark.parametrize(
    "name", ["cleared first", "readme", "after zeros", "thrown away, new", "thrown away, zeros"]
)
def test_it_is_the_same_for_wrapped_models(
    name: str,
    wrap: Callable[[nn.Module], nn.Module],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run(tmp_path / "root", {**LOSING, **KEEPING}[name], 4, wrap=wrap)
    told = [each for each in caplog.records if "accumulated gradients" in each.getMessage()]
    # The views of a bucket come back as the same tensors, and one count is of all.
    assert len(told) == (name in LOSING and wrap is not ddp_with_views)


def test_a_closure_that_computes_gradients_is_no_alarm(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def loop(training: Training, number: int) -> None:
        def closure() -> float:
            training.optimizer.zero_grad()
            training.backward()
            return 0.0

        training.optimizer.step(closure)
        training.save()

    run(tmp_path, loop, 3, optimizer=LBFGS)
    assert not caplog.records


def test_an_optimizer_that_is_not_guarded_is_not_watched(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with SyncPipeline(tmp_path) as pipeline, SyncPipeline(tmp_path / "other") as other:
        training = Training(pipeline)
        training._pipeline = other
        for number in range(3):
            cleared_first(training, number)
    assert not caplog.records


def test_gradients_are_not_kept_alive(tmp_path: Path) -> None:
    def references(training: Training) -> Iterator[weakref.ref[Any]]:
        return (weakref.ref(each.grad) for each in training.model.parameters())

    with SyncPipeline(tmp_path) as pipeline:
        training = Training(pipeline, SGD)
        readme(training, 0)
        kept = [*references(training)]
        training.optimizer.zero_grad()
        training.backward()
        training.save()
        kept += references(training)
        training.optimizer.zero_grad()
        gc.collect()
        assert not any(each() is not None for each in kept)


def test_it_is_told_with_the_saved_step_and_a_data_loader(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The loop of the README with accumulation, whose Batches count on at each batch."""
    samples = TensorDataset(torch.randn(24, 4))
    data = ckpipe.Batches(DataLoader(samples, batch_size=2))
    model = nn.Linear(4, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer, "data": data}
    with SyncPipeline(tmp_path, guard=optimizer) as pipeline:
        for step, (batch,) in enumerate(data):
            model(batch).mean().backward()
            if step % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
            if step == 5:
                pipeline.save(state, step=step)
    (told,) = [each.getMessage() for each in caplog.records]
    assert told.startswith("step 5 was saved between accumulated gradients")
