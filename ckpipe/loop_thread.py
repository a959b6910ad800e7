"""The event loop of a pipeline, in a thread of its own, and how other threads wait for it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import anyio
from anyio.from_thread import BlockingPortal, start_blocking_portal

T = TypeVar("T")


class LoopThread:
    """An asyncio event loop that runs in a daemon thread until it is closed.

    Args:
        name: The thread's name.
    """

    def __init__(self, name: str) -> None:
        self._stack = contextlib.ExitStack()
        self.portal: BlockingPortal = self._stack.enter_context(
            start_blocking_portal("asyncio", name=name)
        )

    def submit(self, function: Callable[..., Awaitable[T]], *args: Any, **kwargs: Any) -> Future[T]:
        """Starts a coroutine function on the loop; cancelling the future cancels it."""
        if kwargs:
            return self.portal.start_task_soon(lambda: function(*args, **kwargs))
        return self.portal.start_task_soon(function, *args)

    def close(self) -> None:
        """Ends the loop and its thread, once all that was submitted is through."""
        self._stack.close()


async def wait_for(future: Future[T]) -> T:
    """Waits in a coroutine for something that happens on another thread.

    Cancelling the coroutine does not touch the future. On asyncio this costs no thread.
    """
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return await anyio.to_thread.run_sync(future.result, abandon_on_cancel=True)
    done = asyncio.Event()

    def wake(_: Future[T]) -> None:
        # The loop is closed if the waiter is gone with it.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(done.set)

    future.add_done_callback(wake)
    await done.wait()
    return future.result()
