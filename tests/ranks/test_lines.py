"""Launches of several real ranks: one line, and one step where a save is given none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ckpipe
from ckpipe import errors
from tests.support.fork_server import Case
from tests.support.rank_processes import Gang

STATE = {"w": torch.ones(3)}


def save_without_steps(case: Case) -> None:
    """Save twice, after a load by some ranks, and compare the steps on all of them."""
    rank = dist.get_rank()
    with ckpipe.SyncPipeline(case["root"], keep_last=1) as pipeline:
        if rank in case["loads"]:
            pipeline.load({"w": torch.zeros(3)}, step=40)
        infos = [pipeline.save(STATE).wait_complete(timeout=300) for _ in range(2)]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, [(info.step, info.line) for info in infos])
    assert all(each == found[0] for each in found), found
    assert [step for step, _ in found[0]] == [41, 42]


def save_after_one_rank_loaded(case: Case) -> None:
    """Save without a step after rank 0 has loaded another checkpoint than the greatest."""
    refused = False
    with ckpipe.SyncPipeline(case["root"]) as pipeline:
        if dist.get_rank() == 0:
            pipeline.load({"w": torch.zeros(3)}, step=10)
        try:
            pipeline.save(STATE)
        except errors.UsageError as error:
            refused = "pass step=" in str(error)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, refused)
    assert sorted(found) == [False, True], found


@pytest.fixture
def saved(root: Path) -> Path:
    """A root with the steps 10 and 40 of one process."""
    with ckpipe.SyncPipeline(root, solo=True) as pipeline:
        for step in (10, 40):
            pipeline.save(STATE, step=step).wait()
    return root


def test_ranks_that_would_save_other_steps_are_asked_for_one(world: Gang, saved: Path) -> None:
    world.succeed("tests.ranks.test_lines:save_after_one_rank_loaded", saved, 2)


@pytest.mark.parametrize("loads", [[], [0], [0, 1]], ids=str)
def test_ranks_that_are_given_no_step_go_on_together(
    world: Gang, saved: Path, loads: list[int]
) -> None:
    world.succeed("tests.ranks.test_lines:save_without_steps", saved, 2, loads=loads)
    with ckpipe.SyncPipeline(saved, solo=True, read_only=True) as pipeline:
        infos = [each for each in pipeline.steps() if each.complete]
    assert [each.step for each in infos][-1] == 42
    if loads:
        assert len({each.line for each in infos}) == 1
        assert 10 not in [each.step for each in infos], "the line is that of rank 0"
    else:
        assert [each.step for each in infos] == [10, 40, 42]
        assert len({each.line for each in infos}) == 2
