"""The store of a bad night, for trainers and their workers alike; it needs no torch."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

from ckpipe.errors import CkpipeError, PermissionDenied, StoreUnavailable
from ckpipe.testing.wrappers import Operation, Result, WrappedBackend
from ckpipe_local import LocalBackend

SCHEME = "night"


class UnsteadyStore(WrappedBackend):
    """A directory that fails now and then, or at which its process dies.

    Args:
        url: ``night:///path``.
        seed: What failures are drawn from.
        failing: Between which operations of a process it fails, by number.
        often: How many operations fail there.
        lasting: How many of those failures are none that trying again helps.
        dying: The operation of a process at which that is killed; 0 for none.
        worker: Whether only worker processes die.
    """

    def __init__(
        self,
        url: str,
        *,
        seed: int = 0,
        failing: tuple[int, int] = (0, 0),
        often: float = 0,
        lasting: float = 0,
        dying: int = 0,
        worker: bool = False,
    ) -> None:
        super().__init__(LocalBackend(url.removeprefix(f"{SCHEME}://")))
        self._chance = random.Random(f"{seed} {_in_worker()}")
        self._failing, self._often, self._lasting = failing, often, lasting
        self._dying = dying if worker == _in_worker() else 0
        self._count = 0

    async def around(self, operation: Operation, call: Callable[[], Awaitable[Result]]) -> Result:
        self._count += 1
        number, before = self._count, self._chance.random() < 0.5
        error = self._error(number, operation)
        if before:
            self._strike(number, error)
        result = await call()
        if not before:
            self._strike(number, error)
        return result

    def _error(self, number: int, operation: Operation) -> CkpipeError | None:
        first, last = self._failing
        # Commits are few, and what matters most.
        commit = operation.verb == "put" and operation.key.startswith("step-")
        often, lasting = (0.6, 0.6) if commit else (self._often, self._lasting)
        if not first <= number < last or self._chance.random() >= often:
            return None
        if self._chance.random() < lasting:
            return PermissionDenied("The night watch has locked the door")
        return StoreUnavailable("The store has dozed off")

    def _strike(self, number: int, error: CkpipeError | None) -> None:
        if number == self._dying:
            os.kill(os.getpid(), signal.SIGKILL)
        if error is not None:
            raise error


def _in_worker() -> bool:
    return "ckpipe.worker" in Path("/proc/self/cmdline").read_text().split("\0")
