"""How many processors a process may use for itself."""

from __future__ import annotations

import os
from collections.abc import Mapping


def own_cores(environment: Mapping[str, str] = os.environ) -> int:
    """Processors that this process may run on, shared fairly with the other ranks of its machine.

    torch's number of threads does not tell: launchers set it to one for each rank, which is right
    while all of them compute and leaves all processors but one idle while a rank waits for a copy.

    Args:
        environment: Where a launcher says how many ranks there are: ``LOCAL_WORLD_SIZE``, as
            ``torchrun`` and most others set it.

    Returns:
        At least one.
    """
    told = environment.get("LOCAL_WORLD_SIZE", "")
    ranks = int(told) if told.isdecimal() else 1
    return max(1, _usable() // max(1, ranks))


def _usable() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # there is none outside Linux
        return os.cpu_count() or 1


__all__ = ["own_cores"]
