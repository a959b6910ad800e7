"""Signals to all processes of a job, as Slurm and systemd send them, while a loader has workers."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpipe
from ckpipe import errors
from tests.preemption.preempted_runs import STEP_SECONDS, Run
from tests.support.fork_server import Case, Forks, forks
from tests.support.killed_runs import notes
from tests.support.pipelines import Stateful, load_existing
from tests.support.sampling import EVERY, SEED

PROGRAM = str(Path(__file__).with_name("preempted_runs.py"))
CELLS = list(itertools.product(["fork", "spawn", "forkserver"], [False, True], ["data", "step"]))
RUNS = 10 if EVERY else 1


@pytest.fixture(scope="module")
def trainers() -> Iterator[Forks]:
    """The process that forks trainers."""
    with forks(PROGRAM) as made:
        yield made


def run_job(trainers: Forks, case: Case, disturb: Callable[[int], None]) -> int | None:
    """Run a case, and wait until its process group is empty; return the trainer's exit code.

    Args:
        trainers: Forks the trainer.
        case: The case.
        disturb: Called with the process group once the trainer has begun.
    """
    root = Path(case["root"])
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(trainers.run, case)
        until(lambda: ended.done() or bool(noted(root, "group")))
        group = noted(root, "group")[0]
        try:
            disturb(group)
            code = ended.result()
            until(lambda: is_empty(group))  # workers see by themselves that the trainer is gone
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
    return code


def until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.001)


def is_empty(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


def noted(root: Path, word: str) -> list[int]:
    """The numbers that a run has noted under a word."""
    return [int(line.split()[1]) for line in notes(root) if line.startswith(f"{word} ")]


def check(root: Path, case: Case) -> None:
    """Check that the newest checkpoint is the whole state of the last step."""
    run = Run(case)
    with ckpipe.SyncPipeline(root) as pipeline:
        loaded = load_existing(pipeline, run.state)
    assert loaded.step == noted(root, "step")[-1]
    assert (run.weight.item(), run.position) == (loaded.step, loaded.step)


@pytest.mark.sample(1)
@pytest.mark.parametrize("number", range(RUNS))
@pytest.mark.parametrize(("method", "persistent", "bound"), CELLS)
def test_the_last_step_is_saved_whenever_the_job_is_told_to_stop(
    trainers: Forks, root: Path, method: str, persistent: bool, bound: str, number: int
) -> None:
    case = {"root": str(root), "method": method, "persistent": persistent, "bound": bound}
    moment = random.Random(f"{SEED} {method} {persistent} {bound} {number}")
    first, delay = moment.randrange(1, 14), moment.random() * 2 * STEP_SECONDS
    sent = moment.choice([signal.SIGTERM, signal.SIGUSR1])

    def stop(group: int) -> None:
        until(lambda: first in noted(root, "step") or is_empty(group))
        time.sleep(delay)
        os.killpg(group, sent)

    code = run_job(trainers, case, stop)
    check(root, case)
    if method != "forkserver":  # which the signal may end, and its workers with it
        assert code == 0


FORKED: Case = {"method": "fork", "persistent": True, "bound": "data"}


def stop_at_once(root: Path) -> Callable[[int], None]:
    def stop(group: int) -> None:
        until(lambda: bool(noted(root, "step")))
        os.killpg(group, signal.SIGTERM)

    return stop


def test_workers_end_with_the_program_and_their_own_function_is_called(
    trainers: Forks, root: Path
) -> None:
    case = {**FORKED, "root": str(root), "held": True, "init": True}
    assert run_job(trainers, case, stop_at_once(root)) == 0
    assert sorted(noted(root, "worker")) == [0, 1]
    check(root, case)


@pytest.mark.parametrize("every", [1000, 2])
def test_a_loader_that_fails_after_the_stop_loses_no_step(
    trainers: Forks, root: Path, every: int
) -> None:
    case = {**FORKED, "root": str(root), "dies": 3, "every": every}
    assert run_job(trainers, case, lambda group: None) == 1
    check(root, case)


def test_an_epoch_that_cannot_begin_after_the_stop_loses_no_step(
    trainers: Forks, root: Path
) -> None:
    case = {"method": "spawn", "persistent": False, "bound": "data", "root": str(root), "starts": 1}
    assert run_job(trainers, case, lambda group: None) == 1
    check(root, case | {"starts": None})


@pytest.mark.parametrize("ranks", [2, 3] if EVERY else [2])
@pytest.mark.parametrize("every", [1000, 2])
def test_ranks_whose_loaders_fail_after_the_same_step_lose_no_step(
    trainers: Forks, root: Path, every: int, ranks: int
) -> None:
    case = {**FORKED, "root": str(root), "dies": [3] * ranks, "every": every}
    assert trainers.ranks(case, ranks) == [1] * ranks
    run = Run({**case, "dies": None})
    with ckpipe.SyncPipeline(root) as pipeline:
        (newest,) = [each for each in pipeline.steps() if each.step == 3]
        assert newest.complete
        pipeline.load(run.state, per_rank="rank0")
    assert (run.weight.item(), run.position) == (3, 3)


def test_ranks_whose_loaders_fail_after_different_steps_tell_what_is_lost(
    trainers: Forks, root: Path, tmp_path: Path
) -> None:
    case: Case = {**FORKED, "root": str(root), "dies": [2, 3], "every": 1000, "grace": 2}
    trainers.ranks(case, 2)
    for rank, step in enumerate(case["dies"]):
        told = [
            line for line in notes(tmp_path / f"run-{rank}") if line.startswith("WARNING A stop")
        ]
        assert len(told) == 1
        assert f"step {step} is not saved: not all ranks have left after the same step" in told[0]
    with ckpipe.SyncPipeline(root) as pipeline:
        assert not [each for each in pipeline.steps() if each.complete]


@pytest.mark.parametrize("every", [1000, 2])
def test_steps_that_are_lost_are_told(trainers: Forks, root: Path, every: int) -> None:
    case = {**FORKED, "root": str(root), "dies": 3, "every": every, "unguarded": True}
    assert run_job(trainers, case, lambda group: None) == 1
    (warning,) = [line for line in notes(root) if line.startswith("WARNING A stop")]
    assert "step 3 is not saved: no optimizer is guarded" in warning
    assert warning.endswith(
        "checkpoint of step 2" if every == 2 else "no checkpoint to resume from"
    )


def refusing_at_the_end(error: BaseException) -> dict[str, Any]:
    """A state that can be saved once."""
    parts: Iterator[torch.Tensor] = iter([torch.ones(1)])

    def part() -> torch.Tensor:
        if (found := next(parts, None)) is None:
            raise error
        return found

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1)
    return {"part": Stateful(part), "optimizer": optimizer}


@pytest.mark.parametrize("error", [ValueError("refused"), KeyboardInterrupt("refused")])
def test_a_pipeline_is_closed_although_its_last_save_fails(
    tmp_path: Path, error: BaseException
) -> None:
    state = refusing_at_the_end(error)
    pipeline = ckpipe.SyncPipeline(tmp_path, guard=state["optimizer"], preemption=True)
    with pytest.raises(type(error), match="refused"), pipeline:  # noqa: PT012
        pipeline.save(state, step=1)
        assert not pipeline.should_save(2)
        pipeline.preempt()
    with pytest.raises(errors.PipelineClosed):
        pipeline.steps()


@pytest.mark.parametrize("error", [ValueError("refused"), asyncio.CancelledError("refused")])
async def test_an_awaiting_pipeline_is_closed_although_its_last_save_fails(
    tmp_path: Path, error: BaseException
) -> None:
    state = refusing_at_the_end(error)
    pipeline = ckpipe.Pipeline(tmp_path, guard=state["optimizer"], preemption=True)
    with pytest.raises(type(error), match="refused"):  # noqa: PT012
        async with pipeline:
            await pipeline.save(state, step=1)
            assert not pipeline.should_save(2)
            pipeline.preempt()
    with pytest.raises(errors.PipelineClosed):
        await pipeline.steps()


class Ends(torch.utils.data.Dataset[int]):
    """Numbers of which the last one cannot be read."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        if index == 2:
            raise ValueError("no more")
        return index


@pytest.mark.parametrize("saves", [False, True])
def test_the_last_save_is_not_that_of_another_state(tmp_path: Path, saves: bool) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    data = ckpipe.Batches(torch.utils.data.DataLoader(Ends()))
    state = {"model": model, "optimizer": optimizer, "data": data}
    told = {"enabled": True, "signals": []}
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        pipeline.save(state, step=0)
    with (  # noqa: PT012
        pytest.raises(ValueError, match="no more"),
        ckpipe.SyncPipeline(tmp_path, guard=optimizer, preemption=told) as pipeline,
    ):
        pipeline.load(state)
        for step, _ in enumerate(data, 1):
            optimizer.step()
            if pipeline.should_save(step):
                pipeline.save(state, step=step)
            if saves and step == 1:
                pipeline.save(state, step=step).wait(60)
            if step == 2:
                pipeline.load({"model": copy.deepcopy(model)}, step=0, include=["model.*"])
                pipeline.preempt()
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        assert (load_existing(pipeline, state).step, data.batch) == (2, 2)


def test_a_state_that_contains_itself_is_saved_before_the_stop(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1)
    state: dict[str, Any] = {"optimizer": optimizer}
    state["self"] = state
    with ckpipe.SyncPipeline(tmp_path, guard=optimizer, preemption=True) as pipeline:
        for step in (1, 2):
            assert pipeline.save(state, step=step).wait(60).complete
