"""Trainers of a bad night: real processes on a store that fails, which are killed or stopped.

As a script this is a process that has imported all there is to import and has one thread. For
every line of JSON on its standard input it forks a trainer that lives as the line says, and answers
with its wait status. What a trainer knows it writes to a ledger, line by line and synced, which is
what the morning is compared with.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import resource
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import ckpipe
from ckpipe.errors import CkpipeError
from ckpipe.events import Completed
from tests.failure.chaos_store import SCHEME
from tests.support.fork_server import serve
from tests.support.settling import SettlingPipeline, settle
from tests.support.worker_runs import find_worker

SETTINGS: dict[str, Any] = {
    "staging": {"block_bytes": 65536},
    "upload": {"retries": 3, "backoff_seconds": 0.005},
    "retention": ckpipe.KeepLast(2) | ckpipe.KeepEvery(steps=7),
    "on_error": "warn",
    "drain_timeout_seconds": 300,
}
SIZE = 60_000
STOPPED_SECONDS = 0.5
"""Elements of the model: four blocks of a file."""


def digest(state: dict[str, Any]) -> str:
    """A fingerprint of all bits of a state."""
    found = hashlib.sha256(f"{state['step']} {list(state)}".encode())
    for name in ("weight", "moment"):
        found.update(state[name].numpy().tobytes())
    return found.hexdigest()


class Ledger:
    """What trainers have written down, in the order in which they did.

    Args:
        path: The file; synced after each line, which one system call appends.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def note(self, *words: object) -> None:
        """Append a line."""
        log = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            os.write(log, (" ".join(map(str, words)) + "\n").encode())
            os.fsync(log)
        finally:
            os.close(log)

    def lines(self, word: str) -> list[list[str]]:
        """The lines that begin with a word, without it."""
        text = self.path.read_text() if self.path.exists() else ""
        lines = [line.split() for line in text.splitlines()]
        return [line[1:] for line in lines if line[0] == word]


class Trainer:
    """One life of a training run.

    Args:
        case: How it goes.
    """

    def __init__(self, case: dict[str, Any]) -> None:
        self._case, self._ledger = case, Ledger(Path(case["ledger"]))
        self._noise = torch.Generator().manual_seed(case["seed"])
        self._state: dict[str, Any] = {
            "weight": torch.zeros(SIZE),
            "moment": torch.zeros(SIZE),
            "step": 0,
        }

    def live(self) -> None:
        """Resumes, trains and saves until the end, or until the night is too bad to go on."""
        case = self._case
        settings = {**SETTINGS, "worker": {**case["worker"], "log_dir": case["logs"]}}
        url = f"{SCHEME}://{case['root']}"
        backends = {SCHEME: case["store"]}
        try:
            with SettlingPipeline(url, backends=backends, **settings) as pipeline:
                pipeline.on_complete(self._completed)
                self._resume(pipeline, None)
                for number in range(case["saves"]):
                    if number == case["rollback"]:
                        self._roll_back(pipeline)
                    with self._trouble(pipeline, number):
                        self._save(pipeline)
                if case["trouble"].endswith("the worker"):
                    self._outlive_the_worker(pipeline)
                self._ledger.note("through", case["life"])
        except CkpipeError as error:
            self._ledger.note("gave-up", case["life"], type(error).__name__)

    def _outlive_the_worker(self, pipeline: ckpipe.SyncPipeline) -> None:
        """Save once to notice, at the latest, that the worker is dead, and once to a new one."""
        for _ in range(2):
            self._save(pipeline)
            settle(pipeline)

    def _resume(self, pipeline: ckpipe.SyncPipeline, step: int | str | None) -> None:
        loaded = pipeline.load(self._state, step=step)
        name = loaded.id if loaded else "nothing"
        self._ledger.note("resumed", self._case["life"], name, digest(self._state))

    def _roll_back(self, pipeline: ckpipe.SyncPipeline) -> None:
        settle(pipeline)  # what follows a commit may delete the one that is chosen
        older = [info for info in pipeline.steps() if info.complete][:-1]
        if older:
            self._resume(pipeline, older[-1].id)

    def _train(self) -> None:
        """One step, different in each life: the same step saved twice has other bits."""
        state = self._state
        state["moment"].mul_(0.9).add_(torch.randn(SIZE, generator=self._noise))
        state["weight"].sub_(state["moment"], alpha=0.01)
        state["step"] += 1

    def _save(self, pipeline: ckpipe.SyncPipeline) -> None:
        self._train()
        step, mark = self._state["step"], digest(self._state)
        self._ledger.note("saving", self._case["life"], step, mark)
        try:
            handle = pipeline.save(self._state, step=step, metadata={"digest": mark})
            if step % 2:  # the others go on while training does
                self._ledger.note("complete", handle.wait().id, mark)
        except CkpipeError as error:
            self._ledger.note("failed", self._case["life"], step, type(error).__name__)

    def _completed(self, event: Completed) -> None:
        self._ledger.note("complete", event.info.id)

    @contextmanager
    def _trouble(self, pipeline: ckpipe.SyncPipeline, number: int) -> Iterator[None]:
        """What happens during one save: the disk is full, or the worker or this trainer dies."""
        case = self._case
        trouble = case["trouble"] if number == case["at"] else ""
        if trouble == "full disk":
            settle(pipeline)  # what is left of the disk must not change while it is filled
            with self._full_disk(pipeline):
                yield
                settle(pipeline)
        elif trouble == "kill at a moment":
            with soon(case["seconds"], os.getpid(), signal.SIGKILL):
                yield
        elif trouble == "kill the worker":
            with soon(case["seconds"], find_worker(pipeline), signal.SIGKILL):
                yield
        elif trouble == "stop the worker":
            with soon(case["seconds"], find_worker(pipeline), signal.SIGSTOP, signal.SIGCONT):
                yield
        else:
            yield
            if trouble == "kill when staged":
                os.kill(os.getpid(), signal.SIGKILL)

    def _full_disk(self, pipeline: ckpipe.SyncPipeline) -> contextlib.AbstractContextManager[None]:
        limit = self._case["limit"]
        if limit is None:
            return full_disk(Path(self._case["root"]), self._case["leave"])
        return small_files([os.getpid(), *filter(None, [find_worker(pipeline)])], limit)


@contextmanager
def soon(seconds: float, process: int | None, *signals: int) -> Iterator[None]:
    """Send signals to a process, one after the other, beside what is done inside."""

    def send() -> None:
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            for number, signum in enumerate(signals):
                time.sleep(number * STOPPED_SECONDS)
                os.kill(process, signum)

    timer = threading.Timer(seconds, send)
    timer.start()
    yield
    timer.join()


@contextmanager
def full_disk(root: Path, leave: int) -> Iterator[None]:
    """Leave so many bytes of a small file system free for a while."""
    ballast = root / "ballast"
    found = os.statvfs(root)
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(1, found.f_bavail * found.f_frsize - leave))
    try:
        yield
    finally:
        ballast.unlink()


@contextmanager
def small_files(processes: list[int], limit: int) -> Iterator[None]:
    """Has processes write no files that are larger, for a while."""
    for each in processes:
        resource.prlimit(each, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        for each in processes:
            with contextlib.suppress(ProcessLookupError):
                endless = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
                resource.prlimit(each, resource.RLIMIT_FSIZE, endless)


def _live(case: dict[str, Any], rank: int, number: int) -> None:
    warnings.simplefilter("ignore", RuntimeWarning)  # of saves that failed
    torch.set_num_threads(1)
    Trainer(case).live()


def install(folder: Path) -> None:
    """Install the unsteady store for all processes that have a folder in their path."""
    about = folder / "night-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: night\nVersion: 1.0\n")
    target = f"{SCHEME} = tests.failure.chaos_store:UnsteadyStore"
    (about / "entry_points.txt").write_text(f"[ckpipe.backends]\n{target}\n")


if __name__ == "__main__":
    serve(_live)
