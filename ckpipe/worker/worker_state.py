"""Judge whether a worker process hangs, by what the system says of it.

Silence proves nothing: a machine that pages, a disk that does not answer, a debugger or a stopped
process group silence a healthy worker for as long as they like. A process hangs if in many looks in
a row it has said nothing, all its threads sleep, and it has done no work since the look before.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

LOOKS = 30
"""How many looks in a row have to find the same before a process is taken to hang."""

_PF_SIGNALED = 0x400  # <linux/sched.h>
_PENDING = ("SigPnd:", "ShdPnd:")


@dataclass(frozen=True, slots=True)
class ProcessState:
    """The state of a process and its threads.

    Args:
        letter: ``R`` for running, ``S`` for sleeping, ``D`` for waiting for a device, ``T`` or
            ``t`` for stopped, ``Z`` for ended: proc(5). ``S`` only if all threads sleep.
        work: Clock ticks that its threads have used, and pages that they had to wait for.
        killed: Whether a signal ends it. It may not be gone while it waits for a device, but no
            instruction of it runs any more.
    """

    letter: str
    work: int
    killed: bool = False


def parse_state(stat: bytes) -> ProcessState:
    """Read the state in a ``/proc/…/stat``: proc(5), fields 3, 9, 12, 14 and 15."""
    # The name in parentheses may hold anything, parentheses too.
    fields = stat[stat.rindex(b")") + 2 :].split()
    work = int(fields[9]) + int(fields[11]) + int(fields[12])
    return ProcessState(fields[0].decode(), work, bool(int(fields[6]) & _PF_SIGNALED))


def process_state(id: int) -> ProcessState | None:
    """Read the state of a process and its threads; None if it is gone.

    The thread that would speak may sleep because another has what it needs, an import's lock or the
    GIL, and waits for a disk, a processor or a debugger with it.
    """
    folder = Path(f"/proc/{id}")
    try:
        state = parse_state((folder / "stat").read_bytes())
        letters = set(_letters(folder / "task")) if state.letter == "S" else set()
        killed = state.killed or _is_kill_pending((folder / "status").read_text())
    except OSError:
        return None
    awake = next((each for each in "DRTt" if each in letters), state.letter)
    return replace(state, letter=awake, killed=killed)


def _is_kill_pending(status: str) -> bool:
    masks = [line.split()[1] for line in status.splitlines() if line.startswith(_PENDING)]
    return any(int(mask, 16) & 1 << signal.SIGKILL - 1 for mask in masks)


def _letters(tasks: Path) -> Iterator[str]:
    for task in tasks.iterdir():
        try:
            yield parse_state((task / "stat").read_bytes()).letter
        except OSError:  # that thread has just ended
            continue


class HangJudge:
    """Counts the looks in a row in which a process seems to hang."""

    def __init__(self) -> None:
        self._before: ProcessState | None = None
        self._looks = 0

    def hangs(self, now: ProcessState | None, *, spoke: bool) -> bool:
        """Take one more look into account; True if the process hangs.

        Args:
            now: The state of the process.
            spoke: Whether it has said anything since the look before.
        """
        still = now is not None and now.letter == "S" and now == self._before and not spoke
        self._looks = self._looks + 1 if still else 0
        self._before = now
        return self._looks >= LOOKS


__all__ = ["LOOKS", "HangJudge", "ProcessState", "parse_state", "process_state"]
