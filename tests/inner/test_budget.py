"""The byte budget, whatever is asked of it, and reservations that give everything back."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpipe.memory.arena import Arena
from ckpipe.memory.budget import BlockReservation, ByteBudget
from ckpipe.save.memory import available_bytes

BLOCK = 4096


async def settle() -> None:
    """Let every task run until it waits for something."""
    for _ in range(4):
        await asyncio.sleep(0)


class Play:
    """Requests of a budget, in the order in which they came."""

    def __init__(self, capacity: int) -> None:
        self.budget = ByteBudget(capacity)
        self.amounts: dict[int, int] = {}
        self.tasks: dict[int, asyncio.Task[None]] = {}

    @property
    def held(self) -> list[int]:
        return [name for name, task in self.tasks.items() if task.done()]

    @property
    def waiting(self) -> list[int]:
        return [name for name, task in self.tasks.items() if not task.done()]

    async def acquire(self, name: int, amount: int) -> None:
        if amount > self.budget.capacity:
            with pytest.raises(ValueError, match="can never be had"):
                await self.budget.acquire(amount)
            return
        self.amounts[name] = amount
        self.tasks[name] = asyncio.create_task(self.budget.acquire(amount))

    def release(self, name: int) -> None:
        self.budget.release(self.amounts[name])
        del self.tasks[name]

    def cancel(self, name: int) -> None:
        self.tasks.pop(name).cancel()

    def check(self) -> None:
        """First come, first served: none waits that could be served, and none is overtaken."""
        budget, held, waiting = self.budget, self.held, self.waiting
        assert budget.used == sum(map(self.amounts.__getitem__, held)) <= budget.capacity
        assert budget.waiting == len(waiting)
        if waiting:
            assert all(name < waiting[0] for name in held)
            assert budget.used + self.amounts[waiting[0]] > budget.capacity

    async def end(self) -> None:
        while self.tasks:
            for name in self.held:
                self.release(name)
            await settle()
            self.check()
        assert (self.budget.used, self.budget.waiting) == (0, 0)


MOVES = st.lists(
    st.tuples(
        st.sampled_from(["acquire", "acquire", "release", "cancel", "grant and cancel", "raise"]),
        st.integers(0, 12),
    ),
    max_size=30,
)


@given(st.integers(1, 10), MOVES)
def test_budget_serves_in_order_and_never_above_capacity(
    capacity: int, moves: list[tuple[str, int]]
) -> None:
    async def main() -> None:
        play = Play(capacity)
        for name, (move, number) in enumerate(moves):
            held, waiting = play.held, play.waiting
            if move == "acquire":
                await play.acquire(name, number)
            elif move == "release" and held:
                play.release(held[number % len(held)])
            elif move == "cancel" and waiting:
                play.cancel(waiting[number % len(waiting)])
            elif move == "grant and cancel" and held and waiting:
                # The head may have its bytes already, and not have run since.
                play.release(held[number % len(held)])
                play.cancel(waiting[0])
            elif move == "raise":
                play.budget.raise_capacity(number)
            await settle()
            play.check()
        await play.end()

    asyncio.run(main())


async def test_small_requests_do_not_overtake_a_large_one() -> None:
    play = Play(10)
    for name, amount in enumerate((6, 8, 1)):
        await play.acquire(name, amount)
    await settle()
    with pytest.raises(anyio.WouldBlock):
        play.budget.acquire_nowait(1)
    play.check()
    play.cancel(1)
    await settle()
    assert play.tasks[2].done()
    await play.end()


@given(
    st.integers(1, 6),
    st.integers(1, 12),
    st.lists(st.tuples(st.booleans(), st.integers(1, 5)), max_size=40),
)
def test_ration_gives_everything_back(
    reserved: int, needed: int, moves: list[tuple[bool, int]]
) -> None:
    reserved = min(reserved, needed)

    async def main() -> None:
        budget, arena = ByteBudget(8 * BLOCK), Arena(BLOCK)
        await budget.acquire(reserved * BLOCK)
        reservation = BlockReservation(budget, arena, reserved=reserved, needed=needed)
        while (block := arena.next_untouched) is not None:
            block.touch()  # without it the reservation waits a while for warm memory
        held: list[Any] = []
        taken = 0
        for take, number in moves:
            if take and taken < needed and reservation.held < reserved:
                blocks = await reservation.take(min(number, needed - taken))
                assert 1 <= len(blocks) <= number
                held += blocks
                taken += len(blocks)
            elif held:
                reservation.give(held.pop(number % len(held)))
            assert reservation.held == len(held) <= reserved
            still_to_come = min(reserved, needed - taken + len(held))
            assert budget.used == max(still_to_come, len(held)) * BLOCK
        reservation.close()
        assert (reservation.held, budget.used) == (0, 0)
        assert arena.free_blocks == arena.blocks == reserved
        reservation.close()
        assert budget.used == 0

    asyncio.run(main())


# What a machine has left

GROUP = {"memory.max": "max", "memory.current": "700", "memory.stat": "anon 5\ninactive_file 100"}


@pytest.mark.parametrize(
    ("job", "pod", "left"),
    [
        ({}, {}, 8 << 20),
        ({"memory.max": "1000"}, {}, 400),
        ({}, {"memory.max": "1100"}, 500),
        ({"memory.max": "1000"}, {"memory.max": "900"}, 300),
        ({"memory.max": "300"}, {}, 0),
        ({"memory.max": "99999999999"}, {}, 8 << 20),
    ],
)
def test_a_limit_of_a_container_counts_if_it_leaves_less(
    tmp_path: Path, job: dict[str, str], pod: dict[str, str], left: int
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9999 kB\nMemAvailable: 8192 kB\n")
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/old\n0::/pod/job\n")
    for group, files in (("pod/job", GROUP | job), ("pod", GROUP | pod)):
        folder = tmp_path / "sys/fs/cgroup" / group
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(f"{text}\n")
    assert available_bytes(tmp_path, {}) == left
    assert available_bytes(tmp_path, {"LOCAL_WORLD_SIZE": "4"}) == left // 4


def test_a_system_that_does_not_say_counts_as_large(tmp_path: Path) -> None:
    assert available_bytes(tmp_path, {}) == 1 << 40
