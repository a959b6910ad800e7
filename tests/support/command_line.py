"""Calling the command line, here and in a process of its own, and other code in one."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpipe
from ckpipe.cli.app import run
from ckpipe.errors import StoreUnavailable
from ckpipe.testing import Landing
from tests.support.fork_server import ForkedProgram
from tests.support.pipelines import small_state, stores
from tests.support.signals import HEARING
from tests.support.stored_files import data_file_key, flip

#: torchrun, whose ranks are forked from one process rather than started: an import of torch each.
TORCHRUN = """
import multiprocessing, sys
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, parse_args
from tests.support.fork_server import run_script
multiprocessing.set_forkserver_preload(["tests.support.preloaded"])
given = parse_args(sys.argv[1:])
if given.standalone:
    given.rdzv_backend, given.rdzv_endpoint = "c10d", "localhost:0"
config, _, _ = config_from_args(given)
config.start_method = "forkserver"
elastic_launch(config, run_script)(given.training_script, *given.training_script_args)
"""
PROGRAM = [sys.executable, "-m", "ckpipe.cli"]


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        """What it printed as JSON."""
        return json.loads(self.out)


class Commands:
    """Calls the command in this process, with arguments as a shell gives them.

    Args:
        capture: Catches what is printed.
    """

    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self._capture = capture

    def __call__(self, *arguments: object) -> Done:
        self._capture.readouterr()
        code = run([str(each) for each in arguments])
        caught = self._capture.readouterr()
        return Done(code, caught.out, caught.err)


def program(*arguments: object, **options: Any) -> Done:
    """Call the real program and wait for it."""
    return _ended([*PROGRAM, *map(str, arguments)], **options)


def script(code: str, *arguments: object, flags: Sequence[str] = (), **options: Any) -> Done:
    """Run Python code in a process of its own and wait for it."""
    return _ended([sys.executable, *flags, "-c", code, *map(str, arguments)], **options)


def _ended(command: Sequence[str], **options: Any) -> Done:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, **options
    )
    return Done(done.returncode, done.stdout, done.stderr)


_ON_TERMINAL = """
import fcntl, json, os, pty, struct, sys, termios, threading
calls = json.loads(sys.argv[1])
seen = os.dup(1)
master, slave = pty.openpty()
def forward():
    ends = 0
    while ends < 2 * len(calls):
        some = os.read(master, 4096)
        ends += some.count(b"\\x1e")
        os.write(seen, some)
reader = threading.Thread(target=forward, daemon=True)
reader.start()
for stream in range(3):
    os.dup2(slave, stream)
before = sys.stdout, sys.stderr  # which would close their descriptors
sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
from ckpipe.cli.app import run
for width, words in calls:
    fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    code = run(words)
    print(f"\\x1e{code}", end="\\x1e", flush=True)
reader.join()
"""


def on_terminal(*calls: tuple[int, Sequence[object]], **variables: str) -> list[Done]:
    """Call the command on a pseudo terminal, one call after the other in one process.

    Args:
        calls: The width of the terminal, and the arguments of each call.
        variables: Variables of the environment.
    """
    words = json.dumps([(width, [str(each) for each in call]) for width, call in calls])
    plain = {name: each for name, each in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
    done = forked(_ON_TERMINAL, words, env=plain | {"TERM": "xterm-256color"} | variables)
    assert done.code == 0, done.err
    outs, codes = done.out.split("\x1e")[:-1:2], done.out.split("\x1e")[1::2]
    return [Done(int(code), out, "") for out, code in zip(outs, codes, strict=True)]


_STUCK = """
import anyio, ckpipe
from ckpipe.testing.wrappers import WrappedBackend
from ckpipe_local import LocalBackend

class Stuck(WrappedBackend):
    async def around(self, operation, call):
        if operation.verb in {verbs} and {key!r} in operation.key:
            print("stuck", flush=True)
            await anyio.sleep_forever()
        return await call()

ckpipe.register_backend("stuck", lambda url: Stuck(LocalBackend(url.replace("stuck", "file"))))
from ckpipe.cli import main
main()
"""


def forked(program: str | Path, *arguments: object, **options: Any) -> Done:
    """Run Python code in a process that is forked, since its start is not tested; wait for it."""
    with ForkedProgram(program, *arguments, **options) as process:
        return _end_of(process)


_FORGET = """
import sys
for name in list(sys.modules):
    if name.partition(".")[0] in {}:
        del sys.modules[name]
"""


def forked_anew(code: str, *forgotten: str, **options: Any) -> Done:
    """Run Python code in a process that is forked and imports the library anew; wait for it.

    Args:
        code: The code.
        forgotten: Further packages that it finds not imported.
        options: Those of a program that is forked.
    """
    names = ["ckpipe", "ckpipe_local", "ckpipe_s3", "ckpipe_gcs", "ckpipe_http", "tests"]
    return forked(_FORGET.format([*names, *forgotten]) + code, **options)


def _end_of(process: ForkedProgram) -> Done:
    out, err = process.communicate()
    assert process.returncode is not None
    return Done(process.returncode, out, err)


@contextmanager
def stuck(
    verbs: str | tuple[str, ...], *arguments: object, key: str = "", cwd: Path | None = None
) -> Iterator[ForkedProgram]:
    """The real program, waiting at its first request of one of some kinds to a ``stuck://`` URL.

    Args:
        verbs: The kinds of requests.
        arguments: Those of the program.
        key: What stands in the key of the request.
        cwd: Where the program runs.
    """
    kinds = (verbs,) if isinstance(verbs, str) else verbs
    code = HEARING + _STUCK.format(verbs=kinds, key=key)
    with ForkedProgram(code, *arguments, cwd=cwd) as process:
        assert process.stdout.readline() == "stuck\n"
        yield process


def interrupted(
    verbs: str | tuple[str, ...], *arguments: object, signum: int = signal.SIGINT, **options: Any
) -> Done:
    """What :func:`stuck` has printed and returned after a signal."""
    with stuck(verbs, *arguments, **options) as process:
        process.send_signal(signum)
        return _end_of(process)


def ends_by_failed_request(
    landing: Landing, command: Callable[[str], int]
) -> Iterator[tuple[str, int]]:
    """Run a command on a store of its own for each of its requests, which fails once.

    Args:
        landing: Whether the request fails before or after it had its effect.
        command: Runs it with the URL of the store; returns its exit code.

    Yields:
        The URL and the exit code.
    """
    for number in itertools.count(1):
        with stores() as made:
            made.faulty.fail(StoreUnavailable("It broke"), number, landing)
            code = command(made.url)
            operations = made.faulty.operations
            if number > len(operations):
                break
            # Opening and closing a store are not tried again.
            expected = 3 if operations[number - 1].verb in ("enter", "exit") else 0
            assert code == expected, operations[number - 1]
            yield made.url, code
    assert number > 8


def damage(root: Path, id: str, at: int = -3) -> None:
    """Flip a bit of a data file."""
    flip(root / data_file_key(id), at)


def save(root: Path, *states: dict[str, Any]) -> None:
    """Save states as the steps from 0 on."""
    with ckpipe.SyncPipeline(root) as pipeline:
        for step, state in enumerate(states):
            pipeline.save(state, step=step, until="committed")


def save_steps(url: object, *steps: int, **settings: Any) -> list[str]:
    """Save small states as checkpoints of these steps; return their ids."""
    ids = []
    with ckpipe.SyncPipeline(str(url), **settings) as pipeline:
        for step in steps:
            state = small_state(step) | {"model": torch.nn.Linear(3, 2)}
            handle = pipeline.save(state, step=step, metrics={"loss": 1 / step})
            ids.append(handle.wait().id)
    return ids
