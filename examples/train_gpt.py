"""Train a small GPT on the documentation of Python, and save checkpoints while it trains.

Run it, stop it at any time (Ctrl-C, kill -9, a power cut), and run the same command again: it
resumes from its newest complete checkpoint. The following losses are the same, bit for bit, as
without the stop.

    python examples/train_gpt.py --checkpoints /tmp/my-run --log /tmp/my-run.jsonl

All code for ckpipe is in `train`; the rest is an ordinary GPT.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (the usual name)
from torch.utils.data import DataLoader, Dataset

import ckpipe


def train(options: argparse.Namespace) -> None:
    """Train from the newest complete checkpoint, or from scratch, to the last step."""
    make_deterministic(options.seed, options.threads)
    excerpts = Excerpts(english_text(), options.context)
    data = ckpipe.Batches(DataLoader(excerpts, options.batch, shuffle=True, drop_last=True))
    model = GPT(options.layers, options.width, options.context, options.dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    scheduler = warmup_then_cosine(optimizer, options.steps)
    progress = ckpipe.Progress(bytes_seen=0)

    # Everything that the next step depends on. `data` has the position in the text, and the random
    # generators, which decide which neurons dropout silences.
    state = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "progress": progress,
        "data": data,
    }

    with (
        ckpipe.SyncPipeline(options.checkpoints, guard=optimizer) as pipeline,
        open(options.log, "a", buffering=1) as log,
    ):
        restored = pipeline.load(state)
        done = restored.step if restored else 0
        say(f"resumed from step {done}" if restored else "no checkpoint yet: starting from scratch")

        batches = endless(data)
        for step in range(done + 1, options.steps + 1):
            began = time.perf_counter()
            batch = next(batches)
            loss = train_step(model, optimizer, scheduler, batch)
            progress.bytes_seen += batch.numel()
            trained = time.perf_counter()

            status = None
            if step % options.save_every == 0:
                handle = pipeline.save(state, step=step)  # returns once the state is copied
                status = handle.status
            blocked = time.perf_counter() - trained

            record = {"step": step, "loss": loss.hex(), "step_seconds": trained - began}
            if status:
                record["blocked_seconds"] = blocked
            log.write(json.dumps(record) + "\n")
            if status:
                say(f"saving step {step}: training paused {blocked * 1e3:.1f} ms, now {status}")
            if step % 20 == 0 or step == options.steps:
                say(f"step {step:4d}   loss {loss:.4f}")

        # Leaving the `with` block waits for the saves that still run.
        log.write(json.dumps({"bytes_seen": progress.bytes_seen, "sha256": checksum(model)}) + "\n")


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    batch: Tensor,
) -> float:
    """Take one optimizer step on a batch and return its loss."""
    logits = model(batch[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    return loss.item()


class GPT(nn.Module):
    """A byte-level transformer that predicts the next byte."""

    def __init__(self, layers: int, width: int, context: int, dropout: float) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        self.head.weight = self.bytes.weight  # tied weights are saved once and stay tied
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.bytes(tokens) + self.positions.weight[: tokens.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(self.dropout(x))))
        return logits


class Block(nn.Module):
    """Causal self-attention, then a feed-forward network, each added to its input."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.heads = width // 32
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm_1(x)))
        change: Tensor = self.dropout(self.mlp(self.norm_2(x)))
        return x + change

    def attention(self, x: Tensor) -> Tensor:
        # (batch, time, 3 × width) -> three of (batch, heads, time, width of a head)
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return result


def english_text() -> Tensor:
    """Return the help texts of Python as bytes: about 460 KB of English."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()


class Excerpts(Dataset[Tensor]):
    """Excerpts of a text, one after the other: each `context` bytes, and one more to predict."""

    def __init__(self, text: Tensor, context: int) -> None:
        self.text, self.context = text, context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.context
        return self.text[start : start + self.context + 1]


def endless(data: ckpipe.Batches) -> Iterator[Tensor]:
    """Yield the batches of one epoch after the other."""
    while True:
        yield from data


def warmup_then_cosine(
    optimizer: torch.optim.Optimizer, steps: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """Make a learning rate that rises for a twentieth of the steps, then falls along a cosine."""
    warmup = max(1, steps // 20)

    def factor(step: int) -> float:
        return min((step + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * step / steps))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def make_deterministic(seed: int, threads: int) -> None:
    """Make two runs equal bit for bit: sums depend on the number of threads."""
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(threads)


def checksum(model: nn.Module) -> str:
    """Compute the SHA-256 of all parameters, in order."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()


def say(line: str) -> None:
    print(line, flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoints", type=Path, required=True, help="folder for checkpoints")
    parser.add_argument("--log", type=Path, required=True, help="file for one JSON line per step")
    parser.add_argument("--steps", type=int, default=320)
    parser.add_argument("--save-every", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2, help="another number rounds differently")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=192, help="a multiple of 32")
    parser.add_argument("--context", type=int, default=128, help="preceding bytes it sees")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--dropout", type=float, default=0.1)
    return parser.parse_args()


if __name__ == "__main__":
    train(parse_arguments())
