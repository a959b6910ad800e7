"""Threads and loops of a pipeline, and the settings of the process that its work changes."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import anyio
import anyio.lowlevel
import pytest
from anyio import (
    CancelScope,
    CapacityLimiter,
    create_task_group,
    fail_after,
    to_thread,
)

from ckpipe.errors import UsageError
from ckpipe.events import BlockUploaded, Event
from ckpipe.interpreter import (
    SWITCH_SECONDS,
    available_cpus,
    gc_paused,
    short_switch_interval,
)
from ckpipe.loop_thread import Caller, LoopThread
from ckpipe.threads import all_of, in_thread, on_loop
from tests.support.actors import PATIENCE
from tests.support.pipelines import Stateful
from tests.support.settling import SettlingPipeline, settle
from tests.support.worker_runs import SETTINGS, state_of


def test_the_end_of_one_pause_leaves_the_others() -> None:
    with gc_paused():
        with pytest.raises(ValueError, match="within"), gc_paused():
            raise ValueError("within")
        assert not gc.isenabled()
    assert gc.isenabled()


def about(seconds: float) -> Any:
    """An interval as the interpreter gives it back, which counts whole microseconds."""
    return pytest.approx(seconds, abs=2e-6)


@pytest.fixture(autouse=True)
def default_interval() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    yield
    sys.setswitchinterval(before)


def test_the_last_who_wanted_them_puts_back_what_was() -> None:
    first, second = short_switch_interval(), short_switch_interval()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert sys.getswitchinterval() == about(SWITCH_SECONDS)
    second.__exit__(None, None, None)
    assert sys.getswitchinterval() == about(0.005)


def test_what_others_set_stays() -> None:
    with short_switch_interval():
        sys.setswitchinterval(0.02)
    assert sys.getswitchinterval() == about(0.02)
    sys.setswitchinterval(1e-4)  # shorter than ours
    with short_switch_interval():
        assert sys.getswitchinterval() == about(1e-4)
    assert sys.getswitchinterval() == about(1e-4)


def test_a_forked_child_has_what_was_before() -> None:
    with short_switch_interval(), short_switch_interval():
        child = os.fork()
        if child == 0:
            os._exit(0 if sys.getswitchinterval() > 0.004 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert sys.getswitchinterval() == about(SWITCH_SECONDS)


@pytest.mark.sample(4)
@pytest.mark.parametrize("worker", ["thread", "process"])
@pytest.mark.parametrize(
    ("setting", "during"),
    [
        ({}, SWITCH_SECONDS),
        ({"switch_interval_seconds": None}, 0.005),
        ({"switch_interval_seconds": 0.002}, 0.002),
        ({"switch_interval_seconds": 0.01}, 0.005),
    ],
)
def test_the_interval_is_a_setting(
    tmp_path: Path, worker: Literal["thread", "process"], setting: dict[str, Any], during: float
) -> None:
    seen: list[float] = []
    walking: list[float] = []
    loaded: list[Any] = []

    def walk() -> dict[str, Any]:
        walking.append(sys.getswitchinterval())
        return {"value": 1}

    def look(event: Event) -> None:
        if isinstance(event, BlockUploaded):
            seen.append(sys.getswitchinterval())

    with SettlingPipeline(tmp_path, worker=worker, **SETTINGS | setting) as opened:
        opened.events.add(look)
        looking = {"looking": Stateful(walk, load=loaded.append)}
        opened.save(state_of(1) | looking).wait()
        settle(opened)
        assert sys.getswitchinterval() == about(0.005)
        walking.clear()
        opened.load(looking, include=["looking*"])
    assert loaded == [{"value": 1}]
    assert seen == [about(during)] * len(seen) != []
    assert walking == [about(during)] * len(walking) != []


@pytest.mark.parametrize(
    ("told", "cores", "mine"),
    [
        (None, 8, 8),
        ("1", 8, 8),
        ("3", 8, 2),
        ("16", 8, 1),
        ("0", 8, 8),
        ("many", 8, 8),
        ("2", 1, 1),
    ],
)
def test_ranks_of_one_machine_share_its_processors(
    monkeypatch: pytest.MonkeyPatch, told: str | None, cores: int, mine: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    assert available_cpus({} if told is None else {"LOCAL_WORLD_SIZE": told}) == mine


def test_this_process_has_some() -> None:
    assert 1 <= available_cpus({}) <= (os.cpu_count() or 1)


class Crash(BaseException):
    """The end of a process, as it were."""


@pytest.mark.parametrize("failure", [ValueError, Crash])
async def test_calls_made_together_end_as_the_first_that_fails(
    failure: type[BaseException],
) -> None:
    async def fail() -> None:
        raise failure

    with pytest.raises(failure):
        await all_of([anyio.sleep_forever, fail])


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


async def test_what_a_caller_does_not_come_to_do_is_never_done() -> None:
    ended: list[int] = []

    async def ask(caller: Caller) -> None:
        with pytest.raises(UsageError, match="ended before"):
            await caller.run(threading.get_ident)
        ended.append(1)

    with anyio.fail_after(PATIENCE):
        async with anyio.create_task_group() as tasks:
            with Caller() as leaving:
                tasks.start_soon(ask, leaving)
                await anyio.lowlevel.checkpoint()  # it is asked, and never looks
            tasks.start_soon(ask, leaving)
    assert len(ended) == 2


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    made = LoopThread("loop of a test")
    yield made
    made.close(cancel=True)


async def test_a_call_that_is_cancelled_twice_is_over_when_it_raises(loop: LoopThread) -> None:
    began, ending, go_on, ended = asyncio.Event(), asyncio.Event(), threading.Event(), []
    here = asyncio.get_running_loop()

    async def work() -> None:
        try:
            here.call_soon_threadsafe(began.set)
            await anyio.sleep_forever()
        finally:
            here.call_soon_threadsafe(ending.set)
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(go_on.wait)
            ended.append(True)

    call = asyncio.create_task(loop.run(work))
    await began.wait()
    call.cancel()
    await ending.wait()
    call.cancel()
    await anyio.wait_all_tasks_blocked()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert ended


def test_an_interrupted_call_is_over_when_it_raises(
    loop: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go_on, ended = threading.Event(), threading.Event(), threading.Event()
    submit = loop.submit

    async def work() -> None:
        try:
            began.set()
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(go_on.wait)
            ended.set()

    def interrupted(function: Callable[..., Any], *args: Any) -> Any:
        monkeypatch.setattr(loop, "submit", letting_go)
        submit(function, *args)
        assert began.wait(PATIENCE)
        raise KeyboardInterrupt  # before the caller has anything that names the call

    def letting_go(function: Callable[..., Any], *args: Any) -> Any:
        future = submit(function, *args)
        go_on.set()
        return future

    monkeypatch.setattr(loop, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        loop.call(work)
    assert ended.is_set()
