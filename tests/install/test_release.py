"""A release of the last commit, built as ``make dist`` builds it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ckpipe import __version__
from tests.support.sampling import EVERY

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not EVERY, reason="CKPIPE_TEST_ALL builds a release")
def test_a_release_is_reproducible_complete_and_passes_its_checks(tmp_path: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("a release is built in a clone")
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    home = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", home], check=True)
    python = str(home / "bin/python")
    pip = [python, "-m", "pip", "--quiet", "install"]
    subprocess.run([*pip, "--upgrade", "pip"], check=True)
    subprocess.run([*pip, "--group", "dist"], cwd=clone, check=True)
    subprocess.run([python, "make_dist.py"], cwd=clone, check=True)
    names = sorted(each.name.partition("-")[2] for each in (clone / "dist").iterdir())
    assert names == [
        f"{__version__}-py3-none-any.whl",
        f"{__version__}-py3-none-manylinux_2_17_aarch64.whl",
        f"{__version__}-py3-none-manylinux_2_17_x86_64.whl",
        f"{__version__}.tar.gz",
    ]
