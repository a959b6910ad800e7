"""Ctrl-C ends commands that read, and leaves nothing behind."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from commands import save_steps
from heard_signals import HEARING

STUCK = """
import anyio
from ckpipe.store.registry import register_backend
from ckpipe.testing.wrappers import WrappedBackend
from ckpipe_local import LocalBackend

class Stuck(WrappedBackend):
    async def around(self, operation, call):
        if operation.verb in ("read_into", "cached", "get"):
            print("stuck", flush=True)
            await anyio.sleep_forever()
        return await call()

register_backend("stuck", lambda url: Stuck(LocalBackend(url.replace("stuck", "file"))))
from ckpipe.cli import main
main()
"""


@pytest.mark.parametrize(
    "arguments", [("verify",), ("verify", "--all"), ("timeline", "--html", "page.html")]
)
def test_an_interrupt_ends_a_command_that_waits_for_the_store(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    save_steps(tmp_path / "root", 1)
    before = set(tmp_path.rglob("*"))
    with subprocess.Popen(
        [sys.executable, "-c", HEARING + STUCK, *arguments, f"stuck://{tmp_path / 'root'}"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "stuck\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(300) == 130
        assert (process.stdout.read(), process.stderr.read()) == ("", "")
    assert set(tmp_path.rglob("*")) == before
