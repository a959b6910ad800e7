"""The state machine of the state lock under any order of events, and holds of loads."""

from __future__ import annotations

import asyncio
import gc
import math
import subprocess
import sys
import threading
from collections.abc import Hashable, Iterator
from typing import Any

import anyio.to_thread
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

from ckpipe import StateLock
from ckpipe.errors import LockMisuse, StateLockTimeout
from ckpipe.lock.guard import guard
from ckpipe.lock.holds import PATIENCE, FrameMark, Hold, LockState, Side
from ckpipe.lock.state_lock import LoadHold, LockHold
from ckpipe.memory.cuda import StreamFence
from tests.support.actors import PATIENCE as PATIENT
from tests.support.actors import DaemonThreads, Held, is_free, noted, until
from tests.support.sampling import EVERY

TRAINERS = st.integers(0, 4)
LOOPS = st.integers(10, 11)
THREADS = TRAINERS | LOOPS


NOBODY = Hold(side=Side.CAPTURING)

NOW, GRACE, LATER = 0.0, 1e12, 2e12
"""Seconds of a clock; a grace that has not passed now, and has passed later."""


class Before:
    """A state as it was before an event."""

    def __init__(self, state: LockState) -> None:
        self.holding, self.waiting = list(state.holding), list(state.waiting)
        self.mutator, self.passed = state.mutator, state.passed


class LockMachine(RuleBasedStateMachine):
    """Owners arrive and leave as they like; what each event let in is judged at once.

    Leaving stands for a release, a timeout and a cancellation, which are one event. A thread that
    waits does nothing else; one that has an event loop does what the loop's tasks do, too.
    """

    holds = Bundle("holds")

    def __init__(self) -> None:
        super().__init__()
        self.state = LockState()
        self.arrived: list[Hold] = []
        self.blocking: dict[Hold, int] = {}

    def arrival(
        self,
        side: Side,
        owner: Hashable = None,
        *,
        caller: int,
        saver: int | None = None,
        home: int | None = None,
        within: int | None = None,
        blocking: bool = True,
    ) -> Hold:
        request = Hold(side=side, owner=owner, saver=saver, home=home, within=within)
        if self.state.deadlock(request) or {caller, home} & self.stopped():
            return request
        self.arrived.append(request)
        if blocking:
            self.blocking[request] = caller
        before = Before(self.state)
        self.state.arrive(request)
        self.state.settle(NOW)
        self.judge(before)
        return request

    def stopped(self) -> set[int | None]:
        """The threads that wait."""
        return {self.blocking[each] for each in self.state.waiting if each in self.blocking}

    @rule(target=holds, owner=THREADS)
    def trainer_comes(self, owner: int) -> Hold:
        # It relies on going before captures, which ends where it must have some patience.
        waits = any(request.home == owner for request in self.state.waiting_for(Side.CAPTURING))
        patient = waits and self.state.passed > PATIENCE // 2
        return NOBODY if patient else self.arrival(Side.MUTATING, owner, caller=owner)

    @rule(target=holds, owner=THREADS)
    def capture_comes(self, owner: int) -> Hold:
        return self.arrival(Side.CAPTURING, owner, caller=owner)

    @rule(target=holds, saver=TRAINERS, home=LOOPS, blocking=st.booleans())
    def save_comes(self, saver: int, home: int, *, blocking: bool) -> Hold:
        return self.arrival(Side.CAPTURING, caller=saver, saver=saver, home=home, blocking=blocking)

    @rule(target=holds, caller=THREADS, home=LOOPS, blocking=st.booleans())
    def load_comes(self, caller: int, home: int, *, blocking: bool) -> Hold:
        if blocking and caller == home:
            return NOBODY  # refused before it gets here
        mutating = [held.owner for held in self.state.holding if held.side is Side.MUTATING]
        return self.arrival(
            Side.MUTATING,
            caller=caller,
            saver=caller if blocking else None,
            home=home,
            within=caller if caller in mutating else None,
            blocking=blocking,
        )

    @rule(hold=holds)
    def anyone_leaves(self, hold: Hold) -> None:
        before = Before(self.state)
        self.arrived = [each for each in self.arrived if each is not hold]
        self.state.leave(hold)
        self.state.settle(NOW)
        self.judge(before)
        assert hold not in self.state.everyone

    @precondition(lambda self: self.state.holding)
    @rule()
    def oldest_holder_leaves(self) -> None:
        self.anyone_leaves(self.state.holding[0])

    @rule(hold=holds, readers=st.integers(0, 1))
    def a_capture_is_deferred(self, hold: Hold, readers: int) -> None:
        if hold.side is Side.CAPTURING and hold in self.state.holding and not hold.revoked:
            hold.grace, hold.readers = GRACE, readers

    @rule(hold=holds)
    def a_thread_has_read(self, hold: Hold) -> None:
        hold.readers = 0
        if hold.revoked:
            self.anyone_leaves(hold)

    @precondition(lambda self: any(each.grace < math.inf for each in self.state.holding))
    @rule()
    def a_grace_passes(self) -> None:
        """A step gets the lock from deferred captures, if no other capture keeps it waiting."""
        before = Before(self.state)
        steps = [each for each in self.state.waiting_for(Side.MUTATING) if each.home is None]
        preempted = steps and not any(each.grace == math.inf for each in before.holding)
        self.state.settle(LATER)
        ended = [each for each in before.holding if each not in self.state.holding]
        assert ended == [each for each in before.holding if preempted and not each.readers]
        assert all(each.revoked for each in before.holding if preempted)
        self.arrived = [each for each in self.arrived if each not in ended]
        self.judge(before)

    def judge(self, before: Before) -> None:
        """Who was let in just now: nobody past one who came first and could be let in."""
        granted = [each for each in self.state.holding if each not in before.holding]
        owners_before = {held.owner for held in before.holding}
        entering = [each for each in granted if not {each.owner, each.within} & owners_before]
        homes = {held.home for held in before.holding}
        if before.mutator is None:
            threads = owners_before | homes
            entering = [
                each for each in entering if not {each.owner, each.saver} & threads - {None}
            ]
        waited = [each for each in before.waiting if each.side is Side.MUTATING]
        for request in entering:
            if request.side is Side.CAPTURING and waited:
                left = set(waited) & set(self.state.waiting)
                assert not left or before.passed >= PATIENCE, "a capture overtook a trainer"
            if request.side is Side.MUTATING and waited:
                still = [other for other in waited if other in self.arrived]
                assert request == still[0], "trainers were not served in their order"

    @invariant()
    def sides_exclude_each_other(self) -> None:
        mutations = [held for held in self.state.holding if held.side is Side.MUTATING]
        captures = [held for held in self.state.holding if held.side is Side.CAPTURING]
        roots = {held.owner if held.within is None else held.within for held in mutations}
        assert len(roots) <= 1
        assert not (mutations and captures)
        assert self.state.mutator == (mutations[0].owner if mutations else None)

    @invariant()
    def nobody_waits_for_one_that_waits(self) -> None:
        """Whoever has to let go of a hold can do so."""
        keepers = {held.owner if held.home is None else held.home for held in self.state.holding}
        assert not keepers & self.stopped()

    @invariant()
    def nobody_is_forgotten(self) -> None:
        """Who waits has a reason to, and everybody who came and did not leave is known."""
        trainers = self.state.waiting_for(Side.MUTATING)
        captures = self.state.waiting_for(Side.CAPTURING)
        if trainers or captures:
            assert self.state.holding
        if captures and self.state.mutator is None:
            assert trainers
        known = {*self.state.holding, *self.state.waiting}
        assert known == set(self.arrived)

    def teardown(self) -> None:
        for request in list(self.arrived):
            self.anyone_leaves(request)
        assert (self.state.everyone, self.state.passed) == ([], 0)


TestLockMachine = LockMachine.TestCase
TestLockMachine.settings = settings(max_examples=150 if EVERY else 40, stateful_step_count=40)


def after(*events: Hold, state: LockState | None = None) -> LockState:
    """The state after requests have arrived, and left where they were there already."""
    state = state or LockState()
    for event in events:
        (state.leave if event in state.everyone else state.arrive)(event)
        state.settle(NOW)
    return state


def trainer(owner: str) -> Hold:
    return Hold(side=Side.MUTATING, owner=owner)


def capture(owner: str | None = None, **threads: Any) -> Hold:
    return Hold(side=Side.CAPTURING, owner=owner, **threads)


def load(**threads: Any) -> Hold:
    return Hold(side=Side.MUTATING, **threads)


def test_a_capture_that_trainers_overtake_without_end_goes_once() -> None:
    waiting, current = capture("a"), trainer("t0")
    state = after(current, waiting)
    for turn in range(1, PATIENCE + 2):
        assert state.holding == [current]
        before, current = current, trainer(f"t{turn}")
        after(current, before, state=state)
    assert state.holding == [waiting]
    assert after(capture("b"), waiting, state=state).holding == [current]


def deferred(owner: str, readers: int = 0) -> Hold:
    return capture(owner, grace=GRACE, readers=readers)


def test_a_step_gets_the_lock_from_deferred_captures_after_their_grace() -> None:
    idle, read, step = deferred("a"), deferred("b", readers=1), trainer("t")
    state = after(idle, read, step)
    assert state.settle(NOW) == step.since + GRACE
    assert state.holding == [idle, read]
    assert state.settle(LATER) == math.inf
    assert state.holding == [read]
    read.readers = 0
    state.settle(LATER)
    assert state.holding == [step]


def test_a_step_waits_for_captures_if_one_of_them_is_not_deferred() -> None:
    captures = [deferred("a"), capture("b")]
    state = after(*captures, trainer("t"))
    assert state.settle(LATER) == math.inf
    assert state.holding == captures


def test_a_load_waits_for_deferred_captures() -> None:
    waiting, reading = load(home="loop"), deferred("a")
    state = after(reading, waiting)
    assert state.settle(LATER) == math.inf
    assert state.holding == [reading]
    after(trainer("t"), state=state).settle(LATER)
    assert state.holding == [waiting]


def refusal(state: LockState, request: Hold) -> str:
    """What is said of a request that would wait for itself."""
    return str(state.deadlock(request))


def test_waiting_for_oneself_is_seen() -> None:
    mutating = after(trainer("t"))
    assert "is changing it" in refusal(mutating, capture("t"))
    assert "is changing it" in refusal(mutating, capture("worker", saver="t"))
    assert "is changing it" in refusal(mutating, capture(home="t"))
    assert not mutating.deadlock(capture("worker", saver="t", awaited=False))
    assert not mutating.deadlock(capture("worker", saver="u"))
    assert not mutating.deadlock(trainer("t"))
    capturing = after(capture("worker", saver="t", home="loop"))
    assert "own capture" in refusal(capturing, trainer("worker"))
    assert "own capture" in refusal(capturing, trainer("loop"))
    assert not capturing.deadlock(trainer("t"))
    keeping = after(capture(home="t"))
    assert "own capture" in refusal(keeping, load(saver="t", home="loop"))
    assert not keeping.deadlock(load(home="loop"))


def test_waiting_for_a_load_on_its_own_loop_is_seen() -> None:
    for state in (after(load(home="loop")), after(trainer("u"), load(home="loop"))):
        for request in (trainer("loop"), capture("loop"), load(saver="loop", home="b")):
            assert "a load on its event loop" in refusal(state, request)
        for request in (trainer("t"), load(saver="t", home="loop")):
            assert not state.deadlock(request)
        # This one waits without its thread.
        assert not state.deadlock(capture(saver="loop", home="loop"))
    assert not after(trainer("loop"), load(home="loop")).deadlock(trainer("loop"))


def test_waiting_behind_oneself_is_seen() -> None:
    running = capture("a")
    waiting = after(running, trainer("t"))
    for request in (trainer("t"), load(saver="t", home="loop")):
        assert "behind its own request" in refusal(waiting, request)
    assert not waiting.deadlock(load(home="loop"))
    assert not waiting.deadlock(capture(saver="t"))
    assert not after(running, state=waiting).deadlock(load(within="t", saver="t"))


# ---- holds of saves ----


def begun(lock: StateLock, thread: int = -1) -> LockHold:
    """The hold of a save that a thread asked for; its loop's thread is none of the test's."""
    hold = DaemonThreads().submit(LockHold, lock, thread).result(PATIENT)
    assert hold.begin()
    return hold


async def taken(lock: StateLock) -> LockHold:
    """The hold of a save whose loop is this one."""
    hold = LockHold(lock, threading.get_ident())
    await hold.take(PATIENT, awaited=True)
    return hold


def test_a_guarded_step_of_the_thread_that_captures_takes_no_hold(lock: StateLock) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))])
    guard(lock, optimizer)
    hold = LockHold(lock, -1)
    assert hold.begin()
    with hold.here():
        optimizer.step()
        assert [use.side for use in lock.statistics().holders] == ["capturing"]
    hold.end()
    assert is_free(lock)


def test_a_capture_is_released_from_any_thread_and_once(
    lock: StateLock, threads: DaemonThreads
) -> None:
    saver = threading.get_ident()
    first, other = begun(lock, saver), begun(lock, saver)
    # The saver goes on training while the copy runs elsewhere: it waits, which is no misuse.
    with pytest.raises(StateLockTimeout), lock.mutating(timeout=0):
        pass
    first.release()
    first.release()
    with pytest.raises(StateLockTimeout), lock.mutating(timeout=0):
        pass
    threads.submit(other.release).result(PATIENT)
    with lock.mutating(timeout=0):
        other.release()
        assert lock.statistics().holders


def test_who_captures_saves_past_a_trainer_that_waits_for_it(
    lock: StateLock, threads: DaemonThreads
) -> None:
    with lock.capturing():
        trainer = threads.waiting(lock, noted, lock.mutating(), [], "")
        begun(lock, threading.get_ident()).release()
        asyncio.run(taken(lock)).release()
    trainer.result(PATIENT)


async def test_the_thread_of_a_task_that_captures_captures_again(
    lock: StateLock, threads: DaemonThreads
) -> None:
    hold = await taken(lock)
    trainer = threads.submit(noted, lock.mutating(), [], "")
    await anyio.to_thread.run_sync(lambda: until(lock, waiters=1))
    with lock.capturing(timeout=0):
        assert not trainer.done()
    hold.end()
    await asyncio.wrap_future(trainer)


async def test_a_task_cancelled_as_it_is_granted_holds_nothing(
    lock: StateLock, threads: DaemonThreads
) -> None:
    trainer = Held(threads, lock.mutating)
    waiting = asyncio.create_task(taken(lock))
    await anyio.to_thread.run_sync(lambda: until(lock, waiters=1))
    # The grant happens while this coroutine keeps the loop, so the task cannot have seen it.
    trainer.end()
    assert [use.side for use in lock.statistics().holders] == ["capturing"]
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert is_free(lock)


async def test_a_task_sees_the_misuse_of_its_own_thread(lock: StateLock) -> None:
    with lock.mutating(), pytest.raises(LockMisuse):
        await taken(lock)
    hold = await taken(lock)
    with pytest.raises(LockMisuse), lock.mutating():
        pass
    hold.end()
    assert is_free(lock)


def test_a_closed_loop_does_not_fail_the_trainer(lock: StateLock, threads: DaemonThreads) -> None:
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda loop, context: None)

    async def begin() -> asyncio.Task[None]:
        hold = LockHold(lock, -1)
        waiting = asyncio.create_task(hold.take(PATIENT, awaited=True))
        await asyncio.sleep(0)
        return waiting

    trainer = Held(threads, lock.mutating)
    task = loop.run_until_complete(begin())
    assert lock.statistics().waiters
    loop.close()
    trainer.end()
    assert not task.done()
    del task
    gc.collect()
    assert is_free(lock)


# ---- holds of loads ----


def test_a_load_outlives_the_thread_that_asked_for_it(
    lock: StateLock, threads: DaemonThreads
) -> None:
    holds: list[LoadHold] = []
    asker = threading.Thread(target=lambda: holds.append(LoadHold(lock, None)))
    asker.start()
    asker.join(PATIENT)
    asyncio.run(holds[0].take())
    with pytest.raises(StateLockTimeout):
        threads.submit(noted, lock.capturing(timeout=0), [], "").result(PATIENT)
    holds[0].end()
    assert is_free(lock)


class Reads(StreamFence):
    """Reads of a device, which a test ends."""

    def __init__(self) -> None:
        super().__init__("", None)
        self.asked, self.over = threading.Event(), threading.Event()

    def passed(self) -> bool:
        self.asked.set()
        return self.over.is_set()

    def hold_back(self) -> None:
        raise AssertionError("it is not one thread's device that a load writes by")


async def test_a_load_waits_for_what_devices_still_read(lock: StateLock) -> None:
    for cancelled in (True, False):
        reads, hold = Reads(), LoadHold(lock, None)
        begun(lock).release([reads])
        task = asyncio.create_task(hold.take())
        assert await anyio.to_thread.run_sync(reads.asked.wait, PATIENT)
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


async def test_a_step_behind_a_load_breaks_a_deferred_capture(
    lock: StateLock, threads: DaemonThreads
) -> None:
    capture = begun(lock)
    hold = LoadHold(lock, None)
    task = asyncio.create_task(hold.take())
    await anyio.to_thread.run_sync(lambda: until(lock, waiters=1))
    step = threads.submit(noted, lock.mutating(), [], "")
    await anyio.to_thread.run_sync(lambda: until(lock, waiters=2))
    capture.defer(0.001)
    await task
    hold.end()
    await asyncio.wrap_future(step)
    assert is_free(lock)


# ---- frames of steps ----


def mark_of_a_frame_that_ended() -> FrameMark:
    return FrameMark.of(sys._getframe())


def test_a_frame_is_seen_from_the_calls_below_it_until_it_ends() -> None:
    mark = FrameMark.of(sys._getframe())
    assert not (lambda: mark.is_gone(sys._getframe()))()
    assert mark_of_a_frame_that_ended().is_gone(sys._getframe())
    assert mark.is_gone(None)


def test_another_function_at_the_same_address_is_not_the_frame() -> None:
    reused = FrameMark(id(sys._getframe()), mark_of_a_frame_that_ended.__code__)
    assert reused.is_gone(sys._getframe())


def test_a_stack_that_ends_in_a_generator_proves_nothing() -> None:
    def numbers() -> Iterator[int]:
        yield 1

    generator = numbers()
    next(generator)
    # This is what is seen of a stack whose top yields while it is being looked at.
    suspended = generator.gi_frame  # type: ignore[attr-defined]
    assert suspended.f_back is None
    assert not FrameMark.of(sys._getframe()).is_gone(suspended)


COLLECTING = """
import gc, sys, threading, time
from ckpipe.lock.holds import FrameMark, Hold, Side

class Lets:
    def __init__(self):
        self.itself = self

    def __del__(self):
        time.sleep(0)  # lets another thread run

def start_threads():
    while not ended.is_set():
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()

ended = threading.Event()
other = threading.Thread(target=ended.wait)
other.start()
starting = [threading.Thread(target=start_threads, daemon=True) for _ in range(3)]
for each in starting:
    each.start()
mark = FrameMark.of(sys._getframe())
hold = Hold(side=Side.MUTATING, thread=other, ident=other.ident, mark=mark)
gc.set_threshold(5)
for _ in range(20_000):
    Lets()
    assert hold.is_over()
ended.set()
print("ended")
"""


def test_a_look_at_a_thread_beside_collections_and_new_threads_ends() -> None:
    command = [sys.executable, "-c", COLLECTING]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "ended\n"
