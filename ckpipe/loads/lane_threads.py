"""The threads of one delivery, from their start to the end of the last, whatever happens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial

from anyio import CancelScope, CapacityLimiter, create_task_group
from anyio.abc import TaskGroup

from ckpipe.loads.handover import Handover
from ckpipe.loads.load_planning import Read
from ckpipe.tasks.awaited_threads import in_thread


class LaneThreads:
    """Lanes and deliverers; the first that fails ends all.

    Args:
        handover: What they hand to one another.
        lane: What a lane does: takes reads from there and gives it what has arrived, to the end.
        deliverer: What a deliverer does with that, likewise.
    """

    def __init__(
        self, handover: Handover, lane: Callable[[], None], deliverer: Callable[[], None]
    ) -> None:
        self._handover, self._lane, self._deliverer = handover, lane, deliverer
        # They may wait long for one another, and must not for threads that all share.
        self._limiter = CapacityLimiter(handover.lanes + handover.deliverers)
        self._failures: list[Exception] = []
        self._over = CancelScope()

    async def run(
        self, reads: AsyncIterator[Sequence[Read]], beside: Callable[[], Awaitable[object]]
    ) -> None:
        """Reads and delivers to the end; when this returns or raises, no thread is left.

        Args:
            reads: What lanes are to read. Without any, there are none.
            beside: Is awaited meanwhile, and ends all if it fails.

        Raises:
            Exception: What failed first.
        """
        # Nobody waits for threads but in this group: a task that asyncio itself cancels cancels
        # the group that it waits for, and what closes the handover must be in it.
        async with create_task_group() as everything:
            self._over = everything.cancel_scope
            everything.start_soon(self._handover.closed_at_the_end)
            everything.start_soon(self._work, reads, beside)
        if self._failures:
            # Only the first tells something: the others may be what stopping them has caused.
            raise self._failures[0]

    async def _work(
        self, reads: AsyncIterator[Sequence[Read]], beside: Callable[[], Awaitable[object]]
    ) -> None:
        async with create_task_group() as tasks:
            tasks.start_soon(self._attempt, beside, name="ckpipe load destinations")
            tasks.start_soon(self._read, reads, name="ckpipe load reads")
            self._start(tasks, "deliverer", self._deliverer, self._handover.deliverers)
        self._over.cancel()

    async def _read(self, reads: AsyncIterator[Sequence[Read]]) -> None:
        async with create_task_group() as tasks:
            tasks.start_soon(self._attempt, partial(self._ask, reads, tasks))
        self._handover.all_arrived()

    async def _ask(self, reads: AsyncIterator[Sequence[Read]], tasks: TaskGroup) -> None:
        async for found in reads:
            if not self._handover.asked:
                self._start(tasks, "lane", self._lane, self._handover.lanes)
            self._handover.ask(found)
        self._handover.all_asked()

    def _start(self, tasks: TaskGroup, name: str, work: Callable[[], None], count: int) -> None:
        thread = partial(in_thread, work, limiter=self._limiter)
        for number in range(count):
            tasks.start_soon(self._attempt, thread, name=f"ckpipe load {name} {number}")

    async def _attempt(self, work: Callable[[], Awaitable[object]]) -> None:
        try:
            await work()
        except Exception as error:
            self._failures.append(error)
            self._over.cancel()


__all__ = ["LaneThreads"]
