"""One request at a time: its address, body, token and deadline, and its errors translated.

The API is the JSON API of Cloud Storage, version 1, as its reference describes it.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar
from urllib.parse import quote, urlencode

import aiohttp
import anyio
from aiohttp.abc import AbstractStreamWriter
from yarl import URL

from ckpipe.errors import InvalidKey
from ckpipe_gcs.access import Tokens
from ckpipe_gcs.failures import refusal, requesting
from ckpipe_http.buckets import BucketAddress
from ckpipe_http.requests import time_limit

Query = Mapping[str, str]
Resource = Mapping[str, Any]
"""The description of an object: its resource, as the reference calls it."""

FIELDS = "name,size,generation,crc32c,timeCreated,metadata"
"""The fields of a resource that are asked for."""

PIECE_BYTES = 1 << 18
"""The bytes of a body that are handed to the socket at a time."""

PART_PREFIX = ".ckpipe-upload-"
PART_SUFFIX = ".ckpipe-part"
"""Temporary objects lie beside the object that they become, and have names of this form. The end
is what lifecycle rules and conditions on rights can match."""

_PART = re.compile(
    rf"(?:.*/)?{re.escape(PART_PREFIX)}([0-9a-f]{{16}})-\d+-\d+{re.escape(PART_SUFFIX)}", re.DOTALL
)


@dataclass(frozen=True, slots=True)
class Address(BucketAddress):
    """A root on Google Cloud Storage, whose names hold no line ends."""

    scheme: ClassVar[str] = "gs"

    def is_reserved(self, key: str) -> bool:
        return BucketAddress.is_reserved(self, key) or upload_of(key) is not None

    def name(self, key: str) -> str:
        name = BucketAddress.name(self, key)
        if "\n" in name or "\r" in name:
            raise InvalidKey("The name of an object on this store holds no line ends", key=key)
        return name

    def part(self, key: str, token: str, level: int, number: int) -> str:
        """Make the whole name of a temporary object.

        Args:
            key: The key of the object that it becomes a part of.
            token: 16 hexadecimal digits that tell one upload from all others.
            level: How often its content was composed.
            number: Its number on that level.

        Raises:
            InvalidKey: If the store cannot hold it.
        """
        folder = key.rpartition("/")[0]
        last = f"{PART_PREFIX}{token}-{level}-{number}{PART_SUFFIX}"
        # A long key is met here too, with a name of its own length instead of the part's.
        BucketAddress.name(self, f"{folder}/{'x' * len(last)}" if folder else "x" * len(last))
        return f"{self.prefix}{folder}/{last}" if folder else self.prefix + last


def upload_of(name: str) -> str | None:
    """Find the token of the upload that a temporary object belongs to; None for other names."""
    found = _PART.fullmatch(name)
    return found[1] if found else None


class MemoryBody(aiohttp.payload.Payload):
    """Send pieces of memory one after the other, without copying them.

    The socket gets slices of the caller's memory. The body may be sent with another
    request, from its beginning. Once ended it sends nothing more, so that a request that was
    cancelled while it still sends never touches memory that has another use by then.

    Args:
        pieces: Flat bytes.
        content_type: Their type.
    """

    _autoclose = True

    def __init__(
        self, *pieces: bytes | memoryview, content_type: str = "application/octet-stream"
    ) -> None:
        super().__init__(None, content_type=content_type)
        self._pieces = [memoryview(piece) for piece in pieces]
        self._size = sum(map(len, pieces))
        self._begun = False

    @property
    def consumed(self) -> bool:
        """Forbid the client to send it again by itself, as it would after a reset; the store is
        asked first how much has arrived."""
        return self._begun

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        raise TypeError("a body is bytes, not text")

    async def write(self, writer: AbstractStreamWriter) -> None:
        await self.write_with_length(writer, None)

    async def write_with_length(
        self, writer: AbstractStreamWriter, content_length: int | None
    ) -> None:
        self._begun = True
        for piece in tuple(self._pieces):
            for at in range(0, len(piece), PIECE_BYTES):
                if not self._pieces:
                    return
                await writer.write(piece[at : at + PIECE_BYTES])

    def end(self) -> None:
        """Forget the memory."""
        self._pieces = []


class Requests:
    """Send requests for one bucket, each under a deadline of its own.

    Args:
        session: Sends them.
        tokens: Gives the tokens that they carry.
        address: Bucket and prefix.
        endpoint: Scheme, host and port of the API.
        timeout: Seconds for a request without a body.
        common: Parameters of every request.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        tokens: Tokens,
        address: Address,
        endpoint: str,
        timeout: float,
        common: Query,
    ) -> None:
        self._session, self._tokens, self.address = session, tokens, address
        self.timeout, self._common = timeout, common
        self._endpoint, self._origin = endpoint, URL(endpoint).origin()

    def url(self, path: str, **query: str) -> URL:
        """Make the address of a path; ``{bucket}`` in it stands for the bucket."""
        whole = path.replace("{bucket}", quote(self.address.bucket, safe=""))
        parameters = urlencode({**query, **self._common}, quote_via=quote)
        return URL(f"{self._endpoint}{whole}?{parameters}", encoded=True)

    def object_url(self, name: str, verb: str = "", **query: str) -> URL:
        """Make the address of an object by its whole name."""
        return self.url(f"/storage/v1/b/{{bucket}}/o/{quote(name, safe='')}{verb}", **query)

    def upload_url(self, kind: str, name: str, **query: str) -> URL:
        """Make the address that creates an object by its whole name."""
        path = "/upload/storage/v1/b/{bucket}/o"
        return self.url(path, uploadType=kind, name=name, fields=FIELDS, **query)

    @contextmanager
    def attempt(
        self, action: str, key: str | None = None, nbytes: int = 0
    ) -> Iterator[anyio.CancelScope]:
        """Bound the time of the block, and translate its errors.

        Args:
            action: The verb for the message of an error, such as ``"read"``.
            key: The key concerned.
            nbytes: The size of the body that is sent or comes.

        Yields:
            The scope that bounds it, to extend once the answer tells how much comes.

        Raises:
            StoreError: If it failed.
        """
        limit = time_limit(self.timeout, nbytes)
        where = f"{self.address}{key or ''}"
        with requesting(action, where, key), anyio.fail_after(limit) as scope:
            yield scope

    @asynccontextmanager
    async def answer(
        self,
        method: str,
        url: URL,
        *,
        headers: Query | None = None,
        body: MemoryBody | None = None,
        expected: tuple[int, ...] = (),
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request within an :meth:`attempt`, whose deadline it has, and lend the answer.

        A token that the store refuses is renewed, and the request sent once more.

        Args:
            method: The method.
            url: The address.
            headers: Headers.
            body: The body. Without one, the client tries a request once more by itself if
                a connection that was kept open turns out to be closed.
            expected: Statuses beyond 399 that are no errors here.

        Raises:
            Refused: If the answer says no.
        """
        # Addresses of upload sessions come from the store, and might lead anywhere.
        own = url.origin() == self._origin
        for is_last in (False, True):
            token = await self._tokens.get() if own else None
            carried = {"Authorization": f"Bearer {token}"} if token else {}
            async with self._session.request(
                method, url, headers={**(headers or {}), **carried},
                data=body, allow_redirects=False,
            ) as response:  # fmt: skip
                if response.status == 401 and token and not is_last:
                    self._tokens.forget(token)
                    continue
                if response.status >= 400 and response.status not in expected:
                    raise await refusal(response)
                yield response
                return

    async def ask(
        self,
        action: str,
        method: str,
        url: URL,
        *,
        key: str | None = None,
        nbytes: int = 0,
        headers: Query | None = None,
        body: MemoryBody | None = None,
    ) -> Resource:
        """Send a request within an attempt of its own, and return the JSON of the answer.

        Args:
            action: The verb for the message of an error.
            method: The method.
            url: The address.
            key: The key concerned.
            nbytes: The size of the body, or of one that would keep the store as busy.
            headers: Headers.
            body: The body.

        Raises:
            StoreError: If it failed.
        """
        with self.attempt(action, key, nbytes):
            async with self.answer(method, url, headers=headers, body=body) as response:
                return await answered(response)


async def answered(response: aiohttp.ClientResponse) -> Resource:
    """Read the JSON of an answer; empty for an answer without content.

    Raises:
        ValueError: If it is no JSON object.
    """
    data = await response.read()
    found = json.loads(data) if data or response.status != 204 else {}
    if not isinstance(found, dict):
        raise ValueError("the answer is no JSON object")
    return found


def json_body(content: Mapping[str, Any]) -> MemoryBody:
    """Make a body of JSON."""
    return MemoryBody(json.dumps(content).encode(), content_type="application/json; charset=UTF-8")
