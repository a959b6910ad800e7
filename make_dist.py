"""Build the sdist and the wheels of a commit, and check and try them: ``make dist``.

``python make_dist.py`` exports the commit, so that no other file gets in, and builds all of it
twice, in two folders: the builds must be equal to the byte. ``python make_dist.py try`` installs
what this machine runs from ``dist/``, each in a new environment, and saves and loads there.
"""

from __future__ import annotations

import filecmp
import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parent
_DIST = _ROOT / "dist"
_GLIBC = (2, 17)  # the oldest that pip still knows for both machines
_WHEELS = {
    "py3-none-manylinux_2_17_x86_64": "x86_64-linux-gnu.2.17",
    "py3-none-manylinux_2_17_aarch64": "aarch64-linux-gnu.2.17",
    "py3-none-any": "",
}
_LIBRARY = "ckpipe/memory/_native.so"

# A library that does not find the features of the processor is thirty times slower than awscrt's.
_TRIAL = """
import tempfile, time
from array import array
import torch, ckpipe
from awscrt.checksums import crc32c
from ckpipe.memory import native

state = {"weight": torch.arange(700_000.0), "small": torch.ones(3)}
with tempfile.TemporaryDirectory() as url:
    with ckpipe.SyncPipeline(url) as pipeline:
        pipeline.save(state, step=1)
    copy = {name: torch.zeros_like(each) for name, each in state.items()}
    assert ckpipe.load(url, copy)
assert all(torch.equal(copy[name], each) for name, each in state.items())
assert "site-packages" in ckpipe.__file__

def quickest(call):
    seconds = []
    for _ in range(9):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return min(seconds)

block = bytes(64 << 20)
where, size = array("Q", [native.address_of(memoryview(block))]), array("Q", [len(block)])
own = quickest(lambda: native.crc32c_each(where, size))
assert own < 10 * quickest(lambda: crc32c(block)), "the compiled library is slow"
print("compiled" if native._free else "pure")
"""


def build_all(source: Path, to: Path, environment: Mapping[str, str]) -> None:
    """Build the sdist of a folder, and the wheels from that sdist.

    Args:
        source: The exported commit.
        to: An empty folder for what is built.
        environment: The variables of the builds.
    """
    run = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(to)]
    _call([*run, "--sdist", str(source)], environment)
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(_only(to, "*.tar.gz")) as archive:
            archive.extractall(folder, filter="data")
        for tag, target in _WHEELS.items():
            own = {**environment, "CKPIPE_WHEEL_TAG": tag}
            own["CC"] = f"{sys.executable} -m ziglang cc -target {target}"
            _call([*run, "--wheel", str(_only(Path(folder), "*"))], own)
            _only(to, f"*-{tag}.whl")  # with another tag the compiler has failed


def check_sdist(sdist: Path, expected: set[str]) -> None:
    """Compare the names of an sdist with those of the commit.

    Raises:
        SystemExit: If a file is missing or too many.
    """
    with tarfile.open(sdist) as archive:
        names = {each.name.partition("/")[2] for each in archive.getmembers()}
    if names ^ expected:
        raise SystemExit(f"dist: {sdist.name} differs from the commit: {sorted(names ^ expected)}")


def check_wheel(wheel: Path) -> None:
    """Check the tag, the compiled library and the SBOM of a wheel.

    Raises:
        SystemExit: If one of them is not as promised.
    """
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (sbom,) = (each for each in names if ".dist-info/sboms/" in each)
        problem = JsonStrictValidator(SchemaVersion.V1_7).validate_str(archive.read(sbom).decode())
    if problem:
        raise SystemExit(f"dist: the SBOM of {wheel.name} is not CycloneDX 1.7: {problem}")
    pure = wheel.stem.endswith("-any")
    if (_LIBRARY in names) == pure:
        raise SystemExit(f"dist: {wheel.name} has a library that its tag forbids, or lacks one")
    if not pure:
        told = _call([sys.executable, "-m", "auditwheel", "show", "--json", str(wheel)])
        found = json.loads(told)["overall_tag"]
        verdict = re.fullmatch(r"manylinux_(\d+)_(\d+)_(\w+)", found)
        if (
            verdict is None
            or (int(verdict[1]), int(verdict[2])) > _GLIBC
            or not wheel.stem.endswith(f"_{verdict[3]}")
        ):
            raise SystemExit(f"dist: auditwheel finds {found} for {wheel.name}")


def try_one(artefact: Path) -> str:
    """Install an artefact in a new environment, save and load; return which library it used.

    Raises:
        SystemExit: If it cannot be installed, or does not work.
    """
    with tempfile.TemporaryDirectory() as home:
        _call([sys.executable, "-m", "venv", home])
        python = str(Path(home, "bin/python"))
        pip = [python, "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
        _call([*pip, "--upgrade", "pip"])
        _call([*pip, "-c", str(_ROOT / "constraints.txt"), f"ckpipe[cli] @ {artefact.as_uri()}"])
        version = _call([str(Path(home, "bin/ckpipe")), "--version"]).split()[-1]
        if f"ckpipe-{version}" not in artefact.name:
            raise SystemExit(f"dist: {artefact.name} says that it is version {version}")
        return _call([python, "-c", _TRIAL]).strip()


def _trials() -> Iterator[str]:
    for artefact in sorted(_DIST.iterdir()):
        if "manylinux" in artefact.name and platform.machine() not in artefact.name:
            yield f"{artefact.name}: not tried, this machine is {platform.machine()}"
            continue
        library = try_one(artefact)
        if (library == "compiled") != ("manylinux" in artefact.name) and ".whl" in artefact.name:
            raise SystemExit(f"dist: {artefact.name} is {library}")
        yield f"{artefact.name}: saves and loads ({library})"


def _export(commit: str, to: Path) -> Path:
    archive = subprocess.run(["git", "archive", commit], cwd=_ROOT, check=True, capture_output=True)
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(to, filter="data")
    return to


def _call(command: list[str], environment: Mapping[str, str] = os.environ) -> str:
    done = subprocess.run(
        command, cwd="/", env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"dist: {' '.join(command)[:200]}\n{done.stdout}{done.stderr}")
    return done.stdout


def _git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=_ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()


def _only(folder: Path, pattern: str) -> Path:
    found = list(folder.glob(pattern))
    if len(found) != 1:
        raise SystemExit(f"dist: {folder} has {len(found)} files {pattern}")
    return found[0]


def make_dist() -> None:
    """Build twice, compare, check, and replace ``dist/``."""
    if not (_ROOT / ".git").exists():
        raise SystemExit("dist: releases are built in a clone, from a commit")
    address = os.environ.get("CKPIPE_REPOSITORY", "")
    print(f"dist: of commit {_git('rev-parse', '--short', 'HEAD')}; other changes are left out")
    if not address:
        print("dist: without REPOSITORY=https://... README's links are text, for no registry")
    epoch = _git("log", "-1", "--format=%ct")
    environment: dict[str, Any] = {**os.environ, "SOURCE_DATE_EPOCH": epoch}
    with tempfile.TemporaryDirectory() as folder:
        first, second = Path(folder, "first/dist"), Path(folder, "second/dist")
        for each in (first, second):
            build_all(_export("HEAD", each.parent / "source"), each, environment)
        built = sorted(each.name for each in first.iterdir())
        equal, *others = filecmp.cmpfiles(first, second, built, shallow=False)
        if any(others):
            raise SystemExit(f"dist: two builds differ: {others}")
        check_sdist(
            _only(first, "*.tar.gz"),
            {*_git("ls-tree", "-r", "--name-only", "HEAD").split("\n"), "PKG-INFO"},
        )
        for wheel in first.glob("*.whl"):
            check_wheel(wheel)
        files = [str(first / name) for name in built]
        _call([sys.executable, "-m", "twine", "check", "--strict", *files])
        contents = [str(Path(sys.executable).with_name("check-wheel-contents")), "--config"]
        _call([*contents, str(_ROOT / "pyproject.toml"), *map(str, first.glob("*.whl"))])
        shutil.rmtree(_DIST, ignore_errors=True)
        shutil.copytree(first, _DIST)
    print(f"dist: two builds are equal, and the checks pass: {', '.join(equal)}")


if __name__ == "__main__":
    if sys.argv[1:] == ["try"]:
        for line in _trials():
            print(f"dist: {line}", flush=True)
    else:
        make_dist()
