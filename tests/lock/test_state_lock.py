"""The state lock between real threads and tasks."""

from __future__ import annotations

import gc
import re
import signal
import threading
import weakref
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

import ckpipe
from ckpipe import StateLock, errors
from ckpipe.errors import LockMisuse, StateLockTimeout
from tests.support.actors import PATIENCE, DaemonThreads, Held, is_free, noted, until
from tests.support.command_line import forked


def test_a_trainer_waits_for_the_running_capture_and_goes_before_the_next(
    lock: StateLock, threads: DaemonThreads
) -> None:
    order: list[str] = []
    running = Held(threads, lock.capturing)
    waiting: list[Future[None]] = []
    for name in ("first trainer", "capture", "second trainer"):
        side = lock.capturing if name == "capture" else lock.mutating
        waiting.append(threads.submit(noted, side(), order, name))
        until(lock, waiters=len(waiting))
    assert order == []
    running.end()
    for future in waiting:
        future.result(PATIENCE)
    assert order == ["first trainer", "second trainer", "capture"]


def test_a_thread_enters_its_own_side_again(lock: StateLock, threads: DaemonThreads) -> None:
    with lock.mutating(), lock.mutating(timeout=0):
        capture = threads.waiting(lock, noted, lock.capturing(), [], "")
    capture.result(PATIENCE)
    with lock.capturing():
        trainer = threads.waiting(lock, noted, lock.mutating(), [], "")
        with lock.capturing(timeout=0):
            pass
        assert not trainer.done()
    trainer.result(PATIENCE)


def test_an_exception_inside_leaves_nothing_held(lock: StateLock) -> None:
    for hold in (lock.mutating, lock.capturing):
        with pytest.raises(KeyError, match="x"), hold():
            raise KeyError("x")
        assert is_free(lock)


FORKING = """
import os, threading
from ckpipe import StateLock
lock, held, go_on = StateLock(), threading.Event(), threading.Event()

def look():
    with lock._changed:
        held.set()
        go_on.wait()

with lock.capturing():
    threading.Thread(target=look).start()
    held.wait()
    child = os.fork()
    if not child:
        with lock.mutating(timeout=50):
            os._exit(7)
    go_on.set()
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7, status
    assert lock.statistics().holders
"""


def test_a_forked_child_waits_for_none_of_its_parents_threads() -> None:
    done = forked(FORKING)
    assert done.code == 0, done.err


@pytest.mark.parametrize("side", ["mutating", "capturing"])
def test_an_interrupt_right_after_the_grant_leaves_nothing_held(
    side: str, lock: StateLock, monkeypatch: pytest.MonkeyPatch
) -> None:
    acquire = lock._acquire

    def interrupted(*args: Any) -> None:
        acquire(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(lock, "_acquire", interrupted)
    with pytest.raises(KeyboardInterrupt), getattr(lock, side)():
        pass
    assert is_free(lock)


def test_a_capture_that_times_out_says_who_is_in_the_way(
    lock: StateLock, threads: DaemonThreads
) -> None:
    trainer = Held(threads, lock.mutating)
    with pytest.raises(StateLockTimeout) as caught, lock.capturing(timeout=0.01):
        pass
    text = str(caught.value)
    assert "within 0.01 s" in text
    assert re.search(r"'trainer_0' has been mutating for \d+\.\d s \(mutating\(\)\)", text)
    assert "more time" in text
    assert not lock.statistics().waiters
    trainer.end()
    with lock.capturing(timeout=0):
        pass


def test_a_refused_hold_keeps_nothing_of_its_caller_alive(lock: StateLock) -> None:
    class Batch:
        pass

    def misuse() -> weakref.ref[Batch]:
        batch = Batch()
        try:
            with lock.mutating(), lock.capturing():
                pass
        except LockMisuse:
            pass
        return weakref.ref(batch)

    gc.disable()  # as programs that train do
    try:
        assert misuse()() is None
    finally:
        gc.enable()


def test_mutating_inside_a_capture_of_the_same_thread_raises(lock: StateLock) -> None:
    with lock.capturing():
        with pytest.raises(LockMisuse, match="MainThread"), lock.mutating():
            pass
        with pytest.raises(LockMisuse, match="MainThread"):
            lock.disallow_state_dict_read()
    assert is_free(lock)


# ---- the trainer's own brackets ----


def test_disallowing_reads_holds_captures_off_until_allowed(
    lock: StateLock, threads: DaemonThreads
) -> None:
    lock.allow_state_dict_read()
    lock.disallow_state_dict_read()
    lock.disallow_state_dict_read()
    with lock.mutating():
        pass
    with pytest.raises(LockMisuse, match="disallow_state_dict_read"):
        lock.check_capture_allowed()
    capture = threads.waiting(lock, noted, lock.capturing(), [], "")
    lock.allow_state_dict_read()
    lock.allow_state_dict_read()
    capture.result(PATIENCE)
    assert is_free(lock)


def test_disallowing_again_after_a_timeout_is_no_empty_gesture(
    lock: StateLock, threads: DaemonThreads
) -> None:
    capture = Held(threads, lock.capturing)
    with pytest.raises(StateLockTimeout):
        lock.disallow_state_dict_read(timeout=0.01)
    lock.allow_state_dict_read()
    retry = threads.waiting(lock, lock.disallow_state_dict_read)
    capture.end()
    retry.result(PATIENCE)
    (holder,) = lock.statistics().holders
    assert (holder.side, holder.purpose) == ("mutating", "disallow_state_dict_read()")


def test_each_thread_has_its_own_bracket(lock: StateLock, threads: DaemonThreads) -> None:
    lock.disallow_state_dict_read()
    threads.submit(lock.allow_state_dict_read).result(PATIENCE)
    other = threads.waiting(lock, lock.disallow_state_dict_read)
    lock.allow_state_dict_read()
    other.result(PATIENCE)


def test_a_thread_that_ends_lets_go(lock: StateLock, threads: DaemonThreads) -> None:
    held, end = threading.Event(), threading.Event()

    def train() -> None:
        lock.disallow_state_dict_read()
        held.set()
        assert end.wait(PATIENCE)

    trainer = threading.Thread(target=train)
    trainer.start()
    assert held.wait(PATIENCE)
    capture = threads.waiting(lock, noted, lock.capturing(), [], "")
    assert not capture.done()
    end.set()
    # Nobody tells the lock: the capture itself has to find out while it waits.
    capture.result(PATIENCE)
    trainer.join(PATIENCE)
    assert is_free(lock)


def test_a_signal_handler_does_not_wait_behind_what_it_interrupts(
    lock: StateLock, threads: DaemonThreads
) -> None:
    reader, caught = Held(threads, lock.capturing), list[BaseException]()
    waiting, handled = threading.get_ident(), threading.Event()

    def handle(*_: object) -> None:
        if handled.is_set():
            return
        handled.set()
        try:
            with lock.mutating():
                pass
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
        with lock.mutating():
            pass
        interrupting.result(PATIENCE)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert "already" in str(caught)
    assert is_free(lock)


# ---- what a person sees ----


def test_repr_and_statistics_tell_who_and_why(lock: StateLock, threads: DaemonThreads) -> None:
    assert repr(lock) == "<StateLock [free]>"
    trainer = Held(threads, lock.mutating)
    capture = threads.waiting(lock, noted, lock.capturing(), [], "")
    assert re.fullmatch(
        r"<StateLock \[mutating by 'trainer_0' for \d+\.\d s \(mutating\(\)\) \| 1 waiting\]>",
        repr(lock),
    )
    now = lock.statistics()
    (holder,), (waiter,) = now.holders, now.waiters
    assert (holder.thread, holder.ident) == ("trainer_0", trainer.ident)
    assert (waiter.side, waiter.thread, waiter.purpose) == ("capturing", "trainer_1", "capture")
    assert 0 <= holder.seconds < PATIENCE
    trainer.end()
    capture.result(PATIENCE)


def test_saving_inside_mutating_raises_at_once(tmp_path: Path) -> None:
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        with pipeline.lock.mutating(), pytest.raises(errors.LockMisuse):
            pipeline.save({"a": 1}, step=0)
        pipeline.save({"a": 1}, step=0, until="committed")


def test_a_trainer_that_holds_the_lock_fails_the_save_not_the_step(
    tmp_path: Path, threads: DaemonThreads
) -> None:
    with ckpipe.SyncPipeline(tmp_path, lock={"timeout_seconds": 0.05}) as pipeline:
        trainer = Held(threads, pipeline.lock.mutating)
        with pytest.raises(errors.StateLockTimeout, match="trainer_0"):
            pipeline.save({"a": 1}, step=0)
        trainer.end()
        pipeline.save({"a": 1}, step=1, until="committed")
