"""Choose the steps at which all ranks save: by steps, by time, or because of preemption.

Theory. Ranks are not at the same step, and a rank cannot save a step that it has passed. So ranks
agree on a step in two rounds. In the first, each rank proposes a bound: its trainer waits at that
step until the step to save is decided. In the second, the ranks decide on the greatest of all
bounds, which no rank can have passed. At the pace of training, the bounds are as many steps ahead
as the agreement should take, so as a rule no trainer waits. The trainer asks in its own thread and
the pipeline proposes on its loop, so one lock guards all of it; it is held for microseconds.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable


class SaveSchedule:
    """Decides at which steps a save is due.

    **Steps.** The marks are the multiples of ``steps``. A save is due as soon as a mark has been
    reached or passed since the last save or load. So a mark that was skipped, or passed before a
    crash, is made up for at the next query. Step 0 of a new run is no mark: it is still untrained.

    **Seconds.** A save is due when that time has passed since the last save or load, or since the
    beginning.

    **The last step** of a run, if it is given, is due too, unless its state is saved already.

    A query changes nothing: a save stays due until one has begun. Any thread may query.

    Args:
        steps: The distance of marks; None for no marks.
        seconds: The longest time between saves in seconds; None for no limit.
        clock: Returns the time in seconds.
    """

    def __init__(
        self,
        steps: int | None,
        seconds: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._steps, self._seconds, self._clock = steps, seconds, clock
        self._last = (0, clock())
        self._begun = False

    @property
    def is_set(self) -> bool:
        """True if there are marks or a longest time."""
        return self._steps is not None or self._seconds is not None

    @property
    def newest(self) -> int | None:
        """The step of the last save or load; None before the first."""
        return self._last[0] if self._begun else None

    def due(self, step: int) -> bool:
        """True if a save is due at a step."""
        return self.is_marked(step) or self.is_overdue()

    def is_marked(self, step: int) -> bool:
        """True if a mark has been reached or passed."""
        return self._steps is not None and step // self._steps > self._last[0] // self._steps

    def is_last(self, step: int, last: int | None) -> bool:
        """True if this is the run's last step, and its state is neither saved nor loaded."""
        return last is not None and step >= last and not (self._begun and self._last[0] == step)

    def is_overdue(self) -> bool:
        """True if the longest time between saves is over."""
        return self._seconds is not None and self._elapsed() >= self._seconds

    def is_near(self, slack: float) -> bool:
        """True if that time is over within ``slack`` seconds, or a tenth of it if that is more."""
        if self._seconds is None:
            return False
        return self._elapsed() >= self._seconds - max(slack, 0.1 * self._seconds)

    def _elapsed(self) -> float:
        return self._clock() - self._last[1]

    def begin_at(self, step: int) -> None:
        """Record that a save of a step begins, or that the step was loaded."""
        self._last = (step, self._clock())
        self._begun = True


logger = logging.getLogger("ckpipe")

_SAMPLES = 32
"""Number of steps over which the pace is measured."""


class Pace:
    """The pace of a trainer in steps per second.

    Args:
        clock: Returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: deque[tuple[int, float]] = deque(maxlen=_SAMPLES)

    def note(self, step: int) -> None:
        """Record the time of a step."""
        if self._seen and step < self._seen[-1][0]:
            self._seen.clear()  # the run was rolled back
        self._seen.append((step, self._clock()))

    def ahead(self, seconds: float) -> int:
        """Estimate the number of steps in so many seconds; at least one."""
        if len(self._seen) < 2:
            return 1
        (first, began), (last, ended) = self._seen[0], self._seen[-1]
        if ended <= began:
            return 1
        return max(1, math.ceil((last - first) / (ended - began) * seconds))


class SaveStepAgreement:
    """A rank's agreements on steps to save, each under the name of its occasion.

    An occasion is a reason to save together: preemption, or the n-th timed save.

    All methods may be called in any thread. Only :meth:`ask` waits, and only if training was faster
    than expected.

    Args:
        patience: Seconds that a trainer waits at a bound at most.
        clock: Returns the time in seconds.
    """

    def __init__(self, patience: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience, self._pace = patience, Pace(clock)
        self._changed = threading.Condition()
        # For each occasion the bound at which the trainer waits, and the step once it is decided.
        self._open: dict[str, tuple[int, int | None]] = {}
        self._passed = -1

    def ask(self, step: int) -> frozenset[str]:
        """Return the occasions for which a save is due at a step; wait until that is decided.

        Args:
            step: The step that the trainer has just taken.
        """
        with self._changed:
            self._pace.note(step)
            if not self._changed.wait_for(lambda: not self._undecided(step), self._patience):
                for occasion in self._undecided(step):
                    del self._open[occasion]
                    logger.error(
                        "Step %d goes on: the ranks did not agree within %g s on the step to save "
                        "at (%s)",
                        step,
                        self._patience,
                        occasion,
                    )
            self._passed = step
            return frozenset(
                occasion
                for occasion, (_, decided) in self._open.items()
                if decided is not None and step >= decided
            )

    def propose(self, occasion: str, seconds: float) -> int:
        """Propose a bound: a step ahead at which the trainer waits for the decision.

        Args:
            occasion: The occasion.
            seconds: Seconds that the decision should take.

        Returns:
            The bound.
        """
        with self._changed:
            bound = self._passed + self._pace.ahead(seconds)
            self._open[occasion] = (bound, None)
            return bound

    def decide(self, occasion: str, step: int) -> bool:
        """Record the step that was decided.

        Returns:
            False if it is too late, since the trainer has passed that step.
        """
        with self._changed:
            missed = self._passed >= step
            if missed:
                self._open.pop(occasion, None)
            else:
                self._open[occasion] = (step, step)
            self._changed.notify_all()
            return not missed

    def consume(self, step: int) -> None:
        """Drop agreements for a step and for earlier steps, since a save of the step begins."""
        with self._changed:
            for occasion, (_, decided) in list(self._open.items()):
                if decided is not None and decided <= step:
                    del self._open[occasion]

    def has(self, beginning: str) -> bool:
        """True if there is an open agreement for an occasion whose name begins like this."""
        with self._changed:
            return any(occasion.startswith(beginning) for occasion in self._open)

    def _undecided(self, step: int) -> list[str]:
        return [
            occasion
            for occasion, (bound, decided) in self._open.items()
            if decided is None and step >= bound
        ]
