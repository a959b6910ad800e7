"""The state lock as loads take it: on an event loop, for a caller on some thread."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future

import anyio
import anyio.to_thread
import pytest
from lock_actors import PATIENCE, DaemonThreads, Held, is_free, noted, until

from ckpipe.errors import LockMisuse, StateLockTimeout
from ckpipe.lock.holds import LoadHold
from ckpipe.lock.lock import StateLock
from ckpipe.loop_thread import Caller


@pytest.fixture
def lock() -> StateLock:
    return StateLock()


@pytest.fixture
def threads() -> DaemonThreads:
    return DaemonThreads()


async def test_a_load_holds_everybody_off_until_it_ends(
    lock: StateLock, threads: DaemonThreads
) -> None:
    order: list[str] = []
    hold = LoadHold(lock, None)
    await hold.take()
    await hold.take()
    waiting: list[Future[None]] = []
    for name in ("capture", "trainer"):
        side = lock.capturing if name == "capture" else lock.mutating
        waiting.append(threads.submit(noted, side(), order, name))
        await anyio.to_thread.run_sync(lambda: until(lock, waiters=len(waiting)))
    assert lock.acquire_capture_nowait(thread=-1) is None
    with pytest.raises(StateLockTimeout, match=r"'MainThread' has been mutating .*\(load\(\)\)"):
        await lock.acquire_capture_async(0)
    assert order == []
    hold.end()
    hold.end()
    await asyncio.gather(*map(asyncio.wrap_future, waiting))
    assert order == ["trainer", "capture"]
    assert is_free(lock)


async def test_the_thread_of_the_loop_may_not_wait_for_a_load_on_it(
    lock: StateLock, threads: DaemonThreads
) -> None:
    trainer = Held(threads, lock.mutating)
    hold = LoadHold(lock, None)
    task = asyncio.create_task(hold.take())
    await anyio.to_thread.run_sync(lambda: until(lock, waiters=1))
    for while_it in ("waits", "holds"):
        with pytest.raises(LockMisuse, match="event loop"), lock.mutating():
            pass
        with pytest.raises(LockMisuse, match="event loop"), lock.capturing():
            pass
        with pytest.raises(LockMisuse, match="event loop"):
            LoadHold(lock, Caller())
        if while_it == "waits":
            trainer.end()
            await task
    hold.end()
    with lock.mutating():
        pass


async def test_a_load_of_who_left_its_mutation_waits_like_any_other(lock: StateLock) -> None:
    with lock.mutating():
        hold = LoadHold(lock, None)
    token = lock.acquire_capture(thread=-1)
    task = asyncio.create_task(hold.take())
    await asyncio.sleep(0)
    assert not task.done()
    lock.release_capture(token)
    await task
    with pytest.raises(LockMisuse), lock.mutating():
        pass
    hold.end()
    assert is_free(lock)


def change(lock: StateLock) -> None:
    with lock.mutating():
        pass


def load(lock: StateLock) -> None:
    LoadHold(lock, Caller())


@pytest.mark.parametrize("work", [change, load])
def test_a_signal_handler_does_not_wait_behind_what_it_interrupts(
    lock: StateLock, threads: DaemonThreads, work: Callable[[StateLock], None]
) -> None:
    reader, caught = Held(threads, lock.capturing), list[BaseException]()
    waiting, handled = threading.get_ident(), threading.Event()

    def handle(*_: object) -> None:
        if handled.is_set():
            return
        handled.set()
        try:
            work(lock)
        except LockMisuse as error:
            caught.append(error)
        finally:
            reader.end()

    def interrupt() -> None:
        until(lock, waiters=1)
        while not handled.wait(0.01):  # one that comes just before a long wait goes unheard
            signal.pthread_kill(waiting, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        interrupting = threads.submit(interrupt)
        change(lock)
        interrupting.result(PATIENCE)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert "already" in str(caught)
    assert is_free(lock)


def test_a_load_whose_loop_is_gone_lets_go(lock: StateLock, threads: DaemonThreads) -> None:
    begun, end = threading.Event(), threading.Event()
    hold = LoadHold(lock, None)

    def serve() -> None:
        asyncio.run(hold.take())
        begun.set()
        assert end.wait(PATIENCE)

    loop = threading.Thread(target=serve)
    loop.start()
    assert begun.wait(PATIENCE)
    capture = threads.submit(noted, lock.capturing(), [], "")
    until(lock, waiters=1)
    end.set()
    capture.result(PATIENCE)
    loop.join(PATIENCE)


def test_a_load_outlives_the_thread_that_asked_for_it(
    lock: StateLock, threads: DaemonThreads
) -> None:
    holds: list[LoadHold] = []
    asker = threading.Thread(target=lambda: holds.append(LoadHold(lock, None)))
    asker.start()
    asker.join(PATIENCE)
    asyncio.run(holds[0].take())
    with pytest.raises(StateLockTimeout):
        threads.submit(lock.acquire_capture, 0, thread=-1).result(PATIENCE)
    holds[0].end()
    assert is_free(lock)


class Reads:
    """Reads of a device, which a test ends."""

    def __init__(self) -> None:
        self.asked, self.over = threading.Event(), threading.Event()

    def passed(self) -> bool:
        self.asked.set()
        return self.over.is_set()

    def hold_back(self) -> None:
        raise AssertionError("it is not one thread's device that a load writes by")


async def test_a_load_waits_for_what_devices_still_read(lock: StateLock) -> None:
    for cancelled in (True, False):
        reads, hold = Reads(), LoadHold(lock, None)
        lock.release_capture(lock.acquire_capture(thread=-1), fences=[reads])
        task = asyncio.create_task(hold.take())
        assert await anyio.to_thread.run_sync(reads.asked.wait, PATIENCE)
        assert not task.done()
        if cancelled:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert is_free(lock)
        reads.over.set()
    await task
    hold.end()
    assert is_free(lock)


async def test_a_load_waits_for_a_deferred_capture_and_does_not_break_it(
    lock: StateLock, threads: DaemonThreads
) -> None:
    token = lock.acquire_capture(thread=-1)
    lock.defer_capture(token, 0.0)
    hold = LoadHold(lock, None)
    task = asyncio.create_task(hold.take())
    await anyio.to_thread.run_sync(lambda: until(lock, waiters=1))
    with pytest.raises(StateLockTimeout):
        await lock.acquire_capture_async(0, thread=-1)  # whose leaving has all look again
    with lock.reading(token):
        assert not task.done()
    lock.release_capture(token)
    await task
    hold.end()


async def test_a_step_behind_a_load_breaks_a_deferred_capture_as_ever(
    lock: StateLock, threads: DaemonThreads
) -> None:
    token = lock.acquire_capture(thread=-1)
    hold = LoadHold(lock, None)
    task = asyncio.create_task(hold.take())
    await anyio.to_thread.run_sync(lambda: until(lock, waiters=1))
    step = threads.submit(noted, lock.mutating(), [], "")
    await anyio.to_thread.run_sync(lambda: until(lock, waiters=2))
    lock.defer_capture(token, 0.001)
    await task
    hold.end()
    await asyncio.wrap_future(step)
    assert is_free(lock)
