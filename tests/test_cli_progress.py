"""Progress is shown to whoever looks on, and to nobody else."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from ckpipe.cli import progress
from ckpipe.cli.progress import Meter


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
    monkeypatch.setattr(progress, "SILENT_SECONDS", -1.0)
    text = shown(terminal=True)
    assert "copying" in text
    assert "1.0/1.0 MiB" in text
    assert "/s" in text
    assert text.endswith("\x1b[2K")  # the line is wiped when the action is over


def test_pipes_and_quick_actions_show_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(terminal=True) == ""
    monkeypatch.setattr(progress, "SILENT_SECONDS", -1.0)
    assert shown(terminal=False) == ""
