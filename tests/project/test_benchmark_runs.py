"""The comparison with the peers goes on whatever a contender does, and keeps what it has."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import compare
import comparison_parts
import pytest
from comparison_parts import Extent, Journal, Part

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
