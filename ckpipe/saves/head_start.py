"""A save's first steps, taken the moment it is asked for if nothing has to be waited for.

In a steady run memory is free, no trainer holds the lock, and the caller waits with nothing to do.
Then the lock is taken and the caller set to work at once, before there are any stages: each of
these is a task, and to hand over from one to the next costs the caller more than a tenth of the
whole call.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ckpipe.errors import LockMisuse
from ckpipe.lock.holds import LockHold
from ckpipe.loop_thread import Job
from ckpipe.saves.saving import CapturedState, Save
from ckpipe.saves.site import Site

Look = Callable[[Save, Site, LockHold], CapturedState | None]
"""Takes the state apart in a turn; blocking."""


class HeadStart:
    """The first turn of a save, in which its caller looks at the state.

    Args:
        save: The save.
        turn: The turn.
        job: The caller's work.
    """

    def __init__(self, save: Save, turn: LockHold, job: Job[CapturedState | None]) -> None:
        self.turn = turn
        self._save, self._job, self._began = save, job, time.perf_counter()

    async def over(self) -> None:
        """Waits until the caller has looked, or is known not to; cannot be cancelled."""
        await self._job.ended()
        self._save.clock.worked("walk", self._began, time.perf_counter())

    def found(self, turn: LockHold) -> CapturedState | None:
        """What the caller has found in a turn; None if it has not looked then.

        Raises:
            UnsupportedState: If it met something that cannot be saved.
        """
        seen = turn is self.turn and self._job.outcome.done()
        return self._job.outcome.result() if seen else None

    def end(self) -> None:
        """Lets go of everything; the save is over, or goes on without it."""
        self.turn.end()
        self._save.head = None


def head_start(save: Save, site: Site, look: Look) -> HeadStart | None:
    """Begins with a save; to be called on the pipeline's loop.

    Args:
        save: The save.
        site: Where it is saved.
        look: What the caller is to do.

    Returns:
        None if the save's stages have to begin with it, since it has no caller who blocks and works
        for it, no plan to go by, not all of its memory, or no lock yet.
    """
    caller, program = save.request.caller, site.program
    if caller is None or not caller.blocks or program is None:
        return None
    if not site.reserve_at_once(save, len(program.blocks)):
        return None
    with save.clock.timing("lock"):
        turn = _turn(save, site)
    if turn is None:
        return None
    job = caller.offer(look, save, site, turn)
    if job is None:  # it was interrupted
        turn.end()
        return None
    save.status = "capturing"
    return HeadStart(save, turn, job)


def _turn(save: Save, site: Site) -> LockHold | None:
    try:
        token = site.lock.acquire_capture_nowait(thread=save.request.thread)
    except LockMisuse:  # which the stage will meet as well, and knows whom to tell
        return None
    return None if token is None else LockHold(site.lock, save.request.thread, token)


__all__ = ["HeadStart", "Look", "head_start"]
