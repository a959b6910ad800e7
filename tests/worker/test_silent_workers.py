"""A worker process that says nothing: a hang is judged by what the system says of the process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import ckpipe
from tests.support.actors import PATIENCE
from tests.support.sampling import EVERY
from tests.support.settling import SettlingPipeline, settle
from tests.support.worker_runs import SETTINGS, state_of, worker_of
from tests.worker.test_environment import customize, traced

SILENT_SECONDS = 10.0 if EVERY else 1.5
BRIEF = SILENT_SECONDS / 3
"""How long a worker may seem to hang: shorter than it is silent."""

ON_SIGNALS = """
import ctypes, os, signal, threading, time
gate = {gate!r}

def run(*_):
    while not os.path.exists(gate):
        pass

def wait_as_for_a_disk(*_):
    # A process waits for a child like this one as for a disk, in state D: vfork(2).
    clone, vfork = (220 if os.uname().machine == "aarch64" else 56), 0x4000
    if ctypes.PyDLL(None).syscall(clone, vfork | signal.SIGCHLD, 0, 0, 0, 0) == 0:
        while not os.path.exists(gate):
            time.sleep(0.01)
        os._exit(0)

def hang(*_):
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

signal.signal(signal.SIGRTMIN, run)
signal.signal(signal.SIGRTMIN + 1, wait_as_for_a_disk)
signal.signal(signal.SIGRTMIN + 2, hang)
ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(-1))  # any process may trace it
"""
RUN, WAIT, HANG = range(signal.SIGRTMIN, signal.SIGRTMIN + 3)


@contextmanager
def stopped(worker: int) -> Iterator[None]:
    """A process that somebody has stopped."""
    os.kill(worker, signal.SIGSTOP)
    yield
    os.kill(worker, signal.SIGCONT)


def kept_busy(gate: Path, with_signal: int) -> Callable[[int], AbstractContextManager[None]]:
    """A process that does something else until a file is there."""

    @contextmanager
    def busy(worker: int) -> Iterator[None]:
        os.kill(worker, with_signal)
        yield
        gate.touch()

    return busy


def brief(**fields: Any) -> dict[str, Any]:
    """Settings by which a hang is judged soon."""
    return {"worker": {"mode": "process", "hang_seconds": BRIEF} | fields} | SETTINGS


def be_silent() -> None:
    """Let the time pass in which a worker is silent."""
    threading.Event().wait(SILENT_SECONDS)


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("how", ["stopped", "traced", "runs", "waits for a disk"])
def test_a_worker_that_the_system_keeps_from_speaking_is_never_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    gate = tmp_path / "gate"
    customize(tmp_path, monkeypatch, ON_SIGNALS.format(gate=str(gate)))
    silences: dict[str, Callable[[int], AbstractContextManager[None]]] = {
        "stopped": stopped,
        "traced": traced,
        "runs": kept_busy(gate, RUN),
        "waits for a disk": kept_busy(gate, WAIT),
    }
    with ckpipe.SyncPipeline(tmp_path / "run", **brief()) as pipeline:
        pipeline.save(state_of(1)).wait(PATIENCE)
        worker = worker_of(pipeline)
        with silences[how](worker):
            handle = pipeline.save(state_of(2))
            be_silent()
        handle.wait(PATIENCE)
        assert worker_of(pipeline) == worker
        pipeline.verify(handle.id)


def test_a_worker_that_hangs_is_replaced_and_the_log_says_what_was_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    customize(tmp_path, monkeypatch, ON_SIGNALS.format(gate=""))
    with SettlingPipeline(tmp_path / "run", **brief()) as pipeline:
        pipeline.save(state_of(1)).wait(PATIENCE)
        settle(pipeline)
        worker = worker_of(pipeline)
        os.kill(worker, HANG)
        handle = pipeline.save(state_of(2))
        handle.wait(PATIENCE)
        assert not psutil.pid_exists(worker)
        assert worker_of(pipeline) != worker
        pipeline.verify(handle.id)
    seen = r"hung: in .* s .*hang_seconds.*said nothing.*30 looks.*\(S\).*exit code -9"
    told = re.search(
        rf"(?s){handle.id} is delivered again.*{seen}.*The whole log is (\S+)\.\n", caplog.text
    )
    assert told
    assert "in hang" in Path(told[1]).read_text()


FORKS = """
import os, signal
if not os.path.exists({told!r}) and os.fork() == 0:
    open({told!r}, "w").write(str(os.getpid()))
    signal.pause()
"""


def test_death_is_noticed_though_a_child_holds_the_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "told"
    customize(tmp_path, monkeypatch, FORKS.format(told=str(told)))
    with SettlingPipeline(tmp_path / "run", worker="process", **SETTINGS) as pipeline:
        pipeline.save(state_of(1)).wait(PATIENCE)
        settle(pipeline)
        child = int(told.read_text())
        try:
            os.kill(worker_of(pipeline), signal.SIGSTOP)
            handle = pipeline.save(state_of(2))
            os.kill(worker_of(pipeline), signal.SIGKILL)
            handle.wait(PATIENCE)
        finally:
            os.kill(child, signal.SIGKILL)


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """So many processes that want a processor all the time."""
    command = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for each in processes:
            each.kill()
            each.wait()


def hold_the_gil() -> None:
    """Keep all other threads of this process from running."""
    import ctypes

    ctypes.PyDLL(None).usleep(int(SILENT_SECONDS * 1e6))


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["holds the GIL", "shares its processors"])
def test_a_worker_outlasts_a_trainer_that_gives_it_or_the_loop_no_time(
    tmp_path: Path, trainer: str
) -> None:
    beside = busy_processes(8 if EVERY else 4) if trainer != "holds the GIL" else nullcontext()
    with ckpipe.SyncPipeline(tmp_path, **brief()) as pipeline, beside:
        pipeline.save(state_of(1)).wait(PATIENCE)
        worker = worker_of(pipeline)
        handles = [
            pipeline.save({"w": torch.rand(1 << 20)}, step=step)
            for step in range(2, 20 if EVERY else 5)
        ]
        if trainer == "holds the GIL":
            hold_the_gil()
        for each in handles:
            each.wait(10 * PATIENCE)
        assert worker_of(pipeline) == worker
