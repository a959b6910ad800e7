"""What a process holds, and whether work that is done again and again makes it more and more."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

import psutil
import pytest

STRETCHES = 5
DRIFT = 0.01
MOST_WORKERS = 8
"""Worker threads that may come later: as many stay as have ever been at work at once."""


@dataclass(frozen=True)
class Usage:
    """What this process holds."""

    bytes: int
    descriptors: int
    threads: int


def usage() -> Usage:
    """What this process holds now."""
    gc.collect()
    process = psutil.Process()
    return Usage(process.memory_info().rss, process.num_fds(), process.num_threads())


def check_that_nothing_grows(stretch: Callable[[], object], *, threads: int = 0) -> None:
    """Do a long stretch of work until one of a few leaves nothing behind.

    What is had once and kept, as a thread that is needed when the machine is busy, and memory of
    its own that the allocator gives it, is left by one of them. What is lost again and again is
    left by all.

    Args:
        stretch: The work; nothing of it goes on when it returns.
        threads: How many threads may come in each stretch.
    """
    found = [usage()]
    for _ in range(STRETCHES):
        stretch()
        found.append(usage())
        begun, ended = found[-2:]
        if (
            ended.descriptors <= begun.descriptors
            and ended.threads <= begun.threads + threads
            and ended.bytes < begun.bytes * (1 + DRIFT)
        ):
            return
    pytest.fail(f"each stretch leaves more behind: {found}")
