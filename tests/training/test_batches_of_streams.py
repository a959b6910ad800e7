"""Batches over streams that remember their position: later epochs are whole after a resume."""

from __future__ import annotations

import itertools
import random
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from ckpipe import Batches, SyncPipeline
from ckpipe.errors import CkpipeError, UsageError
from tests.support.random_numbers import seed
from tests.support.rank_pipelines import ranks
from tests.training.streams import KINDS, Each, Hidden

pytestmark = [
    pytest.mark.usefixtures("generators"),
    # torchdata calls what torch has deprecated.
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
]

EPOCHS = 3
Moment = tuple[int, int | None]
"""An epoch, and the number of batches that its loop has received; None once it is over."""

MOMENTS: list[Moment] = [(0, 0), (0, 1), (0, 3), (0, 6), (0, None), (1, 1), (1, 6), (2, 2)]
WORKERS_MOMENTS: list[Moment] = [(0, 3), (1, 1), (1, 6), (1, None)]
LOADERS: dict[str, Any] = {"DataLoader": DataLoader, "StatefulDataLoader": StatefulDataLoader}
CELLS = [
    (kind, loader, workers, persistent, tells)
    for kind, loader in itertools.product(KINDS, LOADERS)
    for workers, persistent in [(0, False), (2, False), (2, True)]
    for tells in ([False, True] if kind in ("by epoch", "Hugging Face") else [False])
    # The rounds of a dataset in persistent workers are in no state.
    if kind != "runs on" or not workers
]
CASES = [
    (cell, stop)
    for cell in CELLS
    for stop in (WORKERS_MOMENTS if cell[2] else MOMENTS)
    # It begins with the seed that its program drew.
    if (cell[0], stop) != ("runs on", (0, 0))
]


def make(kind: str, loader: str, workers: int, persistent: bool, **options: Any) -> Any:
    return LOADERS[loader](
        KINDS[kind](),
        batch_size=4,
        num_workers=workers,
        persistent_workers=persistent,
        **options,
    )


def seen(batch: Any) -> list[Any]:
    """Return a batch, and numbers that the loop draws after it."""
    values = batch.values() if isinstance(batch, dict) else batch
    drawn = float(torch.rand(1)), random.random(), float(np.random.rand())
    return [[each.tolist() for each in values], drawn]


def run(
    data: Batches, root: Path, stop: Moment | None, *, tells: bool = False, step: int = 0
) -> list[Any]:
    """Go on from the newest checkpoint to the end, or to the moment that is saved."""
    found = []
    with SyncPipeline(root) as pipeline:
        pipeline.load({"data": data})
        if data.batch:
            torch.rand(3)  # such as a new model draws
        if stop == (0, 0):
            pipeline.save({"data": data}, step=step)
            return []
        for epoch in range(data.epoch, EPOCHS):
            if tells:
                data.set_epoch(epoch)
            for batch in data:
                found.append(seen(batch))
                if (epoch, data.batch) == stop:
                    pipeline.save({"data": data}, step=step)
                    return found
            if (epoch, None) == stop:
                pipeline.save({"data": data}, step=step)
                return found
    return found


@cache
def whole(kind: str, loader: str, workers: int, persistent: bool, tells: bool) -> list[Any]:
    """Return all that the bare loader gives."""
    seed(1)
    bare = make(kind, loader, workers, persistent)
    found = []
    for epoch in range(EPOCHS):
        if tells:
            bare.dataset.set_epoch(epoch)
        found += [seen(batch) for batch in bare]
    return found


@pytest.mark.sample(4)
@pytest.mark.parametrize(("cell", "stop"), CASES)
def test_later_epochs_are_those_of_the_whole_run(tmp_path: Path, cell: Any, stop: Moment) -> None:
    kind, loader, workers, persistent, tells = cell
    expected = whole(*cell)
    seed(1)
    if persistent and loader == "StatefulDataLoader" and kind != "without a state":
        with pytest.raises(UsageError, match="persistent_workers=False"):
            Batches(make(kind, loader, workers, persistent))
        return
    first = run(Batches(make(kind, loader, workers, persistent)), tmp_path, stop, tells=tells)
    seed(5)
    rest = run(Batches(make(kind, loader, workers, persistent)), tmp_path, None, tells=tells)
    assert first + rest == expected


@pytest.mark.sample(2)
@pytest.mark.parametrize("again", [(1, 3), (1, 6), (2, 2)])
@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("kind", ["once", "each", "Hugging Face", "interleaved"])
@pytest.mark.parametrize(("workers", "every"), [(0, 1), (2, 1), (2, 3)])
def test_a_resumed_run_is_resumed_again(
    tmp_path: Path, workers: int, kind: str, same: bool, again: Moment, every: int
) -> None:
    options: dict[str, Any] = {"snapshot_every_n_steps": every}

    def data() -> Batches:
        return Batches(make(kind, "StatefulDataLoader", workers, False, **options))

    expected = whole(kind, "StatefulDataLoader", workers, False, False)
    seed(1)
    loaded = data()
    found = run(loaded, tmp_path, (1, 2), step=0)
    for step, stop in enumerate([again, None], 1):
        seed(5)
        loaded = loaded if same else data()
        found += run(loaded, tmp_path, stop, step=step)
    assert found == expected


class Uneven(Each):
    """Gives each rank another number of samples."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def share(self) -> list[int]:
        return list(range(self.samples))


@pytest.mark.parametrize("stop", [(0, 3), (0, None)])
@pytest.mark.parametrize("after", [1, 2])
def test_other_ranks_begin_the_next_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int, stop: Moment
) -> None:
    def batches(world_size: int, rank: int) -> Batches:
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(world_size))
        return Batches(DataLoader(Uneven(9 + 2 * rank), batch_size=4))

    with ranks(str(tmp_path), 2) as pipelines:
        for rank, pipeline in enumerate(pipelines):
            data = batches(2, rank)
            for _ in data:
                if (0, data.batch) == stop:
                    break
            pipeline.save({"data": data}, step=0)
    with ranks(str(tmp_path), after, attempt_id="other") as pipelines:
        for rank, pipeline in enumerate(pipelines):
            data = batches(after, rank)
            refused = after == 1 and stop == (0, 3)
            with pytest.raises(CkpipeError) if refused else nullcontext():
                pipeline.load({"data": data}, per_rank="derive")
            rest = [len(batch[0]) for _ in range(data.epoch, 2) for batch in data]
            whole = [4, 4, 1 + 2 * rank]
            assert rest == whole * (2 if refused else 1)


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("stop", [(0, 1), (0, 6)])
def test_a_load_that_cannot_be_undone_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loader: str, stop: Moment
) -> None:
    monkeypatch.setitem(KINDS, "hidden", Hidden)
    seed(1)
    run(Batches(make("hidden", loader, 0, False)), tmp_path, stop)
    with pytest.raises(UsageError, match="Hidden begins each iteration at the position"):
        run(Batches(make("hidden", loader, 0, False)), tmp_path, None)
