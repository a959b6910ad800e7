"""How many processors a rank may use."""

from __future__ import annotations

import os

import pytest

from ckpipe.interpreter import available_cpus


@pytest.mark.parametrize(
    ("told", "cores", "mine"),
    [
        (None, 8, 8),
        ("1", 8, 8),
        ("3", 8, 2),
        ("16", 8, 1),
        ("0", 8, 8),
        ("many", 8, 8),
        ("2", 1, 1),
    ],
)
def test_ranks_of_one_machine_share_its_processors(
    monkeypatch: pytest.MonkeyPatch, told: str | None, cores: int, mine: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    assert available_cpus({} if told is None else {"LOCAL_WORLD_SIZE": told}) == mine


def test_this_process_has_some() -> None:
    assert 1 <= available_cpus({}) <= (os.cpu_count() or 1)
