"""Other clients that move the same bytes to and from the same bucket, for ``stores.py``.

Each moves one object in parts of one size, several at a time, from and to existing memory. They
sign and checksum by their defaults, and neither copy nor verify for a checkpoint.
"""

from __future__ import annotations

import io
from typing import Any, Protocol

import anyio.to_thread
from store_sockets import Lanes, Sockets

from ckpipe_s3 import S3Backend


class Contender(Protocol):
    """A client that writes, reads and removes one object."""

    async def write(self) -> None:
        """Send the object."""

    async def read(self) -> None:
        """Read the object into the memory that it was sent from."""

    async def remove(self) -> None:
        """Delete the object."""


class _Sink(io.RawIOBase):
    """A file over memory, into which ranges are written."""

    def __init__(self, data: memoryview) -> None:
        super().__init__()
        self._data, self._at = data, 0

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset
        return offset

    def write(self, data: Any) -> int:
        end = self._at + len(data)
        self._data[self._at : end] = data
        self._at = end
        return len(data)


class Boto:
    """boto3 with its transfer manager, in a separate worker thread.

    Args:
        url: The URL of the root.
        endpoint: The URL of the store; None for AWS.
        data: The bytes.
        part: Bytes of a part.
        lanes: The number of concurrent parts.
    """

    def __init__(
        self, url: str, endpoint: str | None, data: memoryview, part: int, lanes: Lanes
    ) -> None:
        import boto3
        from boto3.s3.transfer import TransferConfig

        self._client = boto3.client("s3", endpoint_url=endpoint)
        address = S3Backend(url)
        self._where = (address.bucket, f"{address.prefix}boto")
        self._data = data
        self._writing, self._reading = (
            TransferConfig(multipart_threshold=part, multipart_chunksize=part, max_concurrency=each)
            for each in lanes
        )

    async def write(self) -> None:
        await anyio.to_thread.run_sync(self._write)

    def _write(self) -> None:
        body = io.BytesIO(self._data)
        self._client.upload_fileobj(body, *self._where, Config=self._writing)

    async def read(self) -> None:
        await anyio.to_thread.run_sync(self._read)

    def _read(self) -> None:
        self._client.download_fileobj(*self._where, _Sink(self._data), Config=self._reading)

    async def remove(self) -> None:
        bucket, key = self._where
        await anyio.to_thread.run_sync(lambda: self._client.delete_object(Bucket=bucket, Key=key))


class Obstore:
    """obstore, which makes requests by threads of Rust.

    Args:
        url: The URL of the root.
        endpoint: The URL of the store; None for AWS.
        data: The bytes.
        part: Bytes of a part.
        lanes: The number of concurrent parts.
    """

    def __init__(
        self, url: str, endpoint: str | None, data: memoryview, part: int, lanes: Lanes
    ) -> None:
        from obstore.store import S3Store

        address = S3Backend(url)
        self._key, self._data, self._part, self._lanes = "obstore", data, part, lanes
        options: dict[str, Any] = {"client_options": {"allow_http": True}}
        if endpoint:
            options["endpoint"] = endpoint
        self._store: Any = S3Store(address.bucket, prefix=address.prefix, **options)

    async def write(self) -> None:
        import obstore

        await obstore.put_async(
            self._store, self._key, self._data,
            use_multipart=True, chunk_size=self._part, max_concurrency=self._lanes.writing,
        )  # fmt: skip

    async def read(self) -> None:
        import obstore

        async def lane(offsets: Any) -> None:
            for offset in offsets:
                end = min(offset + self._part, len(self._data))
                found = await obstore.get_range_async(self._store, self._key, start=offset, end=end)
                self._data[offset:end] = memoryview(found)

        offsets = iter(range(0, len(self._data), self._part))
        async with anyio.create_task_group() as tasks:
            for _ in range(self._lanes.reading):
                tasks.start_soon(lane, offsets)

    async def remove(self) -> None:
        import obstore

        await obstore.delete_async(self._store, self._key)


CONTENDERS: dict[str, Any] = {"boto3": Boto, "obstore": Obstore, "sockets": Sockets}
