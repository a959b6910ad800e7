"""Tests of a trainer whose bodies run in processes of their own, which they may kill.

A file of tests is also the program that forks these processes. It imports its trainer as a script
only, so that pytest, which collects all tests, does without it. This module imports no trainer.
"""

from __future__ import annotations

import logging
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ckpipe
from ckpipe.integrations.pointers import Pointer, read_pointer
from tests.support.differences import difference
from tests.support.fork_server import Case, Forks, serve
from tests.support.killed_runs import mortal_backend
from tests.support.sampling import EVERY, SEED

Body = Callable[[Case], None]

LOGS = ("seen", "losses")
"""What a run notes at each step: a run that resumed has the end of it."""


class Runs:
    """Runs functions of a file of tests in processes of their own.

    Args:
        server: The process that forks them: the file as a script, with :func:`serve_runs`.
    """

    def __init__(self, server: Forks) -> None:
        self._server = server

    def __call__(self, do: Body, case: Case, ranks: int = 1, **more: Any) -> list[int | None]:
        """Run a function on some ranks; return their exit codes, None for one that was killed.

        Args:
            do: The function.
            case: What it gets.
            ranks: The number of processes. Several ones are joined by gloo.
            more: Further fields of the case.
        """
        return self._server.ranks({**case, **more, "do": do.__name__}, ranks)


def forked(ranks: int = 1, *, sample: int | None = None, **more: Any) -> Callable[[Body], Any]:
    """Make a test of a function that takes a case and runs in processes of its own.

    Args:
        ranks: The number of processes.
        sample: The short form runs so many of a file's tests that have this number.
        more: Further fields of the case.
    """

    def decorate(body: Body) -> Any:
        def test(run: Runs, tmp_path: Path) -> None:
            assert run(body, new_case(tmp_path, **more), ranks) == [0] * ranks

        test.__doc__ = body.__doc__
        if body.__module__ == "__main__":
            return body
        return test if sample is None else pytest.mark.sample(sample, of="forked")(test)

    return decorate


def serve_runs(
    *ignored: str, quiet: str | None = None, group: bool = False, **variables: str
) -> None:
    """Fork the ranks of cases, each of which calls the function of the program that it names.

    Behind ``mortal://store`` they have a store at the root of the case, which kills the victim.

    Args:
        ignored: The beginnings of warnings that are no errors.
        quiet: A package whose warnings to users are none.
        group: Whether one rank alone joins a group as well.
        variables: Further variables of the environment of several ranks.
    """

    def live(case: Case, rank: int, number: int) -> None:
        warnings.simplefilter("error")
        for each in ("'set_vital' is deprecated", *ignored):  # the first by torchdata
            warnings.filterwarnings("ignore", each)
        for kind in (UserWarning, FutureWarning) if quiet else ():
            warnings.filterwarnings("ignore", category=kind, module=quiet or "")
        torch.set_num_threads(1)
        size = case["ranks"]
        if size > 1 or group:
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
            os.environ.update(LOCAL_WORLD_SIZE=str(size), OMP_NUM_THREADS="1", **variables)
            store = dist.FileStore(f"{case['out']}.store-{number}", size)  # type: ignore[attr-defined]
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=300)
            )
            dist.barrier()  # a rank that leaves earlier breaks the connecting of the others
        mortal_backend(case if case.get("victim") == rank else {"root": case["root"]})
        vars(sys.modules["__main__"])[case["do"]](case)

    serve(live)


def new_case(folder: Path, **more: Any) -> Case:
    """The case of a run in a folder: the names of its checkpoints are in ``out``."""
    (folder / "out").mkdir(parents=True, exist_ok=True)
    return {"root": str(folder / "root"), "out": str(folder / "out"), **more}


def of(case: Case, name: str, **more: Any) -> Case:
    """The case of another run, in a folder of its own."""
    return {**case, **new_case(Path(case["out"], name), **more)}


def keep_outcome(case: Case, outcome: dict[str, Any]) -> None:
    """Keep what this rank has come to, for :func:`outcomes`."""
    torch.save(outcome, f"{case['out']}.result-{rank()}")


def outcomes(case: Case, ranks: int) -> list[dict[str, Any]]:
    """What the ranks of a run have come to."""
    files = [f"{case['out']}.result-{rank}" for rank in range(ranks)]
    return [torch.load(file, weights_only=False) for file in files]


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def check_resumed(case: Case, undisturbed: list[dict[str, Any]], *, done: int = 0) -> None:
    """Compare a run that resumed with the undisturbed one; so many batches are not repeated."""
    for found, all_of_it in zip(outcomes(case, len(undisturbed)), undisturbed, strict=True):
        assert len(found["seen"]) <= len(all_of_it["seen"]) - done
        check_end(found, all_of_it)


def check_end(found: dict[str, Any], undisturbed: dict[str, Any]) -> None:
    """Compare what two runs have come to, one of which resumed and has the end of the logs only."""
    logs = {name: undisturbed[name] for name in LOGS if name in undisturbed}
    ends = {name: each[len(each) - len(found[name]) :] for name, each in logs.items()}
    check_same(found, undisturbed | ends)


def check_kills_inside_saves(
    run: Runs,
    train: Body,
    case_of: Callable[[str], Case],
    undisturbed: list[dict[str, Any]],
    operations: range,
    *,
    victims: int | None = None,
) -> None:
    """Check that runs go on to the bit one of whose ranks was killed inside a save.

    Args:
        run: Runs the ranks.
        train: What they do.
        case_of: Makes the case of a run, by its name.
        undisturbed: What the ranks of a run come to that nothing disturbs.
        operations: Before or after one of these operations of its store a rank is killed.
        victims: Only so many of the first ranks may be killed.
    """
    chance, ranks = random.Random(SEED), len(undisturbed)
    for number in range(8 if EVERY else 1):
        case, victim = case_of(f"{number}"), chance.randrange(victims or ranks)
        death = {"at": chance.choice(operations), "landing": chance.choice(["before", "after"])}
        hurry = {"settings": {"meeting_timeout_seconds": 30}}  # of those that wait for the victim
        codes = run(train, case, ranks, victim=victim, **death, **hurry)
        if codes != [0] * ranks:  # a rank that makes fewer operations comes to its end
            assert codes[victim] is None
            assert run(train, case, ranks) == [0] * ranks
        check_resumed(case, undisturbed)


def check_same(found: Any, expected: Any) -> None:
    """Compare to the last bit."""
    if (other := difference(found, expected)) is not None:
        raise AssertionError(other)


def whole(state: Any) -> Any:
    """The same state with whole tensors in place of sharded ones."""
    if isinstance(state, dict):
        return {name: whole(value) for name, value in state.items()}
    if isinstance(state, list):
        return [whole(value) for value in state]
    return state.full_tensor() if hasattr(state, "full_tensor") else state


def complete(case: Case) -> list[ckpipe.CheckpointInfo]:
    """The complete checkpoints at a root."""
    with ckpipe.SyncPipeline(case["root"], read_only=True, solo=True) as pipeline:
        return [info for info in pipeline.steps() if info.complete]


def ids(found: Iterable[Any]) -> set[str]:
    """The ids of checkpoints, and of those that names of a trainer lead to."""
    pointers = (read_pointer(each) if isinstance(each, Path) else each for each in found)
    return {each.id for each in pointers if each is not None}


def pointer_at(name: Path | str) -> Pointer:
    """What the name of a checkpoint leads to."""
    pointer = read_pointer(name)
    assert pointer is not None
    return pointer


def messages(level: int = logging.WARNING) -> list[str]:
    """A list that grows with what ckpipe logs in this process."""
    said: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("ckpipe")
    logger.addHandler(handler)
    logger.setLevel(level)
    return said


class Strange:
    """An object that only pickle can save."""
