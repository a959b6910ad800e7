"""Shorter turns of the interpreter, while saves and loads need many of them.

A thread that wants the interpreter from one that never lets it go has to wait for the switch
interval, by default 5 ms (``sys.setswitchinterval``). A save needs more than a hundred such turns
for each GiB, most of them one after the other, so that beside a loop of plain Python it lasts a
third longer than it has to. What the loop loses is the Python that a save runs, which is as much in
either case. Of a save in a worker process the trainer hears in a few turns, which took 20 to 40 ms.
The lanes of a load begin beside the match, which is plain Python for 15 to 25 ms.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

TURN_SECONDS = 0.001
"""How long a thread may keep the interpreter from others meanwhile."""


class _Turns:
    """How many want short turns, and what to put back when none does."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._wanted = 0
        self._before = self._set = 0.0

    def shorten(self, seconds: float) -> None:
        if not self._wanted:
            self._before = sys.getswitchinterval()
        if sys.getswitchinterval() > seconds:
            sys.setswitchinterval(seconds)
            self._set = sys.getswitchinterval()
        self._wanted += 1

    def put_back(self) -> None:
        self._wanted -= 1
        # Somebody else may have set it meanwhile, who knows better.
        if not self._wanted and sys.getswitchinterval() == self._set:
            sys.setswitchinterval(self._before)

    def begin_child(self) -> None:
        """A forked child has none of the threads that would put it back."""
        self.lock = threading.Lock()
        if self._wanted:
            self._wanted = 1
            self.put_back()


_turns = _Turns()
os.register_at_fork(after_in_child=_turns.begin_child)


@contextmanager
def short_turns(seconds: float | None = TURN_SECONDS) -> Iterator[None]:
    """Lower the switch interval of the GIL, unless it is as low already; for any thread.

    The interval of before is back once no thread wants a lower one, unless it was set meanwhile.

    Args:
        seconds: How long a thread may keep the GIL from others; None leaves the interval alone.
    """
    if seconds is None:
        yield
        return
    with _turns.lock:
        _turns.shorten(seconds)
    try:
        yield
    finally:
        with _turns.lock:
            _turns.put_back()


__all__ = ["TURN_SECONDS", "short_turns"]
