"""Progress is shown to whoever looks on, and to nobody else."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import signal
import subprocess
import threading
from pathlib import Path

import pytest
from commands import PROGRAM
from rich.console import Console

from ckpipe.cli import screen
from ckpipe.cli.screen import Meter, Spinner, of_things


def shown(*, terminal: bool) -> str:
    """What a meter prints on the way through a mebibyte."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=120)
    with Meter(console, "copying", None) as meter:
        meter.expect(1 << 20)
        for _ in range(4):
            meter.advance(1 << 18)
    return out.getvalue()


def test_a_terminal_shows_rate_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen, "SILENT_SECONDS", -1.0)
    text = shown(terminal=True)
    assert "copying" in text
    assert "1.0/1.0 MiB" in text
    assert "/s" in text
    assert text.endswith("\x1b[2K")  # the line is wiped when the action is over


def test_pipes_and_quick_actions_show_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen, "SILENT_SECONDS", 3600.0)
    assert shown(terminal=True) == ""
    monkeypatch.setattr(screen, "SILENT_SECONDS", -1.0)
    assert shown(terminal=False) == ""


def test_things_are_counted_with_their_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen, "SILENT_SECONDS", -1.0)
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120)
    with Meter(console, "reading indexes", 3, of_things) as meter:
        for _ in range(3):
            meter.advance(1)
    assert "3/3" in out.getvalue()
    assert re.search(r"\d+/s", out.getvalue())


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
    with Spinner(Console(file=out, force_terminal=True, width=80)):
        assert out.written.wait(30)
    assert "at work" in out.getvalue()
    assert out.getvalue().endswith("\x1b[2K")


def test_nobody_is_told_who_does_not_look_or_does_not_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = Seen()
    monkeypatch.setattr(screen, "SILENT_SECONDS", 3600.0)
    with Spinner(Console(file=out, force_terminal=True, width=80)) as spinner:
        spinner.end()
        spinner._show()  # as a timer would that was just too late to be cancelled
    monkeypatch.setattr(screen, "SILENT_SECONDS", 0.0)
    with Spinner(Console(file=out, force_terminal=False, width=80)) as spinner:
        spinner._show()
    assert out.getvalue() == ""


def test_a_terminal_is_told_while_torch_is_imported_and_gets_its_cursor_back(
    tmp_path: Path,
) -> None:
    # In short waits: a signal that comes just before a long one begins would not end it.
    (tmp_path / "torch.py").write_text("import time\nwhile True:\n    time.sleep(0.01)\n")
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    master, terminal = pty.openpty()
    shown = b""
    try:
        with subprocess.Popen(
            [*PROGRAM, "verify", "."],
            stdin=terminal, stdout=terminal, stderr=terminal,
            env=os.environ | {"TERM": "xterm", "PYTHONPATH": path},
        ) as process:  # fmt: skip
            os.close(terminal)
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
