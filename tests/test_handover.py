"""Threads of a load that hand reads, buffers and bytes to one another."""

from __future__ import annotations

import threading
from collections.abc import Callable

import anyio
import pytest
from anyio import create_task_group, fail_after, to_thread

from ckpipe.loads.delivering import Arrived
from ckpipe.loads.handover import Handover
from ckpipe.loads.load_planning import Read


def reads(count: int) -> list[Read]:
    return [Read(0, number, 1, ()) for number in range(count)]


def nothing(begin: int, end: int) -> memoryview:
    return memoryview(b"")


def buffers(count: int) -> list[memoryview]:
    return [memoryview(bytearray([number])) for number in range(count)]


def test_each_read_is_taken_once_and_buffers_go_round() -> None:
    handover, taken = Handover(buffers(2), lanes=3, deliverers=2), list[int]()

    def lane() -> None:
        while (found := handover.next_read()) is not None:
            read, buffer = found
            handover.arrive(Arrived(read.offset, nothing, iter(()), buffer))

    def deliverer() -> None:
        while (arrived := handover.next_arrived()) is not None:
            taken.append(arrived.file)
            assert arrived.buffer is not None
            handover.give_back(arrived.buffer)

    handover.ask(reads(100))
    handover.all_asked()
    lanes = [threading.Thread(target=lane) for _ in range(3)]
    deliverers = [threading.Thread(target=deliverer) for _ in range(2)]
    for thread in lanes + deliverers:
        thread.start()
    for thread in lanes:
        thread.join(20)
    handover.all_arrived()
    for thread in deliverers:
        thread.join(20)
    assert not any(thread.is_alive() for thread in lanes + deliverers)
    assert sorted(taken) == list(range(100))


def _no_read(handover: Handover) -> None:
    assert handover.next_read() is None


def _no_buffer(handover: Handover) -> None:
    assert handover.next_read() is not None
    assert handover.next_read() is None


def _nothing_arrived(handover: Handover) -> None:
    assert handover.next_arrived() is None


@pytest.mark.parametrize(("asked", "wait"), [(0, _no_read), (2, _no_buffer), (0, _nothing_arrived)])
async def test_no_thread_waits_when_it_is_over(
    asked: int, wait: Callable[[Handover], None]
) -> None:
    handover, ended = Handover(buffers(1), lanes=2, deliverers=2), list[int]()
    handover.ask(reads(asked))

    def thread() -> None:
        wait(handover)
        ended.append(1)

    with fail_after(20):
        async with create_task_group() as tasks:
            tasks.start_soon(to_thread.run_sync, thread)
            async with create_task_group() as over:
                over.start_soon(handover.closed_at_the_end)
                await anyio.wait_all_tasks_blocked()
                assert not ended
                over.cancel_scope.cancel()
    assert ended
