"""The names of a launch's checkpoints, also if the run goes back to an older step. Pure.

Theory. The newest checkpoint is the one with the greatest (attempt, step, count), so that a launch
which resumes from step 500 makes the step 1000 of the launch before it an old one. The same must
hold if one launch goes back, by a load, from step 1000 to step 500: what it saves from then on is
what a restart has to find, and what retention has to keep. So from then on its attempt begins a
millisecond later, under the same id. That needs no clock and no store, it is the same on all ranks
that see it, and it is still earlier than whatever launch comes next, since that begins after all
that it finds.

Whether a save goes back is seen at its step: it lies before one that was saved, and something was
loaded since. Steps that are saved in another order are not taken for it.

A step that is saved again counts on. A run of many saves would collect a number for each of its
steps, so only the greatest are remembered, and what comes among the others counts on from the most
that any of these had: more than it need be, and never a name that was given before.
"""

from __future__ import annotations

from datetime import timedelta

from ckpipe.types import CheckpointId, attempt_name, attempt_parts

_REMEMBERED = 1024
"""So many steps, at least, of which a course knows exactly how often they were saved."""


class Course:
    """Gives the checkpoints of a launch their names.

    Args:
        attempt: The name of the launch.
    """

    def __init__(self, attempt: str) -> None:
        self._attempt = attempt
        self._counts: dict[int, int] = {}
        self._furthest = -1
        self._forgotten, self._most_forgotten = -1, 0
        self.rollbacks = 0
        """How often the run has gone back."""
        self.has_loaded = False
        """Whether something was loaded since the last save began."""

    @property
    def has_saved(self) -> bool:
        """Whether a save has begun."""
        return self.rollbacks > 0 or self._furthest >= 0

    def lies_back(self, step: int) -> bool:
        """Whether a step lies before one that was saved since the run began or last went back."""
        return step < self._furthest

    def go_back(self) -> None:
        """Makes what is saved from now on newer than all that was saved before."""
        started, launch = attempt_parts(self._attempt)
        self._attempt = attempt_name(started + timedelta(milliseconds=1), launch)
        self._counts.clear()
        self._furthest = -1
        self._forgotten, self._most_forgotten = -1, 0
        self.rollbacks += 1

    def count(self, step: int) -> int:
        """How often a step was saved since the run began or last went back.

        Of one that may be forgotten, the most that it can be.
        """
        unknown = self._most_forgotten if step <= self._forgotten else 0
        return self._counts.get(step, unknown)

    def draft(self, step: int) -> CheckpointId:
        """The name that the next save of a step would get."""
        return CheckpointId(self._attempt, step, self.count(step))

    def name(self, step: int) -> CheckpointId:
        """The name of a save that begins now."""
        id = self.draft(step)
        self._counts[step] = id.count + 1
        if len(self._counts) > 2 * _REMEMBERED:
            self._forget()
        self._furthest = max(self._furthest, step)
        self.has_loaded = False
        return id

    def _forget(self) -> None:
        for step in sorted(self._counts)[:-_REMEMBERED]:
            self._forgotten = max(self._forgotten, step)
            self._most_forgotten = max(self._most_forgotten, self._counts.pop(step))


__all__ = ["Course"]
