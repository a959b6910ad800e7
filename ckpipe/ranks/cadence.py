"""When a save is due: after so many steps, or so much time. Pure, but for the clock it is given."""

from __future__ import annotations

import time
from collections.abc import Callable


class Cadence:
    """Says at which steps to save.

    **Steps.** The marks are the multiples of ``steps``. A save is due as soon as one has been
    reached or passed since the last save or load, so that a mark that is skipped, or that lay
    before a crash, is made up for at the next step asked about. Step 0 of a new run is no mark:
    nothing has been learned by then.

    **Seconds.** A save is due when so much time has passed since the last save or load, or since
    the beginning.

    **The last step** of a run, if it is told, is due too, unless that state is saved already.

    Asking changes nothing: a save stays due until one has begun. It may be asked in any thread.

    Args:
        steps: The distance of marks; None for none.
        seconds: The longest time between saves in seconds; None for none.
        clock: Tells the time in seconds.
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
        """Whether there is anything to go by."""
        return self._steps is not None or self._seconds is not None

    def due(self, step: int) -> bool:
        """Whether to save at a step."""
        return self.is_marked(step) or self.is_overdue()

    def is_marked(self, step: int) -> bool:
        """Whether a mark has been reached or passed."""
        return self._steps is not None and step // self._steps > self._last[0] // self._steps

    def is_last(self, step: int, last: int | None) -> bool:
        """Whether this is the run's last step, and its state is neither saved nor loaded."""
        return last is not None and step >= last and not (self._begun and self._last[0] == step)

    def is_overdue(self) -> bool:
        """Whether the longest time between saves is over."""
        return self._seconds is not None and self._elapsed() >= self._seconds

    def is_near(self, slack: float) -> bool:
        """Whether the time is over in so many seconds or a tenth of it, whichever is more."""
        if self._seconds is None:
            return False
        return self._elapsed() >= self._seconds - max(slack, 0.1 * self._seconds)

    def _elapsed(self) -> float:
        return self._clock() - self._last[1]

    def begin_at(self, step: int) -> None:
        """Notes that the state of a step is being saved, or has been loaded."""
        self._last = (step, self._clock())
        self._begun = True


__all__ = ["Cadence"]
