"""A process that forks the ranks of a trainer, for each module of tests that names its program."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.fork_server import Forks, forks


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest) -> Iterator[Forks]:
    with forks(request.module.PROGRAM) as made:
        yield made
