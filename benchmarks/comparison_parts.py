"""The parts of the comparison, which run one after the other, and its journal.

A *turn* is one contender's share of a round. The measuring process writes a line to the journal
before a turn and one after it. So an interrupted run keeps its results, and the watching process
knows which contender's turn did not end.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

import states

Kind = Literal["times", "loop", "peaks"]
Entry = dict[str, Any]
"""A line of the journal."""

LIMIT = "the limit"
BESIDE = "durable beside it s"
BLOCKING = ("torch.save", "safetensors", "DCP")
"""Contenders whose saves return only once they are durable."""
FEWEST_ROUNDS = 3
"""The rounds that are always measured, even for slow contenders and if time runs out."""


@dataclass(frozen=True)
class Part:
    """One measurement of all contenders, in its own process.

    Args:
        kind: ``times`` of saves and loads, a ``loop`` beside saves, or the ``peaks`` of memory.
        state: The name of the state.
        loop: The name of the loop that trains beside the saves.
        rounds: The number of rounds, after one round to warm up.
        nominal: Its seconds on two cores, as a first estimate.
    """

    kind: Kind
    state: str
    loop: str
    rounds: int
    nominal: float

    @property
    def title(self) -> str:
        """The table that it fills."""
        return f"{self.state}, {self.loop} loop" if self.loop else self.state

    @property
    def name(self) -> str:
        """The name in the journal."""
        return f"{self.kind}: {self.title}"


@dataclass(frozen=True)
class Extent:
    """All measurements of a run, and their time limits.

    Args:
        parts: The measurements, the most important first.
        minutes: The time of the run; the loops share the rest of it when they begin.
        turn_seconds: The longest time of a turn before its contender is given up.
    """

    parts: tuple[Part, ...]
    minutes: float
    turn_seconds: float


_GPT2, _TINY, _LARGE = states.GPT2, states.TINY, states.LARGE
LOOPS = ("python", "matmul")
FULL = Extent(
    (
        Part("times", _GPT2, "", 7, 400),
        Part("times", _TINY, "", 7, 770),
        Part("times", _LARGE, "", 7, 240),
        *(Part("peaks", name, "", 1, 80) for name in (_GPT2, _TINY, _LARGE)),
        *(Part("loop", name, loop, 7, 300) for name in (_GPT2, _TINY, _LARGE) for loop in LOOPS),
    ),
    70.0,
    120.0,
)
QUICK = Extent(
    (
        Part("times", states.SMALL_GPT2, "", 1, 50),
        Part("loop", states.SMALL_GPT2, "python", 1, 30),
    ),
    1.8,
    40.0,
)
TRIAL = Extent(
    (
        Part("times", states.TRIAL, "", 1, 10),
        Part("peaks", states.TRIAL, "", 1, 40),
        *(Part("loop", states.TRIAL, loop, 1, 10) for loop in LOOPS),
    ),
    2.0,
    30.0,
)
"""The extent for a test of the benchmark itself."""
EXTENTS = {"full": FULL, "quick": QUICK, "trial": TRIAL}


class Journal:
    """A file of lines that is only appended to.

    Args:
        path: The file; it need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: TextIO | None = None

    def write(self, **entry: Any) -> None:
        """Append a line; the file stays open, since a contender may use up all descriptors."""
        if self._file is None:
            self._file = self.path.open("a")
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; the next line opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def read(self) -> list[Entry]:
        """Read all complete lines."""
        if not self.path.exists():
            return []
        whole = self.path.read_text().rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines()]


def unfinished(entries: Iterable[Entry]) -> Entry | None:
    """Find the turn that began and did not end, if there is one."""
    begun: Entry | None = None
    for entry in entries:
        if entry["kind"] == "began":
            begun = entry
        elif entry["kind"] in ("turn", "failed", "left out", "warm"):
            begun = None
    return begun


def given_up(entries: Iterable[Entry], part: Part) -> set[str]:
    """Find the contenders that are left out of the rest of a part."""
    return {
        each["contender"]
        for each in entries
        if each["kind"] == "left out" or (each["kind"] == "failed" and each["part"] == part.name)
    }


def rounds_done(entries: Iterable[Entry], part: Part) -> set[tuple[str, int]]:
    """Find the contenders and rounds of a part that were measured."""
    return {
        (each["contender"], each["round"])
        for each in entries
        if each["kind"] == "turn" and each["part"] == part.name
    }


def results(entries: Iterable[Entry], extent: Extent) -> dict[str, Any]:
    """Convert a journal to the form for files and tables."""
    entries = list(entries)
    named = {part.name: part for part in extent.parts}
    tables: dict[str, dict[str, dict[str, list[float]]]] = {
        part.name: defaultdict(lambda: defaultdict(list)) for part in extent.parts
    }
    found: dict[str, Any] = {"rounds": max(part.rounds for part in extent.parts)}
    found |= {
        "left out": {},
        "failed": [],
        "notes": [],
        "states": {},
        "loops": {},
        "peak memory": {},
    }
    for each in entries:
        if each["kind"] == "turn":
            for measure, value in each["values"].items():
                tables[each["part"]][measure][each["contender"]].append(value)
        elif each["kind"] == "failed":
            where = {"table": named[each["part"]].title, "contender": each["contender"]}
            found["failed"].append(where | {"during": each["part"], "why": each["why"]})
        elif each["kind"] == "left out":
            found["left out"][each["contender"]] = each["why"]
        elif each["kind"] == "note" and each["text"] not in found["notes"]:
            found["notes"].append(each["text"])
        elif each["kind"] in ("about", "timeline", "took"):
            found |= each["values"]
    for part in extent.parts:
        table = {measure: dict(row) for measure, row in tables[part.name].items()}
        if part.kind == "peaks":
            peaks = table.get("peak memory", {})
            found["peak memory"][part.state] = {name: int(row[0]) for name, row in peaks.items()}
        elif table:
            found["loops" if part.loop else "states"][part.title] = table
    _blocking(found, extent)
    return found


def _blocking(found: dict[str, Any], extent: Extent) -> None:
    """Fill in the cost of blocking saves for a loop: their whole time, measured without one."""
    for part in extent.parts:
        table = found["loops"].get(part.title)
        times: Mapping[str, Any] | None = found["states"].get(part.state)
        if table is None or times is None:
            continue
        for name, seconds in times["durable"].items():
            if name in BLOCKING:
                for measure in ("lost s", "held up s", "longest step s"):
                    table.setdefault(measure, {})[name] = list(seconds)
