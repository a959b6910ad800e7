"""The pipeline's event loop: any thread wakes it, and it keeps the interpreter meanwhile."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from ckpipe.tasks.event_loop import KeepingLoop

SECONDS = 60.0
"""After so long nothing more is expected to happen."""


@pytest.fixture
def loop() -> Iterator[KeepingLoop]:
    made = KeepingLoop()
    yield made
    made.close()


@contextmanager
def turns_of_another_thread() -> Iterator[Callable[[], int]]:
    """Counts how often a thread is given the interpreter by others that could have kept it."""
    turns, over, interval = 0, False, sys.getswitchinterval()

    def take_turns() -> None:
        nonlocal turns
        while not over:
            turns += 1
            time.sleep(0)

    thread = threading.Thread(target=take_turns)
    gc.collect()
    gc.disable()  # what other tests left may be files, and closing one lets go of the interpreter
    sys.setswitchinterval(1000)  # seconds: nobody takes it by force
    try:
        thread.start()
        yield lambda: turns
    finally:
        over = True
        sys.setswitchinterval(interval)
        gc.enable()
        thread.join()


def test_all_that_other_threads_hand_over_is_called(loop: KeepingLoop) -> None:
    heard: list[int] = []

    async def listen() -> None:
        done = asyncio.Event()

        def hear(number: int) -> None:
            heard.append(number)
            if len(heard) == 4000:
                done.set()

        def hand_over() -> None:
            for number in range(1000):
                loop.call_soon_threadsafe(hear, number)
                time.sleep(0)  # the loop falls asleep now and then

        threads = [threading.Thread(target=hand_over) for _ in range(4)]
        for thread in threads:
            thread.start()
        await asyncio.wait_for(done.wait(), SECONDS)
        for thread in threads:
            thread.join()

    loop.run_until_complete(listen())
    assert sorted(heard) == [number for number in range(1000) for _ in range(4)]


def spin(loop: asyncio.AbstractEventLoop) -> None:
    """Runs callbacks of which one always is ready."""

    async def go_round() -> None:
        for _ in range(20_000):
            await asyncio.sleep(0)

    loop.run_until_complete(go_round())


def hand_over(loop: asyncio.AbstractEventLoop) -> None:
    """Does what other threads do with a loop."""
    for _ in range(20_000):
        loop.call_soon_threadsafe(int)


@pytest.mark.parametrize("work", [spin, hand_over])
def test_interpreter_is_kept_while_nothing_waits(
    loop: KeepingLoop, work: Callable[[asyncio.AbstractEventLoop], None]
) -> None:
    usual, given, given_by_usual = asyncio.SelectorEventLoop(), 0, 0
    with turns_of_another_thread() as turns:
        while not turns():
            time.sleep(0)
        for _ in range(100):  # who is given it may be too slow to take it, time and again
            before = turns()
            work(loop)
            between = turns()
            work(usual)
            given += between - before
            given_by_usual += turns() - between
            if given_by_usual >= 100:
                break
        else:
            pytest.fail("the test sees no turns")
    usual.close()
    assert given < given_by_usual / 10  # a signal or a library may let go of it, too


def test_what_arrives_is_noticed_while_callbacks_never_end(loop: KeepingLoop) -> None:
    async def serve() -> bytes:
        mine, theirs = socket.socketpair()
        with mine, theirs:
            mine.setblocking(False)
            receiving = asyncio.ensure_future(loop.sock_recv(mine, 5))
            await asyncio.sleep(0)
            theirs.send(b"hello")
            for _ in range(100):
                await asyncio.sleep(0)
                if receiving.done():
                    break
            else:
                pytest.fail("the loop looks for no events while callbacks are ready")
            return receiving.result()

    assert loop.run_until_complete(serve()) == b"hello"


def test_closed_loop_gives_its_descriptors_back_and_wakes_nobody() -> None:
    gc.collect()  # what other tests left may be files
    before = set(os.listdir("/proc/self/fd"))
    loops = [KeepingLoop() for _ in range(10)]
    for each in loops:
        each.close()
        each.close()
        with pytest.raises(RuntimeError, match="closed"):
            each.call_soon_threadsafe(print)
    assert set(os.listdir("/proc/self/fd")) <= before


def test_loop_that_runs_is_not_closed_and_is_woken_as_before(loop: KeepingLoop) -> None:
    async def close() -> None:
        with pytest.raises(RuntimeError, match="running"):
            loop.close()
        done = asyncio.Event()
        thread = threading.Thread(target=loop.call_soon_threadsafe, args=(done.set,))
        loop.call_later(0.01, thread.start)  # once it is asleep, or not: either must do
        await asyncio.wait_for(done.wait(), SECONDS)
        thread.join()

    loop.run_until_complete(close())


def test_handler_of_a_signal_may_wake_what_its_thread_just_wakes() -> None:
    """A handler runs between any two steps of what it interrupts."""
    loop, heard = KeepingLoop(), list[str]()

    def interrupt(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_name != "_write_to_self":
            return None
        return at_each_line

    def at_each_line(frame: FrameType, event: str, _: object) -> Any:
        if event == "line":
            loop.call_soon_threadsafe(heard.append, "the handler's")
        return at_each_line

    def wake() -> None:
        sys.settrace(interrupt)
        loop.call_soon_threadsafe(heard.append, "its own")
        sys.settrace(None)

    thread = threading.Thread(target=wake, daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert not thread.is_alive(), "it waits for itself"
    loop.run_until_complete(asyncio.sleep(0))
    assert heard[0] == "its own"
    assert set(heard) == {"its own", "the handler's"}
    loop.close()
