"""Run each test of this folder in a process of its own, since it measures the whole process."""

from __future__ import annotations

import os

import pytest

from tests.support.command_line import forked
from tests.support.sampling import SEED

PYTEST = "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"
IMPORTED = "ignore::pytest.PytestAssertRewriteWarning"
ALONE = "CKPIPE_TEST_ALONE"


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Have another process run the test; there it runs as any other does."""
    if os.environ.get(ALONE):
        return None
    # What the process was forked with is no code of tests.
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", IMPORTED]
    environment = {**os.environ, ALONE: "1", "CKPIPE_TEST_SEED": str(SEED)}
    test = f"{pyfuncitem.path}::{_name(pyfuncitem)}"
    place = pyfuncitem.config.rootpath
    done = forked(PYTEST, *options, test, cwd=place, env=environment)
    if done.code:
        pytest.fail(done.out + done.err, pytrace=False)
    return True


def _name(item: pytest.Function) -> str:
    return item.nodeid.split("::", 1)[1]
