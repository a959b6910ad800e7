"""Fetching something while what must come before its use is still under way."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

import anyio

T = TypeVar("T")


class Ahead(Generic[T]):
    """A value that is fetched while something else is done.

    Args:
        fetch: Gets it; what it raises is raised to whoever asks for the value, and to nobody
            where nobody asks.
    """

    def __init__(self, fetch: Callable[[], Awaitable[T]]) -> None:
        self._fetch, self._ended = fetch, anyio.Event()
        self._found: list[T] = []
        self._failure: Exception | None = None

    @asynccontextmanager
    async def started(self) -> AsyncIterator[None]:
        """Fetches beside the block, and gives up at its end.

        What the block raises comes as it is, without a group.
        """
        failure: Exception | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._run)
            try:
                yield
            except Exception as error:
                failure = error
            tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure

    async def _run(self) -> None:
        try:
            self._found.append(await self._fetch())
        except Exception as error:
            self._failure = error
        self._ended.set()

    async def get(self) -> T:
        """The value, once it is there; to be asked for within :meth:`started`.

        Raises:
            Exception: What fetching it has raised.
        """
        await self._ended.wait()
        if self._failure is not None:
            raise self._failure
        return self._found[0]


__all__ = ["Ahead"]
