"""A store whose commits can be held, in a package of its own, so that worker processes find it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio.to_thread

from ckpipe.backend import PutMode
from ckpipe_local import LocalBackend

_HELD = "step-000000000002"


class HeldBackend(LocalBackend):
    """A local directory in which step 2 is not committed while somebody holds it."""

    def __init__(self, url: str) -> None:
        path = url.removeprefix("held://")
        super().__init__(path)
        self._beside = Path(path)

    async def put(self, key: str, data: bytes, mode: PutMode) -> None:
        """Wait before the commit until it is not held; tell when a lease is there."""
        if key.startswith(_HELD):
            await anyio.to_thread.run_sync(_wait_for, self._beside.with_suffix(".held"))
        await super().put(key, data, mode)
        if key.startswith(f".ckpipe/leases/{_HELD}"):
            await anyio.to_thread.run_sync(self._beside.with_suffix(".leased").write_text, key)


def _wait_for(path: Path) -> None:
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)


def install(folder: Path) -> None:
    """Make the store known to whoever has a directory on its path, beside that of this module."""
    about = folder / "held_store-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: held-store\nVersion: 1\n")
    (about / "entry_points.txt").write_text(
        "[ckpipe.backends]\nheld = tests.worker.held_store:HeldBackend\n"
    )


@contextmanager
def held(root: Path) -> Iterator[None]:
    """Hold the commit, and make the pipe that tells of a lease."""
    os.mkfifo(root.with_suffix(".leased"))
    with open(root.with_suffix(".held"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def lease_taken(root: Path) -> str:
    """Wait for a lease on step 2; return its key."""
    return root.with_suffix(".leased").read_text()
