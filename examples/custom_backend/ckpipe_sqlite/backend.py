"""The backend: each method sends one transaction to a thread."""

from __future__ import annotations

import sqlite3
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, TypeVar
from urllib.parse import unquote

import anyio

from ckpipe import Backend, ObjectInfo, PutMode, Upload
from ckpipe.backend import check_key, run_in_thread
from ckpipe.errors import (
    ObjectExists,
    PermissionDenied,
    StoreError,
    StoreFull,
    StoreUnavailable,
    UsageError,
)
from ckpipe_sqlite import database

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]

KINDS: dict[int, type[StoreError]] = {
    sqlite3.SQLITE_FULL: StoreFull,
    sqlite3.SQLITE_READONLY: PermissionDenied,
    sqlite3.SQLITE_BUSY: StoreUnavailable,  # it is transient: the pipeline retries
    sqlite3.SQLITE_LOCKED: StoreUnavailable,
}
HINTS = {
    sqlite3.SQLITE_CANTOPEN: "Name a file that is there, or can be made, in a folder that exists",
    sqlite3.SQLITE_NOTADB: "Name another file; this one is as it was",
}


class SqliteBackend(Backend):
    """A store in one SQLite file.

    Args:
        url: ``sqlite://`` and the path of the file; its folder must exist.
        timeout: Seconds to wait for other processes that write.
        access: With ``"read"`` opening makes and changes nothing.

    Raises:
        UsageError: If the URL has no path.
    """

    def __init__(
        self, url: str, *, timeout: float = 60.0, access: Literal["read", "write"] = "write"
    ) -> None:
        path = unquote(url.partition("://")[2])
        if not path:
            raise UsageError(f"{url} names no file", hint="Write sqlite:///folder/run.db")
        self._path = Path(path).absolute()
        self._timeout, self._access = timeout, access
        self._idle: deque[sqlite3.Connection] = deque()
        self._turn = anyio.Lock()

    async def __aenter__(self) -> Self:
        if self._access == "read":
            await self._read("", database.check)
        else:
            await self.write("", database.prepare)
            await run_in_thread(self._write_ahead)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with anyio.CancelScope(shield=True):
            await run_in_thread(self._close)

    def _close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    # Transactions

    async def write(self, key: str, work: Work[T]) -> T:
        """Run a transaction that writes; SQLite has one writer at a time, so writers queue here."""
        async with self._turn:
            return await run_in_thread(self._transact, "BEGIN IMMEDIATE", key, work)

    async def _read(self, key: str, work: Work[T]) -> T:
        """Run a transaction that reads a snapshot, beside all other transactions."""
        return await run_in_thread(self._transact, "BEGIN", key, work)

    def _transact(self, begin: str, key: str, work: Work[T]) -> T:
        with _translated(self._path, key), self._connection() as db:
            db.execute(begin)
            with db:  # commits, or rolls back if the work raises
                return work(db)

    def _write_ahead(self) -> None:
        """Let readers continue beside the writer; the file keeps this mode."""
        with _translated(self._path), self._connection() as db:
            db.execute("PRAGMA journal_mode = WAL")

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        """Lend a connection to this thread alone; a failed one is not used again."""
        try:
            db = self._idle.pop()
        except IndexError:
            db = self._connect()
        try:
            yield db
        except BaseException:
            db.close()
            raise
        self._idle.append(db)

    def _connect(self) -> sqlite3.Connection:
        # A reader writes leases if the file permits it; "rw" makes no file.
        mode = "rw" if self._access == "read" else "rwc"
        db = sqlite3.connect(
            f"{self._path.as_uri()}?mode={mode}", uri=True, timeout=self._timeout,
            isolation_level=None, check_same_thread=False,
        )  # fmt: skip
        db.execute("PRAGMA synchronous = FULL")  # a commit survives a power loss
        return db

    # The contract

    async def put(self, key: str, data: bytes, mode: PutMode) -> None:
        def work(db: sqlite3.Connection) -> None:
            if mode is PutMode.OVERWRITE:
                database.remove(db, [key])
            upload = database.begin_upload(db, key)
            database.write_block(db, upload, 0, memoryview(data))
            database.publish(db, key, upload, len(data))

        check_key(key)
        await self.write(key, work)

    async def open_upload(self, key: str, *, size: int, block_bytes: int) -> Upload:
        check_key(key)
        number = await self.write(key, lambda db: database.begin_upload(db, key))
        return SqliteUpload(self, key, size, number)

    async def get(self, key: str, *, max_bytes: int) -> bytes:
        def work(db: sqlite3.Connection) -> bytes:
            size = database.find(db, key).info.size
            if size > max_bytes:
                raise StoreError(f"{size} bytes are more than {max_bytes}", key=key)
            data = bytearray(size)
            database.read(db, key, 0, memoryview(data))
            return bytes(data)

        check_key(key)
        return await self._read(key, work)

    async def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        check_key(key)
        await self._read(key, lambda db: database.read(db, key, offset, buffer))

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        for info in await self._read(prefix, lambda db: [*database.objects(db, prefix)]):
            yield info

    async def stat(self, key: str) -> ObjectInfo:
        check_key(key)
        return (await self._read(key, lambda db: database.find(db, key))).info

    async def delete(self, keys: Iterable[str]) -> None:
        known = [check_key(key) for key in keys]
        await self.write("", lambda db: database.remove(db, known))

    async def remove_stale_uploads(self, prefix: str, *, before: datetime) -> int:
        return await self.write(prefix, lambda db: database.abandon_stale(db, prefix, before))


class SqliteUpload(Upload):
    """The blocks of an object that does not exist yet."""

    def __init__(self, backend: SqliteBackend, key: str, size: int, number: int) -> None:
        self._backend, self._key, self._size, self._number = backend, key, size, number

    async def write(self, offset: int, data: memoryview) -> None:
        await self._backend.write(
            self._key, lambda db: database.write_block(db, self._number, offset, data)
        )

    async def complete(self) -> None:
        await self._backend.write(
            self._key, lambda db: database.publish(db, self._key, self._number, self._size)
        )

    async def abort(self) -> None:
        await self._backend.write(self._key, lambda db: database.abandon(db, self._number))


@contextmanager
def _translated(path: Path, key: str = "") -> Iterator[None]:
    """Translate errors of SQLite to the errors that a pipeline handles."""
    try:
        yield
    except sqlite3.IntegrityError as error:
        raise ObjectExists("The key is taken", key=key) from error
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the kind; further bits refine it
        message, kind = f"SQLite failed on {path}: {error}", KINDS.get(code, StoreError)
        raise kind(message, key=key or None, hint=HINTS.get(code)) from error
