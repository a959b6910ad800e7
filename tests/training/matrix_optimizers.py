"""The optimizers of the training-state matrix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch.optim import LBFGS, SGD, Adafactor, AdamW, Optimizer, SparseAdam

from tests.training.matrix_variants import Grouping, Variant

LR = 0.0625
TARGETS_OWN = {"foreach": False, "mine": "kept"}
"""Options that only the groups of a target have."""


class Decaying(Optimizer):
    """Decays weights whatever the learning rate, and keeps numbers and tensors of other dtypes."""

    def __init__(self, groups: Any, lr: float, *, summed: bool) -> None:
        super().__init__(groups, {"lr": lr, "decay": 0.75})
        self.summed = summed

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.summed:
            total: Any = self.state.setdefault("total", {"steps": 0})  # type: ignore[call-overload]
            total["steps"] += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    wide = torch.zeros_like(parameter, dtype=torch.float64)
                    state |= {"velocity": wide, "count": 0}
                    state["scale"] = torch.ones((), dtype=torch.float64)
                state["count"] += 1
                state["scale"] *= 0.5
                state["velocity"].mul_(0.5).add_(parameter.grad)
                parameter.mul_(group["decay"]).sub_(state["velocity"], alpha=float(group["lr"]))


def groups_of(named: dict[str, Any], grouping: Grouping, lr: float) -> list[dict[str, Any]]:
    """Divide parameters into one group or two; none is empty."""
    names = list(named)
    first = [name for name in names if "bias" not in name]
    second = [name for name in names if "bias" in name]
    if grouping == "moved":
        second = [name for name in names if "first" in name]
        first = [name for name in names if name not in second]
    found = {
        "one": [(names, lr)],
        "joined": [(names, lr)],
        "reversed": [(names[::-1], lr)],
        "two": [(first, lr), (second, lr)],
        "other": [(first, lr), (second, lr / 2)],
        "moved": [(first, lr), (second, lr / 2)],
        "swapped": [(second[::-1], lr / 2), (first[::-1], lr)],
    }[grouping]
    return [{"params": [named[name] for name in each], "lr": rate} for each, rate in found if each]


def optimizers_of(
    kind: str, named: dict[str, Any], variant: Variant, runs: list[str]
) -> list[Optimizer]:
    """Make the optimizers of a kind for some parameters."""
    lr = LR * variant.lr
    sparse = {name: each for name, each in named.items() if "embed" in name}
    dense = {name: each for name, each in named.items() if name not in sparse}
    all_groups = groups_of(named, variant.grouping, lr)
    match kind:
        case "adamw":
            return [AdamW(all_groups, weight_decay=0.125)]
        case "sgd":
            return [SGD(all_groups, momentum=0.5, nesterov=True)]
        case "adafactor":
            return [Adafactor(all_groups)]
        case "lbfgs":
            if len(all_groups) == 1:
                return [LBFGS(all_groups[0]["params"], lr=lr, max_iter=2, history_size=3)]
            return [LBFGS(all_groups)]
        case "sparseadam":
            made: list[Optimizer] = []
            if sparse:
                made.append(SparseAdam(sparse.values(), lr=lr))
            if dense:
                made.append(SGD(groups_of(dense, variant.grouping, lr), momentum=0.5))
            return made
        case "single":
            if variant.grouping == "joined":
                return [SGD(all_groups, momentum=0.5)]
            return [
                SGD([parameter], lr=group["lr"], momentum=0.5)
                for group in all_groups
                for parameter in group["params"]
            ]
    optimizer = Decaying(all_groups, lr, summed=variant.summed)
    optimizer.register_step_pre_hook(lambda *_: runs.append("before"))
    optimizer.register_step_post_hook(lambda *_: runs.append("after"))
    return [optimizer]


SMALL = torch.float16
"""The dtype in which hooks keep moments in saved states."""


def is_moment(key: Any, value: Any) -> bool:
    return key != "step" and isinstance(value, torch.Tensor) and value.is_floating_point()


def add_hooks(optimizer: Optimizer, hooks: Literal["none", "cast", "drop"]) -> None:
    """Let hooks change what an optimizer saves, and change it back before it loads."""

    def change(
        state: dict[str, Any], each: Callable[[dict[Any, Any]], dict[Any, Any]]
    ) -> dict[str, Any]:
        states = {number: each(dict(kept)) for number, kept in state["state"].items()}
        return {**state, "state": states}

    def cast(kept: dict[Any, Any], dtype: torch.dtype) -> dict[Any, Any]:
        return {key: v.to(dtype) if is_moment(key, v) else v for key, v in kept.items()}

    def drop(kept: dict[Any, Any]) -> dict[Any, Any]:
        return {key: value for key, value in kept.items() if key != DROPPED}

    def make_anew(kept: dict[Any, Any]) -> dict[Any, Any]:
        return {**kept, DROPPED: torch.ones_like(kept["exp_avg"])}

    if hooks == "cast":
        optimizer.register_state_dict_post_hook(
            lambda _, state: change(state, lambda kept: cast(kept, SMALL))
        )
        optimizer.register_load_state_dict_pre_hook(
            lambda _, state: change(state, lambda kept: cast(kept, torch.float32))
        )
    elif hooks == "drop":
        optimizer.register_state_dict_post_hook(lambda _, state: change(state, drop))
        optimizer.register_load_state_dict_pre_hook(lambda _, state: change(state, make_anew))


DROPPED = "exp_avg_sq"


OPTIMIZERS: Sequence[str] = (
    "adamw", "sgd", "adafactor", "lbfgs", "sparseadam", "single", "hooked",
)  # fmt: skip
