"""The environments that targets of the Makefile install into, with a stand-in for Python."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# "-m venv DIR" copies the stand-in to DIR; "-m pip" fails while the file "offline" is there.
STAND_IN = """#!/bin/sh
case "$1 $2" in
"-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && echo made > "$3/pyvenv.cfg" ;;
"-m pip") [ ! -e offline ] && echo "$@" > "$(dirname "$0")/installed" ;;
"-m pytest") echo "$0 $@" ;;
esac
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    if shutil.which("make") is None:
        pytest.skip("there is no make")
    (tmp_path / "ckpipe/memory").mkdir(parents=True)
    native = "ckpipe/memory/_native.c"
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "hatch_build.py", native):
        shutil.copy(ROOT / name, tmp_path / name)
    python = tmp_path / "python"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    return tmp_path


def make(clone: Path, *words: str) -> subprocess.CompletedProcess[str]:
    # Variables that were given to a make that runs these tests are not for this one.
    own = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(
        ["make", f"PYTHON={clone}/python", *words],
        cwd=clone,
        env=own,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def files(folder: Path) -> dict[Path, bytes]:
    return {each: each.read_bytes() for each in folder.rglob("*") if each.is_file()}


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        (".venv", [".venv/.ready"]),
        ("mine", ["VENV=mine", "docs"]),
        (".venv-bench", ["bench-quick"]),
        (".venv-dist", ["dist"]),
        (".venv-torch-2.10.0", ["test-torch", "TORCH=2.10.0"]),
    ],
)
def test_an_environment_that_make_did_not_make_is_left_alone(
    clone: Path, environment: str, words: list[str]
) -> None:
    theirs = clone / environment
    (theirs / "bin").mkdir(parents=True)
    shutil.copy(clone / "python", theirs / "bin" / "python")
    before = files(theirs)
    done = make(clone, *words)
    assert done.returncode != 0
    assert f"{environment} was not made by make" in done.stderr
    assert files(theirs) == before
    make(clone, "clean", *words[:-1])
    assert files(theirs) == before


def test_a_setup_that_broke_off_is_taken_up_again(clone: Path) -> None:
    (clone / "offline").touch()
    assert make(clone, ".venv/.ready").returncode != 0
    assert not (clone / ".venv/bin/installed").exists()
    (clone / "offline").unlink()
    done = make(clone, ".venv/.ready")
    assert done.returncode == 0, done.stderr
    assert (clone / ".venv/bin/installed").exists()
    (clone / "offline").touch()
    assert make(clone, ".venv/.ready").returncode == 0
    assert make(clone, "clean").returncode == 0
    assert not (clone / ".venv").exists()


def test_another_torch_has_an_environment_of_its_own(clone: Path) -> None:
    done = make(clone, "test-torch", "TORCH=2.10.0")
    assert done.returncode == 0, done.stderr
    installed = (clone / ".venv-torch-2.10.0/bin/installed").read_text()
    assert "torch==2.10.0" in installed
    assert "constraints.txt" not in installed
    ran = next(line for line in done.stdout.splitlines() if "pytest -q" in line)
    assert ran.startswith(".venv-torch-2.10.0/bin/python -m pytest")
    assert not (clone / ".venv").exists()
    assert make(clone, "clean").returncode == 0
    assert not (clone / ".venv-torch-2.10.0").exists()


def test_another_torch_must_be_named(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH", "/opt/torch")
    before = files(clone)
    done = make(clone, "test-torch")
    assert done.returncode != 0
    assert "make test-torch TORCH=" in done.stderr
    assert files(clone) == before
