"""Trainers in processes of their own that leave staged saves to their workers, in several ways.

As a script this is a process that has imported all there is to import and has one thread. For
every line of JSON on its standard input it forks a trainer, and answers with its wait status.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch

import ckpipe
from tests.support.fork_server import ForkedProgram

GROUP = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2]
"""What a whole group of processes may get, and a worker ignores."""

SETTINGS: dict[str, Any] = {"staging": {"block_bytes": 65536}}


def state_of(step: int) -> dict[str, Any]:
    """What a checkpoint of a step holds."""
    return {"step": step, "weight": torch.full((100_000,), float(step))}


def find_worker(pipeline: ckpipe.SyncPipeline) -> int | None:
    """Find a pipeline's worker among the children of this process, by the folder of its log.

    Of pipelines that have workers at the same time, all but one need a ``worker.log_dir``.
    """
    log_dir, found = pipeline.settings.worker.log_dir, []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError):
            if "ckpipe.worker" in child.cmdline():
                logs = Path(os.readlink(f"/proc/{child.pid}/fd/1")).parent
                private = logs.parent == Path(tempfile.gettempdir())
                if private if log_dir is None else logs == Path(log_dir).resolve():
                    found.append(child.pid)
    assert len(found) <= 1
    return found[0] if found else None


def worker_of(pipeline: ckpipe.SyncPipeline) -> int:
    """Return the process id of a pipeline's worker, which must be there."""
    found = find_worker(pipeline)
    assert found is not None
    return found


def train(case: dict[str, Any]) -> None:
    """Commits step 1, stages step 2 while the worker cannot commit, tells of it, and leaves.

    The worker is stopped, and got the signals that a whole group gets; or the store is held.
    """
    sys.path += case.get("path", [])
    worker = {
        "mode": "process",
        "survive": case.get("survive", True),
        "log_dir": case["log"],
    }
    pipeline = ckpipe.SyncPipeline(case["url"], keep_last=1, worker=worker, **SETTINGS)
    pipeline.__enter__()
    pipeline.save(state_of(1), step=1).wait()
    process = worker_of(pipeline)
    for each in [signal.SIGSTOP, *GROUP] if case["stopped"] else []:
        os.kill(process, each)
    pipeline.save(state_of(2), step=2)
    Path(case["told"]).write_text(str(process))
    {"kill": _kill, "exit": _exit, "fork": _fork, "raise": _raise}[case["leaves"]]()


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _exit() -> None:
    os._exit(0)


def _raise() -> None:
    raise RuntimeError("training failed")


def _fork() -> None:
    """Leave a child behind that has all its descriptors, as a worker of a DataLoader."""
    if os.fork() == 0:
        signal.pause()
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Run one trainer for each line of the standard input."""
    for line in sys.stdin:
        case = json.loads(line)
        child = os.fork()
        if child == 0:
            os.setpgid(0, 0)
            try:
                train(case)
            except BaseException:
                traceback.print_exc(file=sys.stdout if "-v" in sys.argv else sys.stderr)
            os._exit(1)
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"{json.dumps([child, status])}\n")
        sys.stdout.flush()


class Trainers:
    """Starts trainers and waits for their end.

    Args:
        process: The process that forks them.
    """

    def __init__(self, process: ForkedProgram) -> None:
        self._process = process

    def run(self, root: Path, leaves: str, *, stopped: bool = True, **case: Any) -> tuple[int, int]:
        """Run one; return its process group and its worker."""
        told = root.with_suffix(".worker")
        case = {"url": str(root)} | case
        case |= {
            "stopped": stopped,
            "leaves": leaves,
            "told": str(told),
            "log": str(root.with_suffix(".logs")),
        }
        self._process.stdin.write(json.dumps(case) + "\n")
        self._process.stdin.flush()
        group, _ = json.loads(self._process.stdout.readline())
        sys.stderr.write(self._process.errors())
        return group, int(told.read_text())


def await_end(worker: int, seconds: float = 60) -> None:
    """Wait until a worker has ended."""
    try:
        watched = os.pidfd_open(worker)
    except ProcessLookupError:
        return
    try:
        poll = select.poll()
        poll.register(watched, select.POLLIN)
        assert poll.poll(seconds * 1000), "the worker goes on and on"
    finally:
        os.close(watched)


@contextmanager
def trainers() -> Iterator[Trainers]:
    """The process that forks trainers, for as long as it is needed."""
    with ForkedProgram(Path(__file__)) as process:
        yield Trainers(process)


if __name__ == "__main__":
    main()
