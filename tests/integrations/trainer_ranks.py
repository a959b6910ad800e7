"""Ranks of a run of a trainer: they join a group, die inside a save, and resume to the bit."""

from __future__ import annotations

import os
import random
import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.support.differences import difference
from tests.support.fork_server import Case, Forks

_NO_LONG_WAIT = {"settings": {"meeting_timeout_seconds": 30}}  # for a rank that was killed


def begin_rank(case: Case, rank: int, number: int, **variables: str) -> None:
    """Make a forked process a rank of a case: warnings raise, and several ranks join a group.

    Args:
        case: The case.
        rank: The rank.
        number: The number of the case.
        variables: Further variables of the environment of several ranks.
    """
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # by torchdata
    torch.set_num_threads(1)
    size = case["ranks"]
    if size > 1:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
        os.environ.update(LOCAL_WORLD_SIZE=str(size), OMP_NUM_THREADS="1", **variables)
        store = dist.FileStore(f"{case['out']}.store-{number}", size)  # type: ignore[attr-defined]
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=300)
        )
        dist.barrier()  # a rank that leaves earlier breaks the connecting of the others


def whole(state: Any) -> Any:
    """The same state with whole tensors in place of sharded ones."""
    if isinstance(state, dict):
        return {name: whole(value) for name, value in state.items()}
    if isinstance(state, list):
        return [whole(value) for value in state]
    return state.full_tensor() if hasattr(state, "full_tensor") else state


def result(case: Case, rank: int) -> Any:
    """What a rank of a run has come to."""
    return torch.load(f"{case['out']}.result-{rank}", weights_only=False)


def check_resumed(case: Case, expected: list[Any], *, from_step: int = 0) -> None:
    """Compare what a run has come to, which resumed behind this step, with the undisturbed one."""
    for rank, undisturbed in enumerate(expected):
        found, all_steps = result(case, rank), len(undisturbed["seen"])
        steps = len(found["seen"])
        assert steps <= all_steps - from_step
        tails = {name: undisturbed[name][all_steps - steps :] for name in ("seen", "losses")}
        assert difference(found, {**undisturbed, **tails}) is None


def check_killed_inside_a_save(
    server: Forks,
    case: Case,
    expected: list[Any],
    chance: random.Random,
    operations: range,
    victim: int,
) -> None:
    """Kill a rank at one of these operations of its store, and compare the run that resumes."""
    ranks = len(expected)
    death = {"at": chance.choice(operations), "landing": chance.choice(["before", "after"])}
    codes = server.ranks({**case, **death, "victim": victim, **_NO_LONG_WAIT}, ranks)
    if codes != [0] * ranks:  # a rank that makes fewer operations comes to its end
        assert codes[victim] is None
        assert server.ranks(case, ranks) == [0] * ranks
    check_resumed(case, expected)
