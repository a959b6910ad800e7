"""Run blocking calls in worker threads, also when the interpreter starts none any more.

A pipeline that is open when the interpreter ends is closed from ``atexit``. By then no executor
takes a call, and Python 3.12 starts no thread either. So the loop of a pipeline has a reserve of
threads from its beginning, which work off its calls where no other thread can be had.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor, Future
from contextlib import asynccontextmanager
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import TypeVar, TypeVarTuple

import anyio
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


__all__ = [
    "RESERVE",
    "PipelineLoop",
    "reserve_of_threads",
    "run_sync",
    "use_reserve_if_no_thread_starts",
]
