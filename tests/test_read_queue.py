"""Lanes of a load share what the store has not in memory, down to the last group."""

from __future__ import annotations

import anyio
from anyio.lowlevel import checkpoint

from ckpipe.loads.load_planning import Read
from ckpipe.loads.read_queue import ReadQueue


def reads(count: int) -> list[Read]:
    return [Read(0, number, 1, ()) for number in range(count)]


async def test_a_group_that_is_not_in_memory_is_shared_by_all_lanes() -> None:
    everything = reads(4)
    queue, taken = ReadQueue([everything]), list[tuple[int, Read]]()

    async def lane(number: int) -> None:
        while (found := await queue.next()) is not None:
            if not isinstance(found, Read):
                await anyio.wait_all_tasks_blocked()  # the others have asked, and wait
                first, *rest = found
                queue.settle(rest)
                found = first
            taken.append((number, found))
            await checkpoint()

    async with anyio.create_task_group() as tasks:
        for number in range(3):
            tasks.start_soon(lane, number)
    assert sorted(read.offset for _, read in taken) == [0, 1, 2, 3]
    assert {number for number, _ in taken} == {0, 1, 2}


async def test_single_reads_go_before_groups_and_a_group_that_is_done_is_not_read_again() -> None:
    first, second, third, fourth = reads(4)
    queue = ReadQueue([[first, second], [third, fourth]])
    assert await queue.next() == [first, second]
    queue.settle([second])
    assert await queue.next() == second
    assert await queue.next() == [third, fourth]
    queue.settle()
    assert await queue.next() is None
    assert await ReadQueue([]).next() is None


async def test_of_a_group_that_is_divided_each_part_is_looked_at_by_itself() -> None:
    first, second, third = reads(3)
    queue = ReadQueue([[first, second, third]])
    assert await queue.next() == [first, second, third]
    others: list[list[Read] | Read | None] = []
    async with anyio.create_task_group() as tasks:

        async def wait() -> None:
            others.append(await queue.next())

        tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        assert not others
        queue.divide([[first, second], [third]])
    assert others == [[first, second]]
    queue.settle([second])
    assert await queue.next() == second
    assert await queue.next() == [third]
