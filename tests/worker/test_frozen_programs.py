"""Programs whose ``sys.executable`` is the program itself do not start themselves."""

from __future__ import annotations

import sys
from pathlib import Path

import ckpipe
from tests.support.command_line import forked

MOST_STARTS = 6
PROGRAM = """
import logging, sys
with open({starts!r}, "a+") as starts:
    starts.write("begun\\n")
    starts.seek(0)
    if len(starts.readlines()) > {most}:
        sys.exit("a chain of processes")
if {frozen}:
    sys.frozen = True
sys.executable = {program!r}
import ckpipe
from ckpipe_local import LocalBackend
LocalBackend.prefers_worker = True
logging.basicConfig(level=logging.WARNING)
with ckpipe.SyncPipeline({root!r}, worker={worker!r}) as pipeline:
    pipeline.save({{"w": 1}}, step=1).wait()
"""


def run(folder: Path, *, worker: str, frozen: bool) -> tuple[int, str, int]:
    """Run such a program; return its exit code, what it said, and how often it was started."""
    program, starts = folder / "program", folder / "starts"
    code = PROGRAM.format(
        starts=str(starts), most=MOST_STARTS, frozen=frozen, program=str(program),
        root=str(folder / "run"), worker=worker,
    )  # fmt: skip
    script = folder / "script.py"
    script.write_text(code)
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {script} "$@"\n')
    program.chmod(0o755)
    done = forked(script)
    return done.code, done.err, len(starts.read_text().splitlines())


def test_a_frozen_program_saves_by_a_thread_and_says_so(tmp_path: Path) -> None:
    code, said, starts = run(tmp_path, worker="auto", frozen=True)
    assert (code, starts) == (0, 1), said
    assert "by a thread" in said
    assert "sys.frozen" in said
    with ckpipe.SyncPipeline(tmp_path / "run") as pipeline:
        pipeline.verify(1)


def test_a_frozen_program_is_refused_a_worker_process(tmp_path: Path) -> None:
    code, said, starts = run(tmp_path, worker="process", frozen=True)
    assert (code, starts) == (1, 1), said
    assert "SettingsError" in said
    assert "sys.frozen" in said


def test_a_program_that_is_started_as_a_worker_starts_none(tmp_path: Path) -> None:
    _, said, starts = run(tmp_path, worker="process", frozen=False)
    assert 2 <= starts < MOST_STARTS
    assert "was started as a worker process" in said
    assert "a chain of processes" not in said
