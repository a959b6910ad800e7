"""Ray Train with ckpipe: real workers, killed and restarted by Ray. They start in half a minute."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import ckpipe
from ckpipe.errors import CheckpointNotFound
from ckpipe.integrations.pointers import read_pointer
from tests.integrations.trainer_ranks import messages
from tests.support.sampling import EVERY

if TYPE_CHECKING or __name__ == "__main__":  # pytest does without it
    import ray
    from ray.train import (
        CheckpointConsistencyMode,
        FailureConfig,
        RunConfig,
        ScalingConfig,
        get_all_reported_checkpoints,
        get_checkpoint,
    )
    from ray.train.torch import TorchTrainer

    from ckpipe.integrations.ray import load, report

pytestmark = [
    pytest.mark.skipif(find_spec("ray") is None, reason="the extra integrations is not installed"),
    pytest.mark.skipif(not EVERY, reason="slow: make test-all runs it"),
]

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "ray_train.py"


@pytest.fixture
def session() -> Iterator[dict[str, str]]:
    """Variables for Ray, whose files lie below a short path: it has sockets there."""
    folder = tempfile.mkdtemp(prefix="ray-")
    yield {
        **os.environ, "RAY_TMPDIR": folder, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    shutil.rmtree(folder)


def run(program: Path, *arguments: object, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(program), *map(str, arguments)]
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.mark.timeout(300)
def test_a_killed_worker_is_restarted_and_the_run_ends_alike(
    tmp_path: Path, session: dict[str, str]
) -> None:
    output = run(EXAMPLE, "--folder", tmp_path, env=session).stdout
    whole, killed = (
        next(line for line in output.splitlines() if line.startswith(f"{name}: "))
        for name in ("undisturbed", "killed")
    )
    assert "'resumed': False" in whole
    assert "'resumed': True" in killed
    assert "IDENTICAL to the last bit: 24 losses" in output


class Restart(Exception):
    """Ends an attempt."""


def first_attempt(root: Path, told: Callable[[], str]) -> None:
    """Begin, register two checkpoints, and fail."""
    with ckpipe.SyncPipeline(root) as pipeline:
        assert load(pipeline, {"w": 0}) is None
        assert told() == ""
        report(pipeline.save({"w": 1}, step=1), {"loss": 0.5})
        report(pipeline.save({"w": 2}, step=2, until="committed"), {"loss": 0.25})
    known = get_all_reported_checkpoints(CheckpointConsistencyMode.COMMITTED)
    assert [each.metrics["loss"] for each in known] == [0.5, 0.25]
    for step, each in enumerate(known, 1):
        with each.checkpoint.as_directory() as folder:
            pointer = read_pointer(folder)
        assert pointer is not None
        assert pointer.step == step
        # The pointer has moved to Ray's storage, and still leads to the data.
        assert ckpipe.load(pointer.root, step=pointer.id).state == {"w": step}
    root.with_name("first attempt").touch()
    raise Restart


def second_attempt(root: Path, told: Callable[[], str]) -> None:
    """Load the newest, an older one if it is gone, and none at another root, but say so."""
    assert root.with_name("first attempt").exists(), "it has failed before its end"
    with ckpipe.SyncPipeline(root) as pipeline:
        state = {"w": 0}
        result = load(pipeline, state)
        assert result is not None
        assert (result.step, state) == (2, {"w": 2})
        assert told() == f"resumed step 2 from {root}/{result.id}"
        pipeline.delete(2, force=True)
    with ckpipe.SyncPipeline(root) as pipeline:
        assert load(pipeline, state) is not None
        assert state == {"w": 1}
        warning = told()
        assert f"{result.id}, which is not complete at {root}: an older one is" in warning
    other = root.with_name("other")
    with ckpipe.SyncPipeline(other) as pipeline:
        assert load(pipeline, state) is None
        assert f"which is not complete at {other}: the run begins anew" in told()
    must = ckpipe.SyncPipeline(other, resume="must")
    with must as pipeline, pytest.raises(CheckpointNotFound):
        load(pipeline, state)
    told()
    with ckpipe.SyncPipeline(other, resume="never") as pipeline:
        assert load(pipeline, state) is None
        assert told() == ""
    assert state == {"w": 1}
    # A run that begins takes the weights of another program.
    torch.save({"w": 9}, initial := root.with_name("weights.pt"))
    with ckpipe.SyncPipeline(other, initial=initial) as pipeline:
        assert load(pipeline, state) is not None
        assert state == {"w": 9}
    # A load waits for a save under way, and of two of one step takes the later.
    with ckpipe.SyncPipeline(other) as pipeline:
        for number in (10, 11):
            pipeline.save({"w": number}, step=3)
        assert load(pipeline, state) is not None
        assert state == {"w": 11}
    told()
    # Of a skipped save Ray gets the metrics, and no checkpoint.
    count = len(get_all_reported_checkpoints())
    with ckpipe.SyncPipeline(other, keep_last=0) as pipeline:
        report(pipeline.save(state, step=3), {"loss": 0.125})
    assert len(get_all_reported_checkpoints()) == count


def attempt(config: dict[str, Any]) -> None:
    """Run in a worker of Ray, which Ray restarts after the first attempt."""
    warned, said = messages(logging.WARNING), messages(logging.INFO)

    def told() -> str:
        """Take the warnings, and the line of a resume."""
        lines = warned + [each for each in said if each.startswith("resumed")]
        warned.clear()
        said.clear()
        return "\n".join(lines)

    run_attempt = first_attempt if get_checkpoint() is None else second_attempt
    run_attempt(Path(config["root"]), told)


@pytest.mark.timeout(300)
def test_reports_are_registered_and_a_restart_is_not_silent(
    tmp_path: Path, session: dict[str, str]
) -> None:
    run(Path(__file__), tmp_path, env=session)


if __name__ == "__main__":
    folder = Path(sys.argv[1]).resolve()
    ray.init(num_cpus=1, include_dashboard=False)
    TorchTrainer(
        attempt,
        train_loop_config={"root": str(folder / "root")},
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(
            name="attempts", storage_path=str(folder), failure_config=FailureConfig(max_failures=1)
        ),
    ).fit()
