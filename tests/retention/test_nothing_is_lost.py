"""What somebody does who would like to lose a checkpoint, by rules, damage or a crowded root."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpipe
from ckpipe import errors
from tests.support.pipelines import load_existing, loaded_state

STATE: dict[str, Any] = {"a": torch.ones(1000)}


def saved(root: Path, *steps: int, **settings: Any) -> list[str]:
    """Save some steps, each when the one before is durable; return their ids."""
    with ckpipe.SyncPipeline(root, **settings) as pipeline:
        return [pipeline.save(STATE, step=step).wait().id for step in steps]


def complete(root: Path) -> list[int]:
    with ckpipe.SyncPipeline(root, read_only=True) as pipeline:
        return [info.step for info in pipeline.steps() if info.complete]


@pytest.mark.parametrize("damaged", [[3], [2, 3]])
def test_damaged_checkpoints_take_no_place_among_those_to_keep(
    tmp_path: Path, damaged: list[int]
) -> None:
    ids = saved(tmp_path, 0, 1, 2, 3)
    for step in damaged:
        index = tmp_path / f"{ids[step]}.json"
        index.write_bytes(index.read_bytes()[:-9])
    with ckpipe.SyncPipeline(tmp_path, keep_last=1) as pipeline:
        decision = pipeline.prune()
        newest = 3 - len(damaged)
        kept = [ids[step] for step in sorted([newest, *damaged], reverse=True)]
        assert list(decision.keep) == kept
        assert decision.reasons[ids[newest]] == "the newest"
        assert "cannot be read" in decision.reasons[ids[3]]
        with pytest.warns(RuntimeWarning, match="is damaged"):
            result = load_existing(pipeline, fallback=True)
        assert result.step == newest


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_a_rule_that_raises_deletes_nothing_and_is_heard_of(tmp_path: Path, on_error: Any) -> None:
    settings = {
        "retention": ckpipe.KeepIf(lambda each: bool(1 / (each.step - 1))),
        "on_error": on_error,
    }
    if on_error == "warn":
        with pytest.warns(RuntimeWarning, match="division by zero"):
            saved(tmp_path, 1, 2, **settings)
    else:
        with pytest.raises(ZeroDivisionError):
            saved(tmp_path, 1, 2, **settings)
    assert 1 in complete(tmp_path)
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        assert torch.equal(loaded_state(pipeline, 1)["a"], STATE["a"])


def test_two_runs_with_rules_of_their_own_leave_the_newest_of_each(tmp_path: Path) -> None:
    (base,) = saved(tmp_path, 0)
    with (
        ckpipe.SyncPipeline(tmp_path, keep_last=1) as strict,
        ckpipe.SyncPipeline(tmp_path, keep_last=5) as lax,
    ):
        strict.load()
        lax.load()
        for step in range(1, 4):
            strict.save(STATE, step=step).wait()
            lax.save(STATE, step=100 + step).wait()
            newest = strict.latest()
            assert newest is not None
            assert newest.step == 100 + step, "that of the run that was started last"
        strict.prune()
        lax.prune()
    assert complete(tmp_path) == [0, 3, 103], "a run removes its own newest for nobody"
    assert base in {each.name for each in tmp_path.iterdir()}, "both have resumed from it"


FOREIGN = [
    "notes.txt",
    "step-5",
    "step-000000000001.json",
    "step-000000000001.20260101T000000000Z-a.0.json.bak",
    "step-000000000007.99999999T999999999Z-x.0/file",
    "step-000000000007.99999999T999999999Z-x.0.json",
    "step-000000000008.20261301T000000000Z-x.0.json",
    ".ckpipe/notes",
    ".ckpipe/deleted/hello",
    ".ckpipe/pins/x",
    ".ckpipe/leases/y",
    ".ckpipe/attempts/z",
]


def test_a_root_that_others_use_too_stays_as_it_is(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("theirs")
    for name in FOREIGN:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("theirs")
        os.utime(root / name, (0, 0))
    (tmp_path / "link").symlink_to(root)
    retention = {"keep_last": 2, "lines": "all", "sweep_after_seconds": 0}
    settings: dict[str, Any] = {"retention": retention}
    (first, *_) = saved(tmp_path / "link", 0, 1, **settings)
    (root / "loop").symlink_to(root)
    (root / "step-000000000008.20260101T000000000Z-dead.0").symlink_to(elsewhere)
    (root / first / "file").symlink_to(elsewhere / "precious")
    (root / first / "folder").symlink_to(elsewhere)
    with ckpipe.SyncPipeline(tmp_path / "link", **settings) as pipeline:
        for step in (2, 3):
            pipeline.save(STATE, step=step).wait()
        pipeline.prune()
        pipeline.sweep()
        result = load_existing(pipeline)
        assert result.step == 3
        assert [info.step for info in pipeline.steps() if info.complete] == [2, 3]
    assert not (root / first / "rank-00000.safetensors").exists()
    assert (elsewhere / "precious").read_text() == "theirs"
    assert all((root / name).read_text() == "theirs" for name in FOREIGN)


def test_the_first_and_the_last_step_there_are(tmp_path: Path) -> None:
    rule = ckpipe.KeepEvery(steps=2**31) | ckpipe.KeepLast(1)
    steps = [0, 2**31 - 1, 2**31, 2**31 + 1, 10**12 - 1]
    with ckpipe.SyncPipeline(tmp_path, retention=rule) as pipeline:
        for step in steps:
            pipeline.save(STATE, step=step).wait()
        pipeline.prune()
        assert [info.step for info in pipeline.steps()] == [0, 2**31, 10**12 - 1]
        with pytest.raises(errors.UsageError, match="A step is"):
            pipeline.save(STATE, step=10**12)
        result = load_existing(pipeline)
        assert result.step == 10**12 - 1


def test_a_metric_that_no_float_can_hold_is_refused(tmp_path: Path) -> None:
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        with pytest.raises(errors.UsageError, match="Metrics are numbers"):
            pipeline.save(STATE, step=1, metrics={"tokens": 10**400})
        assert pipeline.steps() == []
