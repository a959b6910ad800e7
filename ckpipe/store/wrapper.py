"""The base of all backends that wrap another one."""

from __future__ import annotations

import abc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from types import TracebackType
from typing import Self, TypeVar

from ckpipe.backend import Backend, Children, ObjectInfo, PutMode, Upload

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation on a backend.

    Args:
        verb: The method: ``enter``, ``exit``, ``put``, ``link``, ``open_upload``, ``write``,
            ``complete``, ``landed``, ``abort``, ``get``, ``read_into``, ``list``, ``children``,
            ``stat``, ``delete`` or ``remove_stale_uploads``.
        key: The key or prefix; of ``link`` the target; of ``delete`` the keys joined by spaces; of
            the first two empty.
        size: Bytes that the caller sends or asks for, as far as they are known beforehand.
    """

    verb: str
    key: str
    size: int = 0


class WrappedBackend(Backend, abc.ABC):
    """Forward every operation on a backend and its uploads to another one via :meth:`around`.

    It does not forward ``open_object``, whose reads :meth:`around` would not see: every read is a
    ``read_into``.

    Args:
        inner: The backend that does the work.
    """

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.limits, self.can_link = inner.limits, inner.can_link

    @abc.abstractmethod
    async def around(self, operation: Operation, call: Callable[[], Awaitable[Result]]) -> Result:
        """Do an operation by awaiting ``call()``, with code before, after or instead of it."""

    async def __aenter__(self) -> Self:
        await self.around(Operation("enter", ""), self.inner.__aenter__)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.around(
            Operation("exit", ""), lambda: self.inner.__aexit__(exc_type, exc, traceback)
        )

    async def put(self, key: str, data: bytes, mode: PutMode) -> None:
        operation = Operation("put", key, len(data))
        await self.around(operation, lambda: self.inner.put(key, data, mode))

    async def put_volatile(self, key: str, data: bytes) -> None:
        operation = Operation("put", key, len(data))
        await self.around(operation, lambda: self.inner.put_volatile(key, data))

    async def link(self, source: str, target: str) -> None:
        await self.around(Operation("link", target), lambda: self.inner.link(source, target))

    async def open_upload(self, key: str, *, size: int, block_bytes: int) -> Upload:
        upload = await self.around(
            Operation("open_upload", key),
            lambda: self.inner.open_upload(key, size=size, block_bytes=block_bytes),
        )
        return WrappedUpload(self, key, upload)

    async def get(self, key: str, *, max_bytes: int) -> bytes:
        return await self.around(
            Operation("get", key), lambda: self.inner.get(key, max_bytes=max_bytes)
        )

    async def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        operation = Operation("read_into", key, len(buffer))
        await self.around(operation, lambda: self.inner.read_into(key, offset, buffer))

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        async def collect() -> tuple[ObjectInfo, ...]:
            return tuple([info async for info in self.inner.list(prefix)])

        for info in await self.around(Operation("list", prefix), collect):
            yield info

    async def children(self, prefix: str = "") -> Children:
        operation = Operation("children", prefix)
        return await self.around(operation, lambda: self.inner.children(prefix))

    async def stat(self, key: str) -> ObjectInfo:
        return await self.around(Operation("stat", key), lambda: self.inner.stat(key))

    async def delete(self, keys: Iterable[str]) -> None:
        known = tuple(keys)
        await self.around(Operation("delete", " ".join(known)), lambda: self.inner.delete(known))

    async def remove_stale_uploads(self, prefix: str, *, before: datetime) -> int:
        return await self.around(
            Operation("remove_stale_uploads", prefix),
            lambda: self.inner.remove_stale_uploads(prefix, before=before),
        )


class WrappedUpload(Upload):
    """Forward every operation to another upload, through the ``around`` of its backend."""

    def __init__(self, backend: WrappedBackend, key: str, inner: Upload) -> None:
        self._backend, self._key, self._inner = backend, key, inner

    async def write(self, offset: int, data: memoryview) -> None:
        operation = Operation("write", self._key, len(data))
        await self._backend.around(operation, lambda: self._inner.write(offset, data))

    async def complete(self) -> None:
        await self._backend.around(Operation("complete", self._key), self._inner.complete)

    async def landed(self) -> bool | None:
        return await self._backend.around(Operation("landed", self._key), self._inner.landed)

    async def abort(self) -> None:
        await self._backend.around(Operation("abort", self._key), self._inner.abort)
