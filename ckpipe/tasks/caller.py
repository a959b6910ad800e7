"""Run user code (``state_dict``, ``load_state_dict``) on the thread that called the pipeline.

Theory. The pipeline runs on a thread of its own, but user code belongs to the thread that called:
that one may hold the user's own locks, and has the user's current device, default device, autocast
and inference mode. So a call of ``save`` or ``load`` is an executor while it waits. A thread that
blocks serves a queue. A coroutine serves it in its own task, so that user code runs between two
awaits of its event loop, never beside other code of that thread. A job that has not begun can be
given up at any time; one that has begun is waited for.
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
import anyio.lowlevel

from ckpipe.errors import UsageError
from ckpipe.tasks.awaited_threads import in_thread
from ckpipe.tasks.user_code import on_calling_thread

Result = TypeVar("Result")
Args = TypeVarTuple("Args")
Post = Callable[[Callable[[], object]], object]
"""Has an event loop call a function soon, from any thread; RuntimeError once it is closed."""

_LOOK_SECONDS = 1.0
"""How often a job that waits for an event loop looks whether that loop was closed."""


def this_loop() -> Post:
    """Return how other threads reach the running event loop, of asyncio or trio."""
    loop: Any = anyio.lowlevel.current_token().native_token
    post: Post = getattr(loop, "run_sync_soon", None) or loop.call_soon_threadsafe
    return post


class Caller:
    """Executor on the calling thread, for the time of one call: a context manager around it.

    Args:
        post: How to wake the event loop of a caller that is a coroutine; None if it blocks.
    """

    def __init__(self, post: Post | None = None) -> None:
        self._jobs: SimpleQueue[Job[Any] | None] = SimpleQueue()
        self._offered: list[Job[Any]] = []
        self._offering = threading.Lock()
        self._gone = False
        self._post, self._thread = post, threading.current_thread()
        if post is not None:
            self._asked = anyio.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.leave()

    def leave(self) -> None:
        """Do no more jobs, and say of those that were interrupted that they are over."""
        with self._offering:
            self._gone = True
        # Of all jobs, since an interrupt may come between a job and what is said of it.
        for job in self._offered:
            job.end()

    @property
    def blocks(self) -> bool:
        """Whether the thread does nothing else meanwhile."""
        return self._post is None

    def serve_until(self, end: Future[Any]) -> None:
        """Do what is asked for on the calling thread, until a future is done; blocking."""
        end.add_done_callback(lambda _: self._jobs.put(None))
        while (job := self._jobs.get()) is not None:
            job.run()

    async def serve(self, end: Future[Any]) -> None:
        """Do what is asked for in the calling task, until a future is done."""
        end.add_done_callback(lambda _: self._wake())
        while not end.done():
            await self._asked.wait()
            self._asked = anyio.Event()
            self.do_pending()

    def do_pending(self) -> None:
        """Do what has been asked for so far; to be called on the caller's thread."""
        while not self._jobs.empty():
            job = self._jobs.get()
            if job is not None:
                job.run()

    async def run(self, function: Callable[[*Args], Result], *args: *Args) -> Result:
        """Run a function on the caller's thread; to be called on the pipeline's loop.

        Never returns while it runs. One that is cancelled before it has begun never begins.

        Raises:
            UsageError: If the caller's event loop was closed before, or the caller has left.
        """
        job = self.offer(function, *args)
        if job is not None and await job.ended(self._wake):
            return job.outcome.result()
        await anyio.lowlevel.checkpoint()  # a call that was left is cancelled
        raise UsageError(
            "The event loop that called ended before state_dict or load_state_dict ran on it",
            hint="Await save() and load() before their event loop ends",
        )

    def offer(self, function: Callable[[*Args], Result], *args: *Args) -> Job[Result] | None:
        """Ask for a call without waiting for it; to be called on the pipeline's loop.

        Returns:
            The call; None if the caller has left.
        """
        job = Job(partial(function, *args))
        with self._offering:
            if self._gone:
                return None
            self._offered.append(job)
            self._jobs.put(job)
        self._wake()
        return job

    def _wake(self) -> bool:
        """Wake a caller that is a coroutine; False if its loop was closed or its thread ended."""
        if self._post is None:
            return True
        try:
            self._post(lambda: self._asked.set())  # of the event that is there by then
        except RuntimeError:
            return False
        return self._thread.is_alive()  # the main one is not while the program ends


class Job(Generic[Result]):
    """One call: run once, or never if it was given up; over without an outcome if interrupted."""

    def __init__(self, function: Callable[[], Result]) -> None:
        self._function = function
        self._loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        self._claim = threading.Lock()
        self.outcome: Future[Result] = Future()

    async def ended(self, wake: Callable[[], bool] = bool) -> bool:
        """Wait until the thread has done it, or will not; returns whether it has an outcome.

        Args:
            wake: Asks the thread again, and returns False if it will not come any more.
        """
        try:
            while not self._over.is_set():
                with anyio.move_on_after(_LOOK_SECONDS):
                    await self._over.wait()
                    break
                if not wake() and self._give_up():
                    break
        except BaseException:
            if not self._give_up():
                with anyio.CancelScope(shield=True):
                    await self._over.wait()
            raise
        return self.outcome.done()

    def run(self) -> None:
        """Do it, unless it was given up.

        ``SystemExit`` and ``KeyboardInterrupt`` pass. The job is over once the caller has left
        because of them: its save is given up by then, and does not fail for another reason.
        """
        if self._give_up():
            try:
                with on_calling_thread():
                    result = self._function()
            except Exception as error:
                self.outcome.set_exception(error)
            else:
                self.outcome.set_result(result)
            self.end()

    def end(self) -> None:
        """Say that it is over, whether or not it was run; may be called twice."""
        with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody waits
            self._loop.call_soon_threadsafe(self._over.set)

    def _give_up(self) -> bool:
        return self._claim.acquire(blocking=False)


async def on_caller(
    caller: Caller | None, function: Callable[[*Args], Result], *args: *Args
) -> Result:
    """Run user code on the thread that called; if that is the pipeline's own, in another."""
    if caller is None:
        return await in_thread(function, *args)
    return await caller.run(function, *args)


__all__ = ["Caller", "Job", "Post", "on_caller", "this_loop"]
