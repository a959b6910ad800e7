"""Somebody else's backend: installed into a fresh environment and used through its URL."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
import venv
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from ckpipe_sqlite import SqliteBackend

import ckpipe
from ckpipe.errors import BackendNotFound
from ckpipe.testing import BackendConformance
from tests.support.sampling import EVERY

PACKAGE = Path(__file__).parents[2] / "examples" / "custom_backend"
USE = """
import torch, ckpipe
state = {"weight": torch.arange(100_000.0), "name": "sqlite"}
with ckpipe.SyncPipeline("sqlite://run.db", keep_last=2, staging={"block_bytes": 65536}) as pipe:
    for step in range(1, 4):
        state["weight"] += 1
        pipe.save(state, step=step, metrics={"loss": 1 / step})
with ckpipe.SyncPipeline("sqlite://run.db") as pipe:
    target = {"weight": torch.zeros(100_000), "name": ""}
    assert pipe.load(target).step == 3
    assert target["name"] == "sqlite" and torch.equal(target["weight"], state["weight"])
    assert [info.step for info in pipe.steps() if info.complete] == [2, 3]
"""


class Fresh:
    """An environment of its own, in which only the example is installed.

    What it needs besides, ckpipe and torch for two, is lent by the environment of the tests.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        venv.create(folder / "venv", with_pip=False, symlinks=True)
        self.python = folder / "venv" / "bin" / "python"
        (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
        lent = sysconfig.get_path("purelib")
        (site / "lent.pth").write_text(f"import site; site.addsitedir({lent!r})\n")

    def run(self, *arguments: str, folder: Path | None = None, quiet: bool = False) -> str:
        done = subprocess.run(
            [str(self.python), *arguments],
            cwd=folder or self.folder,
            env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert not quiet or done.stderr == ""
        return done.stdout


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Fresh:
    folder = tmp_path_factory.mktemp("fresh")
    made = Fresh(folder)
    source = folder / "source"  # a build leaves files beside what it builds
    shutil.copytree(
        PACKAGE, source, ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg*")
    )
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    made.run("-m", "pip", "install", *options, str(source))
    return made


@pytest.fixture(scope="module")
def used(fresh: Fresh, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a program that has saved and loaded by the example."""
    folder = tmp_path_factory.mktemp("used")
    fresh.run("-c", USE, folder=folder)
    return folder


class TestSqlite(BackendConformance):
    sample = 40

    @pytest.fixture
    async def backend(self, tmp_path: Path) -> AsyncIterator[SqliteBackend]:
        async with SqliteBackend(f"sqlite://{tmp_path}/run.db") as backend:
            yield backend


def test_the_scheme_is_known_only_where_the_package_is_installed(fresh: Fresh) -> None:
    show = "from importlib.metadata import entry_points; import ckpipe_sqlite\n"
    show += "print(*entry_points(group='ckpipe.backends').names, ckpipe_sqlite.__file__)"
    *names, where = fresh.run("-c", show).split()
    assert "sqlite" in names
    assert where.startswith(str(fresh.folder / "venv"))
    with pytest.raises(BackendNotFound, match="no backend for 'sqlite'"):
        ckpipe.load("sqlite://run.db")


def test_it_serves_a_pipeline_and_the_command_line(
    fresh: Fresh, used: Path, tmp_path: Path
) -> None:
    assert [path.name for path in used.iterdir()] == ["run.db"]
    command = ("-m", "ckpipe.cli", "cp", f"sqlite://{used}/run.db", "copy", "2")
    assert fresh.run(*command, folder=tmp_path).startswith("copied step 2")
    with ckpipe.SyncPipeline(tmp_path / "copy") as pipeline:
        pipeline.verify(2)


def test_reading_it_takes_a_lease_and_says_nothing(fresh: Fresh, used: Path) -> None:
    verified = fresh.run(
        "-m", "ckpipe.cli", "verify", "sqlite://run.db", "--all", folder=used, quiet=True
    )
    assert verified.count("ok  ") == 2
    assert [path.name for path in used.iterdir()] == ["run.db"]


@pytest.mark.skipif(
    not EVERY, reason="the contract is tested above; CKPIPE_TEST_ALL=1 does so there"
)
def test_its_own_tests_pass_where_it_is_installed(fresh: Fresh) -> None:
    out = fresh.run("-m", "pytest", "-q", "-p", "no:cacheprovider", folder=fresh.folder / "source")
    passed = re.search(r"(\d+) passed", out)
    assert passed is not None
    assert int(passed[1]) > 60
