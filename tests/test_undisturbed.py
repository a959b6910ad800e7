"""What a loop does undisturbed is taken from before and after a save, if these agree."""

from __future__ import annotations

import itertools

import pytest
from undisturbed import MOST_TRIES, Undisturbed, mean_step, steady, steps


def test_steps_are_timed_one_by_one_until_it_is_over() -> None:
    made = list[int]()
    taken = steps(lambda: made.append(1), lambda seconds: len(made) == 5)
    assert len(taken) == len(made) == 5
    assert all(seconds > 0 for seconds in taken)


def test_mean_is_of_at_least_the_time_that_was_asked_for() -> None:
    made = list[int]()
    mean = mean_step(lambda: made.append(1), 0.01)
    assert mean * len(made) >= 0.01


def test_speed_between_two_stretches_is_taken_to_be_between_theirs() -> None:
    found = Undisturbed(2.0, 4.0)
    assert found.step == 3.0
    assert found.change == Undisturbed(4.0, 2.0).change == 2.0


def test_turn_is_repeated_while_the_machine_changes() -> None:
    turns = iter([Undisturbed(1.0, 1.6), Undisturbed(1.6, 1.0), Undisturbed(1.0, 1.01)])
    assert steady(lambda: next(turns), lambda turn: turn) == Undisturbed(1.0, 1.01)
    assert not list(turns)


def test_steadiest_turn_counts_where_none_is_steady() -> None:
    factors = itertools.count(3, -0.1)
    tried = list[Undisturbed]()

    def turn() -> Undisturbed:
        tried.append(Undisturbed(1.0, next(factors)))
        return tried[-1]

    assert steady(turn, lambda each: each) is tried[-1]
    assert len(tried) == MOST_TRIES


@pytest.mark.parametrize("change", [1.0, 1.04])
def test_steady_turn_is_taken_once(change: float) -> None:
    turns = iter([Undisturbed(1.0, change)])
    assert steady(lambda: next(turns), lambda turn: turn).change == change
