"""When a save is due, by steps and by time, and through a whole pipeline."""

from __future__ import annotations

from pathlib import Path

import pytest

import ckpipe
from ckpipe import errors


def test_a_run_goes_on_at_the_marks_after_a_resume(tmp_path: Path) -> None:
    def run(first: int, last: int) -> list[int]:
        with ckpipe.SyncPipeline(tmp_path, save_every_steps=10) as pipeline:
            loaded = pipeline.load()
            assert (loaded.step if loaded else -1) == first - 1
            saves = []
            for step in range(first, last):
                if pipeline.should_save(step):
                    pipeline.save({"step": step}, step=step, until="committed")
                    saves.append(step)
            return saves

    assert run(0, 17) == [10]
    assert run(11, 21) == [20]


def test_the_last_step_is_saved_once_if_it_is_told(tmp_path: Path) -> None:
    for again, (last, expected) in enumerate([(23, [10, 20, 23]), (40, [30, 40]), (40, [])]):
        with ckpipe.SyncPipeline(tmp_path, save_every_steps=10) as pipeline:
            loaded = pipeline.load()
            saves = []
            for step in range(loaded.step + 1 if loaded else 0, last + 1):
                if pipeline.should_save(step, last=last):
                    pipeline.save({"step": step}, step, until="committed")
                    saves.append(step)
                    assert not pipeline.should_save(step, last=last), "it is being saved"
            assert saves == expected, again


def test_without_another_policy_the_last_step_alone_is_saved(tmp_path: Path) -> None:
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        asked = [pipeline.should_save(step, last=2) for step in range(3)]
        assert asked == [False, False, True]
        assert pipeline.should_save(0, last=0)
        with pytest.raises(errors.UsageError, match="A step is"):
            pipeline.should_save(1, last=-1)


async def test_the_awaiting_pipeline_is_asked_without_awaiting(tmp_path: Path) -> None:
    async with ckpipe.Pipeline(tmp_path, save_every_seconds=1e6) as pipeline:
        assert pipeline.should_save(1) is False


def test_without_a_policy_or_a_step_it_cannot_be_asked(tmp_path: Path) -> None:
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        with pytest.raises(errors.SettingsError, match="save_every_steps"):
            pipeline.should_save(1)
        with pytest.raises(errors.UsageError, match="A step is"):
            pipeline.should_save(-1)
    with pytest.raises(errors.PipelineClosed):
        pipeline.should_save(1)
    with pytest.raises(errors.SettingsError, match="save_every_steps"):
        ckpipe.SyncPipeline(tmp_path, save_every_steps=0)
