"""The cells of the training-state matrix, and what each must do."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from tests.training.matrix_optimizers import OPTIMIZERS
from tests.training.matrix_variants import Variant
from tests.training.matrix_wrappers import WRAPPERS

Outcome = Literal["loads", "raises", "is refused at the save"]

HALF = torch.bfloat16
TRIPLED = 3.0
"""Targets have other learning rates than were saved, and have taken another number of steps."""


def target(
    *,
    steps: int = 1,
    used: bool = True,
    frozen: Literal["never", "always", "later"] = "never",
    tied: bool = False,
) -> Variant:
    return Variant(steps=steps, used=used, frozen=frozen, tied=tied, lr=TRIPLED)


@dataclass(frozen=True)
class Scenario:
    """How the training that is loaded into differs from the one that was saved.

    Attributes:
        saved: The training that is saved.
        target: The one that is loaded into.
        outcome: What the load must do.
        cast: Whether dtypes may be cast.
    """

    saved: Variant
    target: Variant
    outcome: Outcome = "loads"
    cast: bool = False


SCENARIOS = {
    "same": Scenario(Variant(), target()),
    "into a fresh one": Scenario(Variant(), target(steps=0)),
    "unused": Scenario(Variant(used=False), target(used=False)),
    "frozen at the save": Scenario(Variant(frozen="always"), target()),
    "frozen at the load": Scenario(Variant(), target(frozen="always")),
    "frozen at both": Scenario(Variant(frozen="always"), target(frozen="always")),
    "frozen after steps": Scenario(Variant(frozen="later"), target(frozen="later")),
    "left out at the save": Scenario(Variant(frozen="always", filtered=True), target()),
    "left out at the load": Scenario(
        Variant(), Variant(frozen="always", filtered=True, lr=TRIPLED), "raises"
    ),
    "before the first step": Scenario(Variant(steps=0), target()),
    "before any step": Scenario(Variant(steps=0), target(steps=0)),
    "one layer more": Scenario(Variant(), Variant(extra=True), "raises"),
    "one layer fewer": Scenario(Variant(extra=True), target(), "raises"),
    "another shape": Scenario(Variant(), Variant(width=8), "raises"),
    "another dtype": Scenario(Variant(), Variant(dtype=HALF), "raises"),
    "cast to bfloat16": Scenario(Variant(), Variant(dtype=HALF, steps=1), cast=True),
    "cast to float32": Scenario(Variant(dtype=HALF), target(), cast=True),
    "groups 1 to 2": Scenario(Variant(grouping="joined"), Variant(grouping="two"), "raises"),
    "equal groups 2 to 1": Scenario(
        Variant(grouping="two"), Variant(grouping="joined", lr=TRIPLED, steps=1)
    ),
    "other groups 2 to 1": Scenario(
        Variant(grouping="other"), Variant(grouping="joined"), "raises"
    ),
    "groups reordered": Scenario(
        Variant(grouping="other"), Variant(grouping="swapped", lr=TRIPLED, steps=1)
    ),
    "groups moved": Scenario(Variant(grouping="other"), Variant(grouping="moved"), "raises"),
    "parameters reordered": Scenario(Variant(), Variant(grouping="reversed", lr=TRIPLED, steps=1)),
    "tied": Scenario(Variant(tied=True), target(tied=True)),
    "tied at the save": Scenario(Variant(tied=True), target()),
    "tied at the load": Scenario(Variant(), target(tied=True), "raises"),
    "meta": Scenario(Variant(), Variant(meta=True), "raises"),
    "other options": Scenario(
        Variant(options="saved"), Variant(options="target", lr=TRIPLED, steps=1)
    ),
    "tensor rates at the save": Scenario(Variant(options="saved"), target()),
    "tensor rates at the load": Scenario(Variant(), Variant(options="target", lr=TRIPLED, steps=1)),
    "extra state": Scenario(Variant(counted=True), Variant(counted=True, lr=TRIPLED, steps=1)),
    "another class": Scenario(Variant(), Variant(subclass=True, lr=TRIPLED, steps=1), "raises"),
    "another class at both": Scenario(
        Variant(subclass=True), Variant(subclass=True, lr=TRIPLED, steps=1)
    ),
    "hooks that cast": Scenario(Variant(hooks="cast"), Variant(hooks="cast", lr=TRIPLED, steps=1)),
    "hooks that cast into a fresh one": Scenario(
        Variant(hooks="cast"), Variant(hooks="cast", lr=TRIPLED, steps=0)
    ),
    "hooks that drop": Scenario(Variant(hooks="drop"), Variant(hooks="drop", lr=TRIPLED, steps=1)),
    "state of no parameter": Scenario(
        Variant(summed=True), Variant(summed=True, lr=TRIPLED, steps=1)
    ),
}

ALONE = ("plain", "compiled", "checkpointed")
"""Wrappers of one rank."""
SHARDED = ("fsdp1", "fsdp1-mesh", "fsdp2", "hsdp", "tp", "2d")
RANKS = (1, 2, 4)
EQUAL_RANKS = [(1, 1), (2, 2), (2, 2), (4, 4)]
OTHER_RANKS = [(saved, loaded) for saved in RANKS for loaded in RANKS if saved != loaded]

BETWEEN_WRAPPERS = ("same", "unused", "frozen at the load", "groups reordered")
"""Scenarios that are tried between any two wrappers."""


@dataclass(frozen=True)
class Saved:
    """One checkpoint, from which several cells may load."""

    wrapper: str
    ranks: int
    optimizer: str
    variant: Variant


@dataclass(frozen=True)
class Cell:
    """One load.

    Attributes:
        saved_in: The wrapper that is saved.
        saved_by: How many ranks save.
        wrapper: The wrapper that is loaded into.
        ranks: How many ranks load.
        optimizer: The kind of the optimizers.
        scenario: The name of the scenario.
    """

    saved_in: str
    saved_by: int
    wrapper: str
    ranks: int
    optimizer: str
    scenario: str

    def __str__(self) -> str:
        return (
            f"{self.optimizer}, {self.saved_in} of {self.saved_by} into {self.wrapper} of "
            f"{self.ranks}, {self.scenario}"
        )

    @property
    def saved(self) -> Saved:
        variant = SCENARIOS[self.scenario].saved
        return Saved(self.saved_in, self.saved_by, self.optimizer, variant)

    @property
    def outcome(self) -> Outcome:
        """Say what must happen, by the promises of ``training_state``."""
        scenario = SCENARIOS[self.scenario]
        joint = scenario.saved.summed or (self.optimizer == "lbfgs" and scenario.saved.steps > 0)
        if self.saved_in == "fsdp1" or (joint and self.saved_in in SHARDED):
            return "is refused at the save"
        if self.wrapper == "fsdp1":
            return "raises"
        if self.optimizer == "single" and self.scenario == "tied at the save":
            return "raises"  # a group would become two
        if joint and self._has_other_parameters():
            return "raises"
        if self.scenario == "one layer fewer" and self.wrapper == "stages" and self.ranks > 1:
            return "loads"  # it may be a layer of another rank
        return scenario.outcome

    def _has_other_parameters(self) -> bool:
        """Tell whether the optimizer has other parameters than were saved, or another order."""
        elsewhere = "stages" in (self.saved_in, self.wrapper) and self.saved_by != self.ranks
        return elsewhere or self.scenario in (
            "left out at the save", "one layer fewer", "parameters reordered", "tied at the save",
        )  # fmt: skip


def every_cell() -> Iterator[Cell]:
    """Yield all cells: each case by one of the nine pairs of ranks, and pairs of wrappers."""
    draw = random.Random(0)
    for optimizer in OPTIMIZERS:
        for name in SCENARIOS:
            if (optimizer, name) == ("single", "groups moved"):
                continue  # each group is one parameter
            if optimizer != "hooked" and name == "state of no parameter":
                continue
            if "hooks" in name and optimizer not in ("adamw", "sgd")[: 1 + ("cast" in name)]:
                continue
            for wrapper in WRAPPERS:
                if "hooks" in name and wrapper == "fsdp1-mesh":
                    continue  # the comparison reads its state by state_dict, which has the hooks
                ranks = draw.choice(EQUAL_RANKS + OTHER_RANKS)
                yield _cell(wrapper, wrapper, ranks, optimizer, name)
    for saved_in in WRAPPERS:
        for wrapper in WRAPPERS:
            for name in draw.sample(BETWEEN_WRAPPERS, 2):
                optimizer = draw.choice(("adamw", "single", "hooked"))
                ranks = draw.choice(EQUAL_RANKS + OTHER_RANKS)
                yield _cell(saved_in, wrapper, ranks, optimizer, name)


def _cell(saved_in: str, wrapper: str, ranks: tuple[int, int], optimizer: str, name: str) -> Cell:
    saved_by, loaded_by = ranks
    return Cell(
        saved_in,
        1 if saved_in in ALONE else saved_by,
        wrapper,
        1 if wrapper in ALONE else loaded_by,
        optimizer,
        name,
    )
