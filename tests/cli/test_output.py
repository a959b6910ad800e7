"""What commands print, what becomes of them where that cannot be written, and how far they are."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import signal
import subprocess
import threading
from pathlib import Path

import pytest
import torch
from rich.console import Console

import ckpipe
from ckpipe.cli import screen
from ckpipe.cli.screen import Meter, Screen, table
from tests.support.command_line import PROGRAM, Commands, damage, program, save_steps


def test_names_from_a_store_cannot_steer_the_terminal(call: Commands, tmp_path: Path) -> None:
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        pipeline.save({"\x1b[31mred": torch.zeros(2)}, step=1, metadata={"\x9b2J": "[bold]"})
    out = call("info", tmp_path).out
    assert "\x1b" not in out
    assert "\x9b" not in out
    assert "\\x1b[31mred" in out
    assert "[bold]" in out


def test_programs_get_json_after_any_failure(call: Commands, tmp_path: Path) -> None:
    one, _ = save_steps(tmp_path / "root", 1, 2)
    damage(tmp_path / "root", one)
    failing = [
        (("ls", tmp_path / "missing"), 3, "StoreError"),
        (("ls", "s3://b/x"), 2, "UsageError"),
        (("info", tmp_path / "root", 9), 2, "CheckpointNotFound"),
        (("rm", tmp_path / "root", 2), 2, "UsageError"),
        (("cp", tmp_path / "root", tmp_path / "copy", 1), 1, "ChecksumMismatch"),
        (("ls",), 2, "UsageError"),
        (("diff", tmp_path / "root", 1), 2, "UsageError"),
        (("lss", tmp_path), 2, "UsageError"),
        (("ls", tmp_path, "--bogus"), 2, "UsageError"),
    ]
    for arguments, code, kind in failing:
        done = call(*arguments, "--json")
        assert (done.code, done.data["error"]) == (code, kind), arguments
        assert done.data["message"], arguments
        assert done.err == f"error: {done.data['message']}\n", arguments
    assert call("ls", "--help", "--json").code == 0
    for options in (("--json", "--version"), ("--version", "--json")):
        assert call(*options).data == {"version": ckpipe.__version__}


def test_errors_say_what_to_do_in_this_command(call: Commands, tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    for command in (("rm", 9), ("pin", 9), ("unpin", 9), ("diff", 1, 9), ("info", 9)):
        name, *steps = command
        assert call(name, tmp_path, *steps).err.endswith("are: 1 [step 9]. Name one of those.\n")
    (tmp_path / "empty").mkdir()
    assert call("rm", tmp_path / "empty", 9).err.endswith("are: none [step 9]\n")
    (tmp_path / "file").touch()
    for arguments in (("ls",), ("info",), ("verify",), ("rm", 1), ("cp", tmp_path / "copy")):
        name, *more = arguments
        done = call(name, tmp_path / "file", *more)
        assert (done.code, done.out) == (3, "")
        assert f"{tmp_path / 'file'} is no directory" in done.err
        assert "Look for a mistake in the path" in done.err
    assert "cannot be created" in call("cp", tmp_path, tmp_path / "file").err
    torch.save({"x": torch.zeros(1)}, tmp_path / "model.pt")
    said = call("rm", tmp_path / "model.pt", 1)
    assert (said.code, "a file that torch.load reads" in said.err) == (3, True)
    (tmp_path / "model.safetensors").write_bytes(bytes(16))
    said = call("rm", tmp_path / "model.safetensors", 1)
    assert (
        said.code,
        "a file that safetensors.torch.load_file reads" in said.err,
    ) == (3, True)
    part = call("export", tmp_path, "--form", "hf", "--part", "zz")
    assert (part.code, "--part of the command" in part.err) == (2, True)
    form = call("export", tmp_path, "--form", "pt", "--json")
    assert form.data["message"].startswith("Invalid value for '--form': 'pt' is not one of")
    misplaced = call("ls", tmp_path, "--settings", "f", "--json")
    assert misplaced.data["message"] == (
        "No such option: --settings. Put it before the command: ckpipe --settings FILE COMMAND"
    )


def test_a_terminal_too_narrow_for_a_table_breaks_its_cells() -> None:
    screen = Screen(False)
    screen.out = Console(file=io.StringIO(), force_terminal=True, width=30, color_system=None)
    cells = [f"{name}-of-the-checkpoint" for name in "abcdef"]
    screen.result({}, table(cells, [cells]))
    assert isinstance(screen.out.file, io.StringIO)
    lines = screen.out.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 30
    assert sorted("".join(lines).replace(" ", "")) == sorted("".join(cells + cells))


FULL, CLOSED = (
    "error: the output cannot be written: No space left on device\n",
    "Bad file descriptor",
)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("arguments", "where", "code", "err"),
    [
        ("--help", ">/dev/full", 3, FULL),
        ("--version", ">/dev/full", 3, FULL),
        ("ls none --json", ">/dev/full", 3, "There is no directory"),
        ("--json foo", ">/dev/full", 3, "No such command"),
        ("--help", ">&gone", 141, ""),
        ("ls none --json", ">&gone", 141, ""),
        ("ls --json", ">&gone", 141, ""),
        ("ls good", ">&-", 3, CLOSED),
        ("--help", ">&-", 3, CLOSED),
        ("ls none", "2>/dev/full", 3, ""),
        ("ls none", "2>&-", 3, ""),
        ("ls", "2>/dev/full", 2, ""),
        ("ls none", "2>&gone", 3, ""),
    ],
)
def test_no_exit_code_says_what_is_not_so_where_output_fails(
    tmp_path: Path, arguments: str, where: str, code: int, err: str
) -> None:
    (tmp_path / "good").mkdir()
    read_end, gone = os.pipe()
    os.close(read_end)
    try:
        done = subprocess.run(
            ["bash", "-c", f'exec "$@" {where.replace("gone", str(gone))}', "", *PROGRAM,
             *arguments.split()],
            cwd=tmp_path, pass_fds=[gone], capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
    finally:
        os.close(gone)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert err in done.stderr


def test_the_program_prints_plain_text_into_pipes(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "40"}
    done = program("ls", tmp_path, env=environment)
    assert (done.code, done.err) == (0, "")
    assert "\x1b" not in done.out
    assert len(done.out.splitlines()) == 2
    assert all(line == line.rstrip() for line in done.out.splitlines())
    assert json.loads(program("info", tmp_path, "--json").out)["step"] == 1
    assert program("--version").out == f"ckpipe {ckpipe.__version__}\n"


def test_a_terminal_without_unicode_gets_escapes(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    plain = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    done = program("info", tmp_path, env=os.environ | plain)
    assert (done.code, done.err) == (0, "")
    assert "tied \\u2192 weight" in done.out


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = subprocess.run(
            [*PROGRAM, "info", str(tmp_path)],
            stdout=write_end,
            stderr=subprocess.PIPE,
            timeout=300,
            check=False,
        )
    finally:
        os.close(write_end)
    assert (done.returncode, done.stderr) == (141, b"")


# How far an action is: shown on a terminal, not in a pipe


def counted(console: Console, *, late: bool) -> None:
    """Count a megabyte, and show it as a second later."""
    with Meter(console, "copying") as meter:
        meter.expect(10**6)
        if late:
            meter.show()
        for _ in range(4):
            meter.advance(250_000)


def terminal(out: io.StringIO) -> Console:
    return Console(file=out, force_terminal=True, width=120)


def test_a_terminal_shows_rate_and_time_left() -> None:
    out = io.StringIO()
    counted(terminal(out), late=True)
    assert "copying" in out.getvalue()
    assert "1.0/1.0 MB" in out.getvalue()
    assert "/s" in out.getvalue()
    assert out.getvalue().endswith("\x1b[2K")  # the line is wiped when the action is over


def test_pipes_and_quick_actions_show_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen, "SILENT_SECONDS", 3600.0)
    out = io.StringIO()
    counted(terminal(out), late=False)
    counted(Console(file=out, force_terminal=False, width=120), late=True)
    with Meter(terminal(out), "at work", unit=None) as meter:
        meter.end()
        meter.show()  # as a timer would that was just too late to be cancelled
    assert out.getvalue() == ""


class Seen(io.StringIO):
    """A terminal that tells when something is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()

    def write(self, text: str) -> int:
        self.written.set()
        return super().write(text)


def test_what_cannot_be_counted_is_said_to_be_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen, "SILENT_SECONDS", 0.0)
    out = Seen()
    with Meter(terminal(out), "at work", unit=None):
        assert out.written.wait(30)
    assert "at work" in out.getvalue()
    assert out.getvalue().endswith("\x1b[2K")


def test_a_terminal_is_told_while_torch_is_imported_and_gets_its_cursor_back(
    tmp_path: Path,
) -> None:
    # In short waits: a signal that comes just before a long one begins would not end it.
    (tmp_path / "torch.py").write_text("import time\nwhile True:\n    time.sleep(0.01)\n")
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    master, slave = pty.openpty()
    shown = b""
    try:
        with subprocess.Popen(
            [*PROGRAM, "verify", "."],
            stdin=slave, stdout=slave, stderr=slave,
            env=os.environ | {"TERM": "xterm", "PYTHONPATH": path},
        ) as process:  # fmt: skip
            os.close(slave)
            while b"at work" not in shown:
                shown += os.read(master, 1024)
            process.send_signal(signal.SIGINT)
            assert process.wait(300) == 130
        # What the end of the program closes reads as an error on Linux.
        with contextlib.suppress(OSError):
            while more := os.read(master, 1024):
                shown += more
    finally:
        os.close(master)
    assert shown.rindex(b"\x1b[?25h") > shown.rindex(b"\x1b[?25l")
