"""The event loop of a pipeline in a thread of its own, and user code on the calling thread.

Theory. The pipeline runs on a thread of its own, but user code (``state_dict``,
``load_state_dict``) belongs to the calling thread: that thread may hold the user's own locks, and
has the user's current device, default device, autocast and inference mode. So a call of ``save``
or ``load`` is an executor while it waits. A thread that blocks serves a queue. A coroutine serves
it in its own task, so user code runs between two awaits of its event loop, never beside other code
of that thread. A job that has not begun can be given up at any time; a job that has begun is
awaited.

``atexit`` runs after all threads that a program has to wait for. A forked child process of
multiprocessing ends without it, but calls the finalizers of multiprocessing.
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

from ckpipe.errors import UsageError, naming_refusals
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
"""Schedules a function on an event loop, from any thread; RuntimeError once the loop is closed."""

_LOOK_SECONDS = 1.0
"""Seconds between checks of a waiting job that the event loop of its caller is still open."""


def this_loop() -> Post:
    """Return the function that schedules calls on the running event loop, of asyncio or trio."""
    loop: Any = anyio.lowlevel.current_token().native_token
    post: Post = getattr(loop, "run_sync_soon", None) or loop.call_soon_threadsafe
    return post


class Caller:
    """Executor on the calling thread for the time of one call; a context manager around it.

    Args:
        post: Wakes the event loop of a caller that is a coroutine; None if the caller blocks.
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
        """Accept no more jobs, and end the interrupted ones."""
        with self._offering:
            self._gone = True
        # All jobs: an interrupt may come between the function of a job and its end().
        for job in self._offered:
            job.end()
        # A job of a load holds this caller, and the target.
        self._offered.clear()

    @property
    def blocks(self) -> bool:
        """True if the caller blocks its thread, False if it is a coroutine."""
        return self._post is None

    def serve_until(self, end: Future[Any]) -> None:
        """Run jobs on the calling thread until a future is done; blocking."""
        end.add_done_callback(lambda _: self._jobs.put(None))
        while (job := self._jobs.get()) is not None:
            job.run()

    async def serve(self, end: Future[Any]) -> None:
        """Run jobs in the calling task until a future is done."""
        end.add_done_callback(lambda _: self._wake())
        while not end.done():
            await self._asked.wait()
            self._asked = anyio.Event()
            self.do_pending()

    def do_pending(self) -> None:
        """Run the jobs in the queue; to be called on the caller's thread."""
        while not self._jobs.empty():
            job = self._jobs.get()
            if job is not None:
                job.run()

    async def run(self, function: Callable[[*Args], Result], *args: *Args) -> Result:
        """Run a function on the caller's thread; to be called on the pipeline's loop.

        The call never returns while the function runs. A function that is cancelled before it has
        begun never begins.

        Raises:
            UsageError: If the caller's event loop was closed before, or the caller has left.
        """
        job = self.offer(function, *args)
        if job is not None and await job.ended(self._wake):
            return job.outcome.result()
        await anyio.lowlevel.checkpoint()  # raises if the caller has left: its call is cancelled
        raise UsageError(
            "The caller's event loop ended before state_dict or load_state_dict ran on it",
            hint="Await save() and load() before their event loop ends",
        )

    def offer(self, function: Callable[[*Args], Result], *args: *Args) -> Job[Result] | None:
        """Queue a function without waiting for it; to be called on the pipeline's loop.

        Returns:
            The job; None if the caller has left.
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
            self._post(lambda: self._asked.set())  # looks the event up at the time of the call
        except RuntimeError:
            return False
        return self._thread.is_alive()  # the main thread is not, while the program ends


class Job(Generic[Result]):
    """One call: runs once, or never if it was given up; ends without an outcome if interrupted."""

    def __init__(self, function: Callable[[], Result]) -> None:
        self._function = function
        self._loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        self.outcome: Future[Result] = Future()

    async def ended(self, wake: Callable[[], bool] = bool) -> bool:
        """Wait until the thread has run the job or never will; return True if it has an outcome.

        Args:
            wake: Wakes the thread again, and returns False if it serves no more jobs.
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
        """Call the function, unless the job was given up.

        ``SystemExit`` and ``KeyboardInterrupt`` pass. The job ends once the caller has left because
        of them: its save is cancelled by then, and does not fail for another reason.
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
        """Release the waiting task, whether or not the job was run; may be called twice."""
        with contextlib.suppress(RuntimeError):  # the loop has ended, and no task waits
            self._loop.call_soon_threadsafe(self._over.set)


async def on_caller(
    caller: Caller | None, function: Callable[[*Args], Result], *args: *Args
) -> Result:
    """Run user code on the calling thread, or in a worker thread without a caller."""
    if caller is None:
        return await in_thread(function, *args)
    return await caller.run(function, *args)


T = TypeVar("T")


class LoopThread:
    """An asyncio event loop that runs in a daemon thread until it is closed.

    Args:
        name: The thread's name.

    Raises:
        CkpipeError: If the system starts no thread.
    """

    def __init__(self, name: str) -> None:
        # Not anyio's start_blocking_portal: its context manager also ends the loop when the garbage
        # collector finds it, and would wait for ever in a process that was forked from this one.
        ready: Future[tuple[BlockingPortal, asyncio.AbstractEventLoop]] = Future()
        self._thread = Thread(target=_run, args=(ready,), name=name, daemon=True)
        with naming_refusals():
            self._thread.start()
            self.portal, self._loop = ready.result()

    def submit(self, function: Callable[..., Awaitable[T]], *args: Any, **kwargs: Any) -> Future[T]:
        """Start a coroutine function on the loop; cancelling the future cancels it."""
        return self.portal.start_task_soon(partial(function, *args, **kwargs))

    def post(self, function: Callable[..., object], *args: Any) -> None:
        """Schedule a function on the loop, after all earlier calls."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(function, *args)

    async def run(
        self,
        function: Callable[..., Awaitable[T]],
        *args: Any,
        caller: Caller | None = None,
        **kwargs: Any,
    ) -> T:
        """Run a coroutine function on the loop, and await it on any loop.

        A cancellation cancels it too, and returns only once it has ended, even if it is repeated.

        Args:
            function: The function.
            args: Its arguments.
            caller: Executor for user code on the calling thread; None if it runs none.
            kwargs: Its keyword arguments.
        """
        if self.is_here:
            return await function(*args, **kwargs)
        work = _LoopCall(partial(function, *args, **kwargs))
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

        An interrupt cancels it, and is raised once it has ended; a second interrupt does not wait.

        Args:
            function: The function.
            args: Its arguments.
            caller: Executor for user code on the calling thread; None if it runs none.
            kwargs: Its keyword arguments.

        Raises:
            UsageError: If the caller is on the loop.
        """
        self.refuse_here()
        work = _LoopCall(partial(function, *args, **kwargs))
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
        """Refuse a blocking call on the loop itself.

        Raises:
            UsageError: If the caller runs on the loop.
        """
        if self.is_here:
            raise UsageError(
                "A hook that runs on the pipeline's event loop must not block it",
                hint="Make the hook a plain function, which runs in a thread of its own",
            )

    @property
    def is_here(self) -> bool:
        """True if the caller runs on the loop, as a hook that is a coroutine function does."""
        return current_thread() is self._thread

    def close(self, *, cancel: bool = False) -> None:
        """End the loop and its thread, once all submitted calls have ended or are cancelled."""
        with contextlib.suppress(RuntimeError):  # the portal has ended by itself
            self.portal.call(self.portal.stop, cancel)
        self._thread.join()


class _LoopCall(Generic[T]):
    """A call on the loop that another thread awaits and may give up at any moment.

    The other thread makes this object before it submits the call, so it can also give up before it
    has the future.
    """

    def __init__(self, function: Callable[[], Awaitable[T]]) -> None:
        self._function = function
        self._scope: anyio.CancelScope | None = None
        self._over: anyio.Event | None = None
        self._unwanted = False

    async def run(self) -> T:
        """Call the function, unless it was given up before."""
        if not self._unwanted:
            self._over = anyio.Event()
            try:
                with anyio.CancelScope() as self._scope, naming_refusals():
                    return await self._function()
            finally:
                self._over.set()
        raise asyncio.CancelledError  # no thread waits

    async def give_up(self) -> None:
        """Cancel the call, and return once it has ended or can no longer begin."""
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
    """Wait in a coroutine for a future of another thread.

    A cancellation of the coroutine does not touch the future.
    """
    post, done = this_loop(), anyio.Event()

    def wake(_: Future[T]) -> None:
        # The loop may have been closed together with the waiting task.
        with contextlib.suppress(RuntimeError):
            post(done.set)

    future.add_done_callback(wake)
    await done.wait()
    return future.result()


def call_at_exit(function: Callable[[BaseException | None], None]) -> Callable[[], None]:
    """Call a function when the program ends, before functions that were registered earlier.

    Args:
        function: Takes the exception that ends the program; None for a normal end.

    Returns:
        A function that unregisters it.
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
    """Return the uncaught exception that ends the program; ``sys.exit`` is a normal end."""
    error = sys.exc_info()[1]  # multiprocessing ends a child while it handles the exception
    if error is None and not hasattr(sys, "ps1"):  # an interactive session goes on after one
        error = getattr(sys, "last_value", None)
    return None if isinstance(error, SystemExit) else error
