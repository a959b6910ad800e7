"""Train a small GPT sharded over several processes, save without collectives, resume on others.

    torchrun --nproc-per-node 4 examples/fsdp_torchrun.py --checkpoints /tmp/sharded
    ... kill it at any time (kill -9 any of the processes), then resume with two:
    torchrun --nproc-per-node 2 examples/fsdp_torchrun.py --checkpoints /tmp/sharded

Every rank writes its own shards and its own manifest, and waits for no other rank. A checkpoint
is complete once all ranks have written theirs. The newest complete checkpoint loads into any
number of ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F  # noqa: N812  (the usual name)
from torch.utils.data import DataLoader, DistributedSampler
from train_gpt import GPT, Excerpts, english_text, say

import ckpipe
from ckpipe.distributed import training_state

BATCH = 8  # samples of all ranks together, whatever their number


def train(options: argparse.Namespace) -> None:
    """Train from the newest complete checkpoint, or from scratch, to the last step."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    excerpts = Excerpts(english_text(), context=32)
    sampler: DistributedSampler[Tensor] = DistributedSampler(excerpts, drop_last=True)
    data = ckpipe.Batches(DataLoader(excerpts, BATCH // ranks, sampler=sampler, drop_last=True))
    model = GPT(layers=2, width=64, context=32, dropout=0.0)
    mesh = init_device_mesh("cpu", (ranks,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    progress = ckpipe.Progress(samples=0)
    state = {"training": training_state(model, optimizer), "progress": progress, "data": data}

    with ckpipe.SyncPipeline(options.checkpoints, guard=optimizer) as pipeline:
        # All ranks choose the same checkpoint. Another number of ranks gets generators of its own.
        restored = pipeline.load(state, per_rank="derive")
        done = restored.step if restored else 0
        if rank == 0:
            say(f"{ranks} ranks, from step {done}")
        batches = epochs(data)
        for step in range(done + 1, options.steps + 1):
            loss = train_step(model, optimizer, next(batches))
            progress.samples += BATCH
            if rank == 0:
                say(f"step {step:4d}   loss {loss:.4f}")
                with options.checkpoints.with_suffix(".jsonl").open("a") as log:
                    log.write(json.dumps({"step": step, "ranks": ranks, "loss": loss}) + "\n")
            if step % options.save_every == 0:
                pipeline.save(state, step=step)  # returns once this rank's shards are copied
            if (step, rank) == (options.die_at, ranks - 1):
                os.kill(os.getpid(), signal.SIGKILL)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> float:
    """Take one step on this rank's share of the batch; return the loss over all ranks."""
    logits = model(batch[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)  # the program's own collective: ckpipe calls none
    return mean.item() / dist.get_world_size()


def epochs(data: ckpipe.Batches) -> Iterator[Tensor]:
    """Yield this rank's share of all batches, one epoch after the other."""
    while True:
        data.set_epoch(data.epoch)
        yield from data


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--die-at", type=int, help="the step at which the last rank is killed")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        train(arguments)
    finally:
        dist.destroy_process_group()
