"""The backend meets the contract, and what is not in the contract but in its README."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from ckpipe_sqlite import SqliteBackend

from ckpipe import PutMode
from ckpipe.errors import StoreError, StoreUnavailable, UsageError
from ckpipe.testing import BackendConformance


class TestSqlite(BackendConformance):
    @pytest.fixture
    async def backend(self, tmp_path: Path) -> AsyncIterator[SqliteBackend]:
        async with SqliteBackend(f"sqlite://{tmp_path}/run.db") as backend:
            yield backend


def started(command: list[str]) -> subprocess.Popen[str]:
    """A process that is talked to through pipes."""
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


async def test_all_is_in_one_file_once_it_is_closed(tmp_path: Path) -> None:
    async with SqliteBackend(f"sqlite://{tmp_path}/run.db") as backend:
        await backend.put("a", b"1", PutMode.CREATE)
    assert os.listdir(tmp_path) == ["run.db"]


async def test_giving_up_after_a_complete_that_did_land_changes_nothing(tmp_path: Path) -> None:
    async with SqliteBackend(f"sqlite://{tmp_path}/run.db") as backend:
        upload = await backend.open_upload("a", size=3, block_bytes=3)
        await upload.write(0, memoryview(b"abc"))
        await upload.complete()
        await upload.abort()
        assert await backend.get("a", max_bytes=3) == b"abc"


async def test_who_only_looks_makes_nothing(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="unable to open"):
        async with SqliteBackend(f"sqlite://{tmp_path}/none.db", access="read"):
            pass
    assert os.listdir(tmp_path) == []


async def test_another_process_that_writes_is_waited_for_and_then_told(tmp_path: Path) -> None:
    holder = """
import sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute("BEGIN IMMEDIATE")
print("held", flush=True)
sys.stdin.read()
"""
    async with SqliteBackend(f"sqlite://{tmp_path}/run.db", timeout=0.05) as backend:
        command = [sys.executable, "-c", holder, str(tmp_path / "run.db")]
        with started(command) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            with pytest.raises(StoreUnavailable):
                await backend.put("a", b"1", PutMode.CREATE)
            process.communicate()
        await backend.put("a", b"1", PutMode.CREATE)


def test_a_url_without_a_path_is_refused() -> None:
    with pytest.raises(UsageError, match="names no file"):
        SqliteBackend("sqlite://")
