"""A training loop that is a coroutine, and saves checkpoints with `await`.

    python examples/async_loop.py          (about ten seconds; run it again to train further)

The training step is plain torch and never awaits, so it blocks this program's event loop. That
does not delay the saves: a pipeline has its own event loop, in its own thread. The output shows
it: each save was durable before this coroutine awaited anything again.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (the usual name)
from torch.utils.data import DataLoader, TensorDataset

import ckpipe

CONTEXT = 24  # preceding bytes that the model sees


async def train(checkpoints: Path, steps: int, save_every: int) -> None:
    """Train some more steps after the newest checkpoint, and save now and then."""
    torch.manual_seed(1)
    text = torch.frombuffer(bytearray("".join(topics.values()).encode()), dtype=torch.uint8).long()
    excerpts = TensorDataset(text.unfold(0, CONTEXT + 1, CONTEXT))
    data = ckpipe.Batches(DataLoader(excerpts, batch_size=256, shuffle=True, drop_last=True))
    model = nn.Sequential(
        nn.Embedding(256, 32), nn.Flatten(), nn.Linear(32 * CONTEXT, 1024), nn.ReLU(),
        nn.Linear(1024, 256),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer, "data": data}

    async with ckpipe.Pipeline(checkpoints, guard=optimizer) as pipeline:
        restored = await pipeline.load(state)  # in place; None if there is no checkpoint yet
        done = restored.step if restored else 0
        print(f"going on from step {done}" if restored else "starting from scratch")

        handle, step = None, done
        while step < done + steps:
            for (batch,) in data:
                step += 1
                loss = train_step(model, optimizer, batch)  # blocks this event loop, and may
                if step % save_every == 0:
                    if handle:
                        print(f"    by now the save of step {handle.step} is {handle.status}")
                    handle = await pipeline.save(state, step=step)  # once the state is copied
                    print(f"step {step:5d}   loss {loss:.4f}   save: {handle.status}")
                if step == done + steps:
                    break

        if handle:
            info = await handle.committed()  # returns once the checkpoint is durable
            print(f"done; the newest checkpoint is {info.id}")


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> float:
    """Take one ordinary optimizer step: predict bytes from the bytes before them."""
    loss = F.cross_entropy(model(batch[:, :-1]), batch[:, -1])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--checkpoints", type=Path, default=Path("async-checkpoints"))
    parser.add_argument("--steps", type=int, default=400, help="how many more steps to train")
    parser.add_argument("--save-every", type=int, default=50)
    options = parser.parse_args()
    asyncio.run(train(options.checkpoints, options.steps, options.save_every))
