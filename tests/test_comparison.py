"""The comparison with the peers goes on whatever a contender does, and keeps what it has."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import compare
import comparison_parts
import pytest
import torch
from comparison_parts import BESIDE, LIMIT, Extent, Journal, Part
from comparison_turns import Referee
from contenders import Captured, Contender, Wait

TIMES = Part("times", "tiny", "", 2, 1.0)
LOOP = Part("loop", "tiny", "python", 3, 1.0)
EXTENT = Extent((TIMES, LOOP), minutes=1.0, turn_seconds=0.8)

TURNS = """
import json, os, signal, sys, time
extent, number, _, journal = sys.argv[1:5]
entries = [json.loads(line) for line in open(journal)]
part = ["times: tiny", "loop: tiny, python loop"][int(number)]
out = {e["contender"] for e in entries if e["kind"] in ("failed", "left out")}

def write(kind, **more):
    with open(journal, "a") as file:
        file.write(json.dumps({"kind": kind, "part": part, **more}) + "\\n")

for name in ("good", "crashing", "hanging", "late"):
    if name in out:
        continue
    write("began", contender=name, round="start" if name == "late" else 0)
    if name == "crashing":
        os.kill(os.getpid(), signal.SIGSEGV)
    if name == "hanging":
        signal.pause()
    if name == "late":
        sys.exit(3)
    write("turn", contender=name, round=0, seconds=0.1, values={"durable": 1.5})
write("done")
os._exit(0) if int(number) else signal.pause()
"""
"""Takes the place of what measures: it crashes, hangs and fails, and does not end by itself."""


class Player(Contender):
    """A contender that is asked for nothing."""

    def __init__(self, root: Path, name: str) -> None:
        super().__init__(root)
        self.name = name

    def _save(self, state: dict[str, Any]) -> Wait:
        raise NotImplementedError

    def load(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


def referee(part: Part, journal: Journal, ends: float = 0.0) -> Referee:
    """One that does not wait for the disk."""
    return Referee(part, journal, ends, 0.0, settle=lambda: None)


def turns(journal: Journal) -> list[tuple[str, int]]:
    """Who was measured in which round, in order."""
    return [(e["contender"], e["round"]) for e in journal.read() if e["kind"] == "turn"]


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    made = Journal(tmp_path / "run.jsonl")
    yield made
    made.close()


def test_who_crashes_hangs_or_cannot_start_is_left_out_with_a_reason(
    tmp_path: Path, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "turns.py"
    script.write_text(TURNS)
    monkeypatch.setattr(compare, "TURNS", script)
    monkeypatch.setattr(compare, "CLOSING_SECONDS", 0.1)
    monkeypatch.setattr(compare, "POLL_SECONDS", 0.02)
    monkeypatch.setitem(comparison_parts.EXTENTS, "test", EXTENT)
    journal.write(kind="about", values={"date": "today"})
    place = compare.Place("test", journal, tmp_path, tmp_path / "run.json", "")
    compare.run(place)
    found = json.loads((tmp_path / "run.json").read_text())
    assert found["date"] == "today"
    assert found["left out"] == {"late": "its process ended with exit code 3"}
    why = {(each["contender"], each["during"]): each["why"] for each in found["failed"]}
    assert why["crashing", TIMES.name] == "its process was ended by SIGSEGV"
    assert why["hanging", TIMES.name] == "it took longer than 1 s and was stopped"
    assert found["states"]["tiny"]["durable"]["good"][-1] == 1.5
    assert "good" in found["loops"]["tiny, python loop"]["durable"], "the next part ran"
    lines = len(journal.read())
    compare.run(place)
    assert len(journal.read()) == lines, "what is done is not measured again"


def test_an_exception_costs_the_contender_the_rest_of_the_part(
    tmp_path: Path, journal: Journal
) -> None:
    def turn(each: Contender) -> dict[str, float]:
        if each.name == "bad" and (each.name, 0) in turns(journal):
            raise ValueError("no more\nof this")
        return {"durable": 1.0}

    players = [Player(tmp_path / name, name) for name in ("bad", "good")]
    referee(TIMES, journal).rounds(players, turn)
    assert turns(journal) == [("bad", 0), ("good", 0), ("good", 1)]
    (failed,) = comparison_parts.results(journal.read(), EXTENT)["failed"]
    assert failed["why"] == "ValueError: no more"


def test_a_run_that_was_killed_goes_on_where_it_was(tmp_path: Path, journal: Journal) -> None:
    for name, number in (("a", 0), ("b", 0), ("a", 1)):
        journal.write(kind="turn", part=TIMES.name, contender=name, round=number, values={"x": 1})
    journal.write(kind="began", part=TIMES.name, contender="b", round=1)
    journal.path.write_text(journal.path.read_text() + '{"kind": "tu')
    assert comparison_parts.unfinished(journal.read()) == journal.read()[-1]
    again = Journal(tmp_path / "run.jsonl")
    again.path.write_text(journal.path.read_text().rpartition("\n")[0] + "\n")
    players = [Player(tmp_path / name, name) for name in "ab"]
    referee(TIMES, again).rounds(players, lambda _: {"x": 2})
    again.close()
    row = comparison_parts.results(again.read(), EXTENT)["states"]["tiny"]["x"]
    assert row == {"a": [1, 1], "b": [1, 2]}


@pytest.mark.parametrize(("late", "rounds"), [(-1e3, 5), (10.0, 3), (1e3, 3)])
def test_rounds_beside_a_loop_end_with_the_time(
    tmp_path: Path, journal: Journal, late: float, rounds: int
) -> None:
    part = Part("loop", "tiny", "python", 5, 1.0)
    ends = time.monotonic() - late
    referee(part, journal, ends).rounds([Player(tmp_path / "a", "a")], lambda _: {"lost s": 1.0})
    assert len(turns(journal)) == rounds


def test_a_slow_contender_has_fewer_rounds(
    tmp_path: Path, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("comparison_turns.SLOW_SECONDS", -1.0)
    part = Part("times", "tiny", "", 5, 1.0)
    referee(part, journal).rounds([Player(tmp_path / "a", "a")], lambda _: {"x": 1.0})
    assert len(turns(journal)) == comparison_parts.FEWEST_ROUNDS


def test_saves_that_block_cost_a_loop_all_of_their_time(journal: Journal) -> None:
    for name in (LIMIT, "torch.save", "other"):
        journal.write(
            kind="turn", part=TIMES.name, contender=name, round=0, values={"durable": 2.0}
        )
    beside = {"lost s": 0.1, "longest step s": 0.2, BESIDE: 1.0}
    journal.write(kind="turn", part=LOOP.name, contender="other", round=0, values=beside)
    found = comparison_parts.results(journal.read(), EXTENT)["loops"][LOOP.title]
    assert found["lost s"] == {"other": [0.1], "torch.save": [2.0]}
    assert found["longest step s"] == {"other": [0.2], "torch.save": [2.0]}
    assert found["held up s"] == {"torch.save": [2.0]}
    assert found[BESIDE] == {"other": [1.0]}


def test_captured_saves_guard_what_a_state_trains_with(tmp_path: Path) -> None:
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(64)).sum().backward()
    optimizer.step()
    captured = Captured(tmp_path)
    try:
        captured.save({"optimizer": optimizer})()
        assert captured.handle is not None
        assert captured.handle.report.captured_seconds is not None
        optimizer.step()
        captured.save({"none": {"weight": torch.zeros(8)}})()
        assert captured.handle.report.captured_seconds is not None, "it has an optimizer made"
    finally:
        captured.close()
