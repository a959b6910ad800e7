"""Leases: a process declares that it uses a checkpoint, or that its launch is running.

A lease is a small object below ``.ckpipe/leases/<subject>/`` that its holder renews by creating
further ones. It is live while the newest of them is young, by the store's own clock. So it ends by
itself after a crash.

**Why nothing is deleted under a reader.** A reader creates its lease and then looks for a
tombstone. A process that deletes creates the tombstone and then looks for leases. Lists are
consistent, so at least one of the two sees the other: the reader takes another checkpoint, or the
data stays until the lease has ended.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta

import anyio

from ckpipe.backend import Backend, ObjectInfo
from ckpipe.errors import PermissionDenied, StoreError, StoreFull
from ckpipe.format.names import LEASES, lease_key
from ckpipe.store.retry import create_once
from ckpipe.threads import beside

logger = logging.getLogger("ckpipe")

LEASE_LIFE = timedelta(minutes=15)
"""Greatest age of the newest object of a live lease."""

EXPORTING = ".export"
"""Suffix that a checkpoint's id has in the lease of a process that will export it once it is
complete. The lease keeps retention away like one on the id itself, but no load waits for such a
checkpoint to become complete."""

RENEW_EVERY = LEASE_LIFE / 5
"""Time between two renewals of a lease: several renewals in a row may fail."""

REMOVE_SECONDS = 5.0
"""Seconds that the removal of the object in :func:`store_time` may outlast a cancellation."""


def live_subjects(leases: Iterable[ObjectInfo], now: datetime) -> set[str]:
    """Return the checkpoints and launches under a live lease.

    Args:
        leases: The objects below ``.ckpipe/leases/``.
        now: The time, by the store's own clock.
    """
    live = set()
    for each in leases:
        subject, slash, _ = each.key.removeprefix(LEASES).partition("/")
        if slash and now - each.modified <= LEASE_LIFE:
            live.add(subject)
    return live


def protected_subjects(live: Iterable[str]) -> set[str]:
    """Return the checkpoints and launches that retention must leave alone, given those leased."""
    return {each.removesuffix(EXPORTING) for each in live}


async def read_leases(backend: Backend) -> list[ObjectInfo]:
    """List all leases of a root, live or not.

    Raises:
        StoreError: If the store failed.
    """
    return [each async for each in backend.list(LEASES)]


async def store_time(backend: Backend) -> datetime:
    """Return the time by the store's own clock: that of a lease which is made and removed again.

    A full store has no room for the lease. Its caller is about to make room, so the time is that of
    this machine's clock then.

    Raises:
        StoreError: If the store failed otherwise.
    """
    key = lease_key("clock", secrets.token_hex(8))
    try:
        await create_once(backend, key, durable=False)
        return (await backend.stat(key)).modified
    except StoreFull:
        return datetime.now(UTC)
    finally:
        with anyio.move_on_after(REMOVE_SECONDS, shield=True):
            await backend.delete([key])


async def time_now(backend: Backend) -> datetime:
    """Return the time by the store's own clock, or by this machine's if nothing may be written.

    Raises:
        StoreError: If the store failed otherwise.
    """
    try:
        return await store_time(backend)
    except PermissionDenied:
        return datetime.now(UTC)


async def leased(backend: Backend, subject: str | None = None) -> set[str]:
    """Return the checkpoints and launches under a live lease, by the store's own clock.

    Costs one list, and three requests more if there are leases at all.

    Args:
        backend: The store.
        subject: The only subject to look at; None for all.

    Raises:
        StoreError: If the store failed.
    """
    below = LEASES if subject is None else f"{LEASES}{subject}/"
    leases = [each async for each in backend.list(below)]
    return live_subjects(leases, await store_time(backend)) if leases else set()


class Lease:
    """One holder's lease, which lasts from :meth:`renew` to :meth:`release`.

    Neither raises if the store fails: a read without protection is better than none.

    Args:
        backend: The store.
        subject: The checkpoint that is being read, or the id of the attempt that is running.
    """

    def __init__(self, backend: Backend, subject: str) -> None:
        self._backend, self.subject = backend, subject
        self._holder, self._renewals = secrets.token_hex(8), 0
        self._written: list[str] = []

    async def renew(self) -> None:
        """Take the lease, or extend it to :data:`LEASE_LIFE` from now."""
        key = lease_key(self.subject, self._holder, self._renewals)
        self._renewals += 1
        # Noted first, since a write with a lost answer leaves the object behind.
        older, self._written = self._written, [*self._written, key]
        try:
            await create_once(self._backend, key, durable=False)
            if older:
                await self._backend.delete(older)
        except PermissionDenied:
            # A process that may not write may still read, without protection.
            logger.info("A lease on %s may not be written", self.subject)
            return
        except StoreError as error:
            logger.warning("A lease on %s could not be renewed: %s", self.subject, error)
            return
        self._written = [key]

    async def keep(self) -> None:
        """Renew the lease every :data:`RENEW_EVERY` until the task is cancelled."""
        while True:
            await anyio.sleep(RENEW_EVERY.total_seconds())
            await self.renew()

    async def release(self) -> None:
        """End the lease; a lease that is not released ends by its age."""
        if not self._written:
            return
        try:
            await self._backend.delete(self._written)
        except PermissionDenied:
            return
        except StoreError as error:
            logger.warning("The lease on %s could not be released: %s", self.subject, error)


@asynccontextmanager
async def under_lease(backend: Backend, subject: str) -> AsyncIterator[None]:
    """Hold a lease during a block, so that no process deletes its subject meanwhile.

    Errors of the block are raised as they are, not in a group.

    Args:
        backend: The store.
        subject: The checkpoint that is being read.
    """
    lease = Lease(backend, subject)
    try:
        async with beside(lease.keep, f"lease on {subject}"):
            await lease.renew()
            yield
    finally:
        with anyio.CancelScope(shield=True):
            await lease.release()
