"""The Google Cloud Storage backend meets the contract, on a strict emulator and a lenient one."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator

import pytest
from gcs_servers import GcsServer

from ckpipe.backend import Backend
from ckpipe.testing import BackendConformance
from ckpipe_gcs import GcsBackend

BUCKET = "conformance"
RESUMABLE_BYTES = 1 << 16
"""Whole blocks go through sessions and shorter ones do not, so that both are seen."""

_numbers = itertools.count()
_with_bucket: set[GcsServer] = set()


def empty_root(server: GcsServer) -> str:
    """The URL of a root that nothing lies below."""
    if server not in _with_bucket:
        server.make_bucket(BUCKET)
        _with_bucket.add(server)
    return f"gs://{BUCKET}/root-{next(_numbers)}"


class TestEmulator(BackendConformance):
    @pytest.fixture
    async def backend(self, gcs_server: GcsServer) -> AsyncIterator[Backend]:
        url = empty_root(gcs_server)
        async with GcsBackend(
            url,
            endpoint_url=gcs_server.url,
            anonymous=True,
            resumable_bytes=RESUMABLE_BYTES,
        ) as made:
            yield made
        below = url.removeprefix(f"gs://{BUCKET}/")
        assert not [name for name in gcs_server.names(BUCKET) if below in name and "part" in name]
        assert not [name for name, _ in gcs_server.sessions(BUCKET) if below in name]
