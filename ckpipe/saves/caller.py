"""What the thread that called ``save`` does for the save while it waits for it.

The walk needs the interpreter and nothing else, and the caller has to wait for it anyway. On the
caller's own thread it costs no change of threads, finds the caches of its core warm, and runs under
whatever the program has set for that thread. What the caller does not come to do, because it was
interrupted or waits no longer, a worker thread does, unless the save was given up by then.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, TypeVarTuple

import anyio

from ckpipe.tasks import to_thread

Result = TypeVar("Result")
Args = TypeVarTuple("Args")


class Caller:
    """A thread that waits for a save and works for it meanwhile: a context manager around that."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Job[Any] | None] = SimpleQueue()
        self._offered: list[Job[Any]] = []
        self._offering = threading.Lock()
        self._gone = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._offering:
            self._gone = True
        # Of all jobs, since an interrupt may come between a job and what is said of it.
        for job in self._offered:
            job.refuse()

    def serve_until(self, end: Future[Any]) -> None:
        """Does what is asked for on the calling thread, until a future is done."""
        end.add_done_callback(lambda _: self._jobs.put(None))
        while (job := self._jobs.get()) is not None:
            job.run()

    async def run(self, function: Callable[[*Args], Result], *args: *Args) -> Result:
        """Runs a function on the caller's thread, or in a worker thread if that is not to be had.

        Never returns while it still runs. If the caller is interrupted in the middle of it, a
        worker thread runs it again.
        """
        job = self.offer(function, *args)
        if job is not None:
            await job.ended()
            if job.outcome.done():
                return job.outcome.result()
        return await to_thread.run_sync(function, *args)

    def offer(self, function: Callable[[*Args], Result], *args: *Args) -> Job[Result] | None:
        """Asks for a call without waiting for it; to be called on a running loop.

        Returns:
            The call; None if the thread has gone.
        """
        job = Job(partial(function, *args))
        with self._offering:
            if self._gone:
                return None
            self._offered.append(job)
            self._jobs.put(job)
            return job


class Job(Generic[Result]):
    """One call; over without an outcome if it was refused or interrupted."""

    def __init__(self, function: Callable[[], Result]) -> None:
        self._function = function
        self._loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        self.outcome: Future[Result] = Future()

    async def ended(self) -> None:
        """Waits until the thread does not work at it, or any more; cannot be cancelled."""
        with anyio.CancelScope(shield=True):
            await self._over.wait()

    def run(self) -> None:
        """Does it."""
        try:
            self.outcome.set_result(self._function())
        except Exception as error:
            self.outcome.set_exception(error)
        finally:
            self.refuse()

    def refuse(self) -> None:
        """Says that it is over, whether or not it was run; may be called twice."""
        with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody waits
            self._loop.call_soon_threadsafe(self._over.set)


__all__ = ["Caller", "Job"]
