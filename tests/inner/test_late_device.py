"""Saves from a device that is as late as it may be, with fences and of a kind that has none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.command_line import forked

PROGRAM = Path(__file__).with_name("late_device_runs.py")


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["fenced", "not fenced"])
def test_what_is_saved_is_what_the_device_computes_before_and_in_the_walk(
    tmp_path: Path, kind: str
) -> None:
    ended = forked(PROGRAM, kind, tmp_path)
    assert ended.code == 0, ended.err
