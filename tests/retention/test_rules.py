"""Retention against a naive model, and the promises that its module states."""

from __future__ import annotations

import json
import math
import pickle
import random
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ckpipe.errors import SettingsError
from ckpipe.retention import (
    AllOf,
    AnyOf,
    Candidate,
    KeepBest,
    KeepEvery,
    KeepIf,
    KeepLast,
    KeepWithin,
    Rule,
    decide,
    from_data,
)

NOW = datetime(2025, 6, 1, tzinfo=UTC)
NAN = float("nan")


def checkpoint(step: int, attempt: str = "a", count: int = 0, **fields: Any) -> Candidate:
    fields.setdefault("created", NOW - timedelta(hours=1))
    return Candidate(f"{step}.{attempt}.{count}", step, attempt, count, **fields)


def even(candidate: Candidate) -> bool:
    return candidate.step % 2 == 0


metrics = st.dictionaries(
    st.sampled_from(["loss", "score"]),
    st.sampled_from([NAN, math.inf, -math.inf, -1.0, 0.0, 0.5, 2]),
)
candidates = st.lists(
    st.builds(
        checkpoint,
        step=st.integers(0, 12),
        attempt=st.sampled_from(["a", "b"]),
        count=st.integers(0, 1),
        created=st.integers(-600, 10).map(lambda s: NOW + timedelta(seconds=s)),
        metrics=metrics,
        final=st.booleans(),
    ),
    max_size=12,
    unique_by=lambda each: each.id,
)
plain_leaves = st.one_of(
    st.builds(KeepLast, st.integers(0, 5)),
    st.builds(KeepLast, st.integers(1, 4), st.sampled_from(["loss", "score"])),
    st.builds(lambda steps: KeepEvery(steps=steps), st.integers(1, 7)),
    st.builds(lambda seconds: KeepEvery(seconds=seconds), st.floats(1, 300)),
    st.builds(
        KeepBest,
        st.sampled_from(["loss", "score"]),
        st.sampled_from(["min", "max"]),
        st.integers(1, 4),
    ),
    st.builds(KeepWithin, st.timedeltas(timedelta(seconds=1), timedelta(seconds=600))),
)
leaves = st.one_of(plain_leaves, st.just(KeepIf(even)))


def composed(children: st.SearchStrategy[Rule]) -> st.SearchStrategy[Rule]:
    pair = st.tuples(children, children)
    return st.one_of(pair.map(lambda p: p[0] | p[1]), pair.map(lambda p: p[0] & p[1]))


rules = st.recursive(leaves, composed, max_leaves=4)
plain_rules = st.recursive(plain_leaves, composed, max_leaves=4)
unions = st.lists(leaves, min_size=1, max_size=3).map(lambda parts: from_data(parts))


def wanted(rule: Rule, each: Candidate, all_of_them: Sequence[Candidate]) -> bool:
    """Whether a rule keeps one checkpoint, said in words of that checkpoint alone."""
    match rule:
        case AnyOf(parts):
            return any(wanted(part, each, all_of_them) for part in parts)
        case AllOf(parts):
            return all(wanted(part, each, all_of_them) for part in parts)
        case KeepLast(0):
            return each.final
        case KeepLast(n, str(metric)):
            having = [one for one in all_of_them if not math.isnan(one.metrics.get(metric, NAN))]
            last = max((one.order for one in having), default=None)
            newer = sum(each.order < one.order != last for one in all_of_them)
            return each.order == last or newer < n - (last is not None)
        case KeepLast(n):
            return sum(other.order > each.order for other in all_of_them) < n
        case KeepWithin(period):
            return each.created >= NOW - period
        case KeepIf(predicate):
            return predicate(each)
        case KeepBest():
            return wins(rule, each, all_of_them)
        case KeepEvery():
            return opens_its_stretch(rule, each, all_of_them)
    raise AssertionError(rule)


def wins(rule: KeepBest, each: Candidate, all_of_them: Sequence[Candidate]) -> bool:
    def score(one: Candidate) -> float:
        return one.metrics.get(rule.metric, NAN) * (1 if rule.mode == "min" else -1)

    def beats(other: Candidate) -> bool:
        return score(other) < score(each) or (
            score(other) == score(each) and other.order > each.order
        )

    if all(math.isnan(score(one)) for one in all_of_them):
        return True  # there is nothing to judge by
    return not math.isnan(score(each)) and sum(map(beats, all_of_them)) < rule.n


def opens_its_stretch(rule: KeepEvery, each: Candidate, all_of_them: Sequence[Candidate]) -> bool:
    def position(one: Candidate) -> float:
        return one.step if rule.steps is not None else one.created.timestamp()

    length = rule.steps or rule.seconds
    assert length is not None
    mates = [one for one in all_of_them if position(one) // length == position(each) // length]
    first = min(map(position, mates))
    return each.order == max(one.order for one in mates if position(one) == first)


@given(candidates, rules, st.sets(st.integers(0, 11)))
def test_decision_is_that_of_the_naive_model(
    checkpoints: list[Candidate], rule: Rule, pinned: set[int]
) -> None:
    protected = {checkpoints[i].id: "pinned" for i in pinned if i < len(checkpoints)}
    decision = decide(checkpoints, rule, now=NOW, protected=protected)
    newest = max((each.order for each in checkpoints), default=None)
    expected = {
        each.id
        for each in checkpoints
        if wanted(rule, each, checkpoints) or each.id in protected or each.order == newest
    }
    assert set(decision.keep) == expected
    assert sorted(decision.keep + decision.remove) == sorted(each.id for each in checkpoints)
    assert set(decision.reasons) == {each.id for each in checkpoints}
    assert all(decision.reasons.values())


@given(candidates, rules, st.randoms(use_true_random=False))
def test_order_of_the_input_does_not_matter(
    checkpoints: list[Candidate], rule: Rule, shuffler: random.Random
) -> None:
    shuffled = list(checkpoints)
    shuffler.shuffle(shuffled)
    assert decide(shuffled, rule, now=NOW) == decide(checkpoints, rule, now=NOW)


def left_by_an_interrupted_prune(
    checkpoints: list[Candidate], rule: Rule, done: float
) -> tuple[set[str], list[Candidate]]:
    decision = decide(checkpoints, rule, now=NOW)
    removed = decision.remove[: round(done * len(decision.remove))]
    return set(decision.keep), [each for each in checkpoints if each.id not in removed]


@given(candidates, rules, st.floats(0, 1))
@example([checkpoint(step) for step in range(5)], KeepLast(2), 1.0)
def test_deciding_again_never_loses_what_was_kept(
    checkpoints: list[Candidate], rule: Rule, done: float
) -> None:
    kept, left = left_by_an_interrupted_prune(checkpoints, rule, done)
    again = decide(left, rule, now=NOW)
    assert kept <= set(again.keep)
    if done == 1:
        assert again.remove == ()


@given(candidates, unions, st.floats(0, 1))
def test_interrupted_prune_ends_the_same_without_intersections(
    checkpoints: list[Candidate], rule: Rule, done: float
) -> None:
    kept, left = left_by_an_interrupted_prune(checkpoints, rule, done)
    assert set(decide(left, rule, now=NOW).keep) == kept


@given(plain_rules)
def test_plain_form_round_trips_through_json(rule: Rule) -> None:
    assert from_data(json.loads(json.dumps(rule.to_data()))) == rule
    assert pickle.loads(pickle.dumps(rule)) == rule
    assert eval(repr(rule), globals() | {"datetime": __import__("datetime")}) == rule


def test_no_rule_keeps_all() -> None:
    decision = decide([checkpoint(1), checkpoint(2)], None, now=NOW)
    assert decision.keep == ("2.a.0", "1.a.0")
    assert decision.remove == ()
    assert decision.reasons == {"2.a.0": "the newest", "1.a.0": "no rule is set"}


def test_removal_begins_with_the_oldest() -> None:
    decision = decide([checkpoint(step) for step in (3, 1, 2, 4)], KeepLast(1), now=NOW)
    assert decision.remove == ("1.a.0", "2.a.0", "3.a.0")


def test_keep_last_zero_keeps_final_ones_and_still_the_newest() -> None:
    steps = [checkpoint(1), checkpoint(2, final=True), checkpoint(3), checkpoint(4)]
    decision = decide(steps, KeepLast(0), now=NOW)
    assert decision.keep == ("4.a.0", "2.a.0")
    assert decision.reasons["2.a.0"] == "a final checkpoint"
    assert decision.reasons["1.a.0"] == "not a final checkpoint"


def test_metric_that_no_checkpoint_has_removes_nothing() -> None:
    steps = [checkpoint(1, metrics={"loss": NAN}), checkpoint(2), checkpoint(3)]
    decision = decide(steps, KeepBest("loss"), now=NOW)
    assert decision.keep == ("3.a.0", "2.a.0", "1.a.0")
    assert decision.reasons["1.a.0"] == "no checkpoint has a number for loss"
    assert decision.missing_metrics == ("loss",)
    assert decide(steps, KeepLast(1) | KeepBest("loss"), now=NOW).remove == ()
    assert decide(steps, KeepLast(2) & KeepBest("loss"), now=NOW).remove == ("1.a.0",)
    judged = decide([*steps, checkpoint(4, metrics={"loss": 1})], KeepBest("loss"), now=NOW)
    assert (judged.keep, judged.missing_metrics) == (("4.a.0",), ())


def test_metric_too_large_for_a_float_is_compared() -> None:
    steps = [checkpoint(1, metrics={"tokens": 10**400}), checkpoint(2, metrics={"tokens": 5})]
    decision = decide([*steps, checkpoint(3)], KeepBest("tokens", "max"), now=NOW)
    assert decision.keep == ("3.a.0", "1.a.0")


def test_reasons_name_the_rules_that_decided() -> None:
    rule = (KeepLast(2) | KeepEvery(steps=10)) & KeepWithin(timedelta(hours=2))
    old = checkpoint(0, created=NOW - timedelta(days=1))
    steps = [old, *(checkpoint(step) for step in (3, 10, 11, 12))]
    reasons = decide(steps, rule, now=NOW, protected={"3.a.0": "pinned"}).reasons
    assert reasons == {
        "12.a.0": "the newest",
        "11.a.0": "among the newest 2 and written within the last 2:00:00",
        "10.a.0": "the first of its 10 steps and written within the last 2:00:00",
        "3.a.0": "pinned",
        "0.a.0": "not written within the last 2:00:00",
    }


def test_repeated_id_is_refused() -> None:
    with pytest.raises(ValueError, match="stands twice"):
        decide([checkpoint(1), checkpoint(1)], None, now=NOW)


def test_what_a_predicate_raises_comes_through() -> None:
    with pytest.raises(ZeroDivisionError):
        decide([checkpoint(0)], KeepIf(lambda each: bool(1 / each.step)), now=NOW)


def test_rules_are_values_that_flatten_and_read_well() -> None:
    a, b, c = KeepLast(3), KeepEvery(steps=1000), KeepBest("loss", n=2)
    assert (a | b) | c == a | (b | c)
    assert hash(a & b) == hash(KeepLast(3) & KeepEvery(steps=1000))
    assert a != KeepLast(4)
    assert repr((a | b) & c) == (
        "(KeepLast(n=3) | KeepEvery(steps=1000)) & KeepBest(metric='loss', n=2)"
    )
    with pytest.raises(TypeError):
        a | 3  # type: ignore[operator]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (5, "is a dict with a 'keep'"),
        ([], "needs at least one rule"),
        ({"n": 3}, "not None"),
        ({"keep": ["last"]}, "is one of last, every"),
        ({"keep": "lest", "n": 3}, "not 'lest'"),
        ({"keep": "last"}, "needs 'n'"),
        ({"keep": "last", "n": "3"}, "whole number of at least 0, not '3'"),
        ({"keep": "last", "n": True}, "whole number"),
        ({"keep": "last", "n": -1}, "not -1"),
        ({"keep": "last", "n": 0, "including": "loss"}, "at least 1, not 0"),
        ({"keep": "last", "n": 1, "including": ""}, "name of a metric"),
        ({"keep": "last", "n": 1, "including": 5}, "name of a metric, not 5"),
        ({"keep": "every"}, "either steps or seconds"),
        ({"keep": "every", "steps": 5, "seconds": 5}, "either steps or seconds"),
        ({"keep": "every", "steps": 0}, "at least 1, not 0"),
        ({"keep": "every", "seconds": NAN}, "not nan"),
        ({"keep": "every", "step": 5}, "no 'step'. The nearest valid name is steps"),
        ({"keep": "best", "metric": ""}, "name of a metric"),
        ({"keep": "best", "metric": "loss", "mode": "least"}, "'min' or 'max'"),
        ({"keep": "best", "metric": "loss", "n": 0}, "at least 1"),
        ({"keep": "within", "seconds": 0}, "positive timedelta"),
        ({"keep": "within", "seconds": "day"}, "number of at least 0"),
        ({"keep": "within", "seconds": 1e30}, "cannot reach back"),
        ({"keep": "any_of", "rules": 3}, "list"),
        ({"keep": "all_of", "rules": [{"keep": "last", "n": -1}]}, "not -1"),
    ],
)
def test_data_that_is_no_rule_is_refused(data: Any, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        from_data(data)


def test_python_function_has_no_plain_form() -> None:
    with pytest.raises(SettingsError, match="Python function"):
        (KeepLast(1) | KeepIf(even)).to_data()
