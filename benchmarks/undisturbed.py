"""How fast a loop steps when nothing runs beside it, and whether the machine kept that speed.

Theory. What a save costs a loop is told by how long its steps take without one. A machine that
others use as well changes its speed within seconds, by up to 1.7, which outweighs what most saves
cost. So steps are timed before and after each save, and where the two differ, the machine has
changed meanwhile: that turn tells nothing of the save, and is done again.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

T = TypeVar("T")

MOST_CHANGE = 1.05
"""How much slower steps may be on one side of a save than on the other."""

MOST_TRIES = 4
LEAST_SECONDS, MOST_SECONDS = 0.5, 4.0


class Undisturbed(NamedTuple):
    """Seconds that a step takes before and after a save."""

    before: float
    after: float

    @property
    def step(self) -> float:
        """What a step would have taken meanwhile."""
        return (self.before + self.after) / 2

    @property
    def change(self) -> float:
        """By what factor the machine changed its speed, at least 1."""
        return max(self) / min(self)


def steps(step: Callable[[], object], over: Callable[[float], bool]) -> list[float]:
    """Steps until it is over, which is asked after each with the seconds so far.

    Returns:
        The seconds of each step.
    """
    taken = list[float]()
    began = last = time.perf_counter()
    while True:
        step()
        now = time.perf_counter()
        taken.append(now - last)
        last = now
        if over(now - began):
            return taken


def calm_seconds(save: float) -> float:
    """How long steps are timed on each side of a save that takes so many seconds.

    Together they are as long as the save, within bounds: an error of one per cent in what a step
    takes is one per cent of the whole save in what is lost to it.
    """
    return min(max(save / 2, LEAST_SECONDS), MOST_SECONDS)


def mean_step(step: Callable[[], object], seconds: float) -> float:
    """Seconds that a step takes, on average over so many seconds.

    Some time before does not count: a disk that has to get rid of what was removed, and
    processors that were idle, make the first steps slower.
    """
    steps(step, lambda so_far: so_far >= LEAST_SECONDS)
    return statistics.fmean(steps(step, lambda so_far: so_far >= seconds))


def steady(turn: Callable[[], T], undisturbed: Callable[[T], Undisturbed]) -> T:
    """Take turns until the machine has kept its speed in one; of a few the steadiest."""
    tried = list[T]()
    while len(tried) < MOST_TRIES:
        tried.append(turn())
        if undisturbed(tried[-1]).change <= MOST_CHANGE:
            break
    return min(tried, key=lambda each: undisturbed(each).change)
