"""One request at a time: its parameters, its deadline, and its errors translated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import anyio

from ckpipe.stores.http_stores import time_limit
from ckpipe_s3.address import Address
from ckpipe_s3.failures import requesting

Parameters = Mapping[str, Any]


class Requests:
    """Sends requests for one bucket, each under a deadline of its own.

    The client's own timeouts do not suffice: it waits for ever on a server that goes silent
    before it has asked for a body, or in the middle of one.

    Args:
        client: The client.
        address: Bucket and prefix.
        timeout: Seconds for a request without a body.
        common: Parameters of every request.
    """

    def __init__(self, client: Any, address: Address, timeout: float, common: Parameters) -> None:
        self._client, self.address, self._timeout = client, address, timeout
        self._common = {"Bucket": address.bucket, **common}

    @contextmanager
    def attempt(self, action: str, key: str | None = None, nbytes: int = 0) -> Iterator[None]:
        """Bounds the time of what is done inside, and translates its errors.

        Raises:
            StoreError: If it failed.
        """
        limit = time_limit(self._timeout, nbytes)
        where = f"{self.address}{key or ''}"
        with requesting(action, where, key), anyio.fail_after(limit):
            yield

    async def send(self, operation: str, /, **parameters: Any) -> Any:
        """Sends a request and returns the answer, with no deadline but that of an
        :meth:`attempt` around it, and with errors as they are."""
        return await getattr(self._client, operation)(**self._common, **parameters)

    async def ask(
        self,
        action: str,
        operation: str,
        /,
        *,
        key: str | None = None,
        nbytes: int = 0,
        **parameters: Any,
    ) -> Any:
        """Sends a request within an attempt of its own.

        Args:
            action: What it does, for the message of an error.
            operation: The client's method.
            key: The key concerned.
            nbytes: The size of the request's body.
            parameters: The method's parameters.

        Raises:
            StoreError: If it failed.
        """
        with self.attempt(action, key, nbytes):
            return await self.send(operation, **parameters)

    async def pages(self, operation: str, /, **parameters: Any) -> Any:
        """All pages of a list, in a list, each under its own deadline.

        Raises:
            StoreError: If the store failed.
        """
        pages: list[Any] = []
        paginator = self._client.get_paginator(operation).paginate(**self._common, **parameters)
        following = aiter(paginator)
        while True:
            with self.attempt("list"):
                page = await anext(following, None)
            if page is None:
                return pages
            pages.append(page)
