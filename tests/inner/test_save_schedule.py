"""When to save, decided without a pipeline: marks, clocks, appointments, signals."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpipe.preemption import SignalWatch, StopRequest
from ckpipe.ranks.schedule import (
    Pace,
    SaveSchedule,
    SaveStepAgreement,
)


def saved_at(asked: list[int], every: int, begin: int = 0) -> list[int]:
    schedule = SaveSchedule(every, None)
    schedule.begin_at(begin)
    saves = []
    for step in asked:
        if schedule.due(step):
            saves.append(step)
            schedule.begin_at(step)
    return saves


def test_marks_are_the_multiples() -> None:
    assert saved_at(list(range(12)), 5) == [5, 10]
    assert saved_at(list(range(7, 22)), 5, begin=6) == [10, 15, 20]


@given(st.sets(st.integers(0, 300), min_size=1), st.integers(1, 40))
def test_a_mark_passed_is_made_up_for_once_at_the_next_step(asked: set[int], every: int) -> None:
    steps = sorted(asked)
    expected = []
    for before, step in zip([0, *steps], steps, strict=False):
        if any(mark % every == 0 for mark in range(before + 1, step + 1)):
            expected.append(step)
    assert saved_at(steps, every) == expected


def test_asking_changes_nothing_and_a_save_stays_due() -> None:
    schedule = SaveSchedule(10, None)
    assert [schedule.due(step) for step in (9, 10, 10, 11, 9)] == [False, True, True, True, False]
    schedule.begin_at(11)
    assert not schedule.due(12)


def test_seconds_count_from_the_last_save() -> None:
    now = 100.0
    schedule = SaveSchedule(None, 60, clock=lambda: now)
    now = 159.9
    assert not schedule.due(1)
    now = 160.0
    assert schedule.due(2)
    schedule.begin_at(2)
    assert not schedule.due(3)
    now = 220.0
    assert schedule.due(4)


class WatchedAgreement(SaveStepAgreement):
    """Tells when a trainer has to wait; the lock is held then, until it waits or goes on."""

    def __init__(self) -> None:
        super().__init__(patience=600)
        self.waits = threading.Event()

    def _undecided(self, step: int) -> list[str]:
        undecided = super()._undecided(step)
        if undecided:
            self.waits.set()
        return undecided


def test_a_trainer_waits_at_its_bound_until_it_is_decided() -> None:
    agreement = WatchedAgreement()
    assert agreement.ask(7) == frozenset()
    bound = agreement.propose("end", 10)
    assert bound == 8
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(agreement.ask, bound)
        assert agreement.waits.wait(600)
        assert agreement.decide("time", bound), "it has not gone on to that step"
        assert agreement.decide("end", 9)
        assert asked.result(600) == {"time"}
    agreement.consume(8)
    assert agreement.ask(9) == agreement.ask(10) == {"end"}
    assert agreement.has("end")
    agreement.consume(10)
    assert not agreement.has("end")
    assert agreement.ask(11) == frozenset()


def test_a_trainer_waits_no_longer_than_its_patience(caplog: pytest.LogCaptureFixture) -> None:
    agreement = SaveStepAgreement(patience=0.01)
    agreement.propose("end", 10)
    assert agreement.ask(0) == frozenset()
    assert "did not agree" in caplog.text
    assert not agreement.decide("end", 0), "it has been left behind"
    assert agreement.decide("end", 1)
    assert agreement.ask(1) == {"end"}


def test_the_pace_tells_how_far_ahead_a_bound_lies() -> None:
    now = 0.0
    pace = Pace(clock=lambda: now)
    assert pace.ahead(100) == 1
    for step in range(0, 50, 5):
        pace.note(step)
        now += 0.5
    assert pace.ahead(3) == 30
    assert pace.ahead(0.001) == 1
    pace.note(3)
    assert pace.ahead(3) == 1, "after a rollback it is measured anew"


MOVES = st.lists(st.tuples(st.integers(0, 3), st.floats(0.001, 9), st.integers(0, 50)))


@given(MOVES, st.floats(0, 5))
def test_no_rank_has_passed_what_is_decided(
    moves: list[tuple[int, float, int]], ahead: float
) -> None:
    now = 0.0
    agreements = [SaveStepAgreement(0, clock=lambda: now) for _ in range(4)]
    steps, bounds = [0] * 4, dict[int, int]()
    for rank, seconds, by in [*moves, *((rank, 1, 0) for rank in range(4))]:
        now += seconds
        if by == 0 and rank not in bounds:
            bounds[rank] = agreements[rank].propose("time", ahead)
        elif steps[rank] < bounds.get(rank, 10**9):
            assert agreements[rank].ask(steps[rank]) == frozenset()
            steps[rank] += max(1, by)
    decided = max(bounds.values())
    for rank, agreement in enumerate(agreements):
        assert agreement.decide("time", decided), rank
        assert agreement.ask(decided + rank) == {"time"}


def send() -> None:
    os.kill(os.getpid(), signal.SIGUSR2)


def test_time_left_counts_from_the_first_time_it_was_told() -> None:
    now = 10.0
    told = StopRequest(clock=lambda: now)
    assert told.seconds_left(30) is None
    assert not told.answer()
    told.tell()
    now = 15.0
    told.tell()
    assert (told.seconds_left(30), told.seconds_left(None)) == (25, None)
    assert told.wants_save
    assert told.answer()
    assert not told.wants_save
    now = 50.0
    assert told.seconds_left(30) == 0


def test_default_action_is_held_back_only_while_watching() -> None:
    child = os.fork()
    if child == 0:  # pragma: no cover
        watch = SignalWatch(["SIGUSR2"], lambda: None)
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)
        watch.begin()
        ours = signal.getsignal(signal.SIGUSR2)
        send()
        watch.end()
        signal.signal(signal.SIGUSR2, ours)  # somebody has kept it, and puts it back
        send()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGUSR2
