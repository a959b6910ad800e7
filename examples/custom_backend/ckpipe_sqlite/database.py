"""Objects, uploads and blocks in tables: plain blocking functions on a connection.

An object is a row that names an upload; the upload's blocks hold its bytes. The row is inserted
last, so an object is there whole or not at all. Its key is the primary key, so exactly one of
several writers wins.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime

from ckpipe import ObjectInfo
from ckpipe.errors import ObjectNotFound, StoreError, TruncatedObject

TABLES = {
    "objects": "(key TEXT PRIMARY KEY, upload INTEGER NOT NULL, size INTEGER NOT NULL, "
    "time TEXT NOT NULL)",
    "uploads": "(upload INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT NOT NULL, time TEXT)",
    "blocks": "(id INTEGER PRIMARY KEY, upload INTEGER NOT NULL, start INTEGER NOT NULL, "
    "data BLOB NOT NULL, UNIQUE (upload, start))",
}
PIECE = 1 << 20
"""The bytes of a block that are in Python's memory at a time."""


@dataclass(frozen=True, slots=True)
class Found:
    """An object's row."""

    info: ObjectInfo
    upload: int


def prepare(db: sqlite3.Connection) -> None:
    """Make the tables of a new database; refuse one that has other tables."""
    if _tables(db):
        check(db)
        return
    for name, columns in TABLES.items():
        db.execute(f"CREATE TABLE {name} {columns}")


def check(db: sqlite3.Connection) -> None:
    """Refuse a database that holds something else, or nothing."""
    if not TABLES.keys() <= _tables(db):
        (_, _, path) = db.execute("PRAGMA database_list").fetchone()
        message = f"{path} is an SQLite database, but not one of checkpoints"
        raise StoreError(message, hint="Name another file; this one is as it was")


def _tables(db: sqlite3.Connection) -> set[str]:
    return {name for (name,) in db.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}


def begin_upload(db: sqlite3.Connection, key: str) -> int:
    """Begin an upload, of which nothing is visible; return its number."""
    query = "INSERT INTO uploads (key, time) VALUES (?, ?) RETURNING upload"
    return int(db.execute(query, (key, _now())).fetchone()[0])


def write_block(db: sqlite3.Connection, upload: int, start: int, data: memoryview) -> None:
    """Write a block of an upload; the same bytes replace a block that is already there."""
    query = (
        "INSERT INTO blocks (upload, start, data) VALUES (?, ?, zeroblob(?)) "
        "ON CONFLICT DO UPDATE SET data = excluded.data RETURNING id"
    )
    ((row,),) = db.execute(query, (upload, start, len(data))).fetchall()
    with db.blobopen("blocks", "data", row) as blob:
        for at in range(0, len(data), PIECE):
            blob.write(data[at : at + PIECE])


def publish(db: sqlite3.Connection, key: str, upload: int, size: int) -> None:
    """Make an upload an object. Raises IntegrityError if the key is taken."""
    # An upload in progress has a time; one that has become an object has none.
    query = "UPDATE uploads SET time = NULL WHERE upload = ? AND time IS NOT NULL"
    if db.execute(query, (upload,)).rowcount != 1:
        raise StoreError("The upload was given up", key=key)
    db.execute("INSERT INTO objects VALUES (?, ?, ?, ?)", (key, upload, size, _now()))


def abandon(db: sqlite3.Connection, upload: int) -> None:
    """Remove an upload, unless it has become an object."""
    query = "DELETE FROM uploads WHERE upload = ? AND time IS NOT NULL"
    if db.execute(query, (upload,)).rowcount:
        db.execute("DELETE FROM blocks WHERE upload = ?", (upload,))


def abandon_stale(db: sqlite3.Connection, prefix: str, before: datetime) -> int:
    """Remove uploads below a prefix that began before a time; return their number."""
    query = "SELECT upload FROM uploads WHERE time < ? AND substr(key, 1, ?) = ?"
    stale = db.execute(query, (before.isoformat(), len(prefix), prefix)).fetchall()
    for (upload,) in stale:
        abandon(db, upload)
    return len(stale)


def find(db: sqlite3.Connection, key: str) -> Found:
    """Find the object of a key."""
    row = db.execute("SELECT * FROM objects WHERE key = ?", (key,)).fetchone()
    if row is None:
        raise ObjectNotFound("No object has this key", key=key)
    return Found(_info(row[0], row[2], row[3]), row[1])


def read(db: sqlite3.Connection, key: str, offset: int, buffer: memoryview) -> None:
    """Fill a buffer with an object's bytes."""
    found, end = find(db, key), offset + len(buffer)
    if end > found.info.size:
        raise TruncatedObject(f"The object has {found.info.size} bytes, not {end}", key=key)
    query = (
        "SELECT id, start, length(data) FROM blocks "
        "WHERE upload = ? AND start < ? AND start + length(data) > ?"
    )
    for row, start, size in db.execute(query, (found.upload, end, offset)).fetchall():
        low, high = max(start, offset), min(start + size, end)
        with db.blobopen("blocks", "data", row, readonly=True) as blob:
            blob.seek(low - start)
            for at in range(low, high, PIECE):
                upto = min(at + PIECE, high)
                buffer[at - offset : upto - offset] = blob.read(upto - at)


def objects(db: sqlite3.Connection, prefix: str) -> Iterator[ObjectInfo]:
    """Yield the objects below a prefix, by a range of the index.

    The prefix is empty or ends with a slash.
    """
    behind = prefix[:-1] + "0" if prefix else "\U0010ffff"  # "0" comes after "/"
    query = "SELECT key, size, time FROM objects WHERE key >= ? AND key < ?"
    with closing(db.execute(query, (prefix, behind))) as rows:
        for row in rows:
            yield _info(*row)


def remove(db: sqlite3.Connection, keys: Iterable[str]) -> None:
    """Delete objects, which frees the file's pages for others."""
    for key in keys:
        query = "DELETE FROM objects WHERE key = ? RETURNING upload"
        for (upload,) in db.execute(query, (key,)).fetchall():
            db.execute("DELETE FROM uploads WHERE upload = ?", (upload,))
            db.execute("DELETE FROM blocks WHERE upload = ?", (upload,))


def _info(key: str, size: int, time: str) -> ObjectInfo:
    return ObjectInfo(key, size, datetime.fromisoformat(time))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")
