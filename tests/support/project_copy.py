"""Copies of the project, and the library that is compiled in them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD, SOURCE, LIBRARY = (
    "hatch_build.py",
    "ckpipe/memory/_native.c",
    "ckpipe/memory/_native.so",
)
NO_COMPILER = shutil.which("cc") is None
needs_compiler = pytest.mark.skipif(NO_COMPILER, reason="there is no C compiler")


def build(root: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Compile the library in a copy of the project, with other variables."""
    return subprocess.run(
        [sys.executable, BUILD],
        cwd=root,
        env={**os.environ, "CC": "", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def copy_project(root: Path) -> Path:
    """Copy what is installed, without the compiled library."""
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    for name in ("ckpipe", "backends", "docs"):
        shutil.copytree(ROOT / name, root / name, ignore=ignored)
    for name in ("pyproject.toml", BUILD, "README.md", "CHANGELOG.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, root / name)
    return root
