"""The uploads that are open on the store, so that none of ours stays open."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime

from ckpipe.errors import ObjectNotFound, StoreError, StoreUnavailable
from ckpipe_s3.failures import upload_is_gone
from ckpipe_s3.requests import Parameters, Requests

logger = logging.getLogger("ckpipe")


class OpenUploads:
    """Begins and ends multipart uploads, and remembers what it does not know the end of.

    If the answer to a request that begins an upload is lost, the upload may be open under a
    name that nobody knows. Its key is remembered then, and *settled* later: whatever is open
    for the key and is not known here is aborted. The key of a data file belongs to one save of
    one rank, so nobody else has an upload for it.

    Args:
        requests: Sends the requests.
        writing: Parameters of every request that begins an upload.
    """

    def __init__(self, requests: Requests, writing: Parameters) -> None:
        self._requests, self._writing = requests, writing
        self._open: dict[str, str] = {}
        self._doubtful: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._open)

    async def begin(self, key: str, more: Parameters) -> str:
        """Begins an upload.

        Args:
            key: The key of its object.
            more: Further parameters of the request.

        Returns:
            The store's name for it.

        Raises:
            StoreError: If the store failed.
        """
        async with self._noted(key):
            answer = await self._requests.ask(
                "begin an upload of", "create_multipart_upload", key=key,
                Key=self._requests.address.name(key), ChecksumAlgorithm="CRC32C", **more,
                **self._writing,
            )  # fmt: skip
        upload_id = str(answer["UploadId"])
        self._open[upload_id] = key
        return upload_id

    @asynccontextmanager
    async def _noted(self, key: str) -> AsyncIterator[None]:
        # Also a caller that is cancelled leaves the key noted.
        self._doubtful[key] += 1
        try:
            yield
        except StoreError as error:
            if not isinstance(error, StoreUnavailable):
                self._doubtful[key] -= 1
            raise
        self._doubtful[key] -= 1

    def forget(self, upload_id: str) -> None:
        """Notes that an upload is complete."""
        self._open.pop(upload_id, None)

    async def abort(self, key: str, upload_id: str) -> None:
        """Aborts an upload, if it is still open.

        Raises:
            StoreError: If the store failed.
        """
        name = self._requests.address.name(key)
        try:
            await self._requests.ask(
                "abort an upload of", "abort_multipart_upload", key=key,
                Key=name, UploadId=upload_id,
            )  # fmt: skip
        except ObjectNotFound:
            pass
        except StoreError as error:
            if not upload_is_gone(error) and upload_id in await self._listed(key):
                raise
        self._open.pop(upload_id, None)

    async def settle(self, key: str) -> None:
        """Aborts what an answer that was lost may have left open for a key.

        Raises:
            StoreError: If the store failed.
        """
        if self._doubtful[key] <= 0:
            return
        for upload_id in await self._listed(key):
            if upload_id not in self._open:
                await self.abort(key, upload_id)
        del self._doubtful[key]

    async def _listed(self, key: str) -> dict[str, datetime]:
        return {
            upload_id: begun
            for upload_id, (found, begun) in (await self._found(key)).items()
            if found == key
        }

    async def _found(self, prefix: str) -> dict[str, tuple[str, datetime]]:
        address = self._requests.address
        pages = await self._requests.pages("list_multipart_uploads", Prefix=address.prefix + prefix)
        found = {}
        for page in pages:
            for entry in page.get("Uploads", ()):
                # Not every store looks at the prefix.
                if entry["Key"].startswith(address.prefix + prefix):
                    key = address.key(entry["Key"])
                    if key is not None:
                        found[entry["UploadId"]] = (key, entry["Initiated"].astimezone(UTC))
        return found

    async def remove_stale(self, prefix: str, before: datetime) -> int:
        """Aborts the uploads below a prefix that were begun before a time.

        Returns:
            How many.

        Raises:
            StoreError: If the store failed.
        """
        found = await self._found(prefix)
        stale = [(key, id) for id, (key, begun) in found.items() if begun < before]
        for key, upload_id in stale:
            await self.abort(key, upload_id)
        return len(stale)

    async def close(self) -> None:
        """Gives up what nobody completed or aborted, as far as the store can be reached."""
        try:
            for upload_id, key in list(self._open.items()):
                await self.abort(key, upload_id)
            for key in list(self._doubtful):
                await self.settle(key)
        except StoreError as error:
            logger.warning("An upload may be left behind: %s", error)
