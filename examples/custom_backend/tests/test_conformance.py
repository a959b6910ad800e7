"""Test the contract, and the claims of the package's README."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Literal

import pytest
from ckpipe_sqlite import SqliteBackend

from ckpipe import PutMode
from ckpipe.errors import PermissionDenied, StoreError, StoreUnavailable, UsageError
from ckpipe.testing import BackendConformance


class TestSqlite(BackendConformance):
    @pytest.fixture
    async def backend(self, tmp_path: Path) -> AsyncIterator[SqliteBackend]:
        async with SqliteBackend(f"sqlite://{tmp_path}/run.db") as backend:
            yield backend


def started(command: list[str]) -> subprocess.Popen[str]:
    """Start a process whose standard input and output are pipes."""
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
    with pytest.raises(StoreError, match=r"none\.db: unable to open"):
        async with SqliteBackend(f"sqlite://{tmp_path}/none.db", access="read"):
            pass
    assert os.listdir(tmp_path) == []


async def test_who_only_looks_may_hold_a_lease(tmp_path: Path) -> None:
    url = f"sqlite://{tmp_path}/run.db"
    async with SqliteBackend(url), SqliteBackend(url, access="read") as reader:
        await reader.put("lease", b"1", PutMode.CREATE)
        await reader.delete(["lease"])
    assert os.listdir(tmp_path) == ["run.db"]


@pytest.mark.parametrize("access", ["read", "write"])
async def test_a_file_of_somebody_else_is_told_and_left_as_it_is(
    tmp_path: Path, access: Literal["read", "write"]
) -> None:
    foreign, text = tmp_path / "foreign.db", tmp_path / "text.db"
    with closing(sqlite3.connect(foreign)) as db:
        db.execute("CREATE TABLE songs (title TEXT)")
    text.write_text("no database at all\n" * 100)
    before = [each.read_bytes() for each in (foreign, text)]
    with pytest.raises(StoreError, match=r"foreign\.db is an SQLite database, but not one of"):
        async with SqliteBackend(f"sqlite://{foreign}", access=access):
            pass
    with pytest.raises(StoreError, match=r"text\.db: file is not a database"):
        async with SqliteBackend(f"sqlite://{text}", access=access):
            pass
    assert [each.read_bytes() for each in (foreign, text)] == before


async def test_what_may_not_be_written_is_a_matter_of_permission(tmp_path: Path) -> None:
    def forbidden(db: sqlite3.Connection) -> None:
        db.execute("PRAGMA query_only = ON")
        db.execute("DELETE FROM objects")

    async with SqliteBackend(f"sqlite://{tmp_path}/run.db") as backend:
        with pytest.raises(PermissionDenied, match="readonly"):
            await backend.write("", forbidden)


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
