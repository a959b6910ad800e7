"""Modules are saved as their ``state_dict()`` says, though it is not what the walk asks for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from ckpipe.format.keys import LabelFilter
from ckpipe.planning import Captured
from ckpipe.state.capture_cache import capture_cache_of
from ckpipe.state.flatten import OpenedState, capture, flatten
from ckpipe.state.kinds import live_state_dict

ALL = LabelFilter()


class Odd(torch.Tensor):
    """A subclass."""


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.buffer = nn.Buffer(torch.ones(2))
        self.register_buffer("passing", torch.ones(1), persistent=False)


class Saying(Layers):
    def get_extra_state(self) -> Any:
        return {"tensor": self.one.bias}

    def set_extra_state(self, state: Any) -> None:
        raise NotImplementedError


class AsItSays:
    """The same module, asked as everybody asks it."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def state_dict(self) -> Any:
        return self.module.state_dict()

    def load_state_dict(self, state: Any) -> None:
        raise NotImplementedError


FIXED = torch.zeros(5), torch.ones(1, 3)


def nothing(model: Any) -> None:
    """Leave a model as it is."""


def tied(model: Any) -> None:
    model.two.weight = model.one.weight


def overlapping(model: Any) -> None:
    model.two.bias = nn.Parameter(model.one.weight.data[0])


def frozen(model: Any) -> None:
    model.one.requires_grad_(False)


def marked(model: Any) -> None:
    model.one.weight.mark = torch.ones(1)


def odd(model: Any) -> None:
    model.buffer = torch.ones(2).as_subclass(Odd)


def replaced(model: Any) -> None:
    model.one.weight.data = torch.ones(3, 3).t()


def hooked(model: Any) -> None:
    def swap(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
        state[prefix + "weight"] = FIXED[0]

    model.one._register_state_dict_hook(swap)


def asked_before(model: Any) -> None:
    def look(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if not keep_vars:
            model.one.weight.data = FIXED[1]

    model.one.register_state_dict_pre_hook(look)


def overridden(model: Any) -> None:
    state = {"all": torch.ones(2), "weight": model.one.weight}
    model.state_dict = lambda *args, **kwargs: state


def without_a_part(model: Any) -> None:
    model.norm = None


CHANGES: list[Callable[[Layers], None]] = [
    nothing, tied, overlapping, frozen, marked, odd, replaced, hooked, asked_before, overridden,
    without_a_part,
]  # fmt: skip


def facts(captured: Captured) -> Any:
    leaves = [replace(leaf, address=0) for leaf in captured.tensors]
    where = [leaf.address for leaf in captured.tensors]
    return captured.tree, leaves, where, captured.values, captured.replicated


@pytest.mark.parametrize("kind", [Layers, Saying])
@pytest.mark.parametrize("change", CHANGES)
def test_a_module_is_what_its_state_dict_says(
    kind: type[Layers], change: Callable[[Layers], None]
) -> None:
    model = kind()
    change(model)
    said, found = capture({"model": AsItSays(model)}), capture({"model": model})
    assert facts(found) == facts(said)
    assert [type(each) for each in found.memory] == [torch.Tensor] * len(found.memory)
    assert not any(each.requires_grad for each in found.memory)


@pytest.mark.parametrize("before", CHANGES)
@pytest.mark.parametrize("after", CHANGES)
def test_the_cache_of_a_module_finds_what_a_walk_would(
    before: Callable[[Layers], None], after: Callable[[Layers], None]
) -> None:
    model = Layers()
    before(model)
    select = LabelFilter(exclude=["*.two.*"])
    state = {"model": model, "one": model.one.weight}
    caches = [
        capture_cache_of(flatten(OpenedState(state), chosen, pickling=False))
        for chosen in (ALL, select)
    ]
    after(model)
    for cache, chosen in zip(caches, (ALL, select), strict=True):
        if cache is None:  # a tensor in the state itself has an attribute
            assert before is marked
            continue
        found = cache.capture(OpenedState(state), chosen)
        if found is not None:
            assert facts(found) == facts(capture(state, select=chosen))
        elif after is nothing:
            raise AssertionError("a model that is as it was was not followed")


@pytest.mark.parametrize("change", [hooked, asked_before, overridden])
def test_what_decides_for_itself_is_not_asked_for_its_own_tensors(
    change: Callable[[Layers], None],
) -> None:
    model = Layers()
    assert live_state_dict(model) is not None
    change(model)
    assert live_state_dict(model) is None
    assert live_state_dict(Saying()) is None
