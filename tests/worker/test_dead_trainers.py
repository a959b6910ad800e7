"""A trainer is gone after its save was staged: the worker finishes the save, and ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as Late
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import ckpipe
from tests.support.pipelines import load_existing, loaded_state, same
from tests.support.rank_processes import Gang, tell, told
from tests.support.sampling import EVERY
from tests.support.stored_files import LEASES
from tests.support.worker_runs import SETTINGS, Trainers, await_end, state_of, trainers, worker_of
from tests.worker import held_store


@pytest.fixture(scope="module")
def mortal() -> Iterator[Trainers]:
    with trainers() as made:
        yield made


def log_of(root: Path) -> str:
    """What the only worker of a run has logged."""
    (path,) = root.with_suffix(".logs").iterdir()
    return path.read_text()


def leases_of(root: Path) -> list[str]:
    return [path.name for path in (root / LEASES).rglob("*") if path.is_file()]


@pytest.mark.parametrize("leaves", ["kill", "fork", "exit", "raise"] if EVERY else ["fork"])
def test_what_was_staged_is_committed_and_old_ones_pruned(
    mortal: Trainers, root: Path, leaves: str
) -> None:
    group, worker = mortal.run(root, leaves)
    try:
        await_end(worker)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    with ckpipe.SyncPipeline(root) as pipeline:
        assert [info.step for info in pipeline.steps() if info.complete] == [2]
        pipeline.verify(2)
        assert same(loaded_state(pipeline), state_of(2))
    # It was stopped until the trainer's death let it go on, of which it may hear a little later.
    assert "is gone" in log_of(root)
    assert leases_of(root) == []


def test_without_survival_nothing_is_committed(
    mortal: Trainers, root: Path, tmp_path: Path
) -> None:
    held_store.install(tmp_path)
    with held_store.held(root):
        case = {"url": f"held://{root}", "path": [str(tmp_path)], "survive": False}
        _, worker = mortal.run(root, "kill", stopped=False, **case)
        while "is gone" not in log_of(root):
            pass
    await_end(worker)
    with ckpipe.SyncPipeline(root) as pipeline:
        assert [info.step for info in pipeline.steps() if info.complete] == [1]
    assert leases_of(root) == []


def test_the_next_trainer_waits_for_a_worker_that_still_finishes(
    mortal: Trainers, root: Path, tmp_path: Path
) -> None:
    held_store.install(tmp_path)
    with ckpipe.SyncPipeline(root) as pipeline, ThreadPoolExecutor(1) as threads:
        with held_store.held(root):
            case = {"url": f"held://{root}", "path": [str(tmp_path)]}
            _, worker = mortal.run(root, "kill", stopped=False, **case)
            held_store.lease_taken(root)
            loading = threads.submit(pipeline.load)
            with contextlib.suppress(Late):
                pytest.fail(f"did not wait, and loaded {loading.result(timeout=0.3)}")
        result = loading.result(timeout=30)
        assert result is not None
        assert result.step == 2
    await_end(worker)
    assert leases_of(root) == []


@pytest.mark.parametrize("which", [None, 1])
def test_waiting_for_a_worker_is_bounded(
    tmp_path: Path, which: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    with ckpipe.SyncPipeline(tmp_path, worker={"resume_wait_seconds": 0.2}, **SETTINGS) as pipeline:
        first = pipeline.save(state_of(1), step=1)
        first.wait()
        # A later checkpoint, of the same step where one is named.
        name = f"{first.id[:-1]}1" if which else first.id.replace("1.", "2.", 1)
        lease = tmp_path / LEASES / name / "somebody.0"
        lease.parent.mkdir(parents=True)
        lease.touch()
        assert load_existing(pipeline, step=which).id == first.id
    assert f"The load no longer waits for {name}" in caplog.text


def test_who_interrupts_the_closing_leaves_the_worker_to_finish(tmp_path: Path) -> None:
    opened = ckpipe.SyncPipeline(tmp_path, worker="process", **SETTINGS)
    opened.__enter__()
    opened.save(state_of(1), step=1).wait()
    process = worker_of(opened)
    os.kill(process, signal.SIGSTOP)
    handle = opened.save(state_of(2), step=2)
    opened._shut(cancel=True)  # what an interrupt during the wait leads to
    assert handle.status == "cancelled"
    os.kill(process, signal.SIGCONT)
    await_end(process)
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        assert [info.step for info in pipeline.steps() if info.complete] == [1, 2]


def resume(case: dict[str, Any]) -> None:
    """Load what is newest, as one of several ranks, each of which waits as long as it is told."""
    worker = {"resume_wait_seconds": case["waits"][dist.get_rank()]}
    with ckpipe.SyncPipeline(case["root"], worker=worker, **SETTINGS) as pipeline:
        result = load_existing(pipeline, per_rank="rank0")
        assert same(result.state, state_of(result.step))
        tell(case, loaded=result.step)


def test_ranks_that_start_again_wait_once_for_a_worker_and_not_for_ever(
    mortal: Trainers, world: Gang, tmp_path: Path
) -> None:
    root, ranks, long = tmp_path / "run", 4, 3600.0
    held_store.install(tmp_path)
    with ThreadPoolExecutor(1) as threads:

        def launch(*waits: float) -> Future[list[int | None]]:
            name = "tests.worker.test_dead_trainers:resume"
            return threads.submit(world.run, name, root, ranks, waits=waits)

        with held_store.held(root):
            case = {"url": f"held://{root}", "path": [str(tmp_path)]}
            _, worker = mortal.run(root, "kill", stopped=False, **case)
            held_store.lease_taken(root)
            # Whoever has waited long enough decides for those who would wait on.
            assert launch(long, 0.2, long, long).result(300) == [0] * ranks
            waiting = launch(*[long] * ranks)
        assert waiting.result(300) == [0] * ranks
    assert told(root, "loaded") == {rank: [1, 2] for rank in range(ranks)}
    await_end(worker)


MODULES = (
    "save/test_pipeline", "load/test_in_place", "retention/test_rules", "save/test_until_captured",
    "save/test_staged_state", "events/test_hooks", "ranks/test_ranks", "alone/test_soak",
)  # fmt: skip


@pytest.mark.skipif(not EVERY, reason="CKPIPE_TEST_ALL runs other tests over workers")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("module", MODULES)
def test_other_tests_pass_over_workers_too(module: str) -> None:
    environment = {name: os.environ[name] for name in os.environ if name != "CKPIPE_TEST_ALL"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, f"tests/{module}.py"],
        env=environment | {"CKPIPE_TEST_WORKER": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout
