"""What tests of the command line share: calling it, here and in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from pipelines import small_state

import ckpipe
from ckpipe.cli.app import run

PROGRAM = [sys.executable, "-m", "ckpipe.cli"]


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        """What it printed as JSON."""
        return json.loads(self.out)


class Commands:
    """Calls the command in this process, with arguments as a shell gives them.

    Args:
        capture: Catches what is printed.
    """

    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self._capture = capture

    def __call__(self, *arguments: object) -> Done:
        self._capture.readouterr()
        code = run([str(each) for each in arguments])
        caught = self._capture.readouterr()
        return Done(code, caught.out, caught.err)


def program(*arguments: object, **options: Any) -> Done:
    """Calls the real program and waits for it."""
    done = subprocess.run(
        [*PROGRAM, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        **options,
    )
    return Done(done.returncode, done.stdout, done.stderr)


def damage(root: Path, id: str, at: int = -3) -> None:
    """Flips a bit of a data file."""
    path = root / id / "rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def save_steps(url: object, *steps: int, **settings: Any) -> list[str]:
    """Saves small states as checkpoints of these steps; returns their ids."""
    ids = []
    with ckpipe.SyncPipeline(str(url), **settings) as pipeline:
        for step in steps:
            state = small_state(step) | {"model": torch.nn.Linear(3, 2)}
            handle = pipeline.save(state, step=step, metrics={"loss": 1 / step})
            ids.append(handle.wait().id)
    return ids
