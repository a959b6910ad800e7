"""Servers that tests start on free ports of the loopback interface, and stop again."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

START_SECONDS = 60


@dataclass(frozen=True)
class LocalServer:
    """A server that runs.

    Args:
        port: Its port.
    """

    port: int

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.port}"


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on, nor on those 10,000 above, which some servers take too.

    They are free until somebody takes them, so they are drawn: processes that test side by side
    must not find the same. None is one that the system gives to whoever connects.
    """
    found: list[int] = []
    with contextlib.ExitStack() as held:
        for port in random.SystemRandom().sample(range(10_000, 22_000), 12_000):
            sockets = [held.enter_context(socket.socket()) for _ in range(2)]
            try:
                sockets[0].bind(("127.0.0.1", port))
                sockets[1].bind(("127.0.0.1", port + 10_000))
            except OSError:
                continue
            found.append(port)
            if len(found) == count:
                return found
    raise AssertionError("no free ports")


@contextlib.contextmanager
def running(command: list[str], log: Path, port: int) -> Iterator[None]:
    """Run a server until the end of the block, and kill it then.

    Args:
        command: What starts it.
        log: The file for what it says; it runs in the folder of that.
        port: Where it answers once it is ready.
    """
    # SeaweedFS logs into the folder of temporary files too.
    environment = os.environ | {"GOMEMLIMIT": "400MiB", "TMPDIR": str(log.parent)}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=log.parent
        )
    try:
        _wait_until_it_answers(process, port, log)
        yield
    finally:
        process.kill()
        process.wait()


def _wait_until_it_answers(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text(errors="replace")[-2000:]
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=1):
                return
        except urllib.error.HTTPError as error:
            error.close()
            if error.code < 500:
                return
        except OSError:
            pass
        time.sleep(0.05)
    raise AssertionError(f"{_name(process)} did not start:\n{log.read_text()[-2000:]}")


def _name(process: subprocess.Popen[bytes]) -> str:
    return str(process.args[0] if isinstance(process.args, list) else process.args)
