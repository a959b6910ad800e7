"""What a worker process has of its trainer's surroundings, however those change meanwhile."""

from __future__ import annotations

import os
import re
import signal
import site
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import indent
from typing import Any, Literal

import anyio
import psutil
import pytest

import ckpipe
from tests.support.command_line import script
from tests.support.settling import SettlingPipeline, settle
from tests.support.worker_runs import SETTINGS, state_of, worker_of

PROCESS: dict[str, Any] = {"worker": "process"} | SETTINGS


def kill_worker(pipeline: ckpipe.SyncPipeline) -> None:
    """End the worker, so that the next save starts another one."""
    settle(pipeline)
    process = psutil.Process(worker_of(pipeline))
    process.kill()
    process.wait(30)


def customize(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> Path:
    """Has every worker run some code when its interpreter starts; returns the file with it."""
    path = folder / "sitecustomize.py"
    path.write_text(f"import sys\nif 'ckpipe.worker' in sys.orig_argv:\n{indent(code, '    ')}")
    inherited = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(inherited))
    return path


TRACER = """
import ctypes, os, sys
call = ctypes.CDLL(None, use_errno=True).ptrace
call.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
PTRACE_SEIZE, PTRACE_INTERRUPT, PTRACE_O_TRACEEXIT = 0x4206, 0x4207, 0x40
process, when = int(sys.argv[1]), sys.argv[2]
if when == "at its end":
    refused = call(PTRACE_SEIZE, process, None, PTRACE_O_TRACEEXIT)
else:
    refused = call(PTRACE_SEIZE, process, None, None) or call(PTRACE_INTERRUPT, process, None, None)
print(os.strerror(ctypes.get_errno()) if refused else "", flush=True)
sys.stdin.read()
"""


@contextmanager
def traced(process: int, when: Literal["now", "at its end"] = "now") -> Iterator[None]:
    """A process that a debugger has stopped, or stops when it ends: ptrace(2).

    One that is killed meanwhile stays with all it has, as one that waits for a disk.
    """
    command, pipe = [sys.executable, "-c", TRACER, str(process), when], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as tracer:
        assert tracer.stdout is not None
        if refused := tracer.stdout.readline().strip():
            pytest.skip(f"no process may be traced here: {refused}")
        yield


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
    with SettlingPipeline(url, **PROCESS) as pipeline:
        there = go_to("there")
        pipeline.save(state_of(1), step=1).wait()
        kill_worker(pipeline)
        pipeline.save(state_of(2), step=2).wait()
        settle(pipeline)
        assert [info.step for info in pipeline.steps()] == [1, 2]
    assert list(there.iterdir()) == []


def test_the_log_of_a_dead_worker_is_found_from_another_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    logging: dict[str, Any] = {"mode": "process", "log_dir": "logs"}
    with SettlingPipeline(tmp_path / "run", worker=logging, **SETTINGS) as pipeline:
        pipeline.save(state_of(1), step=1).wait()
        settle(pipeline)
        worker = worker_of(pipeline)
        os.kill(worker, signal.SIGSTOP)
        handle = pipeline.save(state_of(2), step=2)
        monkeypatch.chdir("/")
        os.kill(worker, signal.SIGKILL)
        handle.wait(timeout=300)
    assert "log ends with" in caplog.text


GROUP = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")


def test_what_a_whole_group_is_sent_ends_no_worker_not_even_one_that_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    customize(
        tmp_path,
        monkeypatch,
        f"""
import os, signal
for each in {GROUP}:
    os.kill(os.getpid(), signal.Signals[each])
""",
    )
    with ckpipe.SyncPipeline(tmp_path / "run", **PROCESS) as pipeline:
        pipeline.save(state_of(1), step=1).wait()
        worker = worker_of(pipeline)
        for each in GROUP:
            os.kill(worker, signal.Signals[each])
        pipeline.save(state_of(2), step=2).wait()
        assert worker_of(pipeline) == worker


def test_saves_do_without_workers_of_another_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    other = "import ckpipe.worker.protocol as messages\nmessages.VERSION += 1\n"
    code = customize(tmp_path, monkeypatch, other)
    with ckpipe.SyncPipeline(tmp_path / "run", **PROCESS) as pipeline:
        pipeline.save(state_of(1), step=1).wait(timeout=300)
        assert re.search("by a thread of this process.*of different versions", caplog.text)
        code.unlink()
        pipeline.save(state_of(2), step=2).wait(timeout=300)
        assert worker_of(pipeline)


def test_a_trainer_needs_no_standard_streams(tmp_path: Path) -> None:
    code = """
import os, sys
import ckpipe, psutil, torch
with ckpipe.SyncPipeline(sys.argv[1], worker="process") as pipeline:
    pipeline.save({"w": 1}, step=1).wait()
    for stream in range(3):
        os.close(stream)
    pipeline.save({"w": torch.ones(16 << 20)}, step=2).wait()
    files = {number: os.path.realpath(f"/proc/self/fd/{number}") for number in range(1000)}
    assert min(number for number, name in files.items() if "memfd:ckpipe" in name) > 2
    (first,) = psutil.Process().children()
    first.kill()
    first.wait(30)
    for step in (3, 4):  # if its death is noticed late, the first of them still meets it
        pipeline.save({"w": step}, step=step).wait()
    (other,) = psutil.Process().children()
    assert other != first
    streams = [os.path.realpath(f"/proc/self/fd/{number}") for number in range(3)]
    assert not any("socket:" in each or "memfd:" in each for each in streams), streams
"""
    done = script(code, tmp_path)
    assert done.code == 0, done.err
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        assert [info.step for info in pipeline.steps()] == [1, 2, 3, 4]


TELLS_MODULES = """
import signal
first = set(sys.modules)
def tell(*_):
    with open({pipe!r}, "w") as pipe:
        pipe.write("\\n".join(set(sys.modules) - first))
signal.signal(signal.SIGRTMIN, tell)
"""
NEEDED = {"ckpipe", "ckpipe_local", "anyio", "typing_extensions", "aiofiles", "numpy", "awscrt"}
NEEDED |= {"_awscrt", "__mp_main__"}  # the latter is the worker's own, to multiprocessing
NEEDED |= {"sniffio"}  # anyio imports it where it is installed, as trio has it
TRAINERS_OWN = ("pipeline", "sync", "handles", "settings", "running", "lock", "state")


def test_a_worker_has_no_module_of_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    customize(tmp_path, monkeypatch, TELLS_MODULES.format(pipe=str(pipe)))
    with SettlingPipeline(tmp_path / "run", keep_last=1, **PROCESS) as pipeline:
        for step in (1, 2):
            pipeline.save(state_of(step), step=step).wait()
        settle(pipeline)
        os.kill(worker_of(pipeline), signal.SIGRTMIN)
        modules = set(pipe.read_text().split())
    assert "ckpipe.save.upload" in modules
    packages = {each.partition(".")[0] for each in modules} - sys.stdlib_module_names
    assert packages <= NEEDED, "the program's, or torch"
    assert not modules & {f"ckpipe.{each}" for each in TRAINERS_OWN}


def test_a_worker_of_an_isolated_interpreter_is_isolated_too(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise ImportError('not meant for this program')")
    code = """
import sys
sys.path[:0] = sys.argv[2:]
import ckpipe
with ckpipe.SyncPipeline(sys.argv[1], worker="process") as pipeline:
    pipeline.save({"w": 1}, step=1).wait()
"""
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = script(code, tmp_path / "run", *sys.path, flags=["-I"], env=environment)
    assert done.code == 0, done.err


def test_a_worker_begins_with_what_only_the_program_knows_where_to_find(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site, "getsitepackages", list)
    monkeypatch.setattr(site, "ENABLE_USER_SITE", False)
    with ckpipe.SyncPipeline(tmp_path, **PROCESS) as pipeline:
        pipeline.save(state_of(1), step=1).wait()
        environment = Path(f"/proc/{worker_of(pipeline)}/environ").read_text().split("\0")
    (path,) = (each[11:].split(":") for each in environment if each.startswith("PYTHONPATH="))
    for package in (ckpipe, anyio):
        assert str(Path(package.__path__[0]).parent) in path
