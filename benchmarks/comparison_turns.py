"""Measure one part of the comparison, turn by turn, into the journal; ``compare.py`` calls it.

It skips results that are in the journal already, and leaves out contenders that failed in this
part. So the same call continues after an earlier process was killed.
"""

from __future__ import annotations

import argparse
import gc
import os
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import comparison_parts
import contenders
import peaks
import raw
import states
import torch
from comparison_parts import BESIDE, LIMIT, Extent, Journal, Part
from contenders import Contender
from undisturbed import Undisturbed, calm_seconds, mean_step, steady

Turn = Callable[[Contender], dict[str, float]]
PYTHON_ROUNDS, MATRIX = 30_000, 320
SLOW_SECONDS = 30.0
"""A contender with longer turns is measured in few rounds."""


def progress(text: str) -> None:
    """Print the current action on the terminal."""
    print(text, flush=True)


def python_step() -> None:
    """Do about two milliseconds of interpreted work."""
    total = 0
    for number in range(PYTHON_ROUNDS):
        total += number * number


_FACTORS = torch.randn(2, MATRIX, MATRIX)


def matmul_step() -> None:
    """Do about two milliseconds of matrix products in one thread."""
    for _ in range(4):
        torch.mm(_FACTORS[0], _FACTORS[1])


LOOPS: dict[str, Callable[[], None]] = {"python": python_step, "matmul": matmul_step}


def settle() -> None:
    """Finish the writes and the garbage of one contender, which would slow down the next."""
    gc.collect()
    os.sync()


class Referee:
    """Call the turns of a part and keep the journal.

    Args:
        part: The part.
        journal: The journal.
        ends: The time at which the part should end, on the monotonic clock.
        later: Seconds that the later parts will take.
        settle: Tidies up between turns.
    """

    def __init__(
        self,
        part: Part,
        journal: Journal,
        ends: float,
        later: float,
        settle: Callable[[], None] = settle,
    ) -> None:
        self.part, self._journal, self._ends, self._later = part, journal, ends, later
        self._settle = settle
        entries = journal.read()
        self._out = comparison_parts.given_up(entries, part)
        self._done = comparison_parts.rounds_done(entries, part)

    def takes_part(self, name: str) -> bool:
        """Tell whether a contender has not been given up."""
        return name not in self._out

    def admit(self, cls: type[Contender], root: Path) -> Contender | None:
        """Start a contender and let it save and load a little; None if it cannot."""
        probe = {"probe": {"weight": torch.zeros(1000)}}
        self._began(cls.name, "start")
        try:
            each = cls(root / cls.__name__)
            each.save(probe)()
            each.load(probe)
            each.forget()
        except Exception as error:
            self._journal.write(kind="left out", contender=cls.name, why=_reason(error))
            return None
        self._journal.write(kind="warm", contender=cls.name)
        return each

    def rounds(self, found: Sequence[Contender], turn: Turn, around: Turn | None = None) -> None:
        """Take the turns of all contenders, once to warm up and then round by round.

        Args:
            found: The contenders.
            turn: Measures one contender.
            around: Warms one contender up; by default a turn does.
        """
        began = longest = 0.0
        slow: set[str] = set()
        for number in range(-1, self.part.rounds):
            if self._over(number, longest):
                progress(f"  out of time after {number} rounds of {self.part.rounds}")
                return
            began = time.monotonic()
            for each in found:
                if (each.name, number) in self._done or not self.takes_part(each.name):
                    continue
                if each.name in slow and number >= comparison_parts.FEWEST_ROUNDS:
                    continue
                took = self._turn(each, (around or turn) if number < 0 else turn, number)
                if took > SLOW_SECONDS:
                    slow.add(each.name)
            longest = max(longest if number else 0.0, time.monotonic() - began)
            self._tell(number, longest)

    def _over(self, number: int, longest: float) -> bool:
        """Tell whether the time of rounds beside a loop is over; a few are always measured."""
        if not self.part.loop or number < comparison_parts.FEWEST_ROUNDS:
            return False
        return time.monotonic() + longest > self._ends

    def _tell(self, number: int, longest: float) -> None:
        if self.part.rounds == 1 and number < 0:
            return
        left = (self.part.rounds - number - 1) * longest
        if self.part.loop:
            left = min(left, max(0.0, self._ends - time.monotonic()))
        what = f"round {number + 1} of {self.part.rounds}" if number >= 0 else "warm"
        progress(f"  {what}, {longest:.0f} s; about {left + self._later:.0f} s left of the whole")

    def _turn(self, each: Contender, turn: Turn, number: int) -> float:
        """Call a turn; return its seconds."""
        self._began(each.name, number)
        began = time.monotonic()
        try:
            values = turn(each)
            each.forget()
        except Exception as error:
            progress(f"  {each.name} failed: {_reason(error)}")
            self._out.add(each.name)
            self._write("failed", each.name, why=_reason(error))
            return 0.0
        took = round(time.monotonic() - began, 3)
        if number < 0:
            self._write("warm", each.name, seconds=took)
        else:
            self._write("turn", each.name, round=number, seconds=took, values=values)
        self._settle()
        return took

    def _began(self, name: str, number: int | str) -> None:
        self._write("began", name, round=number)

    def _write(self, kind: str, name: str, **more: Any) -> None:
        self._journal.write(kind=kind, part=self.part.name, contender=name, **more)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


class Limits(Contender):
    """The limits of the machine, as a contender without saves."""

    name = LIMIT

    def __init__(self, root: Path, nbytes: int) -> None:
        super().__init__(root)
        self._memory, self._nbytes = raw.touched(nbytes), nbytes
        self._source = torch.ones(nbytes, dtype=torch.uint8)  # zeros would have no pages yet

    def measure(self) -> dict[str, float]:
        """Measure a warm copy, one write that ends with fsync, and parallel reads."""
        path, target = self.root / "raw.bin", torch.frombuffer(self._memory, dtype=torch.uint8)
        copy = raw.seconds(lambda: target[: self._nbytes].copy_(self._source))
        write = raw.write(path, self._memory, self._nbytes, 8, 16 * raw.MIB)
        raw.drop_from_cache(path)
        cold = raw.read(path, self._memory, 4, 16 * raw.MIB, direct=True)
        raw.bring_into_cache(path)
        warm = raw.read(path, self._memory, 4, 16 * raw.MIB, direct=False)
        path.unlink()
        return {"blocked": copy, "durable": write, "cold": cold, "warm": warm}

    def _save(self, state: dict[str, Any]) -> contenders.Wait:
        raise NotImplementedError

    def load(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


def times(each: Contender, state: dict[str, Any]) -> dict[str, float]:
    """Measure blocked, durable, cold and warm seconds of one contender, and bytes on disk."""
    if isinstance(each, Limits):
        return each.measure()
    began = time.perf_counter()
    wait = each.save(state)
    values = {"blocked": time.perf_counter() - began}
    wait()
    values["durable"] = time.perf_counter() - began
    files = each.files()
    values["bytes"] = float(sum(path.stat().st_size for path in files))
    if each.loads_like is None:
        for path in files:
            raw.drop_from_cache(path)
        values["cold"] = raw.seconds(lambda: each.load(state))
        for path in files:
            raw.bring_into_cache(path)
        values["warm"] = raw.seconds(lambda: each.load(state))
    return values


def beside(each: Contender, state: dict[str, Any], step: Callable[[], None]) -> dict[str, float]:
    """Measure the effect of a save on a loop: rate, longest step and lost training time."""

    def turn() -> tuple[Undisturbed, Beside]:
        before = mean_step(step, calm_seconds(each.took))
        found = _steps_beside(each, state, step)
        each.took = found.took
        alone = Undisturbed(before, mean_step(step, calm_seconds(found.took)))
        each.forget()
        settle()
        return alone, found

    alone, found = steady(turn, lambda found: found[0])
    undisturbed = len(found.steps) * alone.step
    values = {
        "lost s": found.took - undisturbed,
        "held up s": found.held_up,
        "longest step s": max([found.blocked, *found.steps]),
        BESIDE: found.took,
    }
    if found.took > found.blocked:
        values["step rate"] = undisturbed / (found.took - found.blocked)
    return values


class Beside(NamedTuple):
    """The seconds of a save and of the steps beside it.

    Args:
        steps: The steps.
        blocked: The seconds of the call.
        took: The seconds of the save until it was durable.
        held_up: The call and the time after it in which the training thread could not run.
    """

    steps: list[float]
    blocked: float
    took: float
    held_up: float


def _steps_beside(each: Contender, state: dict[str, Any], step: Callable[[], None]) -> Beside:
    """Save and step until the save is durable."""
    began = time.perf_counter()
    wait = each.save(state)
    blocked = time.perf_counter() - began
    ended: list[float] = []
    failures: list[Exception] = []

    def watch() -> None:
        try:
            wait()
        except Exception as error:
            failures.append(error)
        ended.append(time.perf_counter())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    during: list[float] = []
    stepping, ran = time.perf_counter(), time.thread_time()
    while not ended:
        during.append(raw.seconds(step))
    held_up = time.perf_counter() - stepping - (time.thread_time() - ran)
    watcher.join()
    if failures:
        raise failures[0]
    return Beside(during, blocked, ended[0] - began, blocked + held_up)


def saved(each: Contender, state: dict[str, Any]) -> dict[str, float]:
    """Save once without steps, to warm up."""
    each.save(state)()
    return {}


def timeline(ours: contenders.Ours, state: dict[str, Any]) -> dict[str, Any]:
    """Take the report of one warm save of ckpipe."""
    ours.save(state)()
    report = ours.handle.report.to_data()
    ours.forget()
    return report


def measure(root: Path, part: Part, journal: Journal, referee: Referee) -> None:
    """Measure a part until it is done."""
    everybody = [cls for cls in contenders.EVERYBODY if referee.takes_part(cls.name)]
    if part.kind == "peaks":
        for cls in everybody:
            apart = peaks.InProcess(root / "peaks", cls.name, part.state)
            progress(f"  {cls.name}")
            referee.rounds([apart], peaks.measure, lambda _: {})
        return
    contenders.start_process_group(root)
    if part.loop:
        everybody = [cls for cls in everybody if not cls.blocks]
        everybody += [cls for cls in contenders.OTHER_WAYS if referee.takes_part(cls.name)]
        torch.set_num_threads(1)
    found = [each for cls in everybody if (each := referee.admit(cls, root)) is not None]
    state = states.STATES[part.state]()
    if part.loop:
        step = LOOPS[part.loop]
        referee.rounds(
            found, lambda each: beside(each, state, step), lambda each: saved(each, state)
        )
    else:
        limits = Limits(root / "limits", states.state_bytes(state))
        referee.rounds([limits, *found], lambda each: times(each, state))
        ours = next((each for each in found if isinstance(each, contenders.Ours)), None)
        if ours is not None and not any(each["kind"] == "timeline" for each in journal.read()):
            journal.write(kind="timeline", values={"timeline": timeline(ours, state)})


def main() -> None:
    """Measure the part that the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("extent", choices=comparison_parts.EXTENTS)
    parser.add_argument("part", type=int)
    parser.add_argument("--journal", type=Path, required=True)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True, help="this part's share")
    parser.add_argument("--later", type=float, required=True, help="seconds of the parts after it")
    given = parser.parse_args()
    warnings.simplefilter("ignore")  # of the contenders
    extent: Extent = comparison_parts.EXTENTS[given.extent]
    part, journal = extent.parts[given.part], Journal(given.journal)
    if (note := contenders.allow_many_files()) is not None:
        journal.write(kind="note", text=note)
    ends = time.monotonic() + given.seconds
    measure(given.root, part, journal, Referee(part, journal, ends, given.later))
    journal.write(kind="done", part=part.name)
    # No contender is closed: that may hang, and the caller ends all processes of this session.
    os._exit(0)


if __name__ == "__main__":
    main()
