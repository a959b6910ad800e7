"""Roots on which runs have died: what they leave, made as old as a test needs it."""

from __future__ import annotations

import os
import time
from pathlib import Path

from tests.support.command_line import save_steps


def age(root: Path, days: float, *names: str) -> None:
    """Make all below a root look as if it were that old."""
    then = time.time() - days * 86_400
    for path in root.rglob("*"):
        if path.exists() and (not names or any(name in str(path) for name in names)):
            os.utime(path, (then, then))


def crash(root: Path, step: int, days: float) -> str:
    """Leave what a run leaves that was killed before its commit, so many days ago."""
    (id,) = save_steps(root, step)
    (root / f"{id}.json").unlink()
    age(root, days, id.rpartition("-")[2].partition(".")[0])
    return id
