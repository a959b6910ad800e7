"""A root on S3 or Google Cloud Storage, behind a proxy that sees and disturbs requests."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import anyio
from botocore.exceptions import ClientError
from fault_proxy import Fault, FaultProxy, GcsDialect, Request, S3Dialect, fault_proxy
from gcs_servers import GcsServer
from s3_servers import S3Server

from ckpipe.backend import Backend
from ckpipe_gcs import GcsBackend
from ckpipe_s3 import S3Backend

BUCKET = "backend"
BLOCK = 5 << 20
DIALECTS: dict[type, Any] = {S3Server: S3Dialect, GcsServer: GcsDialect}

_numbers = itertools.count()


class Seen:
    """Requests as they passed."""

    def __init__(self, server: S3Server | GcsServer, proxy: FaultProxy) -> None:
        self.server, self.proxy = server, proxy
        self.scheme = "s3" if isinstance(server, S3Server) else "gs"
        self.root = f"root-{next(_numbers)}"
        self.url = f"{self.scheme}://{BUCKET}/{self.root}"
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

    async def leftovers(self) -> list[str]:
        """The names of open uploads on S3, and of temporary objects on Google Cloud Storage."""
        return await anyio.to_thread.run_sync(self._leftovers)

    def _leftovers(self) -> list[str]:
        if isinstance(self.server, S3Server):
            found = self.server.open_uploads(BUCKET)
        else:
            found = [name for name in self.server.names(BUCKET) if name.endswith(".ckpipe-part")]
        return [name for name in found if name.startswith(f"{self.root}/")]


@contextlib.contextmanager
def watched(server: S3Server | GcsServer) -> Iterator[Seen]:
    """A new root on a server."""
    with contextlib.suppress(ClientError):  # it is there
        server.make_bucket(BUCKET)
    with fault_proxy(server.port, DIALECTS[type(server)]()) as proxy:
        yield Seen(server, proxy)
