"""One request at a time: its address, its token, its deadline, and its errors translated.

The API is the JSON API of Cloud Storage, version 1, as its reference describes it.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from urllib.parse import quote, urlencode

import aiohttp
import anyio
from yarl import URL

from ckpipe.stores.http_stores import time_limit
from ckpipe_gcs.address import Address
from ckpipe_gcs.body import MemoryBody
from ckpipe_gcs.failures import refusal, requesting
from ckpipe_gcs.tokens import Tokens

Query = Mapping[str, str]
Resource = Mapping[str, Any]
"""What the store tells of an object: its resource, as the reference calls it."""

FIELDS = "name,size,generation,crc32c,timeCreated,metadata"
"""What is asked of an object's resource."""

SMALL_ANSWER = 1 << 26
"""The largest answer that is kept whole; a page of a list is less than a MiB."""


class Requests:
    """Sends requests for one bucket, each under a deadline of its own.

    Args:
        session: Sends them.
        tokens: What they carry.
        address: Bucket and prefix.
        endpoint: Scheme, host and port of the API.
        timeout: Seconds for a request without a body.
        common: What stands in the query of every request.
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
        """The address of what a path names; ``{bucket}`` in it stands for the bucket."""
        whole = path.replace("{bucket}", quote(self.address.bucket, safe=""))
        parameters = urlencode({**query, **self._common}, quote_via=quote)
        return URL(f"{self._endpoint}{whole}?{parameters}", encoded=True)

    def object_url(self, name: str, verb: str = "", **query: str) -> URL:
        """The address of an object by its whole name."""
        return self.url(f"/storage/v1/b/{{bucket}}/o/{quote(name, safe='')}{verb}", **query)

    def upload_url(self, kind: str, name: str, **query: str) -> URL:
        """The address that makes an object by its whole name."""
        path = "/upload/storage/v1/b/{bucket}/o"
        return self.url(path, uploadType=kind, name=name, fields=FIELDS, **query)

    @contextmanager
    def attempt(
        self, action: str, key: str | None = None, nbytes: int = 0
    ) -> Iterator[anyio.CancelScope]:
        """Bounds the time of what is done inside, and translates its errors.

        Args:
            action: What is done, for the message of an error.
            key: The key concerned.
            nbytes: The size of the body that is sent or comes.

        Yields:
            What bounds it, for who learns only from the answer how much comes.

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
        """Sends a request and lends the answer, with no deadline but that of an :meth:`attempt`
        around it.

        A token that the store takes no longer is renewed, and the request sent once more.

        Args:
            method: The method.
            url: The address.
            headers: Headers.
            body: What is sent. Without one, the client tries a request once more by itself if
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
        """Sends a request within an attempt of its own, and returns the JSON of the answer.

        Args:
            action: What it does, for the message of an error.
            method: The method.
            url: The address.
            key: The key concerned.
            nbytes: The size of the body, or what the store has to do as if it were one.
            headers: Headers.
            body: What is sent.

        Raises:
            StoreError: If it failed.
        """
        with self.attempt(action, key, nbytes):
            async with self.answer(method, url, headers=headers, body=body) as response:
                return await answered(response)


async def answered(response: aiohttp.ClientResponse) -> Resource:
    """The JSON of an answer; empty for an answer without content.

    Raises:
        ValueError: If it is no JSON object.
    """
    data = await response.read()
    found = json.loads(data) if data or response.status != 204 else {}
    if not isinstance(found, dict):
        raise ValueError("the answer is no JSON object")
    return found


def json_body(content: Mapping[str, Any]) -> MemoryBody:
    """A body of JSON."""
    return MemoryBody(json.dumps(content).encode(), content_type="application/json; charset=UTF-8")
