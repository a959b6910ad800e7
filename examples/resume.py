"""A run that you can stop in the middle of an epoch and resume without a difference.

    python examples/resume.py                    (a second; run it again: nothing is left to do)
    python examples/resume.py --stop-after 25    (stops in the middle of an epoch ...)
    python examples/resume.py                    (... and resumes with the next batch)

One state holds everything that the next step depends on: model, optimizer, schedule, and `Batches`
around the data loader, with the epoch, the position and the random generators (there is dropout).
The losses of a stopped run equal those of an uninterrupted one, bit for bit.

Instead of --stop-after, send the process SIGTERM, as a scheduler does before it takes a machine
away: the run saves its current step and leaves.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ckpipe


def train(checkpoints: Path, epochs: int, stop_after: int | None) -> None:
    """Train to the end of the last epoch, or stop early; resume from the newest checkpoint."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    inputs = torch.randn(320, 16)
    samples = TensorDataset(inputs, inputs[:, :4].prod(1, keepdim=True))
    data = ckpipe.Batches(DataLoader(samples, batch_size=32, shuffle=True))
    model = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.2), nn.GELU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    state = {
        "model": model,
        "optimizer": optimizer,
        "schedule": schedule,
        "data": data,
    }
    with ckpipe.SyncPipeline(
        checkpoints, guard=optimizer, keep_last=2, save_every_steps=10, preemption=True
    ) as pipeline:
        restored = pipeline.load(state)
        step = restored.step if restored else 0
        print(f"going on after step {step}" if restored else "starting from scratch")
        for epoch in range(data.epoch, epochs):
            for x, y in data:
                step += 1
                loss = train_step(model, optimizer, x, y)
                print(f"epoch {epoch} step {step} loss {loss.hex()}")
                if step == stop_after:
                    pipeline.preempt()  # what SIGTERM does
                if pipeline.should_save(step):
                    pipeline.save(state, step=step)
                if pipeline.preempted:
                    return
            schedule.step()


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> float:
    """Take one ordinary optimizer step."""
    loss = (model(x) - y).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.item())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--checkpoints", type=Path, default=Path("resume-checkpoints"))
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--stop-after", type=int, help="the step after which to be preempted")
    options = parser.parse_args()
    train(options.checkpoints, options.epochs, options.stop_after)
