"""Run each test of this folder in a process of its own, since it measures the whole process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.sampling import SEED

ALONE = "CKPIPE_TEST_ALONE"


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Have another process run the test; there it runs as any other does."""
    if os.environ.get(ALONE):
        return None
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    environment = {**os.environ, ALONE: "1", "CKPIPE_TEST_SEED": str(SEED)}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, f"{pyfuncitem.path}::{_name(pyfuncitem)}"],
        cwd=pyfuncitem.config.rootpath,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.fail(done.stdout + done.stderr, pytrace=False)
    return True


def _name(item: pytest.Function) -> str:
    return item.nodeid.split("::", 1)[1]
