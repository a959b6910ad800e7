"""Runs of a trainer in processes of their own: begin one there, kill it, and compare what it does.

A program that forks runs is a module with functions that take a case. This module itself imports no
trainer.
"""

from __future__ import annotations

import os
import pkgutil
import random
import sys
import warnings
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.differences import difference
from tests.support.fork_server import Case, Forks, serve

LOGS = ("seen", "losses")
"""What a run notes at each step: a run that resumed has the end of it."""

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


def serve_runs(*ignored: str) -> None:
    """Fork the ranks of cases; ``do`` is a function of the program, or another one's full name.

    Args:
        ignored: The beginnings of warnings that are no errors.
    """

    def live(case: Case, rank: int, number: int) -> None:
        begin_rank(case, rank, number)
        for each in ignored:
            warnings.filterwarnings("ignore", each)
        found = vars(sys.modules["__main__"]).get(case["do"])
        (found or pkgutil.resolve_name(case["do"]))(case)

    serve(live)


def of(case: Case, name: str, **more: Any) -> Case:
    """The case of a run of its own, in a folder that is there."""
    folder = Path(case["out"]) / name
    folder.mkdir(parents=True, exist_ok=True)
    return {**case, "out": str(folder), "root": str(folder / "root"), **more}


def new_case(folder: Path, **more: Any) -> Case:
    folder.mkdir(parents=True, exist_ok=True)
    return {"do": "train", "root": str(folder / "root"), "out": str(folder / "out"), **more}


def undisturbed_run(server: Forks, case: Case, ranks: int) -> list[Any]:
    """What the ranks of a run come to that nothing disturbs."""
    assert server.ranks(case, ranks) == [0] * ranks
    return [result(case, rank) for rank in range(ranks)]


def check_resumed(case: Case, expected: list[Any], *, done: int = 0) -> None:
    """Compare a run that resumed with the undisturbed one; so many batches are not repeated."""
    for rank, undisturbed in enumerate(expected):
        found, ends = result(case, rank), dict(undisturbed)
        assert len(found["seen"]) <= len(undisturbed["seen"]) - done
        for name in LOGS:
            if name in undisturbed:
                ends[name] = undisturbed[name][len(undisturbed[name]) - len(found[name]) :]
        if (other := difference(found, ends)) is not None:
            raise AssertionError(other)


def check_killed(
    server: Forks, case: Case, dies: Mapping[str, Any], expected: list[Any], *, done: int
) -> None:
    """Kill all ranks of a run where ``dies`` says, run it again, and compare."""
    ranks = len(expected)
    assert server.ranks({**case, **dies}, ranks) == [None] * ranks
    assert server.ranks(case, ranks) == [0] * ranks
    check_resumed(case, expected, done=done)


def check_killed_inside_a_save(
    server: Forks,
    case: Case,
    expected: list[Any],
    chance: random.Random,
    operations: range,
    victim: int,
) -> None:
    """Kill a rank at one of these operations of its store, run all again, and compare."""
    ranks = len(expected)
    death = {"at": chance.choice(operations), "landing": chance.choice(["before", "after"])}
    codes = server.ranks({**case, **death, "victim": victim, **_NO_LONG_WAIT}, ranks)
    if codes != [0] * ranks:  # a rank that makes fewer operations comes to its end
        assert codes[victim] is None
        assert server.ranks(case, ranks) == [0] * ranks
    check_resumed(case, expected)
