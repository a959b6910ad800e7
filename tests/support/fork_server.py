"""Processes that fork programs for tests, so that torch is imported once for many of them."""

from __future__ import annotations

import atexit
import faulthandler
import gc
import json
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy.random  # noqa: F401
import torch

import ckpipe

# A child would import at its first pipeline what is imported when it is first used.
for _name in ckpipe.__all__:
    getattr(ckpipe, _name)

Case = dict[str, Any]


FRESH = multiprocessing.get_context("forkserver")
"""Starts processes with one thread, which have torch imported and have used nothing of it."""
FRESH.set_forkserver_preload(["tests.support.preloaded"])


class ForkedProgram:
    """Run a program in a process of its own that need not import torch first.

    It has standard streams, arguments, a folder and variables like a program that is started, and
    ends like one. A test of the start or the end of an interpreter starts a real one. Leaving the
    block waits for the end of the program, or kills it after an exception.

    Args:
        program: The file of the program, or its text.
        arguments: Those of the program.
        cwd: Where it runs.
        env: Its variables, if not those of this process.

    Attributes:
        stdin: What it reads.
        stdout: What it prints.
        returncode: Its exit code after its end; below zero the signal that killed it.
    """

    def __init__(
        self,
        program: str | Path,
        *arguments: object,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._errors = tempfile.NamedTemporaryFile("r")  # noqa: SIM115 - closed at the end
        stdin, given = FRESH.Pipe(duplex=False)
        taken, stdout = FRESH.Pipe(duplex=False)
        words = ["-c" if isinstance(program, str) else str(program), *map(str, arguments)]
        place, variables = cwd or Path.cwd(), dict(os.environ if env is None else env)
        self._process = FRESH.Process(
            target=_run_program,
            args=(program, words, place, variables, stdin, stdout, self._errors.name),
        )
        with given, taken:
            with stdin, stdout:
                self._process.start()
            self.stdin = os.fdopen(os.dup(given.fileno()), "w")
            self.stdout = os.fdopen(os.dup(taken.fileno()))

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def __enter__(self) -> ForkedProgram:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._process.kill()
        self.communicate()

    def send_signal(self, number: int) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    def errors(self) -> str:
        """Return what it has written to its standard error since the last call."""
        return self._errors.read()

    def communicate(self, timeout: float = 300) -> tuple[str, str]:
        """Wait for its end; return what it printed and nothing has read, and its errors."""
        if self.stdout.closed:
            return "", ""
        self.stdin.close()
        with self.stdout, self._errors:
            out = self.stdout.read()
            self._process.join(timeout)
            assert self._process.exitcode is not None
            return out, self._errors.read()


def _run_program(
    program: str | Path,
    words: list[str],
    cwd: Path,
    variables: dict[str, str],
    stdin: Connection,
    stdout: Connection,
    errors: str,
) -> None:
    with stdin, stdout:
        os.dup2(stdin.fileno(), 0)
        os.dup2(stdout.fileno(), 1)
    os.dup2(os.open(errors, os.O_WRONLY | os.O_APPEND), 2)
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w", 1)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(variables)
    sys.path[:0] = filter(None, variables.get("PYTHONPATH", "").split(os.pathsep))
    # To itself it is no child of multiprocessing.
    multiprocessing.set_start_method(None, force=True)
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]
    torch.set_num_threads(int(variables.get("OMP_NUM_THREADS", torch.get_num_threads())))
    sys.argv = words
    try:
        if isinstance(program, Path):
            run_script(str(program), *words[1:])
        else:
            main = ModuleType("__main__")
            sys.modules["__main__"] = main
            exec(compile(program, "<string>", "exec"), main.__dict__)
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()


def run_script(file: str, *arguments: str) -> None:
    """Run a file in this process as Python runs it as a script."""
    sys.argv = [file, *arguments]
    sys.path.insert(0, str(Path(file).parent))
    runpy.run_path(file, run_name="__main__")


class Forks:
    """Ask a process that forks programs for some of them, and wait for their end.

    Args:
        process: The process, which runs :func:`serve`.
    """

    def __init__(self, process: ForkedProgram) -> None:
        self._process = process

    def ranks(self, case: Case, ranks: int) -> list[int | None]:
        """Run a case on several ranks; return their exit codes, None for one that was killed."""
        self._process.stdin.write(json.dumps({**case, "ranks": ranks}) + "\n")
        self._process.stdin.flush()
        codes: list[int | None] = json.loads(self._process.stdout.readline())
        sys.stderr.write(self._process.errors())
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
    with ForkedProgram(Path(program), env=environment) as process:
        yield Forks(process)


def serve(live: Callable[[Case, int, int], None]) -> None:
    """Fork the ranks of each case on standard input, and answer with their exit codes.

    Args:
        live: Runs a rank of a case; gets the case, the rank and the number of the case.
    """
    faulthandler.enable()  # a rank that crashes in C tells the lines of its threads
    gc.freeze()  # or each rank would look for garbage among all that is imported, and copy it
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
