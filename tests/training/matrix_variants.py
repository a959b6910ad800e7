"""The models of the training-state matrix, bare, and how they and their optimizers differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

Grouping = Literal["one", "joined", "reversed", "two", "other", "swapped", "moved"]


@dataclass(frozen=True)
class Variant:
    """How a model and its optimizers are made.

    Attributes:
        steps: How many steps are taken before the save, or before the load.
        used: Whether the layer ``spare`` is used.
        frozen: When that layer is frozen: never, from the beginning, or after the steps.
        extra: Whether there is one more layer.
        width: The rows of that layer.
        dtype: The dtype of all parameters.
        tied: Whether that layer shares its weight with another.
        meta: Whether all parameters are on the ``meta`` device.
        filtered: Whether frozen parameters are left out of the optimizers.
        grouping: How the parameters are divided into groups.
        lr: What the learning rates are multiplied by.
        options: Whether learning rates are tensors, beside an option that only the saved groups
            have or only those of the target.
        counted: Whether a module has extra state.
        summed: Whether the optimizer has state that is of no parameter.
        subclass: Whether the optimizers are of a class derived from the usual one.
        hooks: Whether hooks cast moments in saved states to a small dtype and back, or drop them
            and make them anew.
    """

    steps: int = 2
    used: bool = True
    frozen: Literal["never", "always", "later"] = "never"
    extra: bool = False
    width: int = 4
    dtype: torch.dtype = torch.float32
    tied: bool = False
    meta: bool = False
    filtered: bool = False
    grouping: Grouping = "one"
    lr: float = 1.0
    options: Literal["usual", "saved", "target"] = "usual"
    counted: bool = False
    summed: bool = False
    subclass: bool = False
    hooks: Literal["none", "cast", "drop"] = "none"


class Counter(nn.Module):
    """Counts its calls, in extra state: as a number, and in every element of two tensors."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x

    def get_extra_state(self) -> dict[str, Any]:
        tensors = {f"seen {n}": torch.full((n,), float(self.calls)) for n in (3, 100_000)}
        return {"calls": self.calls} | tensors

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]
        assert all((state[f"seen {n}"] == self.calls).all() for n in (3, 100_000))


class Net(nn.Module):
    """A few layers with sizes that four ranks cannot share evenly, and a buffer that counts."""

    def __init__(self, variant: Variant, *, sparse: bool) -> None:
        super().__init__()
        self.variant = variant
        self.embed = nn.Embedding(10, 4, sparse=sparse)
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 4)
        self.third = nn.Linear(4, 4, bias=False)
        self.spare = nn.Linear(4, variant.width, bias=False)
        if variant.extra:
            self.extra = nn.Linear(4, 4)
        if variant.counted:
            self.third.add_module("counter", Counter())
        if variant.tied:
            self.spare.weight = self.third.weight
        if variant.frozen == "always":
            self.spare.requires_grad_(False)
        self.third.register_buffer("count", torch.zeros(()))
        self.third.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.to(variant.dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.tail(self.second(torch.relu(self.first(self.embed(ids)))))

    def tail(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.third(x)
        self.third.get_buffer("count").add_(1)
        if self.variant.counted:
            hidden = self.third.get_submodule("counter")(hidden)
        if self.variant.extra:
            hidden = self.extra(hidden)
        if self.variant.used:
            hidden = hidden + self.spare(hidden).sum(-1, keepdim=True)
        return hidden
