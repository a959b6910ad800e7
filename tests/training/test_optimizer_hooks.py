"""Hooks of an optimizer make the state that is saved, and the state that the optimizer gets.

Each case is tried with the optimizer itself in the state, and with a ``training_state``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adam, Optimizer

from ckpipe import SyncPipeline
from tests.support.differences import difference
from tests.support.pipelines import load_existing
from tests.training.test_optimizer_classes import (
    Form,
    Net,
    each_form,
    everything,
    load,
    made,
    save,
    step,
)

SMALL = torch.bfloat16


@pytest.fixture
def pipeline(tmp_path: Path) -> Iterator[SyncPipeline]:
    with SyncPipeline(tmp_path / "run") as opened:
        yield opened


def moments(change: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[..., dict[str, Any]]:
    """A hook that changes the second moments in a state, or drops them."""

    def hook(_: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        states = {}
        for number, kept in state["state"].items():
            changed = change(kept.get("exp_avg_sq", kept["exp_avg"]))
            states[number] = {key: each for key, each in kept.items() if key != "exp_avg_sq"}
            if changed is not None:
                states[number]["exp_avg_sq"] = changed
        return {**state, "state": states}

    return hook


def hooked(
    saves: Callable[..., Any] | None, loads: Callable[..., Any] | None, steps: int = 2
) -> tuple[Net, Optimizer]:
    net, optimizer = made(Adam, steps)
    if saves is not None:
        optimizer.register_state_dict_post_hook(saves)
    if loads is not None:
        optimizer.register_load_state_dict_pre_hook(loads)
    return net, optimizer


small = moments(lambda each: each.to(SMALL))
wide = moments(torch.Tensor.float)
dropped = moments(lambda _: None)
made_anew = moments(lambda each: torch.full_like(each, 7))
nothing = lambda *_: None  # noqa: E731
CASES: dict[str, tuple[Any, Any]] = {
    "small on the store": (small, wide),
    "small, and torch casts back": (small, None),
    "small, and a hook that does nothing": (small, nothing),
    "dropped": (dropped, None),
    "dropped and made anew": (dropped, made_anew),
    "cast by the load": (None, moments(lambda each: each.to(SMALL).float())),
    "hooks that do nothing": (nothing, nothing),
}


@pytest.mark.sample(8)
@each_form
@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("case", CASES)
def test_a_hook_does_what_it_does_with_torch(
    pipeline: SyncPipeline, form: Form, case: str, steps: int
) -> None:
    saved = hooked(*CASES[case])
    save(pipeline, form, *saved)
    written = load_existing(pipeline)
    there = written.state["o"] if form == "plain" else written.state["o"]["optimizer"]
    dtypes = {kept["exp_avg_sq"].dtype for kept in there["state"].values() if "exp_avg_sq" in kept}
    assert dtypes == {"small": {SMALL}, "dropped": set()}.get(
        case.split()[0].strip(","), {torch.float32}
    )
    net, optimizer = hooked(*CASES[case], steps)
    load(pipeline, form, net, optimizer)
    _, twin = hooked(*CASES[case], steps)
    twin.load_state_dict(saved[1].state_dict())
    for ours, theirs in zip(optimizer.state.values(), twin.state.values(), strict=True):
        assert difference(ours, theirs) is None


def bfloat16(steps: int = 2) -> tuple[Net, Optimizer]:
    """Parameters in bfloat16 with moments in float32."""
    net, optimizer = made(Adam, steps)
    net.to(SMALL)
    return net, optimizer


def second(net: nn.Module, optimizer: Optimizer) -> list[torch.Tensor]:
    return [optimizer.state[each]["exp_avg_sq"] for each in net.parameters()]


@pytest.mark.parametrize("steps", [0, 2])
def test_a_training_state_keeps_the_dtype_that_hooks_make(
    pipeline: SyncPipeline, steps: int
) -> None:
    saved = bfloat16()
    expected = [each.to(SMALL).float() for each in second(*saved)]
    saved[1].register_state_dict_post_hook(small)
    save(pipeline, "training", *saved)
    net, optimizer = bfloat16(steps)
    optimizer.register_state_dict_post_hook(small)
    optimizer.register_load_state_dict_pre_hook(wide)
    load(pipeline, "training", net, optimizer)
    assert difference(second(net, optimizer), expected) is None


def test_a_hook_after_the_load_has_the_last_word(pipeline: SyncPipeline) -> None:
    saved = bfloat16()
    save(pipeline, "training", *saved)
    net, optimizer = bfloat16(0)
    seen = []

    def shrink(its: Optimizer) -> None:
        for state in its.state.values():
            seen.append(state["exp_avg_sq"].dtype)
            state["exp_avg_sq"] = state["exp_avg_sq"].to(SMALL)

    optimizer.register_load_state_dict_post_hook(shrink)
    load(pipeline, "training", net, optimizer)
    assert seen == [torch.float32] * 2
    assert difference(second(net, optimizer), [each.to(SMALL) for each in second(*saved)]) is None
    first = [optimizer.state[each]["exp_avg"].dtype for each in net.parameters()]
    assert first == [torch.float32] * 2


class Nested(Optimizer):
    """Keeps tensors inside of containers, in a dtype of their own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for each in self.param_groups[0]["params"]:
            wide = torch.full((3,), float(each.numel()), dtype=torch.float64)
            self.state[each] = {"pair": [wide, (wide + 1,)], "by": {"name": wide + 2}}


@pytest.mark.parametrize("hooks", [False, True])
def test_state_inside_of_containers_keeps_its_dtype(pipeline: SyncPipeline, hooks: bool) -> None:
    saved = made(Nested)
    save(pipeline, "training", *saved)
    net, optimizer = made(Nested, 0)
    if hooks:
        optimizer.register_load_state_dict_pre_hook(nothing)
    load(pipeline, "training", net, optimizer)
    assert difference(everything(net, optimizer)[1], everything(*saved)[1]) is None


def test_what_is_not_loaded_takes_no_way_through_hooks(pipeline: SyncPipeline) -> None:
    saved = hooked(small, wide)
    save(pipeline, "training", *saved)
    net, optimizer = hooked(small, wide)
    step(optimizer, 3)
    first, other = net.parameters()
    kept, changed = dict(optimizer.state[first]), dict(optimizer.state[other])
    load(pipeline, "training", net, optimizer, include=["o.optimizer.state.w1"])
    assert difference(optimizer.state[first], kept) is None
    assert difference(optimizer.state[other], changed) is not None
