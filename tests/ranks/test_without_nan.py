"""Ranks of which one has NaN: all know it, keep the newest without, and load it alike."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ckpipe
from ckpipe.errors import CheckpointNotFound
from tests.support.fork_server import Case
from tests.support.pipelines import Stores
from tests.support.rank_pipelines import ranks
from tests.support.rank_processes import SETTINGS, Gang, same_everywhere, tell, told
from tests.support.settling import settle


def state(rank: int, step: int, nan: int) -> dict[str, Any]:
    """A state of a rank's own, with some NaN, and one that all hold alike."""
    mine = torch.full((1000,), float(step))
    mine[:nan] = math.nan
    return {f"mine.{rank}": mine, "shared": torch.zeros(100)}


def diverge(case: Case) -> None:
    """Save some steps, and go on from the newest without NaN."""
    rank = dist.get_rank()
    settings = SETTINGS | {"plan": {"replicated": ["shared"]}, "worker": case["worker"]}
    with ckpipe.SyncPipeline(case["root"], keep_last=1, **settings) as pipeline:
        for step in range(6):
            nan = 2 if rank == case["rank"] and step >= case["first"] else 0
            handle = pipeline.save(state(rank, step, nan), step=step)
            tell(case, nan=handle.wait_complete(timeout=300).nan)
        dist.barrier()  # else a rank might prune after another has looked
    dist.barrier()
    with ckpipe.SyncPipeline(case["root"], keep_last=1, **settings) as pipeline:
        try:
            result = pipeline.load(state(rank, 9, 0), without_nan=True)
            tell(case, loaded=result and result.step)
        except CheckpointNotFound:
            tell(case, loaded="none")


@pytest.mark.sample(1)
@pytest.mark.parametrize("worker", ["thread", "process"])
@pytest.mark.parametrize(("rank", "first"), [(0, 3), (1, 3), (1, 0)])
def test_one_rank_with_nan_counts_for_all(
    world: Gang, root: Path, rank: int, first: int, worker: str
) -> None:
    do = "tests.ranks.test_without_nan:diverge"
    world.succeed(do, root, 2, rank=rank, first=first, worker=worker)
    expected = [2 * (step >= first) for step in range(6)]
    assert told(root, "nan") == {0: expected, 1: expected}
    assert same_everywhere(root, "loaded") == [first - 1 if first else "none"]
    with ckpipe.SyncPipeline(root, solo=True, read_only=True) as pipeline:
        left = [each.step for each in pipeline.steps() if each.complete]
    assert {*left} >= ({first - 1, 5} if first else {5})


def test_the_warning_of_all_ranks_is_one(store: Stores, caplog: pytest.LogCaptureFixture) -> None:
    with ranks(store.url, 3) as world:
        ids = []
        for step in (1, 2, 3):
            # The last to commit completes the checkpoint: each time another rank.
            for rank in ((step + each) % 3 for each in range(3)):
                nan = rank if step > 1 else 0
                ids.append(world[rank].save(state(rank, step, nan), step=step).wait().id)
                settle(world[rank])
    (text,) = [each.getMessage() for each in caplog.records if "NaN" in each.getMessage()]
    assert "has 3 NaN, 1 of them in mine.1 of rank 1" in text
    assert f"load(without_nan=True) loads {ids[0]}" in text
