"""Whole objects: written by one request, read whole or in ranges, listed and deleted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Any

from ckpipe.backend import Children, ObjectInfo
from ckpipe.errors import ObjectNotFound, StoreError
from ckpipe_http.bodies import fill
from ckpipe_http.buckets import OWNER, BucketObjects
from ckpipe_http.requests import check_range, checksum_of, checksum_text, cut_short, truncated
from ckpipe_s3.client import Address, Parameters, Requests
from ckpipe_s3.failures import refused, status_of

DELETE_BATCH = 1000
"""The most objects that one request deletes; a limit of S3 itself."""


class Objects(BucketObjects[Address]):
    """The objects below a root.

    Args:
        requests: Sends the requests.
        writing: Parameters of every request that makes an object.
    """

    def __init__(self, requests: Requests, writing: Parameters) -> None:
        super().__init__(requests.address)
        self._requests, self._writing = requests, writing

    async def write(
        self,
        name: str,
        data: bytes,
        *,
        create: bool,
        owner: str | None = None,
        key: str | None = None,
    ) -> None:
        condition: Parameters = {"IfNoneMatch": "*"} if create else {}
        checksum = checksum_text(await checksum_of(data))
        await self._requests.ask(
            "write", "put_object", key=key, nbytes=len(data), Key=name, Body=data,
            ChecksumCRC32C=checksum, **condition, **owned_by(owner), **self._writing,
        )  # fmt: skip

    async def owner(self, key: str) -> str | None:
        try:
            head = await self._head(key)
        except ObjectNotFound:
            return None
        found: str | None = head["Metadata"].get(OWNER)
        return found

    async def get(self, key: str, max_bytes: int) -> bytes:
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
            if status_of(error) != 416:
                raise
            size = (await self.stat(key)).size
            raise truncated(key, offset, wanted, size) from error

    async def stat(self, key: str) -> ObjectInfo:
        head = await self._head(key)
        return ObjectInfo(key, int(head["ContentLength"]), _whole_seconds(head["LastModified"]))

    async def _head(self, key: str) -> Any:
        name = self._address.name(key)
        return await self._requests.ask("look at", "head_object", key=key, Key=name)

    async def delete(self, keys: Iterable[str]) -> None:
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
            # Some stores know no batches, or want them otherwise.
            for name in names:
                key = self._address.key(name)
                await self._requests.ask("delete", "delete_object", key=key, Key=name)
            return
        for entry in answer.get("Errors", ()):
            key = self._address.key(entry.get("Key", ""))
            raise refused(entry.get("Code", ""), f"Could not delete {self._address}{key}", key)


def owned_by(owner: str | None) -> Parameters:
    """Make the parameters by which an object names the upload that makes it."""
    return {} if owner is None else {"Metadata": {OWNER: owner}}


def objects(address: Address, pages: Iterable[Any]) -> Iterator[ObjectInfo]:
    """Read the objects on the pages of a list, without names that are no keys of this root."""
    for page in pages:
        for entry in page.get("Contents", ()):
            key = address.key(entry["Key"])
            if key is not None:
                yield ObjectInfo(key, entry["Size"], _whole_seconds(entry["LastModified"]))


def children(address: Address, pages: list[Any]) -> Children:
    """Read the level below a prefix from the pages of a delimited list."""
    prefixes = {
        f"{key}/"
        for page in pages
        for entry in page.get("CommonPrefixes", ())
        if (key := address.key(entry["Prefix"].removesuffix("/"))) is not None
    }
    return Children(tuple(objects(address, pages)), tuple(sorted(prefixes)))


def _whole_seconds(modified: datetime) -> datetime:
    """Cut a time to what the head of an object tells; lists are more exact on some stores."""
    return modified.astimezone(UTC).replace(microsecond=0)
