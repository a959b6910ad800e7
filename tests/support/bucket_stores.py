"""Roots on S3 and Google Cloud Storage, behind a proxy that sees and disturbs requests."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import anyio
from botocore.exceptions import ClientError

import ckpipe
from ckpipe.backend import Backend, Upload
from ckpipe_gcs import GcsBackend
from ckpipe_s3 import S3Backend
from tests.support.fault_proxy import Fault, FaultProxy, GcsDialect, Request, S3Dialect, fault_proxy
from tests.support.gcs_servers import GcsServer
from tests.support.pipelines import loaded_state, same
from tests.support.s3_servers import S3Server

Server = S3Server | GcsServer
BLOCK = 5 << 20

_numbers = itertools.count()


@contextlib.contextmanager
def behind_proxy(server: Server, bucket: str) -> Iterator[FaultProxy]:
    """A proxy before a server that has a bucket."""
    with contextlib.suppress(ClientError):  # it is there
        server.make_bucket(bucket)
    dialect = S3Dialect() if isinstance(server, S3Server) else GcsDialect()
    with fault_proxy(server.port, dialect) as proxy:
        yield proxy


async def written(backend: Backend, key: str = "data", block: int = BLOCK) -> Upload:
    """Begin an upload of two blocks of zeros, and write both."""
    upload = await backend.open_upload(key, size=2 * block, block_bytes=block)
    for offset in (0, block):
        await upload.write(offset, memoryview(bytes(block)))
    return upload


class Root:
    """A root of its own.

    Args:
        server: The server.
        proxy: The proxy.
        bucket: The bucket that it lies in.
    """

    def __init__(self, server: Server, proxy: FaultProxy, bucket: str) -> None:
        self.server, self.proxy, self.bucket = server, proxy, bucket
        self.scheme = "s3" if isinstance(server, S3Server) else "gs"
        self.root = f"run-{next(_numbers)}"
        self.url = f"{self.scheme}://{bucket}/{self.root}"

    def names(self) -> list[str]:
        """The names of all objects in it; blocks."""
        return self.server.names(self.bucket, f"{self.root}/")

    def leftovers(self) -> list[str]:
        """The names of open uploads, temporary objects and sessions with bytes in them; blocks."""
        below = f"{self.root}/"
        if isinstance(self.server, S3Server):
            return [
                each for each in self.server.open_uploads(self.bucket) if each.startswith(below)
            ]
        # A session whose begin was never answered is open under a name that nobody knows. It holds
        # nothing, and ends by itself.
        held = [name for name, had in self.server.sessions(self.bucket) if below in name and had]
        return [name for name in self.names() if name.endswith(".ckpipe-part")] + held


class Seen(Root):
    """A root for a backend, all of whose requests are kept."""

    def __init__(self, server: Server, proxy: FaultProxy, bucket: str) -> None:
        super().__init__(server, proxy, bucket)
        self.requests: list[Request] = []
        self.fault: dict[str, Fault] = {}
        proxy.rule = self._rule

    def _rule(self, request: Request) -> Fault | None:
        self.requests.append(request)
        return self.fault.pop(request.operation, None)

    def backend(self, **options: Any) -> Backend:
        """A backend of the root, not open yet."""
        usual: dict[str, Any] = {"endpoint_url": self.proxy.url}
        if self.scheme == "s3":
            return S3Backend(self.url, **usual | options)
        usual |= {"anonymous": True, "resumable_bytes": 1 << 19}
        return GcsBackend(self.url, **usual | options)

    def headers(self, operation: str) -> list[dict[str, str]]:
        """The headers of each request of an operation."""
        return [each.headers for each in self.requests if each.operation == operation]

    async def left(self) -> list[str]:
        """What :meth:`leftovers` finds."""
        return await anyio.to_thread.run_sync(self.leftovers)


class Store(Root):
    """A root for pipelines, with larger files made of parts."""

    @property
    def part(self) -> str:
        """The request that brings a block."""
        return "UploadPart" if self.scheme == "s3" else "Send"

    def pipeline(
        self,
        endpoint: str | None = None,
        *,
        profile: str | None = None,
        worker: Any = "thread",
        fault: Fault | None = None,
        retention: dict[str, Any] | None = None,
        **upload: Any,
    ) -> ckpipe.SyncPipeline:
        """A pipeline that tries again at once, and gives up soon only requests that a fault hangs.

        It goes through the proxy unless it has another endpoint. On Google Cloud Storage whole
        blocks go through sessions, and the last one, which is shorter, in one request.
        """
        request, attempt = 60.0, 120.0
        if fault is Fault.HANG:
            request, attempt = (1.0, 1.5) if self.scheme == "s3" else (0.7, 3.0)
        options: dict[str, Any] = {"profile": profile}
        if self.scheme == "gs":
            options = {"anonymous": True, "resumable_bytes": BLOCK}
        options |= {"endpoint_url": endpoint or self.proxy.url, "request_timeout": request}
        return ckpipe.SyncPipeline(
            self.url,
            staging={"block_bytes": BLOCK},
            retention=retention or {},
            upload={
                "retries": 9,  # on a busy machine some that do not hang are given up, too
                "backoff_seconds": 0.01,
                "attempt_timeout_seconds": attempt,
                "lanes": 2,
                **upload,
            },
            backends={self.scheme: options},
            worker=worker,
        )

    def check(self, state: dict[str, Any] | None) -> None:
        """Check that a state is saved as step 1, or nothing is, and nothing lies beside it."""
        assert self.leftovers() == []
        with self.pipeline(self.server.url) as opened:
            found = [info for info in opened.steps() if info.complete]
            assert bool(found) is (state is not None)
            if state is not None:
                opened.verify(1)
                assert same(loaded_state(opened), state)
