"""The examples that resume, run as programs of their own."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from test_examples import EXAMPLES, indexes, run_example


def losses(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("epoch")]


def test_a_run_stopped_in_an_epoch_goes_on_to_the_same_losses(tmp_path: Path) -> None:
    whole = run_example("resume.py", "--checkpoints", "whole", folder=tmp_path)
    assert whole.returncode == 0, whole.stderr
    assert len(losses(whole.stdout)) == 40
    parts = []
    for stop in ("7", "25", "1000"):
        part = run_example(
            "resume.py", "--checkpoints", "parts", "--stop-after", stop, folder=tmp_path
        )
        assert part.returncode == 0, part.stderr
        parts += losses(part.stdout)
    assert parts == losses(whole.stdout)
    assert indexes(tmp_path / "parts") == [25, 30, 40], "and the one resumed from"


def test_a_signal_makes_a_run_save_the_step_it_is_in(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "resume.py"), "--epochs", "100000"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline()]
        while lines[-1] and not lines[-1].startswith("epoch 1"):
            lines.append(process.stdout.readline())
        process.send_signal(signal.SIGTERM)
        lines += process.stdout.readlines()
    assert process.returncode == 0
    last = int(lines[-1].split()[3])
    assert indexes(tmp_path / "resume-checkpoints")[-1] == last
