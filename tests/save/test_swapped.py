"""Averaged weights that are swapped in for an evaluation, and saves under way meanwhile."""

from __future__ import annotations

import copy
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, update_bn

import ckpipe
from ckpipe import errors
from tests.save.held_pages import HeldTensor
from tests.support.actors import PATIENCE, DaemonThreads, is_free
from tests.support.pipelines import Stores, awaited_state, loaded_state

PATIENT: dict[str, Any] = {"lock": {"max_step_wait_seconds": PATIENCE}}


def data_copy(weight: nn.Parameter, value: torch.Tensor) -> None:
    weight.data.copy_(value)  # as diffusers, timm and torch_ema do


def numpy_copy(weight: nn.Parameter, value: torch.Tensor) -> None:
    weight.detach().numpy()[:] = value.numpy()


def exchange(weight: nn.Parameter, value: torch.Tensor) -> None:
    weight.data = value


@torch.no_grad()
def counted_copy(weight: nn.Parameter, value: torch.Tensor) -> None:
    weight.copy_(value)


@torch.no_grad()
def foreach_copy(weight: nn.Parameter, value: torch.Tensor) -> None:
    torch._foreach_copy_([weight], [value])


def load_state_dict(weight: nn.Parameter, value: torch.Tensor) -> None:
    nn.ParameterDict({"weight": weight}).load_state_dict({"weight": value})


Swap = Callable[[nn.Parameter, torch.Tensor], object]
SWAPS: list[Swap] = [
    data_copy,
    numpy_copy,
    exchange,
    counted_copy,
    foreach_copy,
    load_state_dict,
]


class HeldTraining:
    """A weight that is copied between two others, which both hold a copy in their middle."""

    def __init__(self) -> None:
        self.before, self.after = HeldTensor(1.0), HeldTensor(2.0)
        self.weight = nn.Parameter(torch.arange(50_000.0))
        self.own, self.average = self.weight.detach().clone(), torch.full((50_000,), -1.0)
        self.state = {"a": self.before.tensor, "b": self.weight, "c": self.after.tensor}
        self.optimizer = torch.optim.SGD(list(self.state.values()))


@pytest.fixture
def held() -> HeldTraining:
    return HeldTraining()


@pytest.mark.parametrize("stays", [False, True], ids=["and out again", "and stays"])
@pytest.mark.parametrize("swap", SWAPS)
def test_a_swap_while_a_block_is_copied_is_never_saved(
    held: HeldTraining, store: Stores, swap: Swap, stays: bool
) -> None:
    with (
        ckpipe.SyncPipeline(store.url, guard=held.optimizer, **PATIENT) as pipeline,
        held.before,
        held.after,
    ):
        handle = pipeline.save(held.state, step=0, until="captured")
        own = held.weight.data
        held.before.wait()
        swap(held.weight, held.average)
        held.before.release()
        held.after.wait()  # the weight is copied
        if not stays:
            swap(held.weight, own if swap is exchange else held.own)
        held.after.release()
        if swap is exchange:  # the memory that was captured has not changed
            handle.wait()
            assert torch.equal(loaded_state(pipeline)["b"], held.own)
        else:
            with pytest.raises(errors.StateChanged) as caught:
                handle.wait()
            assert (caught.value.key, caught.value.step) == ("b", 0)
        assert is_free(pipeline.lock)


@pytest.mark.parametrize("swap", [None, *SWAPS])
def test_a_swap_under_the_lock_waits_for_the_copy(
    held: HeldTraining, store: Stores, threads: DaemonThreads, swap: Swap | None
) -> None:
    """By ``swapped``, or by any code inside ``lock.mutating()``."""
    seen: list[torch.Tensor] = []

    def evaluate() -> None:
        if swap is None:
            with pipeline.swapped([held.weight], [held.average]):
                seen.append(held.weight.detach().clone())
            return
        with pipeline.lock.mutating():
            own = held.weight.data
            swap(held.weight, held.average)
            seen.append(held.weight.detach().clone())
            swap(held.weight, own if swap is exchange else held.own)

    with (
        ckpipe.SyncPipeline(store.url, guard=held.optimizer, **PATIENT) as pipeline,
        held.before,
        held.after,
    ):
        handle = pipeline.save(held.state, step=0, until="captured")
        held.before.wait()
        evaluation = threads.waiting(pipeline.lock, evaluate)
        held.before.release()
        held.after.wait()
        assert not seen
        held.after.release()
        evaluation.result(PATIENCE)
        handle.wait()
        assert torch.equal(loaded_state(pipeline)["b"], held.own)
        assert torch.equal(seen[0], held.average)
        assert torch.equal(held.weight, held.own)


def test_a_loop_that_swaps_in_one_line_commits_every_save(store: Stores) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(120, 120) for _ in range(20)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    averages = [each.detach().clone().neg_() for each in model.parameters()]
    fields: dict[str, Any] = {**PATIENT, "staging": {"block_bytes": 1 << 16}}
    with ckpipe.SyncPipeline(store.url, guard=optimizer, **fields) as pipeline:
        for step in range(10):
            state = {"model": model, "optimizer": optimizer}
            handle = pipeline.save(state, step=step, until="captured")
            saved = copy.deepcopy(model.state_dict())
            with pipeline.swapped(model.parameters(), averages):
                model(torch.ones(120)).sum().item()
            handle.wait()
            found = loaded_state(pipeline, step)["model"]
            assert all(torch.equal(found[name], each) for name, each in saved.items())
            model(torch.ones(120)).square().mean().backward()
            optimizer.step()


def test_an_averaged_model_is_updated_and_evaluated_beside_saves(store: Stores) -> None:
    model = nn.Sequential(nn.Linear(30, 30), nn.BatchNorm1d(30))
    optimizer = torch.optim.AdamW(model.parameters())
    averaged = AveragedModel(model)
    state = {"model": model, "optimizer": optimizer, "averaged": averaged}
    batches = [torch.randn(8, 30) for _ in range(3)]
    with ckpipe.SyncPipeline(store.url, guard=optimizer, **PATIENT) as pipeline:
        for step in range(5):
            model(batches[0]).square().mean().backward()
            optimizer.step()
            averaged.update_parameters(model)
            handle = pipeline.save(state, step=step, until="captured")
            saved = copy.deepcopy([model.state_dict(), averaged.state_dict()])
            update_bn(batches, averaged)
            inside = [*averaged.module.parameters(), *averaged.module.buffers()]
            outside = [*model.parameters(), *model.buffers()]
            with pipeline.swapped(outside, inside):
                model.eval()(batches[0])
            model.train()
            handle.wait()
            found = loaded_state(pipeline, step)
            for name, wanted in zip(("model", "averaged"), saved, strict=True):
                assert all(torch.equal(found[name][key], each) for key, each in wanted.items())


# ---- what is sampled ----


@pytest.mark.parametrize("part", [slice(0, 50), slice(150, 200)], ids=["first", "last"])
def test_a_swap_of_which_one_end_is_left_is_noticed(store: Stores, part: slice) -> None:
    """As a swap is whose other end was still to come, or was there no more, when both looked."""
    weight = nn.Parameter(torch.zeros(200, 200))
    gate = HeldTensor(1.0)
    state = {"gate": gate.tensor, "weight": weight}
    optimizer = torch.optim.SGD(list(state.values()))
    with ckpipe.SyncPipeline(store.url, guard=optimizer, **PATIENT) as pipeline, gate:
        handle = pipeline.save(state, step=0, until="captured")
        gate.wait()
        weight.data[part] = 5.0
        gate.release()
        with pytest.raises(errors.StateChanged, match="'weight'"):
            handle.wait()


# ---- swapped ----


async def test_values_are_swapped_in_a_coroutine_and_back_bit_for_bit(store: Stores) -> None:
    own = torch.tensor([1.0, float("nan"), -0.0, 1e-40]).bfloat16()
    weight = nn.Parameter(own.clone())
    average = torch.tensor([0.1, 0.2, 0.3, 0.4])  # rounded inside
    async with ckpipe.Pipeline(store.url) as pipeline:
        with pipeline.swapped([weight], [average]):
            assert torch.equal(weight, average.bfloat16())
            assert average.tolist() == torch.tensor([0.1, 0.2, 0.3, 0.4]).tolist()
        assert torch.equal(weight.detach().view(torch.int16), own.view(torch.int16))
        await (await pipeline.save({"weight": weight}, step=0))
        found = (await awaited_state(pipeline, 0))["weight"].detach()
        assert torch.equal(found.view(torch.int16), own.view(torch.int16))


def test_an_error_inside_leaves_own_values_and_a_free_lock(store: Stores) -> None:
    weights = [torch.zeros(2), torch.ones(3)]
    pipeline = ckpipe.SyncPipeline(store.url)

    def evaluate() -> None:
        with pipeline.swapped(weights, [torch.ones(2), torch.zeros(3)]):
            assert weights[1].tolist() == [0, 0, 0]
            raise KeyError

    with pytest.raises(KeyError):
        evaluate()
    assert [each.tolist() for each in weights] == [[0, 0], [1, 1, 1]]
    assert is_free(pipeline.lock)


@pytest.mark.parametrize("values", [[], [torch.ones(2), torch.ones(1)]], ids=["fewer", "shapes"])
def test_values_that_do_not_fit_are_refused_untouched(
    store: Stores, values: list[torch.Tensor]
) -> None:
    weights = [torch.zeros(2), torch.zeros(3)]
    pipeline = ckpipe.SyncPipeline(store.url)
    with pytest.raises(errors.UsageError), pipeline.swapped(weights, values):
        pass
    assert [each.tolist() for each in weights] == [[0, 0], [0, 0, 0]]
    assert is_free(pipeline.lock)


def test_values_that_are_no_tensors_are_refused(store: Stores) -> None:
    model, average = nn.Linear(2, 2), nn.Linear(2, 2)
    pipeline: Any = ckpipe.SyncPipeline(store.url)
    for one, other in [
        (model.state_dict(), average.state_dict()),
        (model.named_parameters(), average.named_parameters()),
        ([model.bias], [average.bias.detach().numpy()]),
    ]:
        with pytest.raises(errors.UsageError, match="only tensors"), pipeline.swapped(one, other):
            pass
    assert is_free(pipeline.lock)


def test_a_decorator_swaps_at_every_call(store: Stores) -> None:
    model, average = nn.Linear(2, 2), nn.Linear(2, 2)
    pipeline: Any = ckpipe.SyncPipeline(store.url)

    def is_swapped() -> bool:
        return torch.equal(model.weight, average.weight)

    decorated = pipeline.swapped(model.parameters(), average.parameters())(is_swapped)
    assert (decorated(), decorated()) == (True, True)


def test_a_save_inside_is_refused(store: Stores) -> None:
    weight = torch.zeros(2)
    with (
        ckpipe.SyncPipeline(store.url) as pipeline,
        pipeline.swapped([weight], [torch.ones(2)]),
        pytest.raises(errors.LockMisuse),
    ):
        pipeline.save({"weight": weight}, step=0)


class Interrupting(torch.Tensor):
    """A tensor at whose second write Ctrl-C is pressed."""

    writes = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_:
            cls.writes += 1
            if cls.writes == 2:
                signal.raise_signal(signal.SIGINT)
        forward: Any = super().__torch_function__
        return forward(func, types, args, kwargs or {})


def test_an_interrupt_on_the_way_out_leaves_no_other_values(store: Stores) -> None:
    Interrupting.writes = 0
    weights = [torch.zeros(2), torch.zeros(2).as_subclass(Interrupting), torch.zeros(2)]
    pipeline = ckpipe.SyncPipeline(store.url)
    with pytest.raises(KeyboardInterrupt), pipeline.swapped(weights, [torch.ones(2)] * 3):
        pass
    assert [each.tolist() for each in weights] == [[0, 0]] * 3
    assert is_free(pipeline.lock)
