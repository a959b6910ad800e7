"""Opening the store behind a URL without a pipeline: nothing is claimed there."""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import anyio.to_thread

from ckpipe.backend import Backend, CachedRange
from ckpipe.stores.patient_backend import PatientBackend
from ckpipe.stores.registry import create_backend, create_reader, scheme_of
from ckpipe.stores.retrying import RetryPolicy, logging_policy

if TYPE_CHECKING:
    from ckpipe.settings import Settings

OnRead = Callable[[int], None]
"""Told how many more bytes of large objects were read."""


class Access(enum.Enum):
    """What somebody is about to do with a store."""

    READ = "read"
    """Look only, so that a read-only root will do; nothing is written but leases, where they may
    be (see ``access`` in :class:`ckpipe.backend.Backend`)."""

    CHANGE = "change"
    """Change what is there: a root that does not exist is an error, and is not made."""

    CREATE = "create"
    """Write, and make the root if the store has such a thing and it is missing."""


class WatchedBackend(PatientBackend):
    """A patient backend that tells how much of large objects is read.

    Args:
        inner: The backend that does the work.
        policy: How often and how long to try.
        on_read: Told of each range that was read.
    """

    def __init__(self, inner: Backend, policy: RetryPolicy, on_read: OnRead) -> None:
        super().__init__(inner, policy)
        self._on_read = on_read

    async def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        await super().read_into(key, offset, buffer)
        self._on_read(len(buffer))

    def read_here(self, key: str, offset: int, buffer: memoryview) -> bool:
        return False  # what is read is told on the event loop

    async def cached(self, key: str, offset: int, size: int) -> CachedRange | None:
        found = await super().cached(key, offset, size)
        if found is not None:
            self._on_read(size)
        return found


@asynccontextmanager
async def open_store(
    url: str, settings: Settings, access: Access, on_read: OnRead = lambda nbytes: None
) -> AsyncIterator[Backend]:
    """Opens the store of a URL; its requests are tried again after errors that may pass.

    Args:
        url: A URL, or a plain path.
        settings: Options of backends, and how often to try.
        access: What is about to be done.
        on_read: Told of bytes that were read, as they come.

    Raises:
        BackendNotFound: If no backend is known for the URL.
        UsageError: If the URL or the backend's options are wrong.
        StoreError: If the store cannot be used, or is missing and not to be made.
    """
    options = settings.backends.get(scheme_of(url), {})
    policy = logging_policy(settings.upload)
    if access is not Access.CREATE:
        # Opening for writing might make the root, so whether it is there is seen first.
        reader = await anyio.to_thread.run_sync(create_reader, url, options)
        async with reader:
            if access is Access.READ:
                yield WatchedBackend(reader, policy, on_read)
                return
    backend = await anyio.to_thread.run_sync(create_backend, url, options)
    async with backend:
        yield WatchedBackend(backend, policy, on_read)


__all__ = ["Access", "OnRead", "WatchedBackend", "open_store"]
