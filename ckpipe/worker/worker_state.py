"""Whether a process that has gone silent is dead, hangs, or merely has no time.

A machine that pages, or a disk that does not answer, silences a healthy worker for seconds, and
killing it would lose its saves. So silence only makes the trainer look: a process that is stopped,
or sleeps without having used the processor since the last look, will not speak again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

PATIENCE = 30
"""How many times as long one may be silent that is busy, or waits for a disk or a processor."""


@dataclass(frozen=True, slots=True)
class ProcessState:
    """What the system says of a process.

    Args:
        letter: ``R`` for running, ``S`` for sleeping, ``D`` for waiting for a device, ``T`` or
            ``t`` for stopped, ``Z`` for ended: proc(5). ``S`` only if all threads sleep.
        ticks: Processor time that all its threads have used.
    """

    letter: str
    ticks: int

    @property
    def stopped(self) -> bool:
        """Whether somebody has stopped it, and may never let it go on."""
        return self.letter in "Tt"


def parse_state(stat: bytes) -> ProcessState:
    """The state in a ``/proc/…/stat``: proc(5), fields 3, 14 and 15."""
    # The name in parentheses may hold anything, parentheses too.
    fields = stat[stat.rindex(b")") + 2 :].split()
    return ProcessState(fields[0].decode(), int(fields[11]) + int(fields[12]))


def process_state(id: int) -> ProcessState | None:
    """What the system says of a process and its threads; None if it is gone.

    The thread that would speak may sleep because another has what it needs, an import's lock or the
    interpreter's, and waits for a disk or a processor with it.
    """
    folder = Path(f"/proc/{id}")
    try:
        state = parse_state((folder / "stat").read_bytes())
        letters = set(_letters(folder / "task")) if state.letter == "S" else set()
    except OSError:
        return None
    awake = next((each for each in "DR" if each in letters), state.letter)
    return replace(state, letter=awake)


def _letters(tasks: Path) -> Iterator[str]:
    for task in tasks.iterdir():
        try:
            yield parse_state((task / "stat").read_bytes()).letter
        except OSError:  # that thread has just ended
            continue


def hangs(before: ProcessState | None, now: ProcessState, silent: float, limit: float) -> bool:
    """Whether a silent process will not speak again.

    Args:
        before: Its state at an earlier look in the same silence, if there was one.
        now: Its state.
        silent: How long it has been silent, in seconds.
        limit: How long it may be without a reason.
    """
    if silent < limit:
        return False
    if now.stopped or silent >= PATIENCE * limit:
        return True
    return now.letter == "S" and before is not None and before.ticks == now.ticks


__all__ = ["PATIENCE", "ProcessState", "hangs", "parse_state", "process_state"]
