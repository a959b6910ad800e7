"""A fine-tuning recipe with eight lines for checkpoints.

    python examples/finetune_recipe.py                    (seconds; saves during training)
    python examples/finetune_recipe.py --stop-after 25    (stops early ...)
    python examples/finetune_recipe.py                    (... and resumes from the newest)

The base model stays frozen and is not saved: `include` names the adapters, the optimizer and the
position in the data. Saves are written while training continues. The last save is also written in
another form, for programs that do not know ckpipe: the adapters alone, as safetensors with an
index, in the folder `step-….hf`. With `final_format="torch"` it would be a file for `torch.load`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ckpipe


class Adapted(nn.Module):
    """A frozen linear layer with a small learned correction."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.adapter_in = nn.Parameter(torch.randn(rank, base.in_features) * 0.01)
        self.adapter_out = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + x @ self.adapter_in.t() @ self.adapter_out.t()
        return out


def pretrained() -> nn.Module:
    """Make a base model that is always the same, with adapters."""
    torch.manual_seed(0)
    return nn.Sequential(Adapted(nn.Linear(16, 64)), nn.GELU(), Adapted(nn.Linear(64, 1)))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> float:
    """Take one ordinary step."""
    loss = (model(x) - x[:, :2].prod(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.item())


def finetune(output: Path, steps: int, stop_after: int | None) -> None:
    """Run the recipe."""
    torch.set_num_threads(1)
    model = pretrained()
    adapters = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=0.01)
    data = ckpipe.Batches(DataLoader(TensorDataset(torch.randn(320, 16)), 32, shuffle=True))
    state = {"model": model, "optimizer": optimizer, "data": data}
    trained = ["model.*.adapter_*", "optimizer", "data"]
    with ckpipe.SyncPipeline(output, guard=optimizer, keep_last=2, final_format="hf") as pipeline:
        restored = pipeline.load(state, include=trained)
        step = restored.step if restored else 0
        while step < steps:
            for (x,) in data:
                step += 1
                print(f"step {step} loss {train_step(model, optimizer, x).hex()}")
                if step % 10 == 0:
                    pipeline.save(state, step=step, include=trained, final=step == steps)
                if step in (stop_after, steps):
                    return


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("finetuned"))
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--stop-after", type=int, help="the step after which to leave")
    options = parser.parse_args()
    finetune(options.output, options.steps, options.stop_after)
