"""The state of an optimizer goes to the same class with the same parameters, or nothing is touched.

Each case is tried with the optimizer itself in the state, and with a ``training_state``.
"""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adam, AdamW, Optimizer, SparseAdam

from ckpipe import SyncPipeline
from ckpipe.distributed import training_state
from ckpipe.errors import CkpipeError, ShapeMismatch, StructureMismatch, UsageError
from tests.support.differences import difference
from tests.support.pipelines import newest_of
from tests.support.sampling import sample

Form = Literal["plain", "training"]
FORMS: tuple[Form, ...] = ("plain", "training")
each_form = pytest.mark.parametrize("form", FORMS)

KINDS: dict[str, Callable[..., Optimizer]] = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
}
PAIRS = [pair for pair in itertools.product(KINDS, KINDS) if pair[0] != pair[1]]
SAMPLE = sample(PAIRS, 8)


class Net(nn.Module):
    """Two matrices, which every optimizer of torch can step."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        for number, shape in enumerate(shapes or ((4, 3), (2, 5))):
            self.register_parameter(f"w{number}", nn.Parameter(torch.ones(shape)))


def step(optimizer: Optimizer, steps: int = 2) -> None:
    for _ in range(steps):

        def loss() -> torch.Tensor:
            for group in optimizer.param_groups:
                for each in group["params"]:
                    grad = torch.arange(1.0, each.numel() + 1).view_as(each).to(each.dtype)
                    each.grad = grad.to_sparse() if isinstance(optimizer, SparseAdam) else grad
            return torch.zeros(())

        loss()
        optimizer.step(loss if isinstance(optimizer, LBFGS) else None)  # type: ignore[arg-type]


def made(kind: Callable[..., Optimizer], steps: int = 2, **options: Any) -> tuple[Net, Optimizer]:
    net = Net()
    optimizer = kind(list(net.parameters()), **options)
    step(optimizer, steps)
    return net, optimizer


def state_of(form: Form, net: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    return {"o": optimizer if form == "plain" else training_state(net, optimizer)}


def everything(net: nn.Module, optimizer: Optimizer) -> Any:
    return copy.deepcopy((net.state_dict(), optimizer.state_dict()))


@pytest.fixture
def pipeline(tmp_path: Path) -> Iterator[SyncPipeline]:
    with SyncPipeline(tmp_path / "run") as opened:
        yield opened


def save(pipeline: SyncPipeline, form: Form, net: nn.Module, optimizer: Optimizer) -> int:
    pipeline.save(state_of(form, net, optimizer)).wait()
    return newest_of(pipeline).step


def load(
    pipeline: SyncPipeline, form: Form, net: nn.Module, optimizer: Optimizer, **how: Any
) -> None:
    assert pipeline.load(state_of(form, net, optimizer), **how)


def refused(
    pipeline: SyncPipeline,
    error: type[CkpipeError],
    match: str,
    form: Form,
    net: nn.Module,
    optimizer: Optimizer,
    **how: Any,
) -> None:
    """Make sure that a load raises, and leaves everything as it was."""
    before = everything(net, optimizer)
    with pytest.raises(error, match=match) as caught:
        load(pipeline, form, net, optimizer, **how)
    assert caught.value.key
    assert caught.value.hint
    assert difference(everything(net, optimizer), before) is None


# Classes


@pytest.mark.timeout(600)
def test_another_class_is_refused_or_loads_as_torch_loads_it(pipeline: SyncPipeline) -> None:
    steps = {
        (name, form): save(pipeline, form, *made(KINDS[name]))
        for name in {name for name, _ in SAMPLE}
        for form in FORMS
    }
    for (saved, target), form in itertools.product(SAMPLE, FORMS):
        for stepped in (0, 1):
            net, optimizer = made(KINDS[target], stepped)
            wanted = {"step": steps[saved, form]}
            names = f"[.:]{saved}\\b.*[.:]{target}\\b"
            refused(pipeline, StructureMismatch, names, form, net, optimizer, **wanted)
            _, twin = made(KINDS[target], stepped)
            how: dict[str, Any] = {**wanted, "optimizer_class": "any"}
            try:
                twin.load_state_dict(made(KINDS[saved])[1].state_dict())
            except KeyError:
                refused(pipeline, StructureMismatch, "torch cannot", form, net, optimizer, **how)
                continue
            load(pipeline, form, net, optimizer, **how)
            _assert_as_torch(optimizer, twin, f"{saved} to {target}, {form}")


WAYS_TO_STEP = ("foreach", "fused", "capturable", "differentiable")


def _assert_as_torch(optimizer: Optimizer, twin: Optimizer, case: str) -> None:
    found, expected = optimizer.state_dict(), twin.state_dict()
    assert difference(found["state"], expected["state"]) is None, case
    for here, there in zip(found["param_groups"], expected["param_groups"], strict=True):
        wanted = {key: value for key, value in there.items() if key not in WAYS_TO_STEP}
        assert {key: here[key] for key in wanted} == wanted, case


@pytest.mark.sample(8)
@each_form
@pytest.mark.parametrize("name", KINDS)
def test_the_same_class_gets_its_state(pipeline: SyncPipeline, form: Form, name: str) -> None:
    saved = made(KINDS[name])
    save(pipeline, form, *saved)
    for steps in (0, 1):
        net, optimizer = made(KINDS[name], steps)
        load(pipeline, form, net, optimizer)
        assert difference(everything(net, optimizer)[1], everything(*saved)[1]) is None


def same_name(base: type[Optimizer], module: str, **members: Any) -> type[Optimizer]:
    return type("Mine", (base,), {"__module__": module, "__qualname__": "Mine", **members})


@each_form
def test_a_class_that_has_moved_is_the_same(
    pipeline: SyncPipeline, form: Form, caplog: pytest.LogCaptureFixture
) -> None:
    saved = made(same_name(Adam, "__main__"))
    save(pipeline, form, *saved)
    net, optimizer = made(same_name(Adam, "train"), 0)
    with caplog.at_level(logging.INFO, "ckpipe"):
        load(pipeline, form, net, optimizer)
    assert difference(optimizer.state_dict(), saved[1].state_dict()) is None
    (record,) = [each for each in caplog.records if "train:Mine" in each.getMessage()]
    assert record.levelno == logging.INFO
    assert "__main__:Mine" in record.getMessage()
    # With other options it is another class, and so is a subclass.
    refused(pipeline, StructureMismatch, "momentum", form, *made(same_name(SGD, "train"), lr=0.1))
    refused(pipeline, StructureMismatch, "__main__:Mine.*adam:Adam", form, *made(Adam))


class Wrapper(Optimizer):
    """Averages what another optimizer does."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, inner.defaults)
        self.param_groups, self.state = inner.param_groups, inner.state

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


@each_form
def test_the_optimizer_inside_of_a_wrapper_counts(pipeline: SyncPipeline, form: Form) -> None:
    def wrapped(kind: Callable[..., Optimizer], steps: int = 2) -> tuple[Net, Optimizer]:
        return made(lambda parameters: Wrapper(kind(parameters)), steps)

    save(pipeline, form, *wrapped(Adam))
    load(pipeline, form, *wrapped(Adam, 0))
    refused(pipeline, StructureMismatch, r"Wrapper\(.*Adam\).*AdamW\)", form, *wrapped(AdamW))
    refused(pipeline, StructureMismatch, r"Wrapper\(.*a torch.optim.adam:Adam", form, *made(Adam))


def test_other_values_of_the_option_are_refused(pipeline: SyncPipeline) -> None:
    with pytest.raises(UsageError, match="'same' or 'any'"):
        pipeline.load({}, optimizer_class="other")  # type: ignore[arg-type]


# A state_dict in a plain dict has no class


def test_without_a_class_the_options_are_compared(pipeline: SyncPipeline) -> None:
    saved = made(Adam)
    pipeline.save({"o": saved[1].state_dict()}).wait()
    refused(pipeline, StructureMismatch, "amsgrad", "plain", *made(KINDS["Adamax"]))
    refused(pipeline, StructureMismatch, "momentum", "plain", *made(SGD))
    net, optimizer = made(Adam, 0)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 10)
    load(pipeline, "plain", net, optimizer)
    assert difference(optimizer.state_dict(), saved[1].state_dict()) is None


def test_options_of_schedulers_are_none_of_a_class(pipeline: SyncPipeline) -> None:
    saved = made(Adam)
    torch.optim.lr_scheduler.OneCycleLR(saved[1], 0.1, 10)
    pipeline.save({"o": saved[1].state_dict()}).wait()
    net, optimizer = made(Adam, 0)
    load(pipeline, "plain", net, optimizer)
    assert difference(optimizer.state_dict(), saved[1].state_dict()) is None


# The order of parameters


class Blocks(Optimizer):
    """Keeps state of other shapes than its parameters."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for each in self.param_groups[0]["params"]:
            self.state[each] = {"block": torch.full((7,), float(each.numel()))}


@pytest.mark.sample(8)
@pytest.mark.parametrize("kind", [*KINDS.values(), Blocks])
@pytest.mark.parametrize("steps", [0, 1])
def test_parameters_in_another_order_are_refused_by_their_shapes(
    pipeline: SyncPipeline, kind: Callable[..., Optimizer], steps: int
) -> None:
    saved = made(kind)
    save(pipeline, "plain", *saved)
    other = Net((2, 5), (4, 3))
    optimizer = kind(list(other.parameters()))
    step(optimizer, steps)
    ways: list[dict[str, Any]] = [{}, {"optimizer_class": "any"}]
    if saved[1].state:  # else nothing of it is loaded
        ways.append({"exclude": ["o.param_groups"]})
    for how in ways:
        refused(pipeline, ShapeMismatch, "shape", "plain", other, optimizer, **how)


@pytest.mark.parametrize("name", sorted(KINDS.keys() - {"LBFGS", "SGD", "Adafactor"}))
def test_a_state_without_a_record_is_compared_too(pipeline: SyncPipeline, name: str) -> None:
    pipeline.save({"o": made(KINDS[name])[1].state_dict()}).wait()
    load(pipeline, "plain", *made(KINDS[name], 0))
    other = Net((2, 5), (4, 3))
    optimizer = KINDS[name](list(other.parameters()))
    refused(pipeline, ShapeMismatch, "shape", "plain", other, optimizer)


def named(kind: Callable[..., Optimizer], net: Net, order: int = 1) -> Optimizer:
    return kind(list(net.named_parameters())[::order])


def test_parameters_of_other_names_are_refused(pipeline: SyncPipeline) -> None:
    net = Net((3, 3), (3, 3))
    optimizer = named(Adam, net)
    step(optimizer)
    save(pipeline, "plain", net, optimizer)
    other = Net((3, 3), (3, 3))
    refused(
        pipeline, StructureMismatch, "0.*'w1' here.*'w0'", "plain", other, named(Adam, other, -1)
    )
    its = named(Adam, other)
    load(pipeline, "plain", other, its)
    assert difference(its.state_dict(), optimizer.state_dict()) is None
    # Wrappers change names, and an optimizer without names takes what is there.
    wrapped = Adam([(f"module.{name}", each) for name, each in other.named_parameters()])
    load(pipeline, "plain", other, wrapped)
    load(pipeline, "plain", other, Adam(other.parameters()))


def test_a_hook_may_put_parameters_in_order(pipeline: SyncPipeline) -> None:
    net = Net()
    optimizer = named(Adam, net)
    step(optimizer)
    save(pipeline, "plain", net, optimizer)

    def reordered(its: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        (group,) = state["param_groups"]
        wanted = its.param_groups[0]["param_names"]
        order = [group["param_names"].index(name) for name in wanted]
        states = {place: state["state"][number] for place, number in enumerate(order)}
        return {"state": states, "param_groups": [{**group, "param_names": wanted}]}

    for steps in (0, 1):
        other = Net()
        its = named(Adam, other, -1)
        step(its, steps)
        its.register_load_state_dict_pre_hook(reordered)
        load(pipeline, "plain", other, its)
        for name, each in other.named_parameters():
            expected = optimizer.state[net.get_parameter(name)]
            assert difference(its.state[each], expected) is None


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_zero_redundancy_counts_as_what_it_wraps(pipeline: SyncPipeline, tmp_path: Path) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/init", rank=0, world_size=1
    )
    try:

        def sharded(kind: type[Optimizer], steps: int = 2) -> tuple[Net, Optimizer]:
            net = Net()
            optimizer = ZeroRedundancyOptimizer(net.parameters(), kind, lr=0.1)
            step(optimizer, steps)
            optimizer.consolidate_state_dict()
            return net, optimizer

        save(pipeline, "plain", *sharded(Adam))
        load(pipeline, "plain", *sharded(Adam))
        load(pipeline, "plain", *made(Adam, lr=0.1))
        refused(pipeline, StructureMismatch, "Adam.*AdamW", "plain", *sharded(AdamW))
    finally:
        torch.distributed.destroy_process_group()
