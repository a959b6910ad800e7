"""Whole objects: written by one request, read whole or in ranges, looked at and deleted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ckpipe.backend import ObjectInfo, PutMode
from ckpipe.errors import ObjectExists, ObjectNotFound, StoreError
from ckpipe.stores.body_checksums import checksum_of, checksum_text
from ckpipe.stores.bucket_backend import OWNER
from ckpipe.stores.http_bodies import fill
from ckpipe.stores.http_stores import check_range, cut_short, truncated
from ckpipe_s3.failures import answer_of, refused
from ckpipe_s3.listing import whole_seconds
from ckpipe_s3.requests import Parameters, Requests

DELETE_BATCH = 1000
"""The most objects that one request deletes; a limit of S3 itself."""


class Objects:
    """The objects below a root.

    Args:
        requests: Sends the requests.
        writing: Parameters of every request that makes an object.
    """

    create_only = True
    """Whether the store honours ``If-None-Match``. Where it does not, a create-only put looks
    first, which is not atomic."""

    def __init__(self, requests: Requests, writing: Parameters) -> None:
        self._requests, self._writing = requests, writing
        self._address = requests.address

    async def put(self, key: str, data: bytes, mode: PutMode, owner: str | None = None) -> None:
        """See :class:`ckpipe.stores.bucket_backend.BucketObjects`."""
        name = self._address.name(key)
        condition: Parameters = {}
        if mode is PutMode.CREATE and self.create_only:
            condition = {"IfNoneMatch": "*"}
        elif mode is PutMode.CREATE:
            await self.check_free(key)
        await self._write(name, data, {**condition, **owned_by(owner)}, key)

    async def owner(self, key: str) -> str | None:
        """See :class:`ckpipe.stores.bucket_backend.BucketObjects`."""
        try:
            head = await self._head(key)
        except ObjectNotFound:
            return None
        found: str | None = head["Metadata"].get(OWNER)
        return found

    async def create(self, name: str, data: bytes) -> None:
        """See :class:`ckpipe.stores.bucket_backend.BucketObjects`."""
        await self._write(name, data, {"IfNoneMatch": "*"})

    async def _write(
        self, name: str, data: bytes, more: Parameters, key: str | None = None
    ) -> None:
        checksum = checksum_text(await checksum_of(data))
        await self._requests.ask(
            "write", "put_object", key=key, nbytes=len(data), Key=name, Body=data,
            ChecksumCRC32C=checksum, **more, **self._writing,
        )  # fmt: skip

    async def check_free(self, key: str) -> None:
        """Looks whether a key is free.

        Raises:
            ObjectExists: If it is not.
            StoreError: If the store failed.
        """
        try:
            await self.stat(key)
        except ObjectNotFound:
            return
        raise ObjectExists(f"There is an object at {self._address}{key} already", key=key)

    async def get(self, key: str, max_bytes: int) -> bytes:
        """See :meth:`ckpipe.Backend.get`."""
        name = self._address.name(key)
        with self._requests.attempt("read", key, max(0, min(max_bytes, 1 << 28))):
            answer = await self._requests.send("get_object", Key=name)
            stream = answer["Body"].raw_stream
            try:
                size = int(answer["ContentLength"])
                if size > max_bytes:
                    message = f"The object has {size} bytes, more than the {max_bytes} expected"
                    raise StoreError(message, key=key)
                data = bytes(await stream.content.read())
            finally:
                stream.close()
        if len(data) != size:
            raise cut_short(f"{self._address}{key}", key, len(data), size)
        return data

    async def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """See :meth:`ckpipe.Backend.read_into`."""
        name, wanted = self._address.name(key), len(buffer)
        last = offset + wanted - 1
        try:
            with self._requests.attempt("read", key, wanted):
                answer = await self._requests.send(
                    "get_object", Key=name, Range=f"bytes={offset}-{last}"
                )
                stream = answer["Body"].raw_stream
                try:
                    where = f"{self._address}{key}"
                    check_range(answer.get("ContentRange"), where, key, offset, wanted)
                    came = await fill(stream, buffer)
                finally:
                    stream.close()
            if came != wanted:
                raise cut_short(where, key, came, wanted)
        except StoreError as error:
            if _status(error) != 416:
                raise
            size = (await self.stat(key)).size
            raise truncated(key, offset, wanted, size) from error

    async def stat(self, key: str) -> ObjectInfo:
        """See :meth:`ckpipe.Backend.stat`."""
        head = await self._head(key)
        return ObjectInfo(key, int(head["ContentLength"]), whole_seconds(head["LastModified"]))

    async def _head(self, key: str) -> Any:
        name = self._address.name(key)
        return await self._requests.ask("look at", "head_object", key=key, Key=name)

    async def delete(self, keys: Iterable[str]) -> None:
        """See :meth:`ckpipe.Backend.delete`."""
        names = [self._address.name(key) for key in keys]
        for start in range(0, len(names), DELETE_BATCH):
            await self._delete(names[start : start + DELETE_BATCH])

    async def _delete(self, names: list[str]) -> None:
        try:
            answer = await self._requests.ask(
                "delete objects of", "delete_objects",
                Delete={"Objects": [{"Key": name} for name in names], "Quiet": True},
            )  # fmt: skip
        except StoreError as error:
            if type(error) is not StoreError:
                raise
            await self._delete_singly(names)  # some stores know no batches, or want them otherwise
            return
        for entry in answer.get("Errors", ()):
            key = self._address.key(entry.get("Key", ""))
            raise refused(entry.get("Code", ""), f"Could not delete {self._address}{key}", key)

    async def _delete_singly(self, names: list[str]) -> None:
        for name in names:
            key = self._address.key(name)
            await self._requests.ask("delete", "delete_object", key=key, Key=name)


def owned_by(owner: str | None) -> Parameters:
    """Parameters of a request that makes an object, which name the upload that makes it."""
    return {} if owner is None else {"Metadata": {OWNER: owner}}


def _status(error: StoreError) -> int:
    answer = answer_of(error.__cause__)
    return int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
