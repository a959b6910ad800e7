"""Steps that all ranks save at: what a rank has promised, and what was decided. Pure.

Theory. Ranks are not at the same step, and a rank that is told of a step that it has left behind
cannot save it. So a step is agreed on in two rounds. Each rank promises a bound: its trainer goes
no further than that before the step is decided. Then the greatest of all bounds is decided, which
nobody can have passed. The bounds lie ahead by as many steps as the agreement should take at the
pace of training, so that as a rule no trainer ever waits.

The trainer asks in its own thread and the pipeline promises on its loop, so all of it is under one
lock, which is held for microseconds.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

logger = logging.getLogger("ckpipe")

_SAMPLES = 32
"""How many steps the pace is measured over."""


class Pace:
    """How fast a trainer goes through its steps.

    Args:
        clock: Tells the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: deque[tuple[int, float]] = deque(maxlen=_SAMPLES)

    def note(self, step: int) -> None:
        """Notes that a step is asked about now."""
        if self._seen and step < self._seen[-1][0]:
            self._seen.clear()  # the run was rolled back
        self._seen.append((step, self._clock()))

    def ahead(self, seconds: float) -> int:
        """How many steps are likely to go by in so many seconds; at least one."""
        if len(self._seen) < 2:
            return 1
        (first, began), (last, ended) = self._seen[0], self._seen[-1]
        if ended <= began:
            return 1
        return max(1, math.ceil((last - first) / (ended - began) * seconds))


@dataclass(slots=True)
class _Appointment:
    """One step to save at: not to be passed before it is decided, and then to be kept."""

    bound: int
    step: int | None = None


class Diary:
    """The appointments of a rank, each under the name of its occasion.

    All methods may be called in any thread. Only :meth:`ask` waits, and only if training went
    faster than expected.

    Args:
        patience: How long a trainer waits at a bound at most, in seconds.
        clock: Tells the time in seconds.
    """

    def __init__(self, patience: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience, self._pace = patience, Pace(clock)
        self._changed = threading.Condition()
        self._open: dict[str, _Appointment] = {}
        self._passed = -1

    def ask(self, step: int) -> frozenset[str]:
        """The occasions that a save is due for at a step; waits until that is decided.

        Args:
            step: The step that the trainer has just taken.
        """
        with self._changed:
            self._pace.note(step)
            if not self._changed.wait_for(lambda: not self._undecided(step), self._patience):
                self._give_up(step)
            self._passed = step
            return frozenset(
                occasion
                for occasion, each in self._open.items()
                if each.step is not None and step >= each.step
            )

    def promise(self, occasion: str, seconds: float) -> int:
        """Promises not to reach a step before it is decided whether to save there.

        Args:
            occasion: What for.
            seconds: How long the decision should take.

        Returns:
            That step, which lies ahead.
        """
        with self._changed:
            bound = self._passed + self._pace.ahead(seconds)
            self._open[occasion] = _Appointment(bound)
            return bound

    def decide(self, occasion: str, step: int) -> bool:
        """Notes the step that was decided.

        Returns:
            False if it is too late, since the trainer has left that step behind.
        """
        with self._changed:
            missed = self._passed >= step
            if missed:
                self._open.pop(occasion, None)
            else:
                self._open[occasion] = _Appointment(step, step)
            self._changed.notify_all()
            return not missed

    def keep(self, step: int) -> None:
        """Notes that a save of a step begins; appointments for it or for before it are kept."""
        with self._changed:
            for occasion, each in list(self._open.items()):
                if each.step is not None and each.step <= step:
                    del self._open[occasion]

    def has(self, beginning: str) -> bool:
        """Whether an appointment is not kept yet, for an occasion whose name begins like this."""
        with self._changed:
            return any(occasion.startswith(beginning) for occasion in self._open)

    def _undecided(self, step: int) -> list[str]:
        return [
            occasion
            for occasion, each in self._open.items()
            if each.step is None and step >= each.bound
        ]

    def _give_up(self, step: int) -> None:
        for occasion in self._undecided(step):
            del self._open[occasion]
            logger.error(
                "Step %d goes on: the ranks did not agree within %g s on the step to save at (%s)",
                step,
                self._patience,
                occasion,
            )


__all__ = ["Diary", "Pace"]
