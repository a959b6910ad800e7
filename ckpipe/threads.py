"""Run blocking calls in worker threads, and several tasks that fail as one.

A pipeline that is open when the interpreter ends is closed from ``atexit``. By then no executor
takes a call, and Python 3.12 starts no thread either. So the loop of a pipeline has a reserve of
threads from its beginning, which work off its calls where no other thread can be had.
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

Result = TypeVar("Result")
Args = TypeVarTuple("Args")

RESERVE = 8
"""How many threads a pipeline's loop has for the end of the interpreter: one for each lane of an
upload, and some for calls that wait for others."""

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
    """Keep threads for the calls of this loop that come when no thread can be started."""
    calls: _Calls = SimpleQueue()
    _reserve.set(calls)
    async with anyio.create_task_group() as tasks:
        for _ in range(RESERVE):
            serve = partial(anyio.to_thread.run_sync, _serve, calls)
            tasks.start_soon(partial(serve, limiter=anyio.CapacityLimiter(1)))
        try:
            yield
        finally:
            for _ in range(RESERVE):
                calls.put(None)


def _serve(calls: _Calls) -> None:
    while (call := calls.get()) is not None:
        call()


class PipelineLoop(asyncio.SelectorEventLoop):
    """An event loop whose default executor is the worker threads of :func:`run_sync`.

    That of asyncio takes no call any more while the interpreter ends.
    """

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*Args], Result], *args: *Args
    ) -> asyncio.Future[Result]:
        """Call a function in a worker thread, unless an executor is named."""
        if executor is not None:
            return super().run_in_executor(executor, func, *args)
        return self.create_task(run_sync(func, *args, abandon_on_cancel=True))


def use_reserve_if_no_thread_starts() -> None:
    """Have calls go to the reserves if the interpreter ends and starts no thread any more."""
    global _uses_reserve
    try:
        Thread(target=int, daemon=True).start()
    except RuntimeError:
        _uses_reserve = True


async def in_thread(
    function: Callable[[*Args], Result], *args: *Args, limiter: anyio.CapacityLimiter | None = None
) -> Result:
    """Run a function in a worker thread and never return while it still runs.

    A cancelled anyio scope waits for the thread by itself. A task cancelled by asyncio's own
    means does not: its caller would go on while the thread still reads the caller's memory.
    So the end of the thread is awaited here in that case too, before the cancellation goes on.

    Args:
        function: What to run.
        args: What to call it with.
        limiter: Bounds how many threads there are; None for anyio's own, which all share.
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
    """Run a function in several threads at once; when this returns or raises, none is left.

    However this is cancelled, the threads see it: they run in a task group, which is cancelled
    even where asyncio itself cancels the task that waits for it.

    Raises:
        Exception: The first failure, which ends the others.
    """
    # They may wait long, and must not for threads that all share.
    limiter = anyio.CapacityLimiter(max(1, count))
    await run_lanes(count, lambda: in_thread(work, limiter=limiter))


def on_loop(function: Callable[[*Args], Awaitable[Result]], *args: *Args) -> Result:
    """Await something on the loop, from a worker thread; cancelled if the thread's scope is.

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
        # The thread was not cancelled: its waiter would take this for its plain end.
        what = f"{function!r} was cancelled by something else than its caller"
        raise concurrent.futures.CancelledError(what) from None


T = TypeVar("T")


async def run_lanes(count: int, lane: Callable[[], Awaitable[None]]) -> None:
    """Run a function as several tasks at once, until all have returned or one has failed.

    Args:
        count: How many tasks.
        lane: What each does; they usually pull from one iterator.

    Raises:
        BaseException: What the first failing task raised, as it was; the others are cancelled,
            since what they raise may be what stopping them has caused.
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
    """Make several calls at once, and return what they return, in their order.

    Args:
        calls: The calls.
        at_once: How many at a time; None makes all.

    Raises:
        BaseException: What the first failing call raised; the others are cancelled.
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
    """Run a call beside a block, and cancel it at the end of the block.

    What the block raises comes as it is, without a group.

    Args:
        call: The call.
        name: The name of its task; None for that of the function.
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


class Ahead(Generic[T]):
    """A value that is fetched while something else is done.

    Args:
        fetch: Gets it; its errors are raised by the value's getter; without a call of that they are
            dropped.
    """

    def __init__(self, fetch: Callable[[], Awaitable[T]]) -> None:
        self._fetch, self._ended = fetch, anyio.Event()
        self._found: list[T] = []
        self._failure: Exception | None = None

    def started(self) -> AbstractAsyncContextManager[None]:
        """Fetch beside a block, and give up at its end; see :func:`beside`."""
        return beside(self._run)

    async def _run(self) -> None:
        try:
            self._found.append(await self._fetch())
        except Exception as error:
            self._failure = error
        self._ended.set()

    async def get(self) -> T:
        """The value, once it is there; to be asked for within :meth:`started`.

        Raises:
            Exception: What fetching it has raised.
        """
        await self._ended.wait()
        if self._failure is not None:
            raise self._failure
        return self._found[0]
