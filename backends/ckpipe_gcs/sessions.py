"""Resumable uploads: an object's bytes in a session that outlives connections.

Theory. A session is begun by one request and takes the bytes in others. The store keeps what it
has received when a connection breaks, in whole pieces of 256 KiB. So after anything but a clear
answer the store is asked how much it has, and the rest is sent from there; perhaps it has
everything and only the answer was lost, and then the object is there. Source of the protocol:
"Resumable uploads" and "Perform resumable uploads" in the Cloud Storage documentation. A session
that is left alone shows nothing on the store, and ends by itself after a week.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from yarl import URL

from ckpipe.errors import ObjectNotFound, StoreError, StoreUnavailable
from ckpipe_gcs.failures import bucket_missing, status_of
from ckpipe_gcs.objects import BYTES, NEW
from ckpipe_gcs.requests import MemoryBody, Requests, Resource, answered, json_body
from ckpipe_http.requests import checksum_text

INCOMPLETE = 308
"""The status that says how much of a session's bytes the store has."""

GONE = (404, 410, 499)
"""The statuses that say that there is no such session, or no longer; 499 also answers a request
that ends one."""

_RANGE = re.compile(r"bytes=0-(\d+)")


class Session:
    """Send one object through a session of its own.

    Args:
        requests: Sends the requests.
        name: The whole name of the object, which is this session's alone.
        key: The key that it is for, for errors.
        resource: Further fields of the object's resource.
        query: Further parameters of the request that begins it.
    """

    def __init__(
        self,
        requests: Requests,
        name: str,
        key: str,
        resource: Mapping[str, Any],
        query: Mapping[str, str],
    ) -> None:
        self._requests, self._name, self._key = requests, name, key
        self._resource, self._query = resource, query
        self._url: URL | None = None

    async def send(self, data: memoryview, checksum: int) -> Resource:
        """Send the object, or the rest that the store does not have yet.

        Args:
            data: All of the object's bytes, the same in each call.
            checksum: Their CRC-32C, which the store verifies.

        Returns:
            The object's resource.

        Raises:
            ObjectExists: If there is an object of the name.
            StoreError: If the store failed. Calling again goes on from what it has.
        """
        at = 0
        if self._url is None:
            self._url = await self._begin(len(data), checksum)
        else:
            had = await self._ask(self._url, len(data))
            if not isinstance(had, int):
                return had
            at = had
        while True:
            sent = await self._send(self._url, data, at)
            if not isinstance(sent, int):
                return sent
            if sent <= at:
                where = f"{self._requests.address}{self._key}"
                message = f"Could not write {where}: the store takes no more bytes of an upload"
                raise StoreUnavailable(message, key=self._key)
            at = sent

    async def _begin(self, size: int, checksum: int) -> URL:
        url = self._requests.upload_url("resumable", self._name, **NEW, **self._query)
        told = {"name": self._name, "contentType": BYTES, **self._resource}
        headers = {"X-Upload-Content-Type": BYTES, "X-Upload-Content-Length": str(size)}
        body = json_body({**told, "crc32c": checksum_text(checksum)})
        action = "begin an upload of"
        try:
            with self._requests.attempt(action, self._key):
                async with self._requests.answer("POST", url, headers=headers, body=body) as begun:
                    await begun.read()
                    return URL(begun.headers["Location"], encoded=True)
        except ObjectNotFound as error:
            raise bucket_missing(error, str(self._requests.address)) from error

    async def _ask(self, url: URL, size: int) -> int | Resource:
        """Ask how many bytes the store has; it answers with the resource if it has all."""
        return await self._put(url, None, f"bytes */{size}", 0)

    async def _send(self, url: URL, data: memoryview, at: int) -> int | Resource:
        body = MemoryBody(data[at:])
        span = f"bytes {at}-{len(data) - 1}/{len(data)}"
        try:
            return await self._put(url, body, span, len(data) - at)
        finally:
            body.end()

    async def _put(
        self, url: URL, body: MemoryBody | None, span: str, nbytes: int
    ) -> int | Resource:
        headers = {"Content-Range": span}
        try:
            with self._requests.attempt("write", self._key, nbytes):
                async with self._requests.answer("PUT", url, headers=headers, body=body) as had:
                    if had.status == INCOMPLETE:
                        await had.read()
                        return received(had.headers.get("Range"))
                    return await answered(had)
        except StoreError as error:
            if status_of(error) not in GONE:
                raise
            self._url = None  # the next call begins anew
            message = f"{error.message}: the upload was ended by somebody else"
            raise StoreUnavailable(message, key=self._key) from error

    async def cancel(self) -> None:
        """End the session, if one is open.

        Raises:
            StoreError: If the store failed.
        """
        if self._url is None:
            return
        with self._requests.attempt("end an upload of", self._key):
            async with self._requests.answer("DELETE", self._url, expected=GONE) as ended:
                await ended.read()
        self._url = None


def received(header: str | None) -> int:
    """Read in the ``Range`` header of an answer how many bytes the store has.

    Raises:
        ValueError: If it is of another form.
    """
    if header is None:
        return 0
    found = _RANGE.fullmatch(header)
    if found is None:
        raise ValueError("the range of what the store has does not begin at 0")
    return int(found[1]) + 1
