"""The newest checkpoint without NaN stays under every rule, and no wrong summary deletes it."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckpipe
from ckpipe import errors
from ckpipe.retention import Candidate, KeepBest, KeepEvery, KeepIf, KeepLast, KeepWithin, decide
from tests.support.stored_files import document_of, flip, sealed

NOW = datetime(2026, 1, 1, tzinfo=UTC)
RULES = [
    KeepLast(0), KeepLast(1), KeepLast(2), KeepEvery(steps=3) & KeepLast(2), KeepBest("loss"),
    KeepWithin(timedelta(seconds=5)), KeepIf(lambda _: False),
]  # fmt: skip


@given(st.lists(st.sampled_from([0, 0, 1, 7]), max_size=8), st.sampled_from(RULES))
def test_the_newest_without_nan_stays_beside_what_the_rule_keeps(
    counts: list[int], rule: ckpipe.Rule
) -> None:
    def candidates(counts: list[int]) -> list[Candidate]:
        return [
            Candidate(f"{step}", step, "a", 0, NOW - timedelta(seconds=20 - step), {}, nan=nan)
            for step, nan in enumerate(counts)
        ]

    every = candidates(counts)
    decision = decide(every, rule, now=NOW)
    plain = decide(candidates([0] * len(counts)), rule, now=NOW)
    sound = [each.id for each in every if not each.nan][-1:]
    assert {*decision.keep} == {*plain.keep, *sound}
    for name in {*decision.keep} - {*plain.keep}:
        assert decision.reasons[name] == "the newest without NaN"
    again = decide([each for each in every if each.id in decision.keep], rule, now=NOW)
    assert again.remove == ()


def state(nan: bool) -> dict[str, Any]:
    return {"a": torch.tensor([math.nan if nan else 1.0])}


def saved(root: Path, marks: str, **settings: Any) -> list[str]:
    """Save a step for each mark, with NaN for ``x``; return the ids."""
    with ckpipe.SyncPipeline(root, **settings) as pipeline:
        ids = [
            pipeline.save(state(mark == "x"), step=step).wait().id
            for step, mark in enumerate(marks)
        ]
        if settings:
            pipeline.prune()
    return ids


def complete(root: Path) -> list[int]:
    return sorted(int(path.name[5:17]) for path in root.glob("step-*.json"))


@pytest.mark.parametrize(
    ("marks", "left"),
    [("..", [1]), (".xxx", [0, 3]), ("..x.xx", [3, 5]), ("xxx", [2]), (".x.", [2])],
)
def test_a_run_that_diverges_leaves_its_last_good_one(
    tmp_path: Path, marks: str, left: list[int]
) -> None:
    saved(tmp_path, marks, keep_last=1)
    assert complete(tmp_path) == left
    with ckpipe.SyncPipeline(tmp_path, keep_last=1) as pipeline:  # it knows no index yet
        decision = pipeline.prune()
        assert len(decision.keep) == len(left)
        assert decision.remove == ()


def test_a_run_goes_on_from_its_last_good_one(tmp_path: Path) -> None:
    saved(tmp_path, "..xx", keep_last=1)
    with ckpipe.SyncPipeline(tmp_path, keep_last=1) as pipeline:
        target = state(True)
        result = pipeline.load(target, without_nan=True)
        assert result is not None
        assert (result.step, target["a"].item()) == (1, 1.0)
        pipeline.save(target, step=2).wait()
        pipeline.prune()
        decision = pipeline.prune()
        assert [int(each[5:17]) for each in decision.keep] == [2, 1]
        assert decision.reasons[decision.keep[1]] == "this run resumed from it"


def test_force_alone_deletes_it(tmp_path: Path) -> None:
    ids = saved(tmp_path, "..xx")
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        with pytest.raises(errors.UsageError, match=r"protected: the newest without NaN.*--force"):
            pipeline.delete(ids[1])
        pipeline.delete(ids[0])
        pipeline.delete(ids[2])
        pipeline.delete(ids[1], force=True)
        assert [each.step for each in pipeline.steps()] == [3]


def forge(root: Path, name: str, nan: int) -> None:
    """Make the summary of a checkpoint tell another count."""
    path = root / ".ckpipe" / "digests" / f"{name}.json"
    document = document_of(path.read_bytes())
    document.pop("nan", None)
    path.write_bytes(sealed(document | ({"nan": nan} if nan else {})))


@pytest.mark.parametrize(
    "told", ["...x.xxxx", "...xx....", "xxxxxxxxx", ".........", "xxx..xxxx", "..x..xxxx"]
)
@pytest.mark.parametrize("marks", ["...xxxxxx", "..xx.xxx.", "xxxxxxxxx"])
def test_no_wrong_summary_deletes_it(tmp_path: Path, marks: str, told: str) -> None:
    """More checkpoints than those whose indexes a prune reads anyway."""
    ids = saved(tmp_path, marks)
    for name, mark in zip(ids, told, strict=True):
        forge(tmp_path, name, int(mark == "x"))
    with ckpipe.SyncPipeline(tmp_path, keep_last=2) as pipeline:
        pipeline.prune()
    left = complete(tmp_path)
    assert {*left} >= {7, 8, *[step for step, mark in enumerate(marks) if mark == "."][-1:]}
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        if "." not in marks:
            with pytest.raises(errors.CheckpointNotFound, match="has NaN"):
                pipeline.load(without_nan=True)
        else:
            result = pipeline.load(without_nan=True)
            assert result is not None
            assert marks[result.step] == ".", "and of those that summaries do not hide the newest"


def test_an_index_that_cannot_be_read_takes_its_place_from_nobody(tmp_path: Path) -> None:
    ids = saved(tmp_path, "...xx")
    index = tmp_path / f"{ids[2]}.json"
    index.write_bytes(index.read_bytes()[:-9])
    with ckpipe.SyncPipeline(tmp_path, keep_last=1) as pipeline:
        decision = pipeline.prune()
        assert [int(each[5:17]) for each in decision.keep] == [4, 2, 1]
        assert decision.reasons[ids[1]] == "the newest without NaN"
        with pytest.raises(errors.CorruptCheckpoint):
            pipeline.load(without_nan=True)
        with pytest.warns(RuntimeWarning, match="is damaged"):
            result = pipeline.load(without_nan=True, fallback=True)
        assert result is not None
        assert result.step == 1


def test_a_fallback_tells_of_an_index_that_it_passes_over(tmp_path: Path) -> None:
    """A damaged index may be the last one without NaN: no load says that all have some."""
    ids = saved(tmp_path, "..x")
    for number, left in ((1, 0), (0, None)):
        index = tmp_path / f"{ids[number]}.json"
        index.write_bytes(index.read_bytes()[:-9])
        with ckpipe.SyncPipeline(tmp_path) as pipeline:
            if left is None:
                with (
                    pytest.raises(errors.CorruptCheckpoint),
                    pytest.warns(RuntimeWarning, match="is damaged"),
                ):
                    pipeline.load(without_nan=True, fallback=True)
                continue
            with pytest.warns(RuntimeWarning, match="is damaged"):
                result = pipeline.load(without_nan=True, fallback=True)
            assert result is not None
            assert result.report is not None
            assert result.step == left
            assert [*result.report.damaged] == [ids[number]]


def test_a_fallback_passes_over_nan_too(tmp_path: Path) -> None:
    ids = saved(tmp_path, ".x.xx")
    file = next((tmp_path / ids[2]).glob("*.safetensors"))
    flip(file, -1)
    with (
        ckpipe.SyncPipeline(tmp_path) as pipeline,
        pytest.warns(RuntimeWarning, match="is damaged"),
    ):
        result = pipeline.load(without_nan=True, fallback=True)
    assert result is not None
    assert result.step == 0


def test_calls_that_name_what_to_load_are_refused(tmp_path: Path) -> None:
    saved(tmp_path / "run", ".x")
    torch.save(state(False), tmp_path / "other.pt")
    with ckpipe.SyncPipeline(tmp_path / "run") as pipeline:
        for named in ({"step": 1}, {"source": tmp_path / "other.pt"}):
            with pytest.raises(errors.UsageError, match="without_nan chooses"):
                pipeline.load(without_nan=True, **named)
        with pytest.raises(errors.UsageError, match="without_nan is True or False"):
            pipeline.load(without_nan="yes")  # type: ignore[arg-type]
    assert ckpipe.load(tmp_path / "run", without_nan=True).step == 0
    with pytest.raises(errors.UsageError, match="without_nan chooses"):
        ckpipe.load(tmp_path / "other.pt", without_nan=True)


def test_a_root_of_nan_and_an_empty_one(tmp_path: Path) -> None:
    saved(tmp_path / "run", "xx")
    with pytest.raises(errors.CheckpointNotFound, match=r"Every complete checkpoint .* has NaN"):
        ckpipe.load(tmp_path / "run", without_nan=True)
    with ckpipe.SyncPipeline(tmp_path / "new") as pipeline:
        assert pipeline.load(state(False), without_nan=True) is None
    (tmp_path / "empty").mkdir()
    with pytest.raises(errors.CheckpointNotFound):
        ckpipe.load(tmp_path / "empty", without_nan=True)
