"""The trainings of the training-state matrix: a model in a wrapper, with optimizers, trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import LBFGS, Optimizer

from tests.training.matrix_optimizers import TARGETS_OWN, add_hooks, optimizers_of
from tests.training.matrix_variants import Net, Variant
from tests.training.matrix_wrappers import WRAPPERS


@dataclass
class Trained:
    """A model, bare and wrapped, with its optimizers.

    Attributes:
        net: The bare model, whose names count.
        model: What is trained and saved: the wrapped model or a list of stages.
        optimizers: Its optimizers.
        variant: How it was made.
        hook_runs: How often hooks of the optimizers have run.
    """

    net: Net
    model: nn.Module | list[nn.Module]
    optimizers: list[Optimizer]
    variant: Variant
    hook_runs: list[str]

    @property
    def modules(self) -> list[nn.Module]:
        return self.model if isinstance(self.model, list) else [self.model]

    def train(self, steps: range) -> list[float]:
        """Train on data that depend on nothing but the step; return all losses."""
        losses = []
        for step in steps:

            def loss_of(step: int = step) -> Any:
                for each in self.modules:
                    each.zero_grad()
                loss = self._loss(step)
                loss.backward()  # type: ignore[no-untyped-call]
                return loss

            losses.append(loss_of().item())
            for optimizer in self.optimizers:
                optimizer.step(loss_of if isinstance(optimizer, LBFGS) else None)
        return losses

    def _loss(self, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(10, (6,), generator=generator)
        if not isinstance(self.model, list):
            hidden: torch.Tensor = self.model(ids)
            return hidden.float().square().mean()
        inputs = {"embed": ids}
        for name, width in (("first", 4), ("second", 8), ("tail", 4)):
            inputs[name] = torch.randn(6, width, generator=generator).to(self.variant.dtype)
        blocks: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            name: block for stage in self.model for name, block in stage.named_children()
        }
        if "third" in blocks:
            blocks["tail"] = self.net.tail
        outputs = [blocks[name](x) for name, x in inputs.items() if name in blocks]
        return torch.stack([each.float().square().mean() for each in outputs]).sum()

    def freeze_later(self) -> None:
        if self.variant.frozen == "later":
            for name, parameter in self.net.named_parameters():
                if "spare" in name:
                    parameter.requires_grad_(False)


def make(wrapper: str, kind: str, variant: Variant) -> Trained:
    """Make a model with optimizers, and take the steps of its variant."""
    torch.manual_seed(3)
    with torch.device("meta" if variant.meta else "cpu"):
        net = Net(variant, sparse=kind == "sparseadam")
    model: nn.Module | list[nn.Module] = WRAPPERS[wrapper](net)
    named = dict(net.named_parameters())
    if isinstance(model, list):
        held = {id(each) for stage in model for each in stage.parameters()}
        named = {name: each for name, each in named.items() if id(each) in held}
    if variant.filtered:
        named = {name: each for name, each in named.items() if each.requires_grad}
    runs: list[str] = []
    optimizers = optimizers_of(kind, named, variant, runs)
    for each in optimizers:
        add_hooks(each, variant.hooks)
        if variant.subclass:
            each.__class__ = type("Derived", (type(each),), {})
    for group in (group for each in optimizers for group in each.param_groups):
        if variant.options != "usual":
            group["lr"] = torch.tensor(group["lr"])
            group |= {"initial_lr": 5} if variant.options == "saved" else TARGETS_OWN
    made = Trained(net, model, optimizers, variant, runs)
    if variant.meta:
        assert all(each.is_meta for each in named.values()), f"{wrapper} gives meta tensors memory"
    else:
        made.train(range(variant.steps))
        made.freeze_later()
    return made
