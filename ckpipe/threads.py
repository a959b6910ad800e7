"""Run blocking calls in worker threads, and several tasks that fail as one.

A pipeline that is open when the interpreter ends is closed from ``atexit``. By then no executor
accepts a call, and Python 3.12 starts no thread either. So the loop of a pipeline keeps a reserve
of threads from its beginning. They run its calls once no other thread can be started.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import math
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Executor, Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any, Generic, TypeVar, TypeVarTuple

import anyio
import anyio.from_thread
import anyio.to_thread
from anyio.lowlevel import RunVar

from ckpipe.errors import StoreError, naming_refusals

Result = TypeVar("Result")
Args = TypeVarTuple("Args")

RESERVE = 8
"""Number of threads that a pipeline's loop keeps for the end of the interpreter: one for each lane
of an upload, and some for calls that wait for others."""

_Calls = SimpleQueue[Callable[[], None] | None]
_reserve: RunVar[_Calls] = RunVar("ckpipe_reserve_of_threads")
_uses_reserve = False


async def run_sync(
    function: Callable[[*Args], Result],
    *args: *Args,
    abandon_on_cancel: bool = False,
    limiter: anyio.CapacityLimiter | None = None,
) -> Result:
    """Run a function in a worker thread; see :func:`anyio.to_thread.run_sync`."""
    calls = _reserve.get(None) if _uses_reserve else None
    if calls is None:
        return await anyio.to_thread.run_sync(
            function, *args, abandon_on_cancel=abandon_on_cancel, limiter=limiter
        )
    outcome: Future[Result] = Future()
    calls.put(partial(_answer, outcome, partial(function, *args)))
    answered = asyncio.wrap_future(outcome)
    with anyio.CancelScope(shield=not abandon_on_cancel):
        await asyncio.wait([answered])
    return await answered


def _answer(outcome: Future[Result], call: Callable[[], Result]) -> None:
    if outcome.set_running_or_notify_cancel():
        try:
            outcome.set_result(contextvars.copy_context().run(call))
        except BaseException as error:
            outcome.set_exception(error)


@asynccontextmanager
async def reserve_of_threads() -> AsyncIterator[None]:
    """Keep threads for calls of this loop at a time when no thread can be started."""
    calls: _Calls = SimpleQueue()
    _reserve.set(calls)
    async with anyio.create_task_group() as tasks:
        try:
            begun = [anyio.Event() for _ in range(RESERVE)]
            for each in begun:
                serve = partial(anyio.to_thread.run_sync, _serve, calls, each)
                tasks.start_soon(partial(serve, limiter=anyio.CapacityLimiter(1)))
            for each in begun:
                await each.wait()
            yield
        finally:
            for _ in range(RESERVE):
                calls.put(None)


def _serve(calls: _Calls, begun: anyio.Event) -> None:
    anyio.from_thread.run_sync(begun.set)
    while (call := calls.get()) is not None:
        call()


class PipelineLoop(asyncio.SelectorEventLoop):
    """An event loop whose default executor is the worker threads of :func:`run_sync`.

    The default executor of asyncio accepts no calls while the interpreter ends.
    """

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*Args], Result], *args: *Args
    ) -> asyncio.Future[Result]:
        """Call a function in a worker thread, or in the executor if one is given."""
        if executor is not None:
            return super().run_in_executor(executor, func, *args)

        async def run() -> Result:
            with naming_refusals(StoreError):  # backends use it, by aiofiles
                return await run_sync(func, *args, abandon_on_cancel=True)

        return self.create_task(run())


def use_reserve_if_no_thread_starts() -> None:
    """Switch all calls to the reserves if the interpreter ends and starts no more threads."""
    global _uses_reserve
    try:
        Thread(target=int, daemon=True).start()
    except RuntimeError:
        _uses_reserve = True


async def in_thread(
    function: Callable[[*Args], Result], *args: *Args, limiter: anyio.CapacityLimiter | None = None
) -> Result:
    """Run a function in a worker thread and never return while it still runs.

    A cancelled anyio scope waits for the thread by itself. A task that asyncio cancels does not:
    its caller would go on while the thread still reads the caller's memory. So the end of the
    thread is awaited here in that case too, before the cancellation goes on.

    Args:
        function: The function.
        args: Its arguments.
        limiter: Bounds the number of threads; None for anyio's own limiter, which all share.
    """
    begun, ended = threading.Lock(), Future[None]()

    def call() -> Result:
        if not begun.acquire(blocking=False):
            raise RuntimeError("The call was cancelled before it began")
        try:
            return function(*args)
        finally:
            ended.set_result(None)

    try:
        return await run_sync(call, limiter=limiter)
    except asyncio.CancelledError:
        if not begun.acquire(blocking=False):  # else it never begins
            while not ended.done():
                # The first cancellation is raised once the thread has ended.
                with anyio.CancelScope(shield=True), contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([asyncio.wrap_future(ended)])
        raise


async def in_threads(work: Callable[[], None], count: int) -> None:
    """Run a function in several threads at once; return or raise only once all have ended.

    The threads see every cancellation: they run in a task group, which is cancelled even if asyncio
    itself cancels the task that waits for it.

    Raises:
        Exception: The first failure, which ends the others.
    """
    # The threads may wait long, so they must not come from the limiter that all share.
    limiter = anyio.CapacityLimiter(max(1, count))
    await run_lanes(count, lambda: in_thread(work, limiter=limiter))


def on_loop(function: Callable[[*Args], Awaitable[Result]], *args: *Args) -> Result:
    """Await a coroutine function on the loop, from a worker thread.

    It is cancelled if the scope of the thread is. anyio looks for tasks to cancel when a scope is
    cancelled, and perhaps never again. So a call that reaches the loop later checks the scope
    itself; otherwise it might wait for ever.
    """

    async def unless_cancelled() -> Result:
        if anyio.current_effective_deadline() == -math.inf:
            raise asyncio.CancelledError
        return await function(*args)

    try:
        return anyio.from_thread.run(unless_cancelled)
    except asyncio.CancelledError:
        anyio.from_thread.check_cancelled()
        # The thread was not cancelled: its waiter would take CancelledError for a normal end.
        what = f"{function!r} was cancelled by something else than its caller"
        raise concurrent.futures.CancelledError(what) from None


T = TypeVar("T")


async def run_lanes(count: int, lane: Callable[[], Awaitable[None]]) -> None:
    """Run a function as several tasks at once, until all have returned or one has failed.

    Args:
        count: The number of tasks.
        lane: The function of each; they usually pull from one iterator.

    Raises:
        BaseException: The error of the first failing task, without a group. The others are
            cancelled, and their errors are dropped, since the cancellation may have caused them.
    """
    failures: list[BaseException] = []

    async def attempt() -> None:
        try:
            await lane()
        except anyio.get_cancelled_exc_class():
            raise
        except BaseException as error:
            failures.append(error)
            group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        for _ in range(count):
            group.start_soon(attempt)
    if failures:
        raise failures[0]


async def all_of(
    calls: Sequence[Callable[[], Awaitable[T]]], at_once: int | None = None
) -> list[T]:
    """Run several calls at once, and return their results in their order.

    Args:
        calls: The calls.
        at_once: The largest number of calls at a time; None for all.

    Raises:
        BaseException: The error of the first failing call; the others are cancelled.
    """
    found: dict[int, T] = {}
    waiting = iter(enumerate(calls))

    async def lane() -> None:
        for number, call in waiting:
            found[number] = await call()

    await run_lanes(len(calls) if at_once is None else min(at_once, len(calls)), lane)
    return [found[number] for number in range(len(calls))]


@asynccontextmanager
async def beside(
    call: Callable[[], Coroutine[Any, Any, None]], name: str | None = None
) -> AsyncIterator[None]:
    """Run a call concurrently with a ``with`` block, and cancel it at the end of the block.

    An error of the block is raised without a group.

    Args:
        call: The call.
        name: The name of its task; None for the name of the function.
    """
    failure: Exception | None = None
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call, name=name)
        try:
            yield
        except Exception as error:
            failure = error
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure


class BackgroundTask(Generic[T]):
    """Prefetch: a value that is fetched concurrently with other work.

    Args:
        fetch: Gets the value. Its errors are raised by :meth:`get`, and dropped if that is never
            called.
    """

    def __init__(self, fetch: Callable[[], Awaitable[T]]) -> None:
        self._fetch, self._ended = fetch, anyio.Event()
        self._found: list[T] = []
        self._failure: Exception | None = None

    def started(self) -> AbstractAsyncContextManager[None]:
        """Fetch concurrently with a block, and cancel at its end; see :func:`beside`."""
        return beside(self._run)

    async def _run(self) -> None:
        try:
            self._found.append(await self._fetch())
        except Exception as error:
            self._failure = error
        self._ended.set()

    async def get(self) -> T:
        """Wait for the value and return it; to be called within :meth:`started`.

        Raises:
            Exception: The error of the fetch.
        """
        await self._ended.wait()
        if self._failure is not None:
            raise self._failure
        return self._found[0]
