"""Runs of a trainer in processes of their own: begin one there, kill it, and compare what it does.

A program that forks runs is a module with functions that take a case, and ends with
:func:`serve_runs`. This module itself imports no trainer.
"""

from __future__ import annotations

import pkgutil
import random
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.integrations.trainer_ranks import begin_rank, result
from tests.support.differences import difference
from tests.support.fork_server import Case, Forks, serve

LOGS = ("seen", "losses")
"""What a run notes at each step: a run that resumed has the end of it."""


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
    for rank, whole in enumerate(expected):
        found = result(case, rank)
        assert len(found["seen"]) <= len(whole["seen"]) - done
        ends = {name: whole[name][-len(found[name]) :] for name in LOGS if name in whole}
        if (other := difference(found, {**whole, **ends})) is not None:
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
    server: Forks, case: Case, expected: list[Any], chance: random.Random
) -> None:
    """Kill one rank of a run at an operation of its store, run it again, and compare."""
    ranks = len(expected)
    case = {**case, "url": "mortal://store"}
    victim, at = chance.randrange(ranks), chance.randrange(8, 40)
    landing = chance.choice(["before", "after"])
    codes = server.ranks({**case, "victim": victim, "at": at, "landing": landing}, ranks)
    if codes != [0] * ranks:  # a rank that makes fewer operations comes to its end
        assert codes[victim] is None
        assert server.ranks(case, ranks) == [0] * ranks
    check_resumed(case, expected)
