"""Ctrl-C ends commands that read, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import interrupted, save_steps


@pytest.mark.parametrize(
    "arguments", [("verify",), ("verify", "--all"), ("timeline", "--html", "page.html")]
)
def test_an_interrupt_ends_a_command_that_waits_for_the_store(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    save_steps(tmp_path / "root", 1)
    before = set(tmp_path.rglob("*"))
    verbs = ("read_into", "cached", "get")
    done = interrupted(verbs, *arguments, f"stuck://{tmp_path / 'root'}", cwd=tmp_path)
    assert (done.code, done.out, done.err) == (130, "", "")
    assert set(tmp_path.rglob("*")) == before
