"""Lets whoever trains have the processor first.

Two things decide who gets it. Between threads it is their niceness, sched(7). Where the kernel
groups processes by session (autogroup, sched(7) too), it first shares out between sessions, in
which a worker alone would weigh as much as a trainer with all its threads; so the session is made
as nice as the threads. Batch scheduling keeps a thread that wakes up, as those that write do for
every block, from taking the place of one that runs.
"""

from __future__ import annotations

import contextlib
import os
import time

_GROUP = "/proc/self/autogroup"
_TRIES = 20
_PAUSE_SECONDS = 0.1


def step_back(niceness: int) -> None:
    """Makes the calling thread, and all that it starts from now on, give way to others."""
    os.nice(niceness)
    with contextlib.suppress(OSError):  # a container may forbid it; the niceness is what counts
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def step_back_together(niceness: int) -> bool:
    """Makes the whole session give way to others; blocking.

    The kernel takes one such wish in a tenth of a second, of all processes of a machine that are
    not privileged. Where many workers start at once, some have to ask again.

    Returns:
        Whether the kernel has taken it; where it does not group sessions there is no need to.
    """
    for _ in range(_TRIES):
        try:
            with open(_GROUP, "w") as group:
                group.write(str(niceness))
        except BlockingIOError:
            time.sleep(_PAUSE_SECONDS)
        except OSError:
            return False
        else:
            return True
    return False


__all__ = ["step_back", "step_back_together"]
