"""Worker threads that are awaited to their end, and that await something on the loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading

import anyio
import pytest
from anyio import (
    CancelScope,
    CapacityLimiter,
    create_task_group,
    fail_after,
    to_thread,
    wait_all_tasks_blocked,
)

from ckpipe.backend import run_in_thread
from ckpipe.threads import in_thread, on_loop


async def test_a_cancelled_caller_goes_on_only_once_its_thread_has_ended() -> None:
    began, go_on, ended = asyncio.Event(), threading.Event(), list[int]()
    loop = asyncio.get_running_loop()

    def work(number: int) -> None:
        loop.call_soon_threadsafe(began.set)
        assert go_on.wait(20)
        ended.append(number)

    task = asyncio.create_task(run_in_thread(work, 1))
    await began.wait()
    task.cancel()
    await wait_all_tasks_blocked()
    assert not task.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == [1]


async def test_what_a_thread_awaits_after_it_was_cancelled_is_cancelled_too() -> None:
    began, go_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def thread() -> None:
        loop.call_soon_threadsafe(began.set)
        assert go_on.wait(20)
        on_loop(anyio.sleep_forever)

    with fail_after(20):
        async with create_task_group() as tasks:
            tasks.start_soon(in_thread, thread)
            await began.wait()
            tasks.cancel_scope.cancel()
            with CancelScope(shield=True):
                await anyio.sleep(0.05)  # by then nobody looks any more for whom to cancel
            go_on.set()


async def test_what_is_cancelled_by_somebody_else_is_an_error() -> None:
    async def cancelled() -> None:
        raise asyncio.CancelledError

    with pytest.raises(concurrent.futures.CancelledError):
        await in_thread(on_loop, cancelled)


async def test_the_end_of_a_thread_is_awaited_without_a_thread_that_it_may_need() -> None:
    began, go_on, ended = asyncio.Event(), threading.Event(), list[int]()
    loop = asyncio.get_running_loop()

    def thread() -> None:
        loop.call_soon_threadsafe(began.set)
        assert go_on.wait(20)
        on_loop(to_thread.run_sync, ended.append, 1)

    shared = to_thread.current_default_thread_limiter()
    before, shared.total_tokens = shared.total_tokens, 1
    try:
        task = asyncio.create_task(in_thread(thread, limiter=CapacityLimiter(1)))
        await began.wait()
        task.cancel()
        await anyio.sleep(0.05)
        go_on.set()
        with fail_after(20), contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(task)
    finally:
        shared.total_tokens = before
    assert ended
