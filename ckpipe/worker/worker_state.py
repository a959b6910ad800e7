"""Whether a process that has gone silent is dead, hangs, or merely has no time.

A machine that pages, or a disk that does not answer, silences a healthy worker for seconds, and
killing it would lose its saves. So silence only makes the trainer look: a process that is stopped,
or sleeps without having used the processor since the last look, will not speak again.
"""

from __future__ import annotations

from dataclasses import dataclass

PATIENCE = 30
"""How many times as long one may be silent that is busy, or waits for a disk or a processor."""


@dataclass(frozen=True, slots=True)
class ProcessState:
    """What the system says of a process.

    Args:
        letter: ``R`` for running, ``S`` for sleeping, ``D`` for waiting for a device, ``T`` or
            ``t`` for stopped, ``Z`` for ended: proc(5).
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


__all__ = ["PATIENCE", "ProcessState", "hangs", "parse_state"]
