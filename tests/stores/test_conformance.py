"""Every backend of this repository meets the contract, and so do the fakes around them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from ckpipe.backend import Backend
from ckpipe.testing import BackendConformance, FaultyBackend, MemoryBackend, SlowBackend
from ckpipe_local import LocalBackend


class TestMemory(BackendConformance):
    @pytest.fixture
    async def backend(self) -> AsyncIterator[Backend]:
        async with MemoryBackend() as backend:
            yield backend


class TestLocalDirect(BackendConformance):
    @pytest.fixture
    async def backend(self, tmp_path: Path) -> AsyncIterator[Backend]:
        async with LocalBackend(str(tmp_path)) as backend:
            yield backend


class TestLocalBuffered(BackendConformance):
    sample = 30

    @pytest.fixture
    async def backend(self, tmp_path: Path) -> AsyncIterator[Backend]:
        async with LocalBackend(tmp_path.as_uri(), direct=False) as backend:
            yield backend


@pytest.fixture
def memory_directory() -> Iterator[str]:
    """A directory on a file system that has no direct I/O."""
    if not os.path.isdir("/dev/shm"):
        pytest.skip("This machine has no /dev/shm")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield directory


class TestLocalInMemory(BackendConformance):
    sample = 30

    @pytest.fixture
    async def backend(self, memory_directory: str) -> AsyncIterator[Backend]:
        async with LocalBackend(memory_directory) as backend:
            yield backend


class TestWrapped(BackendConformance):
    sample = 30

    @pytest.fixture
    async def backend(self, tmp_path: Path) -> AsyncIterator[Backend]:
        inner = SlowBackend(LocalBackend(str(tmp_path)), bytes_per_second=1e10)
        async with FaultyBackend(inner) as backend:
            yield backend
