"""Several tasks that do one thing together, and fail as one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio


async def run_lanes(count: int, lane: Callable[[], Awaitable[None]]) -> None:
    """Runs a function as several tasks at once, until all have returned or one has failed.

    Args:
        count: How many tasks.
        lane: What each does; they usually pull from one iterator.

    Raises:
        Exception: What the first failing task raised, as it was; the others are cancelled, since
            what they raise may be what stopping them has caused.
    """
    failures: list[Exception] = []

    async def attempt() -> None:
        try:
            await lane()
        except Exception as error:
            failures.append(error)
            group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        for _ in range(count):
            group.start_soon(attempt)
    if failures:
        raise failures[0]


__all__ = ["run_lanes"]
