"""A backend whose requests are tried again, for all that is not a save's own upload and commit."""

from __future__ import annotations

import builtins
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import replace
from datetime import datetime
from typing import TypeVar

from ckpipe.backend import Backend, CachedRange, Children, ObjectInfo, PutMode, Upload
from ckpipe.errors import StoreError
from ckpipe.stores.pace import Pace
from ckpipe.stores.retrying import RetryPolicy, retrying

T = TypeVar("T")


class PatientBackend(Backend):
    """Hands every request on to another backend, which stays open, and tries it again.

    A request whose answer was lost may have taken effect before it is tried again. So a
    create-only put may meet its own object and raise :class:`~ckpipe.errors.ObjectExists`; who
    cares reads back what is there. An upload that was opened belongs to its caller, who has
    retries of its own. Reads of large objects are fewer at a time while the store throttles.

    Args:
        inner: The backend that does the work.
        policy: How often and how long to try.
    """

    def __init__(self, inner: Backend, policy: RetryPolicy) -> None:
        self._inner, self._policy = inner, policy
        self._reading = replace(policy, pace=Pace())
        self.limits = inner.limits

    def __repr__(self) -> str:
        return f"<PatientBackend {self._inner!r}>"

    async def _try(self, operation: Callable[[], Awaitable[T]]) -> T:
        return await retrying(self._policy, operation)

    async def put(self, key: str, data: bytes, mode: PutMode) -> None:
        await self._try(lambda: self._inner.put(key, data, mode))

    async def put_volatile(self, key: str, data: bytes) -> None:
        await self._try(lambda: self._inner.put_volatile(key, data))

    async def open_upload(self, key: str, *, size: int, block_bytes: int) -> Upload:
        return await self._try(
            lambda: self._inner.open_upload(key, size=size, block_bytes=block_bytes)
        )

    async def get(self, key: str, *, max_bytes: int) -> bytes:
        return await self._try(lambda: self._inner.get(key, max_bytes=max_bytes))

    async def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        await retrying(self._reading, lambda: self._inner.read_into(key, offset, buffer))

    def read_here(self, key: str, offset: int, buffer: memoryview) -> bool:
        try:
            return self._inner.read_here(key, offset, buffer)
        except StoreError as error:
            if error.transient:
                return False  # and so it is tried again as other requests are
            raise

    async def cached(self, key: str, offset: int, size: int) -> CachedRange | None:
        return await self._try(lambda: self._inner.cached(key, offset, size))

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        # A list that breaks off begins again, so nothing of it is handed on before its end.
        async def collect() -> builtins.list[ObjectInfo]:
            return [info async for info in self._inner.list(prefix)]

        for info in await self._try(collect):
            yield info

    async def children(self, prefix: str = "") -> Children:
        return await self._try(lambda: self._inner.children(prefix))

    async def stat(self, key: str) -> ObjectInfo:
        return await self._try(lambda: self._inner.stat(key))

    async def delete(self, keys: Iterable[str]) -> None:
        known = tuple(keys)
        await self._try(lambda: self._inner.delete(known))

    async def remove_stale_uploads(self, prefix: str, *, before: datetime) -> int:
        return await self._try(lambda: self._inner.remove_stale_uploads(prefix, before=before))
