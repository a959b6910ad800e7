"""Small file systems of their own, for tests that fill them or may not write to them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(options: list[str], where: Path) -> Iterator[Path]:
    """Mount something for a while, or skip the test where that is not allowed."""
    where.mkdir()
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting needs root and the program mount")
    done = subprocess.run(["mount", *options, str(where)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"mounting is not allowed here: {done.stderr.strip()}")
    try:
        yield where
    finally:
        subprocess.run(["umount", str(where)], check=True)
