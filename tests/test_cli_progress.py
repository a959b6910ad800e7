"""A terminal is shown how far an action is; a pipe is not."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import signal
import subprocess
import threading
from pathlib import Path

import pytest
from commands import PROGRAM
from rich.console import Console

from ckpipe.cli import screen
from ckpipe.cli.screen import Meter


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
