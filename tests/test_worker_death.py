"""What a trainer learns of a worker process that dies, and when."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ranks import settle
from worker_runs import SETTINGS, state_of, worker_of

import ckpipe
from ckpipe import errors

PATIENT: dict[str, Any] = {"worker": {"mode": "process", "heartbeat_seconds": 600}} | SETTINGS


def held_save(pipeline: ckpipe.SyncPipeline) -> tuple[int, ckpipe.SyncSaveHandle]:
    """A save that its worker, which is stopped, cannot bring to the store."""
    pipeline.save(state_of(1)).wait()
    settle(pipeline)
    worker = worker_of(pipeline)
    os.kill(worker, signal.SIGSTOP)
    return worker, pipeline.save(state_of(2))


@pytest.fixture
def children_ignored() -> Iterator[None]:
    """Nobody is told how a child of this process has ended."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGCHLD, before)


@pytest.mark.usefixtures("children_ignored")
def test_an_exit_code_that_nobody_tells_is_not_made_up(tmp_path: Path) -> None:
    with ckpipe.SyncPipeline(tmp_path, **PATIENT) as pipeline:
        worker, handle = held_save(pipeline)
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(errors.WorkerDied, match="exit code unknown.*SIGCHLD"):
            handle.wait(timeout=30)
