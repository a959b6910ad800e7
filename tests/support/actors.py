"""Threads that act on a state lock in tests, and ways to wait for what they do without sleeping."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from ckpipe import StateLock

T = TypeVar("T")

PATIENCE = 60.0
"""Seconds after which something that must happen is taken not to happen any more."""


class DaemonThreads:
    """Runs each function in a thread of its own, which a failed test may leave stuck."""

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def submit(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        name = f"trainer_{next(self._numbers)}"
        threading.Thread(target=run, name=name, daemon=True).start()
        return future

    def waiting(
        self, lock: StateLock, function: Callable[..., T], *args: Any, **kwargs: Any
    ) -> Future[T]:
        """Run a function, and return once it waits for a lock, which nothing else does."""
        future = self.submit(function, *args, **kwargs)
        until(lock, waiters=1)
        return future


class Held:
    """A hold that another thread has from now until it is told to let go."""

    def __init__(
        self, threads: DaemonThreads, hold: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._begun, self._end = threading.Event(), threading.Event()
        self.ident = 0
        self._future = threads.submit(self._run, hold)
        assert self._begun.wait(PATIENCE)

    def _run(self, hold: Callable[[], AbstractContextManager[None]]) -> None:
        with hold():
            self.ident = threading.get_ident()
            self._begun.set()
            assert self._end.wait(PATIENCE)

    def end(self) -> None:
        self._end.set()
        self._future.result(PATIENCE)


def noted(hold: AbstractContextManager[None], order: list[str], name: str) -> None:
    """Enter and leave a hold, and write down when."""
    with hold:
        order.append(name)


def until(lock: StateLock, *, waiters: int, holders: int | None = None) -> None:
    """Return once so many wait for the lock, and hold it; what comes is told on its condition."""

    def found() -> bool:
        now = lock.statistics()
        return len(now.waiters) == waiters and holders in (None, len(now.holders))

    with lock._changed:
        assert lock._changed.wait_for(found, timeout=PATIENCE)


def is_free(lock: StateLock) -> bool:
    """Whether nobody holds the lock or waits for it."""
    now = lock.statistics()
    return not now.holders and not now.waiters
