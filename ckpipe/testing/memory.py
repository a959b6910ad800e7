"""The contract of a store, in a dictionary."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from anyio.lowlevel import checkpoint

from ckpipe.backend import (
    Backend,
    ObjectInfo,
    ObjectReader,
    PutMode,
    Upload,
    check_key,
    truncated,
)
from ckpipe.errors import ObjectExists, ObjectNotFound, StoreError, UsageError


@dataclass(frozen=True, eq=False)
class _Object:
    data: bytes | bytearray
    modified: datetime
    source: str | None = None  # of a link


@dataclass
class _Store:
    # Each change is one call of a dict method, so that stores shared by threads need no lock.
    objects: dict[str, _Object] = field(default_factory=dict)
    uploads: dict[MemoryUpload, datetime] = field(default_factory=dict)

    def create(self, key: str, data: bytes | bytearray, source: str | None = None) -> None:
        new = _Object(data, datetime.now(UTC), source)
        found = self.objects.setdefault(key, new)
        if found is not new and (source is None or found.source != source):
            raise ObjectExists("The key is taken", key=key)

    def find(self, key: str) -> _Object:
        if found := self.objects.get(check_key(key)):
            return found
        raise ObjectNotFound("No object has this key", key=key)


_shared: dict[str, _Store] = {}


@dataclass(frozen=True)
class _OpenObject:
    key: str
    data: bytes | bytearray

    @property
    def size(self) -> int:
        return len(self.data)

    def is_cached(self, offset: int, size: int) -> bool:
        return True

    def read_into(self, offset: int, buffer: memoryview, *, cached: bool = True) -> None:
        if offset + len(buffer) > len(self.data):
            raise truncated(self.key, offset, len(buffer), len(self.data))
        buffer[:] = memoryview(self.data)[offset : offset + len(buffer)]


class MemoryBackend(Backend):
    """A store in the memory of this process: the reference semantics, and stricter.

    Beyond the contract it refuses blocks at wrong offsets, and refuses to complete an upload that
    lacks a block, so that mistakes of a caller show in tests.

    Args:
        url: ``memory://name`` is one store for the whole process, so a test can open it again;
            ``memory://`` is a new store each time.
    """

    can_link = True

    def __init__(self, url: str = "memory://") -> None:
        self._name = url.partition("://")[2]
        self._store = _shared.setdefault(self._name, _Store()) if self._name else _Store()

    def __repr__(self) -> str:
        return f"<MemoryBackend memory://{self._name} [{len(self._store.objects)} objects]>"

    async def put(self, key: str, data: bytes, mode: PutMode) -> None:
        await checkpoint()
        if mode is PutMode.CREATE:
            self._store.create(check_key(key), bytes(data))
        else:
            self._store.objects[check_key(key)] = _Object(bytes(data), datetime.now(UTC))

    async def link(self, source: str, target: str) -> None:
        await checkpoint()
        self._store.create(check_key(target), self._store.find(source).data, source)

    async def open_upload(self, key: str, *, size: int, block_bytes: int) -> Upload:
        await checkpoint()
        upload = MemoryUpload(self._store, check_key(key), size, block_bytes)
        self._store.uploads[upload] = datetime.now(UTC)
        return upload

    async def get(self, key: str, *, max_bytes: int) -> bytes:
        await checkpoint()
        data = self._store.find(key).data
        if len(data) > max_bytes:
            message = f"The object has {len(data)} bytes, more than the {max_bytes} expected"
            raise StoreError(message, key=key)
        return bytes(data)

    async def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        await checkpoint()
        _OpenObject(key, self._store.find(key).data).read_into(offset, buffer)

    def open_object(self, key: str) -> ObjectReader | None:
        return _OpenObject(key, self._store.find(key).data)

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        await checkpoint()
        for key, found in tuple(self._store.objects.items()):
            if key.startswith(prefix):
                yield ObjectInfo(key, len(found.data), found.modified)

    async def stat(self, key: str) -> ObjectInfo:
        await checkpoint()
        found = self._store.find(key)
        return ObjectInfo(key, len(found.data), found.modified)

    async def delete(self, keys: Iterable[str]) -> None:
        await checkpoint()
        for key in keys:
            self._store.objects.pop(check_key(key), None)

    async def remove_stale_uploads(self, prefix: str, *, before: datetime) -> int:
        await checkpoint()
        removed = 0
        for upload, begun in tuple(self._store.uploads.items()):
            if begun < before and upload.key.startswith(prefix):
                removed += self._store.uploads.pop(upload, None) is not None
        return removed


class MemoryUpload(Upload):
    """An upload to a :class:`MemoryBackend`."""

    def __init__(self, store: _Store, key: str, size: int, block_bytes: int) -> None:
        self.key = key
        self._store = store
        self._data = bytearray(size)
        self._block_bytes = block_bytes
        self._missing = set(range(0, size, block_bytes))

    async def write(self, offset: int, data: memoryview) -> None:
        await checkpoint()
        if offset % self._block_bytes or len(data) != len(self._block(offset)):
            message = f"{len(data)} bytes at {offset} are no block of {len(self._data)} bytes"
            raise UsageError(message, key=self.key)
        self._block(offset)[:] = data
        self._missing.discard(offset)

    def _block(self, offset: int) -> memoryview:
        return memoryview(self._data)[offset : offset + self._block_bytes]

    async def complete(self) -> None:
        await checkpoint()
        if self._missing or self not in self._store.uploads:
            message = f"The upload lacks {len(self._missing)} blocks, or was aborted"
            raise UsageError(message, key=self.key)
        self._store.create(self.key, self._data)
        self._store.uploads.pop(self, None)

    async def abort(self) -> None:
        self._store.uploads.pop(self, None)
