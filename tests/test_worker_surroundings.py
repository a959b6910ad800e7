"""What a worker process has of its trainer's surroundings, however those change meanwhile."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from ranks import settle
from worker_runs import SETTINGS, state_of, worker_of

import ckpipe

PROCESS: dict[str, Any] = {"worker": "process"} | SETTINGS


def kill_worker(pipeline: ckpipe.SyncPipeline) -> None:
    """Ends the worker, so that the next save starts another one."""
    settle(pipeline)
    process = psutil.Process(worker_of(pipeline))
    process.kill()
    process.wait(30)


@pytest.mark.parametrize("url", ["run", "~/run"])
def test_a_worker_that_is_started_later_saves_to_the_same_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    def go_to(name: str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        monkeypatch.chdir(folder)
        monkeypatch.setenv("HOME", str(folder))
        return folder

    go_to("here")
    with ckpipe.SyncPipeline(url, **PROCESS) as pipeline:
        there = go_to("there")
        pipeline.save(state_of(1), step=1).wait()
        kill_worker(pipeline)
        pipeline.save(state_of(2), step=2).wait()
        settle(pipeline)
        assert [info.step for info in pipeline.steps()] == [1, 2]
    assert list(there.iterdir()) == []


GROUP = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")


def test_what_a_whole_group_is_sent_ends_no_worker_not_even_one_that_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "if 'ckpipe._worker' in sys.orig_argv:\n"
        f"    for each in {GROUP}:\n"
        "        os.kill(os.getpid(), signal.Signals[each])\n"
    )
    inherited = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(inherited))
    with ckpipe.SyncPipeline(tmp_path / "run", **PROCESS) as pipeline:
        pipeline.save(state_of(1), step=1).wait()
        worker = worker_of(pipeline)
        for each in GROUP:
            os.kill(worker, signal.Signals[each])
        pipeline.save(state_of(2), step=2).wait()
        assert worker_of(pipeline) == worker
