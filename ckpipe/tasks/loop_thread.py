"""The event loop of a pipeline, in a thread of its own, and how other threads wait for it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from functools import partial
from threading import Thread, current_thread
from typing import Any, Generic, TypeVar

import anyio
from anyio.from_thread import BlockingPortal
from anyio.lowlevel import EventLoopToken, current_token

from ckpipe.errors import CkpipeError, UsageError
from ckpipe.tasks.caller import Caller, this_loop
from ckpipe.tasks.to_thread import PipelineLoop, reserve_of_threads

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
        ready: Future[tuple[BlockingPortal, EventLoopToken]] = Future()
        self._thread = Thread(target=_run, args=(ready,), name=name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            raise CkpipeError(
                f"The system starts no thread for the pipeline: {error}", hint=_MORE_THREADS
            ) from error
        self.portal, self._token = ready.result()
        self._loop: asyncio.AbstractEventLoop = self._token.native_token  # type: ignore[assignment]

    def submit(self, function: Callable[..., Awaitable[T]], *args: Any, **kwargs: Any) -> Future[T]:
        """Starts a coroutine function on the loop; cancelling the future cancels it."""
        if kwargs:
            return self.portal.start_task_soon(lambda: function(*args, **kwargs))
        return self.portal.start_task_soon(function, *args)

    def post(self, function: Callable[..., object], *args: Any) -> None:
        """Has the loop call a function soon, after all that it was asked for before."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(function, *args)

    async def run(
        self,
        function: Callable[..., Awaitable[T]],
        *args: Any,
        caller: Caller | None = None,
        **kwargs: Any,
    ) -> T:
        """Runs a coroutine function on the loop, and awaits it on any.

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
        """Runs a coroutine function on the loop; blocking.

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

    def at_once(self, function: Callable[..., T], *args: Any) -> T:
        """Calls a function on the loop, which may be where the caller is."""
        if self.is_here:
            return function(*args)
        # The portal would make a task of it, and its caller wait for the loop twice.
        return anyio.from_thread.run_sync(function, *args, token=self._token)

    def refuse_here(self) -> None:
        """Lets nobody wait who runs on the loop.

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
        """Whether the caller runs on the loop: a hook does that is a coroutine function."""
        return current_thread() is self._thread

    def close(self) -> None:
        """Ends the loop and its thread, once all that was submitted is through."""
        self._end(cancel=False)

    def abandon(self) -> None:
        """Ends the loop and its thread, and cancels what was submitted and is not through."""
        self._end(cancel=True)

    def _end(self, *, cancel: bool) -> None:
        with contextlib.suppress(RuntimeError):  # the portal has ended by itself
            self.portal.call(self.portal.stop, cancel)
        self._thread.join()


class _Work(Generic[T]):
    """What somebody waits for on another thread, who may be interrupted at any moment.

    That may be before they hold what names the work, so it is made first.
    """

    def __init__(self, function: Callable[[], Awaitable[T]]) -> None:
        self._function = function
        self._scope: anyio.CancelScope | None = None
        self._over: anyio.Event | None = None
        self._unwanted = False

    async def run(self) -> T:
        """Does it, unless it was given up before."""
        if not self._unwanted:
            self._over = anyio.Event()
            try:
                with anyio.CancelScope() as self._scope:
                    return await self._function()
            finally:
                self._over.set()
        raise asyncio.CancelledError  # nobody waits

    async def give_up(self) -> None:
        """Cancels it, and returns once it has ended, or if it has not begun and never will."""
        self._unwanted = True
        if self._scope is not None and self._over is not None:
            self._scope.cancel()
            await self._over.wait()


def _run(ready: Future[tuple[BlockingPortal, EventLoopToken]]) -> None:
    async def serve() -> None:
        async with reserve_of_threads(), BlockingPortal() as portal:
            ready.set_result((portal, current_token()))
            await portal.sleep_until_stopped()

    try:
        anyio.run(serve, backend_options={"loop_factory": PipelineLoop})
    except BaseException as error:
        if ready.done():
            raise
        ready.set_exception(error)


async def wait_for(future: Future[T]) -> T:
    """Waits in a coroutine for something that happens on another thread.

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
