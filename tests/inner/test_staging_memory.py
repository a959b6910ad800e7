"""Staging memory: reused, bounded, given back, mapped, registered, not inherited; its budget."""

from __future__ import annotations

import asyncio
import gc
import logging
import mmap
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpipe.memory import arena as arena_module
from ckpipe.memory import cuda
from ckpipe.memory.arena import Arena, Block
from ckpipe.memory.budget import BlockReservation, ByteBudget
from ckpipe.memory.mapping import HUGE_PAGE_BYTES, map_to_read, map_to_write
from ckpipe.save.memory import available_bytes
from tests.support.command_line import forked
from tests.support.settling import SettlingPipeline, settle

BLOCK = 64 << 10


def backed(block: Block) -> int:
    """How many bytes of a block have memory behind them, as the kernel's page map says.

    Source: Documentation/admin-guide/mm/pagemap.rst of Linux; bit 63 is "page present".
    """
    pages = len(block.view) // mmap.PAGESIZE
    with Path("/proc/self/pagemap").open("rb") as pagemap:
        pagemap.seek(block.address // mmap.PAGESIZE * 8)
        entries: tuple[int, ...] = struct.unpack(f"<{pages}Q", pagemap.read(pages * 8))
    return sum(entry >> 63 for entry in entries) * mmap.PAGESIZE


def test_blocks_are_reused_the_last_one_first() -> None:
    arena = Arena(BLOCK)
    first, second = arena.take(), arena.take()
    assert arena.blocks == 2
    arena.give(first)
    arena.give(second)
    assert arena.take() is second
    assert arena.take() is first
    assert (arena.blocks, arena.free_blocks) == (2, 0)


def test_used_blocks_go_before_untouched_ones() -> None:
    arena = Arena(BLOCK)
    arena.reserve(3)
    used = arena.take()
    assert (arena.free_blocks, arena.touched_blocks) == (2, 0)
    arena.give(used)
    assert (arena.free_blocks, arena.touched_blocks) == (3, 1)
    assert arena.take() is used


def test_reserving_grows_only_by_what_is_missing() -> None:
    arena = Arena(BLOCK)
    arena.reserve(4)
    held = [arena.take() for _ in range(3)]
    arena.reserve(1)
    assert arena.blocks == 4
    arena.reserve(3)
    assert (arena.blocks, arena.free_blocks) == (6, 3)
    assert len(held) == 3


def test_touching_ahead_backs_a_block_and_keeps_its_bytes() -> None:
    arena = Arena(BLOCK)
    arena.reserve(1)
    block = arena.next_untouched
    assert block is not None
    assert backed(block) == 0
    block.touch()
    assert backed(block) == BLOCK
    assert (arena.next_untouched, arena.touched_blocks) == (None, 1)
    block.view[:3] = b"abc"
    block.touch()
    assert bytes(block.view[:3]) == b"abc"


def test_growing_opens_no_file() -> None:
    arena = Arena(BLOCK)
    gc.collect()  # what other tests left may be files
    before = len(os.listdir("/proc/self/fd"))
    for blocks in range(1, 30):
        arena.reserve(blocks)
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_system_without_memory_refuses_in_words(tmp_path: Path) -> None:
    # In a process of its own, since the limit holds for all of it.
    code = """
import resource, sys
import torch
import ckpipe
state = {"w": torch.ones(25_000_000)}
_, hard = resource.getrlimit(resource.RLIMIT_AS)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
with ckpipe.SyncPipeline(sys.argv[1]) as pipeline:
    pipeline.save({"small": torch.ones(1)}, until="committed")
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), hard))
    try:
        pipeline.save(state)
    except ckpipe.CkpipeError as error:
        print(type(error).__name__, error)
    pipeline.save({"small": torch.ones(1)}, until="committed")
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    pipeline.save(state, until="committed")
    print([info.step for info in pipeline.steps()])
"""
    run = forked(code, tmp_path)
    assert "SaveError" in run.out, run.err
    assert "no memory for" in run.out
    assert run.out.endswith("[0, 2, 3]\n")


# Mapped files

PAGE = 4096
SIZE = 3 * HUGE_PAGE_BYTES


@pytest.fixture
def descriptor() -> Iterator[int]:
    """A file in memory in which every page is another."""
    made = os.memfd_create("ckpipe-test-mapping")
    pages = np.arange(SIZE // PAGE, dtype=np.uint32).repeat(PAGE // 4)
    os.write(made, pages.tobytes())
    yield made
    os.close(made)


def mappings() -> list[tuple[int, int]]:
    """Where this process has mapped such files."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    found = [re.match(r"(\w+)-(\w+) ", line) for line in lines if "ckpipe-test-mapping" in line]
    return [(int(each[1], 16), int(each[2], 16)) for each in found if each]


@pytest.mark.parametrize("offset", [0, PAGE, 77 * PAGE, HUGE_PAGE_BYTES - PAGE, HUGE_PAGE_BYTES])
def test_address_and_offset_are_alike_modulo_a_huge_page(descriptor: int, offset: int) -> None:
    view = map_to_read(descriptor, SIZE - offset, offset)
    address = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    assert (address - offset) % HUGE_PAGE_BYTES == 0
    assert view == os.pread(descriptor, SIZE, offset)
    assert view.readonly


def test_what_is_written_to_a_mapping_is_in_the_file_at_a_like_offset(descriptor: int) -> None:
    memory, offset = map_to_write(descriptor, HUGE_PAGE_BYTES)
    address = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
    assert (address - offset) % HUGE_PAGE_BYTES == 0
    memory[:3] = b"new"
    assert os.pread(descriptor, HUGE_PAGE_BYTES, offset) == memory[:]


def test_what_is_written_later_is_seen_too(descriptor: int) -> None:
    view = map_to_read(descriptor, SIZE, 0)
    os.pwrite(descriptor, b"new", SIZE - 3)
    assert bytes(view[-3:]) == b"new"


def test_it_is_unmapped_with_the_last_view_of_it(descriptor: int) -> None:
    view = map_to_read(descriptor, SIZE, 0)
    part = view[PAGE : 2 * PAGE]
    del view
    gc.collect()
    assert [end - begin for begin, end in mappings()] == [SIZE]
    assert part == os.pread(descriptor, PAGE, PAGE)
    del part
    gc.collect()
    assert mappings() == []


def test_a_file_that_cannot_be_mapped_is_an_error(tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(OSError, match="No such device"):
            map_to_read(folder, PAGE, 0)
        with pytest.raises(OSError, match="Permission denied"):
            map_to_write(folder, PAGE)
    finally:
        os.close(folder)


# Registered memory


class Registrar:
    """Stands for CUDA's register of host memory, which takes so many pieces and no more."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.asked = 0
        self.registered: list[tuple[int, int]] = []

    def register(self, memory: torch.Tensor) -> str:
        self.asked += 1
        if len(self.registered) >= self.most:
            return "cudaErrorMemoryAllocation"
        self.registered.append((memory.data_ptr(), memory.numel()))
        return ""

    def unregister(self, memory: torch.Tensor) -> None:
        self.registered.remove((memory.data_ptr(), memory.numel()))


@pytest.fixture
def registrar(monkeypatch: pytest.MonkeyPatch) -> Registrar:
    made = Registrar(most=2)
    monkeypatch.setattr(cuda, "in_use", lambda: True)
    monkeypatch.setattr(cuda, "register", made.register)
    monkeypatch.setattr(cuda, "unregister", made.unregister)
    return made


@pytest.mark.parametrize("shared", [False, True])
def test_a_segment_is_registered_once_for_its_life(registrar: Registrar, shared: bool) -> None:
    arena = Arena(BLOCK, pin=True, shared=shared)
    arena.reserve(4)
    for _ in range(3):
        blocks = [arena.take() for _ in range(4)]
        for block in blocks:
            arena.give(block)
    assert registrar.asked == 1
    ((address, size),) = registrar.registered
    assert all(address <= each.address <= address + size - BLOCK for each in blocks)
    arena.close()
    assert registrar.registered == []


def test_what_a_worker_process_maps_is_registered_once_for_its_life(
    registrar: Registrar, tmp_path: Path
) -> None:
    registrar.most = 100
    settings: dict[str, Any] = {"worker": "process", "staging": {"block_bytes": BLOCK}}
    with SettlingPipeline(tmp_path, **settings) as pipeline:
        for step in range(3):
            pipeline.save({"w": torch.full((BLOCK,), float(step))}, step=step).wait()
            settle(pipeline)
        lines = Path("/proc/self/maps").read_text().splitlines()
        shared = {line.split()[0] for line in lines if "memfd:ckpipe" in line}
        registered = {f"{at:x}-{at + size:x}" for at, size in registrar.registered}
        assert registered
        assert registered <= shared, "the worker has no other"
        assert registrar.asked == len(registered)
    assert registrar.registered == []


def test_memory_that_is_refused_serves_and_is_told_of_once_with_the_reason(
    registrar: Registrar,
) -> None:
    arena = Arena(BLOCK, pin=True)
    registrar.most = 0
    with pytest.warns(RuntimeWarning, match=r"cudaErrorMemoryAllocation.*ulimit -l") as told:
        blocks = [arena.take() for _ in range(3)]
    assert registrar.asked > 1
    assert len(told) == 1
    for block in blocks:
        block.view[:] = b"x" * BLOCK
        arena.give(block)
    arena.close()
    assert registrar.registered == []


@pytest.mark.filterwarnings("error")
def test_nothing_is_registered_without_cuda_or_wish_and_nothing_warns_of_it(
    registrar: Registrar, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    arena_module._mention.cache_clear()
    caplog.set_level(logging.DEBUG, "ckpipe")
    Arena(BLOCK).take()
    assert caplog.messages == []
    monkeypatch.setattr(cuda, "in_use", lambda: False)
    arena = Arena(BLOCK, pin=True)
    for each in (arena, arena, Arena(BLOCK, pin=True)):
        each.take()
    assert registrar.asked == 0
    (told,) = caplog.messages
    assert "does not use CUDA" in told
    assert [each.levelname for each in caplog.records] == ["DEBUG"]
    monkeypatch.setattr(cuda, "in_use", lambda: True)
    registrar.most = 0
    with pytest.warns(RuntimeWarning, match="cudaErrorMemoryAllocation"):
        arena.take()


def test_trimming_gives_back_whole_segments_of_which_no_block_is_in_use() -> None:
    arena = Arena(BLOCK)
    arena.reserve(2)
    kept = arena.take()
    arena.reserve(4)  # a second segment, of three blocks
    arena.trim(5)
    assert arena.blocks == 5
    arena.trim(2)
    assert arena.blocks == 2
    arena.trim(0)
    assert arena.blocks == 2, "a block of it is in use"
    arena.give(kept)
    arena.trim(0)
    assert arena.blocks == 0


async def until_idle() -> None:
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
            await until_idle()
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
            await until_idle()
            play.check()
        await play.end()

    asyncio.run(main())


async def test_small_requests_do_not_overtake_a_large_one() -> None:
    play = Play(10)
    for name, amount in enumerate((6, 8, 1)):
        await play.acquire(name, amount)
    await until_idle()
    with pytest.raises(anyio.WouldBlock):
        play.budget.acquire_nowait(1)
    play.check()
    play.cancel(1)
    await until_idle()
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
        budget, arena = ByteBudget(8 * PAGE), Arena(PAGE)
        await budget.acquire(reserved * PAGE)
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
            assert budget.used == max(still_to_come, len(held)) * PAGE
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
