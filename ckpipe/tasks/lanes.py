"""Several tasks that belong together, and fail as one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import anyio

T = TypeVar("T")


async def run_lanes(count: int, lane: Callable[[], Awaitable[None]]) -> None:
    """Runs a function as several tasks at once, until all have returned or one has failed.

    Args:
        count: How many tasks.
        lane: What each does; they usually pull from one iterator.

    Raises:
        BaseException: What the first failing task raised, as it was; the others are cancelled,
            since what they raise may be what stopping them has caused.
    """
    failures: list[BaseException] = []

    async def attempt() -> None:
        try:
            await lane()
        except anyio.get_cancelled_exc_class():
            raise
        except BaseException as error:
            failures.append(error)
            group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        for _ in range(count):
            group.start_soon(attempt)
    if failures:
        raise failures[0]


async def all_of(calls: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
    """Makes several calls at once, and returns what they return, in their order.

    Raises:
        BaseException: What the first failing call raised; the others are cancelled.
    """
    found: dict[int, T] = {}
    waiting = iter(enumerate(calls))

    async def lane() -> None:
        for number, call in waiting:
            found[number] = await call()

    await run_lanes(len(calls), lane)
    return [found[number] for number in range(len(calls))]


__all__ = ["all_of", "run_lanes"]
