"""A process that forks the ranks of a trainer, for each module of tests: the module as a script."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integrations.trainer_ranks import Runs
from tests.support.fork_server import forks


@pytest.fixture(scope="module")
def run(request: pytest.FixtureRequest) -> Iterator[Runs]:
    with forks(request.module.__file__) as server:
        yield Runs(server)
