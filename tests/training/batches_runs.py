"""Small runs over a data loader, whole or stopped and resumed, for tests of Batches."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import ckpipe
from tests.support.fork_server import Case
from tests.support.killed_runs import die, note
from tests.support.random_numbers import seed

EPOCHS = 2
SAMPLES = 24


class Samples(Dataset[Any]):
    """Numbers from 0 on, each with a draw of every global generator if ``draws`` is set."""

    def __init__(self, draws: bool, samples: int = SAMPLES) -> None:
        self.draws, self.samples = draws, samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> list[float]:
        drawn = 0.0
        if self.draws:
            drawn = float(torch.rand(1)) + random.random() + float(np.random.rand())
        return [float(index), drawn]


class Cell(NamedTuple):
    """A kind of loop.

    Args:
        loader: The name of the loader's class.
        shuffle: Whether it shuffles.
        workers: The number of workers.
        persistent: Whether they live on between epochs.
        draws: Whether a sample depends on the global generators.
    """

    loader: str = "DataLoader"
    shuffle: bool = True
    workers: int = 0
    persistent: bool = False
    draws: bool = True


def make_loader(cell: Cell, dataset: Dataset[Any], sampler: Any = None) -> DataLoader[Any]:
    cls: Any = DataLoader
    if cell.loader == "StatefulDataLoader":
        from torchdata.stateful_dataloader import StatefulDataLoader

        cls = StatefulDataLoader
    loader: DataLoader[Any] = cls(
        dataset,
        batch_size=4,
        shuffle=cell.shuffle if sampler is None else None,
        sampler=sampler,
        num_workers=cell.workers,
        persistent_workers=cell.persistent,
    )
    return loader


def losses_of(
    cell: Cell,
    root: Path | None,
    *,
    stop: int | None = None,
    rank: int = 0,
    ranks: int = 1,
    with_rng: bool = False,
    at_stop: Callable[[], None] = lambda: None,
) -> Iterator[tuple[int, str]]:
    """Train a small model with dropout over the loader, and yield each step and its loss.

    Args:
        cell: The kind of loop.
        root: The place of the checkpoints; None iterates over the bare loader.
        stop: The step that is saved; the run goes no further.
        rank: The rank.
        ranks: The number of ranks.
        with_rng: Whether the state has an RngState too.
        at_stop: Called in the loop once the stopped run has its checkpoint.
    """
    seed(rank)
    net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.001)
    dataset = Samples(cell.draws)
    sampler: Any = None
    if ranks > 1:
        sampler = DistributedSampler(dataset, ranks, rank, shuffle=cell.shuffle)
    loader = make_loader(cell, dataset, sampler)

    def step_of(batch: list[torch.Tensor]) -> str:
        loss = (net(torch.stack(batch, 1).float() / SAMPLES) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return f"{sorted(batch[0].int().tolist())} {loss.item().hex()}"

    step = 0
    if root is None:
        for epoch in range(EPOCHS):
            if sampler is not None:
                sampler.set_epoch(epoch)
            for batch in loader:
                yield step, step_of(batch)
                step += 1
        return
    data = ckpipe.Batches(loader)
    state: dict[str, Any] = {"net": net, "optimizer": optimizer, "data": data}
    if with_rng:
        state["rng"] = ckpipe.RngState()
    with ckpipe.SyncPipeline(root) as pipeline:
        restored = pipeline.load(state)
        if restored is not None:
            step = restored.step + 1
        for epoch in range(data.epoch, EPOCHS):
            data.set_epoch(epoch)
            for batch in data:
                yield step, step_of(batch)
                if step == stop:
                    pipeline.save(state, step=step).wait_complete(timeout=300)
                    at_stop()
                    return
                step += 1


def run(case: Case) -> None:
    """Run one of several ranks: over the bare loader, up to a kill, or to the end."""
    warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # which torchdata calls
    rank, ranks = dist.get_rank(), dist.get_world_size()
    root = None if case["how"] == "bare" else Path(case["root"])

    def kill() -> None:
        dist.barrier()  # a rank that dies first would leave the others in their loop
        die()

    losses = losses_of(
        Cell(*case["cell"]), root, stop=case.get("stop"), rank=rank, ranks=ranks, at_stop=kill
    )
    for step, loss in losses:
        note(case["root"], f"{case['how']} {rank} {step} {loss}")
