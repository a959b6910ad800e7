"""An object in the state_dict of another comes back as the target's own object, or is refused."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    ExponentialLR,
    LinearLR,
    LRScheduler,
    SequentialLR,
)

import ckpipe
from ckpipe.errors import ShapeMismatch, StructureMismatch
from tests.support.one_checkpoint import load_one, save_one

State = dict[str, Any]


class Inner:
    """An object whose state is a number and a tensor."""

    def __init__(self, number: int) -> None:
        self.number, self.tensor = number, torch.full((3,), float(number))
        self.loads = 0

    def state_dict(self) -> State:
        return {"number": self.number, "tensor": self.tensor}

    def load_state_dict(self, state: State) -> None:
        self.number, self.tensor = state["number"], state["tensor"]
        self.loads += 1


class Outer:
    """An object that hands out its members as they are, and takes them so."""

    def __init__(self, members: Any) -> None:
        self.members = members

    def state_dict(self) -> State:
        return {"members": self.members, "more": 1}

    def load_state_dict(self, state: State) -> None:
        self.members = state["members"]


class AsItsDict:
    """An object whose state is its ``__dict__``, as that of a scheduler is."""

    def __init__(self, members: Any) -> None:
        self.members = members

    def state_dict(self) -> State:
        return vars(self)

    def load_state_dict(self, state: State) -> None:
        vars(self).update(state)


class Extra(nn.Module):
    """A module with such members in its extra state."""

    def __init__(self, members: Any) -> None:
        super().__init__()
        self.members = members

    def get_extra_state(self) -> Any:
        return {"members": self.members}

    def set_extra_state(self, state: Any) -> None:
        self.members = state["members"]


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Record:
    member: Any


HOLDERS: list[Callable[[Any], Any]] = [
    lambda inner: inner,
    lambda inner: [0, inner],
    lambda inner: (inner, 0),
    lambda inner: {"a": {"b": inner}},
    lambda inner: deque([inner]),
    lambda inner: Pair(1, inner),
    lambda inner: Record(inner),
    lambda inner: Outer([inner]),
    lambda inner: AsItsDict({"deep": Outer(inner)}),
]


def inner_of(members: Any) -> Any:
    """The only Inner in these members, or what is in its place."""
    while not isinstance(members, Inner):
        if isinstance(members, Outer | AsItsDict):
            members = members.members
        elif isinstance(members, Record):
            members = members.member
        elif isinstance(members, dict):
            (members,) = members.values()
        elif isinstance(members, list | tuple | deque):
            members = next(each for each in members if not isinstance(each, int))
        else:
            return members
    return members


@pytest.mark.sample(6)
@pytest.mark.parametrize("outer", [Outer, AsItsDict, Extra])
@pytest.mark.parametrize("hold", HOLDERS)
def test_the_targets_own_object_is_filled_and_handed_over(
    outer: Callable[[Any], Any], hold: Callable[[Any], Any], tmp_path: Path
) -> None:
    save_one(tmp_path, {"outer": outer(hold(Inner(7)))})
    own = Inner(1)
    tensor = own.tensor
    target = outer(hold(own))
    load_one(tmp_path, {"outer": target})
    assert inner_of(target.members) is own
    assert (own.number, own.loads) == (7, 1)
    assert own.tensor is tensor
    assert tensor.tolist() == [7.0, 7.0, 7.0]


@pytest.mark.sample(6)
@pytest.mark.parametrize("outer", [Outer, AsItsDict, Extra])
@pytest.mark.parametrize("hold", [HOLDERS[n] for n in (0, 1, 3, 8)])
@pytest.mark.parametrize("other", [None, 0, "none", "absent"])
def test_a_target_without_such_an_object_is_refused_by_name(
    outer: Callable[[Any], Any], hold: Callable[[Any], Any], other: Any, tmp_path: Path
) -> None:
    save_one(tmp_path, {"a": torch.ones(2), "outer": outer(hold(Inner(7)))})
    members = {} if other == "absent" else hold(other)
    target = {"a": torch.zeros(2), "outer": outer(members)}
    with pytest.raises(StructureMismatch) as caught:
        load_one(tmp_path, target)
    assert "load_state_dict" in str(caught.value)
    assert caught.value.key is not None
    assert caught.value.key.startswith("outer")
    assert target["outer"].members is members
    assert target["a"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("outer", [Outer, AsItsDict, Extra])
def test_an_inner_module_that_does_not_fit_is_refused_untouched(
    outer: Callable[[Any], Any], tmp_path: Path
) -> None:
    save_one(tmp_path, {"outer": outer([Inner(7), nn.Linear(2, 2)])})
    own = Inner(1)
    with pytest.raises(ShapeMismatch, match=r"outer.*members\.1\.weight"):
        load_one(tmp_path, {"outer": outer([own, nn.Linear(3, 2)])})
    assert (own.number, own.loads, own.tensor.tolist()) == (1, 0, [1.0, 1.0, 1.0])


def test_a_target_that_hands_out_a_state_dict_gets_one(tmp_path: Path) -> None:
    save_one(tmp_path, {"outer": Outer([Inner(7)])})
    target = Outer([Inner(1).state_dict()])
    load_one(tmp_path, {"outer": target})
    assert target.members[0]["number"] == 7


def test_an_object_that_is_in_the_state_too_is_loaded_once(tmp_path: Path) -> None:
    inner = Inner(7)
    save_one(tmp_path, {"inner": inner, "outers": [Outer(inner), AsItsDict([inner])]})
    own = Inner(1)
    first, second = Outer(own), AsItsDict([own])
    load_one(tmp_path, {"inner": own, "outers": [first, second]})
    assert first.members is second.members[0] is own
    assert (own.number, own.loads) == (7, 1)


def test_what_was_one_object_fills_two_of_the_target(tmp_path: Path) -> None:
    inner = Inner(7)
    save_one(tmp_path, {"outers": [Outer(inner), Outer(inner)]})
    first, second = Inner(1), Inner(2)
    outers = [Outer(first), Outer(second)]
    load_one(tmp_path, {"outers": outers})
    assert [each.members for each in outers] == [first, second]
    assert (first.number, second.number) == (7, 7)


def test_an_object_that_holds_itself_is_handed_over(tmp_path: Path) -> None:
    def ring(number: int) -> tuple[Outer, AsItsDict, Inner]:
        inner = Inner(number)
        back = AsItsDict([inner])
        outer = Outer({"back": back})
        back.members.append(outer)
        return outer, back, inner

    save_one(tmp_path, {"outer": ring(7)[0]})
    outer, back, inner = ring(1)
    load_one(tmp_path, {"outer": outer})
    assert outer.members["back"] is back
    assert back.members[0] is inner
    assert back.members[1] is outer
    assert (inner.number, inner.loads) == (7, 1)


def test_a_label_that_is_left_out_keeps_its_object(tmp_path: Path) -> None:
    save_one(tmp_path, {"outer": Outer({"one": Inner(7), "two": Inner(8)})})
    one, two = Inner(1), Inner(2)
    target = Outer({"one": one, "two": two})
    load_one(tmp_path, {"outer": target}, exclude=["outer.members.two.*"])
    assert target.members == {"one": one, "two": two}
    assert (one.number, two.number, two.loads) == (7, 2, 0)


# Schedulers


class Warmup(LRScheduler):
    """As popular warmup schedulers: ``state_dict`` is the ``__dict__``, with the next one in it."""

    def __init__(self, optimizer: Optimizer, held: Any, steps: int = 3) -> None:
        self.held, self.steps = held, steps
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        return [base * min(1.0, (self.last_epoch + 1) / self.steps) for base in self.base_lrs]

    def step(self, epoch: int | None = None) -> None:
        if self.last_epoch < self.steps:
            super().step()
        else:
            self.after.step()
            self.last_epoch += 1

    @property
    def after(self) -> Any:
        held = self.held
        while not isinstance(held, LRScheduler):
            held = held["next"] if isinstance(held, dict) else held[0]
        return held


SCHEDULERS: dict[str, Callable[[SGD], LRScheduler]] = {
    "attribute": lambda sgd: Warmup(sgd, CosineAnnealingLR(sgd, 20)),
    "list": lambda sgd: Warmup(sgd, [CosineAnnealingLR(sgd, 20)]),
    "dict": lambda sgd: Warmup(sgd, {"next": [ExponentialLR(sgd, 0.9)]}),
    "nested": lambda sgd: Warmup(sgd, Warmup(sgd, ExponentialLR(sgd, 0.9), 4), 2),
    "sequential": lambda sgd: SequentialLR(
        sgd, [LinearLR(sgd), Warmup(sgd, [ExponentialLR(sgd, 0.9)])], milestones=[3]
    ),
    "chained": lambda sgd: ChainedScheduler([LinearLR(sgd), ExponentialLR(sgd, 0.9)]),
    "in torch's": lambda sgd: Warmup(
        sgd, SequentialLR(sgd, [LinearLR(sgd), ExponentialLR(sgd, 0.9)], milestones=[2])
    ),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_scheduler_inside_a_scheduler_goes_on(kind: str, tmp_path: Path) -> None:
    def built() -> State:
        model = nn.Linear(2, 2)
        optimizer = SGD(model.parameters(), lr=0.1)
        return {"model": model, "optimizer": optimizer, "schedule": SCHEDULERS[kind](optimizer)}

    def rates(state: State, count: int) -> list[float]:
        found = []
        for _ in range(count):
            state["optimizer"].step()
            state["schedule"].step()
            found.append(state["optimizer"].param_groups[0]["lr"])
        return found

    whole = rates(built(), 12)
    state = built()
    rates(state, 6)
    save_one(tmp_path, state)
    again = built()
    load_one(tmp_path, again)
    assert rates(again, 6) == whole[6:]
    schedule = again["schedule"]
    inner = getattr(schedule, "after", None) or schedule._schedulers[-1]
    assert inner.optimizer is again["optimizer"]


def test_a_fresh_load_has_the_state_of_the_inner_object(tmp_path: Path) -> None:
    save_one(tmp_path, {"outer": Outer([Inner(7)])})
    state = ckpipe.load(tmp_path).state
    assert state["outer"]["members"][0]["number"] == 7
