"""Worker threads whose end is always awaited, and what they do on the event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import math
import threading
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar, TypeVarTuple

import anyio
import anyio.from_thread

from ckpipe.tasks import to_thread

Result = TypeVar("Result")
Args = TypeVarTuple("Args")


async def in_thread(
    function: Callable[[*Args], Result], *args: *Args, limiter: anyio.CapacityLimiter | None = None
) -> Result:
    """Runs a function in a worker thread and never returns while it still runs.

    A cancelled anyio scope waits for the thread by itself. A task cancelled by asyncio's own
    means does not: its caller would go on while the thread still reads the caller's memory.
    So the end of the thread is awaited here in that case too, before the cancellation goes on.

    Args:
        function: What to run.
        args: What to call it with.
        limiter: Bounds how many threads there are; None for anyio's own, which all share.
    """
    call = _Call(lambda: function(*args))
    try:
        return await to_thread.run_sync(call.run, limiter=limiter)
    except asyncio.CancelledError:
        await call.ended_or_revoked()
        raise


async def in_threads(work: Callable[[], None], count: int) -> None:
    """Run a function in several threads at once; when this returns or raises, none is left.

    However this is cancelled, the threads see it: they run in a task group, which is cancelled
    even where asyncio itself cancels the task that waits for it.

    Raises:
        Exception: The first failure, which ends the others.
    """
    # They may wait long, and must not for threads that all share.
    limiter = anyio.CapacityLimiter(max(1, count))
    failures: list[Exception] = []

    async def attempt() -> None:
        try:
            await in_thread(work, limiter=limiter)
        except Exception as error:
            # Only the first tells something: the others may be what stopping them has caused.
            failures.append(error)
            tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        for _ in range(count):
            tasks.start_soon(attempt)
    if failures:
        raise failures[0]


def on_loop(function: Callable[[*Args], Awaitable[Result]], *args: *Args) -> Result:
    """Awaits something on the loop, from a worker thread; is cancelled if the thread's scope is.

    anyio looks for whom to cancel when a scope is cancelled, and perhaps never again. So what comes
    to the loop later finds that out itself; otherwise it might wait for ever.
    """

    async def unless_cancelled() -> Result:
        if anyio.current_effective_deadline() == -math.inf:
            raise asyncio.CancelledError
        return await function(*args)

    try:
        return anyio.from_thread.run(unless_cancelled)
    except asyncio.CancelledError:
        anyio.from_thread.check_cancelled()
        # Nobody has cancelled the thread: who waits for it would take this for its plain end.
        what = f"{function!r} was cancelled by something else than its caller"
        raise concurrent.futures.CancelledError(what) from None


class _Call(Generic[Result]):
    """One call that either runs to its end or never begins."""

    def __init__(self, function: Callable[[], Result]) -> None:
        self._function = function
        self._lock = threading.Lock()
        self._begun = False
        self._revoked = False
        self._ended: concurrent.futures.Future[None] = concurrent.futures.Future()

    def run(self) -> Result:
        with self._lock:
            if self._revoked:
                raise RuntimeError("The call was cancelled before it began")
            self._begun = True
        try:
            return self._function()
        finally:
            self._ended.set_result(None)

    async def ended_or_revoked(self) -> None:
        with self._lock:
            self._revoked = not self._begun
        while self._begun and not self._ended.done():
            # The first cancellation is raised by our caller once the thread ended.
            with anyio.CancelScope(shield=True), contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([asyncio.wrap_future(self._ended)])


__all__ = ["in_thread", "in_threads", "on_loop"]
