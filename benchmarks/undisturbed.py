"""Measure the undisturbed speed of a loop, and whether the machine kept that speed.

Theory. The cost of a save is computed from the time of steps without one. A shared machine changes
its speed within seconds, by up to 1.7, which is more than the cost of most saves. So steps are
timed before and after each save. If the two differ, the machine has changed its speed meanwhile:
that turn has no meaning, and is repeated.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

T = TypeVar("T")

MOST_CHANGE = 1.05
"""The most that steps before and after a save may differ, as a ratio."""

MOST_TRIES = 4
LEAST_SECONDS, MOST_SECONDS = 0.5, 4.0


class Undisturbed(NamedTuple):
    """The seconds of a step before and after a save."""

    before: float
    after: float

    @property
    def step(self) -> float:
        """The seconds of an undisturbed step meanwhile."""
        return (self.before + self.after) / 2

    @property
    def change(self) -> float:
        """The factor by which the machine changed its speed, at least 1."""
        return max(self) / min(self)


def steps(step: Callable[[], object], over: Callable[[float], bool]) -> list[float]:
    """Take steps until a function is true; it gets the seconds so far after each step.

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
    """Compute how long steps are timed before and after a save of some seconds.

    Together they are as long as the save, within bounds: an error of one percent in the time of a
    step is an error of one percent of the whole save in its lost time.
    """
    return min(max(save / 2, LEAST_SECONDS), MOST_SECONDS)


def mean_step(step: Callable[[], object], seconds: float) -> float:
    """Measure the average seconds of a step over some seconds.

    Some time before does not count: a disk that still frees removed files, and processors that were
    idle, make the first steps slower.
    """
    steps(step, lambda so_far: so_far >= LEAST_SECONDS)
    return statistics.fmean(steps(step, lambda so_far: so_far >= seconds))


def steady(turn: Callable[[], T], undisturbed: Callable[[T], Undisturbed]) -> T:
    """Take turns until the machine has kept its speed in one; else return the steadiest."""
    tried = list[T]()
    while len(tried) < MOST_TRIES:
        tried.append(turn())
        if undisturbed(tried[-1]).change <= MOST_CHANGE:
            break
    return min(tried, key=lambda each: undisturbed(each).change)
