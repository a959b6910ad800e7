"""Processes that fork programs for tests, so that torch is imported once for many of them."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy.random  # noqa: F401

import ckpipe

# A child would import at its first pipeline what is imported when it is first used.
for _name in ckpipe.__all__:
    getattr(ckpipe, _name)

Case = dict[str, Any]

#: What servers of multiprocessing import once for all that they fork: there is one for a process.
PRELOADED = [
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "tests.support.fork_server",
]


class Forks:
    """Ask a process that forks programs for some of them, and wait for their end.

    Args:
        process: The process, which runs :func:`serve`.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ranks(self, case: Case, ranks: int) -> list[int | None]:
        """Run a case on several ranks; return their exit codes, None for one that was killed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({**case, "ranks": ranks}) + "\n")
        self._process.stdin.flush()
        codes: list[int | None] = json.loads(self._process.stdout.readline())
        return codes

    def run(self, case: Case) -> int | None:
        """Run a case; return its exit code, or None if it was killed."""
        return self.ranks(case, 1)[0]


@contextmanager
def forks(program: str, *path: Path) -> Iterator[Forks]:
    """Start a program that runs :func:`serve`, for as long as it is needed.

    Args:
        program: The file of the program.
        path: Folders to import from besides, also for processes that it starts.
    """
    folders = [*map(str, path), str(Path(__file__).parents[2]), *sys.path] if path else []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)} if path else None
    with subprocess.Popen(
        [sys.executable, program],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield Forks(process)


def serve(live: Callable[[Case, int, int], None]) -> None:
    """Fork the ranks of each case on standard input, and answer with their exit codes.

    Args:
        live: Runs a rank of a case; gets the case, the rank and the number of the case.
    """
    faulthandler.enable()  # a rank that crashes in C tells the lines of its threads
    for number, line in enumerate(sys.stdin):
        case = json.loads(line)
        children = [_fork(live, case, rank, number) for rank in range(case["ranks"])]
        codes: dict[int, int | None] = {}
        while len(codes) < len(children):
            process, status = os.wait()
            codes[process] = os.waitstatus_to_exitcode(status)
            if codes[process] == -signal.SIGKILL:
                codes[process] = None
        sys.stdout.write(f"{json.dumps([codes[child] for child in children])}\n")
        sys.stdout.flush()


def _fork(live: Callable[[Case, int, int], None], case: Case, rank: int, number: int) -> int:
    child = os.fork()
    if child == 0:
        os.dup2(2, 1)  # gloo of torch 2.10 writes to standard output, which is for the answers
        try:
            live(case, rank, number)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return child
