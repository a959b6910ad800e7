"""Installations with and without the compiled library: how they are built, and what they save."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.project_copy import (
    LIBRARY,
    NO_COMPILER,
    SOURCE,
    build,
    copy_project,
    needs_compiler,
)
from tests.support.sampling import EVERY, sample


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return copy_project(tmp_path / "project")


SAVE_AND_LOAD = """
import logging, pathlib, sys
logging.basicConfig(level=logging.DEBUG)
import torch
import ckpipe

def executable():
    lines = pathlib.Path("/proc/self/maps").read_text().splitlines()
    return {line for line in lines if "x" in line.split()[1] and len(line.split()) < 6}

before = executable()
state = {str(n): torch.arange(n * 1000.0) for n in range(40)} | {"large": torch.arange(700_000.0)}
with ckpipe.SyncPipeline(sys.argv[1]) as pipeline:
    pipeline.save(state, step=1)
copies = {name: torch.zeros_like(each) for name, each in state.items()}
assert ckpipe.load(sys.argv[1], copies)
assert all(torch.equal(copies[name], each) for name, each in state.items())
print(len(executable() - before))
"""


def save_and_load(
    root: Path, to: Path, *, python: str = sys.executable, program: str = SAVE_AND_LOAD,
    environment: Mapping[str, str] = os.environ,
) -> tuple[str, str]:  # fmt: skip
    """Save and load with the ckpipe of a directory; return its library, and what was logged."""
    path = [str(root), str(root / "backends")] if root != Path() else []
    done = subprocess.run(
        [python, "-c", program, str(to)],
        cwd=to.parent,
        env={**environment, "PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        check=False,
    )
    if "no such policy" in done.stderr:
        pytest.skip("the kernel has no such policy, which came with Linux 6.3")
    assert done.returncode == 0, done.stderr
    way = "by libraries" if "compiled library" in done.stderr else "compiled"
    return f"{way} {done.stdout.strip()}", done.stderr


STRICT = """
import ctypes
refuse_new_code, option = 1, 65  # PR_MDWE_REFUSE_EXEC_GAIN of PR_SET_MDWE, <linux/prctl.h>
if ctypes.CDLL(None).prctl(option, refuse_new_code, 0, 0, 0):
    raise SystemExit("no such policy")
"""


@needs_compiler
def test_a_checkpoint_is_the_same_compiled_or_not(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CKPIPE_NATIVE", raising=False)
    ways = sample(["missing", "off", "stale"], 1)
    if "missing" in ways:
        assert save_and_load(project, tmp_path / "missing")[0] == "by libraries 0"
    assert build(project).returncode == 0
    assert save_and_load(project, tmp_path / "compiled")[0] == "compiled 0"
    if "off" in ways:
        off = {**os.environ, "CKPIPE_NATIVE": "0"}
        printed, logged = save_and_load(project, tmp_path / "off", environment=off)
        assert printed == "by libraries 0"
        assert "CKPIPE_NATIVE is 0" in logged
    if "stale" in ways:
        with (project / SOURCE).open("a") as source:
            source.write("\n")
        printed, logged = save_and_load(project, tmp_path / "stale")
        assert printed == "by libraries 0"
        (line,) = [each for each in logged.splitlines() if "compiled library" in each]
        assert line.startswith("DEBUG:ckpipe:")
        assert "python hatch_build.py" in line
    compiled, *others = (
        [each.read_bytes() for each in sorted((tmp_path / way).rglob("*.safetensors"))]
        for way in ("compiled", *ways)
    )
    assert compiled
    assert others == [compiled] * len(ways)


@needs_compiler
def test_no_memory_is_made_executable(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CKPIPE_NATIVE", raising=False)
    assert build(project).returncode == 0
    strict = SAVE_AND_LOAD.replace("import torch\n", f"import torch\n{STRICT}", 1)
    assert save_and_load(project, tmp_path / "saved", program=strict)[0] == "compiled 0"


@pytest.mark.parametrize("environment", [{"CC": "/nonexistent"}, {"CC": "false"}, {"PATH": ""}])
def test_without_a_compiler_one_line_says_so(project: Path, environment: dict[str, str]) -> None:
    done = build(project, **environment)
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("ckpipe: _native.c is not compiled")
    assert not [each for each in os.listdir(project / "ckpipe/memory") if ".so" in each]


@pytest.mark.skipif(not EVERY, reason="CKPIPE_TEST_ALL installs what is built")
@pytest.mark.parametrize("compiler", ["cc", "/nonexistent"])
@pytest.mark.parametrize("form", ["wheel", "sdist", "editable"])
def test_what_is_built_can_be_installed(
    project: Path, tmp_path: Path, form: str, compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if compiler == "cc" and NO_COMPILER:
        pytest.skip("there is no C compiler")
    monkeypatch.setenv("CC", compiler)
    monkeypatch.delenv("CKPIPE_NATIVE", raising=False)
    home, dist = tmp_path / "environment", tmp_path / "dist"
    subprocess.run([sys.executable, "-m", "venv", home], check=True)
    python = str(home / "bin/python")
    pip = [python, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    given = str(project)
    if form == "sdist":
        subprocess.run([*pip, "install", "build"], check=True)
        command = [python, "-m", "build", "--sdist", "--outdir", str(dist), str(project)]
        subprocess.run(command, check=True, capture_output=True)
        (given,) = map(str, dist.glob("*.tar.gz"))
    if form == "editable":
        subprocess.run([*pip, "install", "--no-deps", "-e", given], check=True)
    else:
        subprocess.run([*pip, "wheel", "--no-deps", "-w", str(dist), given], check=True)
        (wheel,) = dist.glob("*.whl")
        names = zipfile.ZipFile(wheel).namelist()
        assert SOURCE in names
        assert (LIBRARY in names) == (compiler == "cc")
        assert ("-py3-none-any" in wheel.name) == (compiler != "cc")
        assert "-py3-none-" in wheel.name
        subprocess.run([*pip, "install", "--no-deps", str(wheel)], check=True)
    (site,) = home.glob("lib/python*/site-packages")
    others = [path for path in sys.path if path.endswith("site-packages")]
    (site / "others.pth").write_text("\n".join(others))
    printed, _ = save_and_load(Path(), tmp_path / "saved", python=python)
    assert printed.startswith("compiled" if compiler == "cc" else "by libraries")
