"""Checkpoints of ckpipe in one SQLite file: ``sqlite:///folder/run.db``."""

from ckpipe_sqlite.backend import SqliteBackend

__all__ = ["SqliteBackend"]
