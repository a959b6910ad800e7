"""Ray Train with ckpipe: real workers, killed and restarted by Ray. They start in half a minute."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.sampling import EVERY

pytestmark = [
    pytest.mark.skipif(find_spec("ray") is None, reason="the extra integrations is not installed"),
    pytest.mark.skipif(not EVERY, reason="slow: make test-all runs it"),
]

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_train.py"
ATTEMPTS = Path(__file__).with_name("ray_runs.py")


@pytest.fixture
def session() -> Iterator[dict[str, str]]:
    """Variables for Ray, whose files lie below a short path: it has sockets there."""
    folder = tempfile.mkdtemp(prefix="ray-")
    yield {
        **os.environ, "RAY_TMPDIR": folder, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0",
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


@pytest.mark.timeout(300)
def test_reports_are_registered_and_a_restart_is_not_silent(
    tmp_path: Path, session: dict[str, str]
) -> None:
    run(ATTEMPTS, tmp_path, env=session)
