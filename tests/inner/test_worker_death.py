"""What a trainer learns of a worker process that dies, and when."""

from __future__ import annotations

import asyncio
import math
import os
import queue
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import ckpipe
from ckpipe.errors import DrainTimeout
from ckpipe.events import Staged
from ckpipe.worker import uploader
from tests.support.actors import PATIENCE, DaemonThreads
from tests.support.settling import SettlingPipeline, settle
from tests.support.worker_runs import SETTINGS, state_of, worker_of
from tests.worker.test_environment import PROCESS, customize, traced

BRIEF: dict[str, Any] = {"worker": {"mode": "process", "hang_seconds": 1}} | SETTINGS
PATIENT: dict[str, Any] = {"worker": {"mode": "process", "hang_seconds": 6000}} | SETTINGS


def idle_worker(pipeline: ckpipe.SyncPipeline) -> int:
    """The process of a worker that has brought a save to the store."""
    pipeline.save(state_of(1)).wait()
    settle(pipeline)
    return worker_of(pipeline)


def held_save(pipeline: ckpipe.SyncPipeline) -> tuple[int, ckpipe.SyncSaveHandle]:
    """A save that its worker, which is stopped, cannot bring to the store."""
    worker = idle_worker(pipeline)
    os.kill(worker, signal.SIGSTOP)
    return worker, pipeline.save(state_of(2))


def is_reaped(worker: int) -> bool:
    """Wait until a process that has ended is reaped; whether it was."""
    until = time.monotonic() + PATIENCE
    while psutil.pid_exists(worker) and time.monotonic() < until:
        os.sched_yield()
    return not psutil.pid_exists(worker)


def test_closing_never_hangs_and_says_what_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploader, "GIVE_UP_SECONDS", 0.5)
    opened = SettlingPipeline(tmp_path, drain_timeout_seconds=0.05, **PROCESS)
    opened.__enter__()
    worker, _ = held_save(opened)
    opened.preempt()
    with pytest.raises(DrainTimeout):
        opened.__exit__(None, None, None)
    assert not psutil.pid_exists(worker)


def next_timer(loop: asyncio.AbstractEventLoop) -> float:
    """Seconds until a pipeline's event loop does something that nobody has asked it for."""

    async def look() -> float:
        timers = [each for each in loop._scheduled if not each.cancelled()]  # type: ignore[attr-defined]
        return float(min(each.when() for each in timers) - loop.time())

    return asyncio.run_coroutine_threadsafe(look(), loop).result()


def test_death_is_noticed_within_a_second_and_nobody_looks_for_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    took, loops = [math.inf], queue.SimpleQueue[asyncio.AbstractEventLoop]()

    async def hear(event: Staged) -> None:
        loops.put(asyncio.get_running_loop())

    with SettlingPipeline(tmp_path, **PATIENT) as pipeline:
        pipeline.on_staged(hear)
        while min(took) > 1 and len(took) < 20:  # the machine may have other things to do
            worker, handle = held_save(pipeline)
            assert next_timer(loops.get(timeout=PATIENCE)) > 30
            killed = time.monotonic()
            os.kill(worker, signal.SIGKILL)
            while "is delivered again" not in caplog.text:
                os.sched_yield()
            took.append(time.monotonic() - killed)
            handle.wait(PATIENCE)
            caplog.clear()
    assert min(took) < 1


@pytest.fixture
def children_ignored() -> Iterator[None]:
    """Nobody is told how a child of this process has ended."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGCHLD, before)


@pytest.mark.usefixtures("children_ignored")
def test_an_exit_code_that_nobody_tells_is_not_made_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with SettlingPipeline(tmp_path, **PATIENT) as pipeline:
        worker, handle = held_save(pipeline)
        os.kill(worker, signal.SIGKILL)
        handle.wait(PATIENCE)
    assert re.search(r"exit code unknown.*SIGCHLD", caplog.text)


@pytest.fixture
def soon_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that does not end is left to the system soon; any process may trace it."""
    monkeypatch.setattr(uploader, "REAP_SECONDS", 0.1)
    anybody = "import ctypes\nctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(-1))\n"
    customize(tmp_path, monkeypatch, anybody)


@pytest.mark.usefixtures("soon_left")
def test_closing_leaves_a_worker_to_the_system_that_does_not_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    opened = SettlingPipeline(tmp_path / "run", **PROCESS)
    opened.__enter__()
    worker = idle_worker(opened)
    with traced(worker, "at its end"):
        DaemonThreads().submit(opened.__exit__, None, None, None).result(PATIENCE)
        assert psutil.pid_exists(worker)
        assert f"process {worker} was killed and does not end" in caplog.text
    assert is_reaped(worker), "nobody waits for it any more"


@pytest.mark.usefixtures("soon_left")
def test_a_save_does_not_wait_for_a_dead_worker_that_does_not_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with SettlingPipeline(tmp_path / "run", **BRIEF) as pipeline:
        worker = idle_worker(pipeline)
        with traced(worker, "at its end"):
            os.kill(worker, signal.SIGSTOP)
            handle = pipeline.save(state_of(2))
            os.kill(worker, signal.SIGKILL)
            handle.wait(PATIENCE)
            assert "not ended it yet" in caplog.text
            assert psutil.pid_exists(worker)
        assert is_reaped(worker), "nobody waits for it any more"
