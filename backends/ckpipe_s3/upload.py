"""Large objects on their way to S3.

An object is sent as a multipart upload, one part for each block, straight from the caller's
memory. The store shows nothing of it until it is completed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import anyio

from ckpipe.backend import Upload
from ckpipe.errors import UsageError
from ckpipe.stores.body_checksums import checksum_of, checksum_text
from ckpipe_s3.body import MemoryBody
from ckpipe_s3.objects import Objects
from ckpipe_s3.open_uploads import OpenUploads
from ckpipe_s3.requests import Requests


class MultipartUpload(Upload):
    """An object that is sent in parts.

    Args:
        requests: Sends them.
        objects: Looks for an object of the same key.
        unfinished: The uploads that are open on the store.
        key: Its key.
        size: Its size in bytes.
        block_bytes: The size of all parts but the last.
        upload_id: The store's name for the upload.
        token: The upload's own name, which its object carries.
    """

    takes_checksums = True

    def __init__(
        self,
        requests: Requests,
        objects: Objects,
        unfinished: OpenUploads,
        key: str,
        size: int,
        block_bytes: int,
        upload_id: str,
        token: str,
    ) -> None:
        self._requests, self._objects, self._unfinished = requests, objects, unfinished
        self._key, self._size, self._block_bytes, self._id = key, size, block_bytes, upload_id
        self._name, self._token = requests.address.name(key), token
        self._parts: dict[int, Mapping[str, Any]] = {}

    def __repr__(self) -> str:
        done = f"{len(self._parts)} of {self._count} parts"
        return f"<MultipartUpload {self._key} {self._size} bytes [{done}]>"

    @property
    def _count(self) -> int:
        return -(-self._size // self._block_bytes)

    async def write(self, offset: int, data: memoryview) -> None:
        await self.write_summed(offset, data, await checksum_of(data))

    async def write_summed(self, offset: int, data: memoryview, checksum: int) -> None:
        number, beside = divmod(offset, self._block_bytes)
        if beside or len(data) != min(self._block_bytes, self._size - offset):
            message = f"{len(data)} bytes at {offset} are no block of {self._size} bytes"
            raise UsageError(message, key=self._key)
        told = checksum_text(checksum)
        body = MemoryBody(data)
        try:
            answer = await self._requests.ask(
                "write a part of", "upload_part", key=self._key, nbytes=len(data),
                Key=self._name, UploadId=self._id, PartNumber=number + 1, Body=body,
                ContentLength=len(data), ChecksumCRC32C=told,
            )  # fmt: skip
        finally:
            body.end()
        part = {"PartNumber": number + 1, "ETag": answer["ETag"]}
        if "ChecksumCRC32C" in answer:  # so the store has checked it, and checks it once more
            part["ChecksumCRC32C"] = told
        self._parts[number] = part

    async def complete(self) -> None:
        if len(self._parts) != self._count:
            message = f"The upload has {len(self._parts)} of its {self._count} parts"
            raise UsageError(message, key=self._key)
        await self._objects.check_free(self._key)
        # Some stores ignore If-None-Match here, so the check above is what there is. It is
        # enough where names are unique, as those of data files are.
        await self._requests.ask(
            "complete", "complete_multipart_upload", key=self._key, nbytes=self._size // 100,
            Key=self._name, UploadId=self._id,
            MultipartUpload={"Parts": [self._parts[number] for number in range(self._count)]},
        )  # fmt: skip
        self._unfinished.forget(self._id)
        await self._unfinished.settle(self._key)

    async def landed(self) -> bool:
        if await self._objects.owner(self._key) != self._token:
            return False
        self._unfinished.forget(self._id)  # closing settles what else may be open for the key
        return True

    async def abort(self) -> None:
        with anyio.CancelScope(shield=True):
            await self._unfinished.abort(self._key, self._id)
            await self._unfinished.settle(self._key)
