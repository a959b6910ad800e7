"""Large objects on their way to S3, as multipart uploads.

Each block is a part, sent straight from the caller's memory. The store shows nothing of an object
until its upload is completed.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import anyio

from ckpipe.errors import ObjectNotFound, StoreError, StoreUnavailable
from ckpipe_http.buckets import BlockUpload, Leftovers
from ckpipe_http.requests import checksum_text
from ckpipe_s3.bucket import Parameters, S3Bucket, owned_by

PIECE_BYTES = 1 << 20
"""The bytes of a body that are handed to the socket at a time. Each piece costs a switch to a
worker thread, so it is larger than the HTTP client asks for."""


class MultipartUpload(BlockUpload[Mapping[str, Any]]):
    """An object that is sent in parts; :meth:`begin` comes first.

    Args:
        bucket: Sends the requests.
        open_uploads: The uploads that are open on the store.
        key: Its key.
        size: Its size in bytes.
        block_bytes: The size of all parts but the last.
    """

    def __init__(
        self, bucket: S3Bucket, open_uploads: OpenUploads, key: str, size: int, block_bytes: int
    ) -> None:
        super().__init__(key, size, block_bytes)
        self._bucket, self._open_uploads = bucket, open_uploads
        self._name = bucket.address.name(key)

    async def begin(self) -> None:
        """Begin the upload on the store.

        Raises:
            StoreError: If the store failed.
        """
        self._id = await self._open_uploads.begin(self._key, owned_by(self._token))

    async def write_summed(self, offset: int, data: memoryview, checksum: int) -> None:
        number = self._number(offset, data)
        told = checksum_text(checksum)
        body = MemoryBody(data)
        try:
            answer = await self._bucket.ask(
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
        parts = self._all_parts()
        await self._bucket.check_free(self._key)
        # Some stores ignore If-None-Match here, so the check above is what there is. It is
        # enough where names are unique, as those of data files are.
        await self._bucket.ask(
            "complete", "complete_multipart_upload", key=self._key, nbytes=self._size // 100,
            Key=self._name, UploadId=self._id, MultipartUpload={"Parts": parts},
        )  # fmt: skip
        self._open_uploads.forget(self._id)
        await self._open_uploads.settle(self._key)

    async def landed(self) -> bool:
        if await self._bucket.owner(self._key) != self._token:
            return False
        self._open_uploads.forget(self._id)  # closing settles what else may be open for the key
        return True

    async def abort(self) -> None:
        with anyio.CancelScope(shield=True):
            await self._open_uploads.abort(self._key, self._id)
            await self._open_uploads.settle(self._key)


class OpenUploads(Leftovers):
    """Begin and end multipart uploads, so that none of ours stays open on the store.

    If the answer to a request that begins an upload is lost, the upload may be open under an id
    that is unknown here. Its key is noted then, and *settled* later: every upload that is open
    for the key and is not known here is aborted. The key of a data file belongs to one save of
    one rank, so no other process has an upload for it.

    Args:
        bucket: Sends the requests.
        writing: Parameters of every request that begins an upload.
    """

    def __init__(self, bucket: S3Bucket, writing: Parameters) -> None:
        self._bucket, self._writing = bucket, writing
        self._open: dict[str, str] = {}
        self._doubtful: Counter[str] = Counter()

    async def begin(self, key: str, more: Parameters) -> str:
        """Begin an upload.

        Args:
            key: The key of its object.
            more: Further parameters of the request.

        Returns:
            The store's id of it.

        Raises:
            StoreError: If the store failed.
        """
        self._doubtful[key] += 1  # stays so if the answer is lost, or the caller is cancelled
        try:
            answer = await self._bucket.ask(
                "begin an upload of", "create_multipart_upload", key=key,
                Key=self._bucket.address.name(key), ChecksumAlgorithm="CRC32C", **more,
                **self._writing,
            )  # fmt: skip
        except StoreError as error:
            if not isinstance(error, StoreUnavailable):
                self._doubtful[key] -= 1
            raise
        self._doubtful[key] -= 1
        upload_id = str(answer["UploadId"])
        self._open[upload_id] = key
        return upload_id

    def forget(self, upload_id: str) -> None:
        """Note that an upload is complete."""
        self._open.pop(upload_id, None)

    async def abort(self, key: str, upload_id: str) -> None:
        """Abort an upload, if it is still open.

        Raises:
            StoreError: If the store failed.
        """
        name = self._bucket.address.name(key)
        try:
            await self._bucket.ask(
                "abort an upload of", "abort_multipart_upload", key=key,
                Key=name, UploadId=upload_id,
            )  # fmt: skip
        except ObjectNotFound:
            pass
        except StoreError as error:
            gone = self._bucket.answer_to(error).code == "NoSuchUpload"
            if not gone and upload_id in await self._listed(key):
                raise
        self._open.pop(upload_id, None)

    async def settle(self, key: str) -> None:
        """Abort uploads of a key whose beginning was not answered.

        Raises:
            StoreError: If the store failed.
        """
        if self._doubtful[key] <= 0:
            return
        for upload_id in await self._listed(key):
            if upload_id not in self._open:
                await self.abort(key, upload_id)
        del self._doubtful[key]

    async def _listed(self, key: str) -> list[str]:
        found = await self._found(self._bucket.address.name(key))
        return [upload_id for upload_id, (of, _) in found.items() if of == key]

    async def _found(self, prefix: str) -> dict[str, tuple[str, datetime]]:
        found = {}
        async for page in self._bucket.answers("list_multipart_uploads", Prefix=prefix):
            for entry in page.get("Uploads", ()):
                # Not every store looks at the prefix.
                if entry["Key"].startswith(prefix):
                    key = self._bucket.address.key(entry["Key"])
                    if key is not None:
                        found[entry["UploadId"]] = (key, entry["Initiated"].astimezone(UTC))
        return found

    async def remove_stale(self, prefix: str, before: datetime) -> int:
        found = await self._found(prefix)
        stale = [(key, id) for id, (key, begun) in found.items() if begun < before]
        for key, upload_id in stale:
            await self.abort(key, upload_id)
        return len(stale)

    async def close(self) -> None:
        for upload_id, key in list(self._open.items()):
            await self.abort(key, upload_id)
        for key in list(self._doubtful):
            await self.settle(key)


class MemoryBody(io.RawIOBase):
    """Read a memoryview as a file, without copying it.

    The client insists on a file for a body that is not ``bytes``. Reads return slices of the
    caller's memory. Once closed, the body reads as ended, so that a request that was
    cancelled while it still sends never touches memory that has another use by then.

    Args:
        data: Flat bytes.
    """

    def __init__(self, data: memoryview) -> None:
        super().__init__()
        self._data, self._at, self._ended = data, 0, False

    def __len__(self) -> int:
        return len(self._data)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._data)}[whence]
        self._at = min(max(base + offset, 0), len(self._data))
        return self._at

    def read(self, size: int | None = -1) -> memoryview:
        """Return a slice of the memory, which may be longer than ``size``; empty at the end."""
        if self._ended:
            return memoryview(b"")
        piece = self._data[self._at : self._at + PIECE_BYTES]
        self._at += len(piece)
        return piece

    def end(self) -> None:
        """Forget the memory."""
        self._ended, self._data = True, memoryview(b"")
