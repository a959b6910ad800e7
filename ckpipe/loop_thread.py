"""The event loop of a pipeline in a thread of its own, and user code on the thread that called.

Theory. The pipeline runs on a thread of its own, but user code (``state_dict``,
``load_state_dict``) belongs to the thread that called: that one may hold the user's own locks, and
has the user's current device, default device, autocast and inference mode. So a call of ``save``
or ``load`` is an executor while it waits. A thread that blocks serves a queue. A coroutine serves
it in its own task, so that user code runs between two awaits of its event loop, never beside other
code of that thread. A job that has not begun can be given up at any time; one that has begun is
waited for.

``atexit`` comes after all threads that a program has to wait for. A child process of
multiprocessing that was forked ends without it, but calls the finalizers of multiprocessing.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import multiprocessing
import multiprocessing.util
import sys
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from threading import Thread, current_thread
from typing import Any, Generic, Self, TypeVar, TypeVarTuple

import anyio
import anyio.lowlevel
from anyio.from_thread import BlockingPortal

from ckpipe.errors import CkpipeError, UsageError
from ckpipe.interpreter import on_calling_thread
from ckpipe.threads import (
    PipelineLoop,
    in_thread,
    reserve_of_threads,
    use_reserve_if_no_thread_starts,
)

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

    def __exit__(self, *exc: object) -> None:
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
        """Tell whether the thread does nothing else meanwhile."""
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
        self.outcome: Future[Result] = Future()

    async def ended(self, wake: Callable[[], bool] = bool) -> bool:
        """Wait until the thread has done it, or will not; return whether it has an outcome.

        Args:
            wake: Asks the thread again, and returns False if it will not come any more.
        """
        try:
            while not self._over.is_set():
                with anyio.move_on_after(_LOOK_SECONDS):
                    await self._over.wait()
                    break
                if not wake() and self.outcome.cancel():
                    break
        except BaseException:
            if not self.outcome.cancel():
                with anyio.CancelScope(shield=True):
                    await self._over.wait()
            raise
        return self.outcome.done() and not self.outcome.cancelled()

    def run(self) -> None:
        """Do it, unless it was given up.

        ``SystemExit`` and ``KeyboardInterrupt`` pass. The job is over once the caller has left
        because of them: its save is given up by then, and does not fail for another reason.
        """
        if self.outcome.set_running_or_notify_cancel():
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
        with contextlib.suppress(RuntimeError):  # the loop has ended, and no task waits
            self._loop.call_soon_threadsafe(self._over.set)


async def on_caller(
    caller: Caller | None, function: Callable[[*Args], Result], *args: *Args
) -> Result:
    """Run user code on the thread that called; if that is the pipeline's own, in another."""
    if caller is None:
        return await in_thread(function, *args)
    return await caller.run(function, *args)


T = TypeVar("T")

_MORE_THREADS = "Raise the limit of processes and threads: ulimit -u, or pids.max of the container"


class LoopThread:
    """An asyncio event loop that runs in a daemon thread until it is closed.

    Args:
        name: The thread's name.

    Raises:
        CkpipeError: If the system starts no thread.
    """

    def __init__(self, name: str) -> None:
        # Not anyio's start_blocking_portal: its context manager also ends the loop when it is
        # collected, and in a process that was forked from this one it would wait for ever.
        ready: Future[tuple[BlockingPortal, asyncio.AbstractEventLoop]] = Future()
        self._thread = Thread(target=_run, args=(ready,), name=name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            raise CkpipeError(
                f"The system starts no thread for the pipeline: {error}", hint=_MORE_THREADS
            ) from error
        self.portal, self._loop = ready.result()

    def submit(self, function: Callable[..., Awaitable[T]], *args: Any, **kwargs: Any) -> Future[T]:
        """Start a coroutine function on the loop; cancelling the future cancels it."""
        return self.portal.start_task_soon(partial(function, *args, **kwargs))

    def post(self, function: Callable[..., object], *args: Any) -> None:
        """Have the loop call a function soon, after all that it was asked for before."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(function, *args)

    async def run(
        self,
        function: Callable[..., Awaitable[T]],
        *args: Any,
        caller: Caller | None = None,
        **kwargs: Any,
    ) -> T:
        """Run a coroutine function on the loop, and await it on any.

        Cancelling cancels it, and goes on once it has ended, however often it is asked for.

        Args:
            function: The function.
            args: What to call it with.
            caller: Does what it asks of the calling thread; None if it asks nothing.
            kwargs: More to call it with.
        """
        if self.is_here:
            return await function(*args, **kwargs)
        work = _Work(partial(function, *args, **kwargs))
        try:
            future = self.submit(work.run)
            if caller is not None:
                await caller.serve(future)
            return await wait_for(future)
        except GeneratorExit:  # closed with its event loop, where nothing can be awaited
            with contextlib.suppress(RuntimeError):
                self.submit(work.give_up)
            raise
        except BaseException:
            if caller is not None:
                caller.leave()
            with anyio.CancelScope(shield=True), contextlib.suppress(RuntimeError):
                ended = self.submit(work.give_up)  # fails if the loop has ended
                while not ended.done():
                    with contextlib.suppress(asyncio.CancelledError):
                        await wait_for(ended)
            raise

    def call(
        self,
        function: Callable[..., Awaitable[T]],
        *args: Any,
        caller: Caller | None = None,
        **kwargs: Any,
    ) -> T:
        """Run a coroutine function on the loop; blocking.

        An interrupt cancels it, and is raised once it has ended; a second one does not wait.

        Args:
            function: The function.
            args: What to call it with.
            caller: Does what it asks of the calling thread; None if it asks nothing.
            kwargs: More to call it with.

        Raises:
            UsageError: If the caller is on the loop.
        """
        self.refuse_here()
        work = _Work(partial(function, *args, **kwargs))
        try:
            future = self.submit(work.run)
            if caller is not None:
                caller.serve_until(future)
            return future.result()
        except BaseException:
            if caller is not None:
                caller.leave()
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self.submit(work.give_up).result()
            raise

    def refuse_here(self) -> None:
        """Refuse to wait on the loop itself.

        Raises:
            UsageError: If the caller does.
        """
        if self.is_here:
            raise UsageError(
                "A hook that runs on the pipeline's event loop must not block it",
                hint="Make the hook a plain function, which runs in a thread of its own",
            )

    @property
    def is_here(self) -> bool:
        """Tell whether the caller runs on the loop: a hook does that is a coroutine function."""
        return current_thread() is self._thread

    def close(self, *, cancel: bool = False) -> None:
        """End the loop and its thread, once all that was submitted is through or cancelled."""
        with contextlib.suppress(RuntimeError):  # the portal has ended by itself
            self.portal.call(self.portal.stop, cancel)
        self._thread.join()


class _Work(Generic[T]):
    """A result that another thread waits for and may stop waiting for at any moment.

    That may be before they hold what names the work, so it is made first.
    """

    def __init__(self, function: Callable[[], Awaitable[T]]) -> None:
        self._function = function
        self._scope: anyio.CancelScope | None = None
        self._over: anyio.Event | None = None
        self._unwanted = False

    async def run(self) -> T:
        """Do it, unless it was given up before."""
        if not self._unwanted:
            self._over = anyio.Event()
            try:
                with anyio.CancelScope() as self._scope:
                    return await self._function()
            finally:
                self._over.set()
        raise asyncio.CancelledError  # no thread waits

    async def give_up(self) -> None:
        """Cancel it, and return once it has ended, or if it has not begun and never will."""
        self._unwanted = True
        if self._scope is not None and self._over is not None:
            self._scope.cancel()
            await self._over.wait()


def _run(ready: Future[tuple[BlockingPortal, asyncio.AbstractEventLoop]]) -> None:
    async def serve() -> None:
        async with reserve_of_threads(), BlockingPortal() as portal:
            ready.set_result((portal, asyncio.get_running_loop()))
            await portal.sleep_until_stopped()

    try:
        anyio.run(serve, backend_options={"loop_factory": PipelineLoop})
    except BaseException as error:
        if ready.done():
            raise
        ready.set_exception(error)


async def wait_for(future: Future[T]) -> T:
    """Wait in a coroutine for something that happens on another thread.

    Cancelling the coroutine does not touch the future.
    """
    post, done = this_loop(), anyio.Event()

    def wake(_: Future[T]) -> None:
        # The loop is closed if the waiter is gone with it.
        with contextlib.suppress(RuntimeError):
            post(done.set)

    future.add_done_callback(wake)
    await done.wait()
    return future.result()


def call_at_exit(function: Callable[[BaseException | None], None]) -> Callable[[], None]:
    """Have a function called when the program ends, before those that were registered earlier.

    Args:
        function: Takes the exception that ends the program; None for a normal end.

    Returns:
        A function that takes it off again.
    """

    def end() -> None:
        use_reserve_if_no_thread_starts()
        function(_ending_exception())

    if multiprocessing.parent_process() is None:
        atexit.register(end)
        return lambda: atexit.unregister(end)
    finalizer = multiprocessing.util.Finalize(None, end, exitpriority=100)
    return finalizer.cancel


def _ending_exception() -> BaseException | None:
    """The exception that nothing has caught; ``sys.exit`` is a normal end."""
    error = sys.exc_info()[1]  # multiprocessing ends a child while it is being handled
    if error is None and not hasattr(sys, "ps1"):  # an interactive session goes on after one
        error = getattr(sys, "last_value", None)
    return None if isinstance(error, SystemExit) else error
