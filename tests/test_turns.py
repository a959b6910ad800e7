"""Shorter turns of the interpreter: for as long as a save of this process wants them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from ranks import settle
from worker_runs import SETTINGS, state_of

import ckpipe
from ckpipe.events import BlockUploaded, Event


def about(seconds: float) -> Any:
    """An interval as the interpreter gives it back, which counts whole microseconds."""
    return pytest.approx(seconds, abs=2e-6)


@pytest.fixture(autouse=True)
def default_interval() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("worker", ["thread", "process"])
def test_saves_want_them_until_they_are_through(
    tmp_path: Path, worker: Literal["thread", "process"]
) -> None:
    seen: list[float] = []

    def look(event: Event) -> None:
        if isinstance(event, BlockUploaded):
            seen.append(sys.getswitchinterval())

    with ckpipe.SyncPipeline(tmp_path, worker=worker, **SETTINGS) as opened:
        opened.events.add(look)
        opened.save(state_of(1)).wait()
        settle(opened)
        assert sys.getswitchinterval() == about(0.005)
    assert seen == [about(0.001)] * len(seen) != []


class Looking:
    """An object that notes the interval while it is looked at."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        self.seen.append(sys.getswitchinterval())
        return {"value": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == {"value": 1}


@pytest.mark.parametrize("worker", ["thread", "process"])
@pytest.mark.parametrize(("setting", "during"), [(None, 0.005), (0.002, 0.002), (0.01, 0.005)])
def test_the_interval_is_a_setting(
    tmp_path: Path, worker: Literal["thread", "process"], setting: float | None, during: float
) -> None:
    seen: list[float] = []
    looking = Looking()

    def look(event: Event) -> None:
        if isinstance(event, BlockUploaded):
            seen.append(sys.getswitchinterval())

    with ckpipe.SyncPipeline(
        tmp_path, worker=worker, switch_interval_seconds=setting, **SETTINGS
    ) as opened:
        opened.events.add(look)
        opened.save(state_of(1) | {"looking": looking}).wait()
        looking.seen.clear()
        opened.load({"looking": looking}, include=["looking*"])
    assert seen == [about(during)] * len(seen) != []
    assert looking.seen == [about(during)] * len(looking.seen) != []
