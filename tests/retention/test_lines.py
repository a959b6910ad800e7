"""Rules count the checkpoints of one line: a launch, and the launches that resumed from it."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpipe
from ckpipe import KeepBest, KeepEvery, KeepLast, KeepWithin, errors
from ckpipe.retention import KeepIf
from tests.support.rank_pipelines import ranks
from tests.support.settling import SettlingPipeline, settle

BEGINS = "has loaded nothing"


def state(step: int = 0) -> dict[str, Any]:
    return {"model": {"w": torch.full((4,), float(step))}, "step": step}


def complete(root: Path) -> list[int]:
    """The steps of all complete checkpoints, the oldest first."""
    with ckpipe.SyncPipeline(root, read_only=True) as pipeline:
        return [info.step for info in pipeline.steps() if info.complete]


def lines(root: Path) -> list[str | None]:
    """Their lines."""
    with ckpipe.SyncPipeline(root, read_only=True) as pipeline:
        return [info.line for info in pipeline.steps() if info.complete]


def launch(root: Path, *steps: int, load: dict[str, Any] | None = None, **fields: Any) -> None:
    """Run a program that may load and then saves some steps."""
    with SettlingPipeline(root, **fields) as pipeline:
        if load is not None:
            assert pipeline.load(**load) is not None
        for step in steps:
            pipeline.save(state(step), step=step, metrics={"loss": 1 / (step + 1)})
            settle(pipeline)


def launch_ranks(
    root: Path, name: str, *steps: int, world: int, loads: tuple[int, ...] = (), **fields: Any
) -> None:
    """Run a launch of several ranks, some of which load."""
    with ranks(str(root), world, attempt_id=name, **fields) as pipelines:
        for rank in loads:
            pipelines[rank].load(state(), step=30)
        for step in steps:
            for pipeline in pipelines:
                pipeline.save(state(step), step=step)
            for pipeline in pipelines:
                settle(pipeline)


RULES = {
    "last": KeepLast(2),
    "last including": KeepLast(2, including="loss"),
    "best": KeepBest("loss", n=2),
    "every": KeepEvery(steps=1000) | KeepLast(2),
    "all of": KeepLast(2) & KeepLast(3),
    "within": KeepWithin(timedelta(microseconds=1)),
    "if": KeepIf(lambda each: each.step == 0),
}
STARTS: list[dict[str, Any]] = [
    {},
    {"resume": "never"},
    {"resume": "must"},
    {"worker": "process"},
]


@pytest.mark.parametrize("fields", STARTS, ids=str)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.sample(3)
def test_a_launch_that_loaded_nothing_deletes_nothing_of_another(
    tmp_path: Path, rule: str, fields: dict[str, Any]
) -> None:
    if rule == "if" and "worker" in fields:
        pytest.skip("a Python function cannot cross to the worker")
    launch(tmp_path, 100, 200, 300)
    launch(tmp_path, 10, 20, 30, 40, retention=RULES[rule], **fields)
    assert complete(tmp_path)[:3] == [100, 200, 300]
    assert len(complete(tmp_path)) < 7, "it prunes its own"
    assert len(set(lines(tmp_path))) == 2


def weights(root: Path) -> None:
    """Load weights only, by a pipeline that only reads."""
    with ckpipe.SyncPipeline(root, read_only=True) as pipeline:
        pipeline.load(include=["model.*"])


JOINS: dict[str, tuple[dict[str, Any] | None, Callable[[Path], object]]] = {
    "the newest": ({}, lambda root: None),
    "a step": ({"step": 20}, lambda root: None),
    "with fallback": ({"fallback": True}, lambda root: None),
    "weights alone": ({"include": ["model.*"]}, lambda root: None),
    "ckpipe.load": (None, ckpipe.load),
    "a pipeline that reads": (None, weights),
    "a pipeline that saves nothing": (None, lambda root: launch(root, load={})),
}


@pytest.mark.parametrize("how", JOINS)
def test_a_launch_that_loads_goes_on_with_the_line(tmp_path: Path, how: str) -> None:
    load, before = JOINS[how]
    launch(tmp_path, 10, 20, 30, keep_last=2)
    before(tmp_path)
    launch(tmp_path, 40, 50, 60, load=load, keep_last=2)
    kept = 30 if load is None else load.get("step", 30)
    assert complete(tmp_path) == [kept, 50, 60], "what it resumed from, and its newest"
    launch(tmp_path, 70, 80, load={}, keep_last=2)
    assert complete(tmp_path) == [60, 70, 80]
    assert len(set(lines(tmp_path))) == 1


def test_a_load_from_elsewhere_joins_no_line(tmp_path: Path) -> None:
    launch(tmp_path / "base", 5)
    launch(tmp_path / "run", 100, 200)
    ckpipe.load(tmp_path / "base")
    launch(tmp_path / "run", 10, 20, 30, keep_last=1)
    assert complete(tmp_path / "run") == [100, 200, 30]


def test_what_another_program_wrote_joins_no_line(tmp_path: Path) -> None:
    torch.save(state(1), tmp_path / "weights.pt")
    root = tmp_path / "run"
    launch(root, 100, 200)
    launch(root, 10, 20, load={"source": tmp_path / "weights.pt"}, keep_last=1)
    assert complete(root) == [100, 200, 20]


def test_the_last_load_before_the_first_save_decides(tmp_path: Path) -> None:
    launch(tmp_path, 1, 2)
    launch(tmp_path, 10, 20)
    with SettlingPipeline(tmp_path, keep_last=1) as pipeline:
        pipeline.load(step=20)
        pipeline.load(step=2)
        pipeline.save(state(3), step=3)
        pipeline.load(step=20)  # later ones change nothing
        pipeline.save(state(21), step=21)
        pipeline.save(state(22), step=22)
        settle(pipeline)
    assert complete(tmp_path) == [10, 20, 22]


def test_two_launches_at_once_leave_each_other_alone(tmp_path: Path) -> None:
    one, two = (SettlingPipeline(tmp_path, keep_last=2) for _ in range(2))
    with one, two:
        for step in (1, 2, 3, 4):
            one.save(state(step), step=step)
            two.save(state(step), step=10 + step)
            settle(one)
            settle(two)
    assert sorted(complete(tmp_path)) == [3, 4, 13, 14]


def test_two_launches_of_one_line_keep_what_a_running_one_needs(tmp_path: Path) -> None:
    launch(tmp_path, 10, 20)
    one, two = SettlingPipeline(tmp_path), SettlingPipeline(tmp_path, keep_last=1)
    with one, two:
        one.load(step=10)
        running = one.save(state(11), step=11).wait()
        settle(one)
        lease = tmp_path / ".ckpipe" / "leases" / running.attempt.partition("Z-")[2] / "holder.0"
        lease.parent.mkdir(parents=True)  # as after the first minutes of a launch
        lease.write_text("{}")
        two.load(step=20)
        for step in (21, 22):
            two.save(state(step), step=step)
            settle(two)
        assert complete(tmp_path) == [10, 20, 11, 22], "what each resumed from, and its newest"


def test_going_back_and_falling_back_stay_in_the_line(tmp_path: Path) -> None:
    launch(tmp_path, 10, 20, 30)
    for path in tmp_path.glob("step-000000000030.*/*.safetensors"):
        path.write_bytes(b"damaged")
    with SettlingPipeline(tmp_path, keep_last=2) as pipeline:
        with pytest.warns(RuntimeWarning, match="damaged"):
            assert pipeline.load(fallback=True) is not None
        for step in (21, 22):
            pipeline.save(state(step), step=step)
        pipeline.load(step=20)
        for step in (15, 16, 17):
            pipeline.save(state(step), step=step)
            settle(pipeline)
    assert complete(tmp_path) == [20, 16, 17]
    assert len(set(lines(tmp_path))) == 1


def test_a_setting_counts_all_lines_together(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    launch(tmp_path, 100, 200, 300)
    launch(tmp_path, 10, 20, 30, retention={"keep_last": 2, "lines": "all"})
    assert complete(tmp_path) == [20, 30]
    assert BEGINS not in caplog.text


def test_the_first_save_of_a_line_beside_others_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    launch(tmp_path, 1, 2)
    launch(tmp_path, 3, load={})
    assert BEGINS not in caplog.text
    launch(tmp_path, 4, 5)
    (told,) = [each for each in caplog.records if BEGINS in each.getMessage()]
    assert told.levelno == logging.WARNING
    text = told.getMessage()
    assert "3 complete checkpoints" in text
    assert "step-000000000003" in text
    assert all(word in text for word in ("ckpipe ls", "ckpipe prune", str(tmp_path)))


LOADS = {"none": (), "the first": (0,), "the second": (1,), "both": (0, 1)}


@pytest.mark.parametrize("loads", LOADS)
def test_of_several_ranks_the_first_that_loaded_decides(
    tmp_path: Path, loads: str, caplog: pytest.LogCaptureFixture
) -> None:
    launch_ranks(tmp_path, "one", 10, 20, 30, world=2)
    launch_ranks(tmp_path, "two", 40, 50, 60, world=2, loads=LOADS[loads], keep_last=1)
    warned = sum(BEGINS in each.getMessage() for each in caplog.records)
    if LOADS[loads]:
        assert complete(tmp_path) in ([30, 60], [60]), "the loaded one stays if its rank prunes"
        assert set(lines(tmp_path)) == {"one"}
        assert warned == 0
    else:
        assert complete(tmp_path) == [10, 20, 30, 60]
        assert lines(tmp_path) == ["one"] * 3 + ["two"]
        assert warned == 1


def test_a_newest_load_tells_of_a_greater_step_of_another_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    launch(tmp_path, 100, 300)
    launch(tmp_path, 200, load={"step": 100})
    launch(tmp_path, 201, load={})
    assert "is there too" not in caplog.text, "the run went back"
    launch(tmp_path, 10)
    for load in (lambda: ckpipe.load(tmp_path), lambda: launch(tmp_path, load={})):
        caplog.clear()
        load()
        (told,) = [each.getMessage() for each in caplog.records if "is there too" in each.message]
        assert "step 10" in told
        assert "step-000000000300" in told


def test_a_save_without_a_step_goes_on_after_the_greatest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ckpipe")
    launch(tmp_path, 40)
    launch(tmp_path, 7)
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        assert [pipeline.save(state()).wait().step for _ in range(2)] == [41, 42]
    assert "goes on with step 41" in caplog.text
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        pipeline.load(step=7)
        assert pipeline.save(state()).wait().step == 8, "after the one that was loaded"


def test_ranks_agree_on_a_step_that_they_are_not_given(tmp_path: Path) -> None:
    with ranks(str(tmp_path), 2, attempt_id="late") as (first, second):
        launch(tmp_path, 40)  # the first opened before; the start of the launch tells both
        with ranks(str(tmp_path), 2, attempt_id="later") as (third, fourth):
            for one, two, step in ((first, second, 0), (third, fourth, 41)):
                handles = [pipeline.save(state()) for pipeline in (two, one)]
                assert [handle.wait().step for handle in handles] == [step, step]


def test_no_line_is_pruned_if_that_of_the_newest_is_unknown(tmp_path: Path) -> None:
    launch(tmp_path, 1, 2, 3)
    launch(tmp_path, 10)
    (index,) = tmp_path.glob("step-000000000010.*.json")
    index.write_bytes(index.read_bytes()[:-9])
    with ckpipe.SyncPipeline(tmp_path, keep_last=1) as pipeline:
        with pytest.raises(errors.CorruptCheckpoint, match="the line to prune"):
            pipeline.prune()
        pipeline.load(step=3)
        assert len(pipeline.prune(dry_run=True).remove) == 2, "the line that it has loaded"
    launch(tmp_path, 4, load={"step": 3}, keep_last=1)
    assert complete(tmp_path) == [3, 10, 4]


def test_checkpoints_without_the_field_are_one_line(tmp_path: Path) -> None:
    root, other = tmp_path / "run", tmp_path / "other"
    for each in (root, other):
        shutil.copytree(Path(__file__).parents[1] / "data" / "format-v1" / "world-1", each)
    launch(other, 1)  # takes what other tests of this process have read under the same name
    launch(root, 10, 20, keep_last=1)
    assert complete(root) == [500, 20], "a launch that loaded nothing leaves them alone"
    launch(root, 501, 502, 503, load={"step": 500}, keep_last=1)
    assert complete(root) == [500, 20, 503], "one that has loaded goes on with them"
    assert lines(root)[0] == lines(root)[2] == ""
    launch(root, 504, load={}, keep_last=1)
    assert complete(root) == [20, 503, 504]


def test_a_read_serves_one_launch_that_may_resume(tmp_path: Path) -> None:
    launch(tmp_path, 100, 200)
    ckpipe.load(tmp_path)
    launch(tmp_path, 1, 2, resume="never", keep_last=1)
    assert complete(tmp_path) == [100, 200, 2]
    launch(tmp_path, 300, keep_last=1)
    assert complete(tmp_path) == [200, 2, 300], "the one that was read, and the next"
    launch(tmp_path, 10, 20, keep_last=1)
    assert complete(tmp_path) == [200, 2, 300, 20], "the load has served a launch already"


def test_a_read_beside_a_resumed_run_changes_no_line(tmp_path: Path) -> None:
    launch(tmp_path, 100, 200, 300)
    launch(tmp_path, 1, 2)
    with SettlingPipeline(tmp_path, keep_last=1) as pipeline:
        pipeline.load(step=2)
        ckpipe.load(tmp_path, step=300)
        for step in (3, 4):
            pipeline.save(state(step), step=step)
            settle(pipeline)
    assert complete(tmp_path) == [100, 200, 300, 2, 4]


def test_a_call_of_prune_keeps_to_the_line_of_the_launch(tmp_path: Path) -> None:
    launch(tmp_path, 1)
    with SettlingPipeline(tmp_path, keep_last=1) as one:
        launch(tmp_path, 100, 200, 300)
        one.save(state(2), step=2)
        one.load(step=300)
        one.save(state(3), step=3)
        settle(one)
        one.prune()
    assert complete(tmp_path) == [1, 3, 100, 200, 300]
    with ckpipe.SyncPipeline(tmp_path, keep_last=1, resume="never") as anew:
        assert not anew.prune().remove
    ckpipe.load(tmp_path, step=3)
    with ckpipe.SyncPipeline(tmp_path, keep_last=1) as reader:
        assert not reader.prune().remove, "the line that it would go on with"
        reader.load(step=300)
        assert len(reader.prune().remove) == 2


def test_a_launch_id_of_copied_checkpoints_is_used(tmp_path: Path) -> None:
    launch(tmp_path / "run", 10, attempt_id="exp")
    ckpipe.copy(tmp_path / "run", tmp_path / "copy", 10)
    with (
        ckpipe.SyncPipeline(tmp_path / "copy", attempt_id="exp") as pipeline,
        pytest.raises(errors.AttemptReused),
    ):
        pipeline.save(state(), step=1)


def test_the_warning_counts_what_is_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    launch(tmp_path, 10, 20)
    with SettlingPipeline(tmp_path) as pipeline:
        for step in (10, 20):
            pipeline.delete(step, force=True)
        pipeline.save(state(), step=1)
        settle(pipeline)
    assert BEGINS not in caplog.text


def test_no_greater_step_is_told_of_if_the_load_fell_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    launch(tmp_path, 100)
    launch(tmp_path, 300)
    for path in tmp_path.glob("step-000000000300.*/*.safetensors"):
        path.write_bytes(b"damaged")
    with pytest.warns(RuntimeWarning, match="damaged"):
        assert ckpipe.load(tmp_path, fallback=True).step == 100
    assert "is there too" not in caplog.text
