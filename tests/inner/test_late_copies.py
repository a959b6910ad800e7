"""Late copies: of which tensors, how a change of one is noticed, and how long trainers wait."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ckpipe.errors import CaptureTooSlow, StateLockTimeout
from ckpipe.lock.late_copies import (
    ByteSample,
    MutationDetector,
    owned_facts,
    owned_leaves,
    owned_tensors,
    ownership_test,
)
from ckpipe.lock.state_lock import LockHold, StateLock
from ckpipe.memory.arena import Arena
from ckpipe.memory.cuda import SideStreams, StreamFence
from ckpipe.memory.native import address_of, copy_bytes
from ckpipe.planning import LocalPlanner
from ckpipe.save.program import BlockPlan, plan_blocks
from ckpipe.save.request import SaveRequest
from ckpipe.save.save import Save, StagedBlock
from ckpipe.save.stage import BlockCopiers, CopyPiece
from ckpipe.state.tensors import is_dense, tensor_leaf
from ckpipe.types import CheckpointId
from tests.inner.made_up_ranks import capture
from tests.support.actors import PATIENCE, DaemonThreads, is_free, noted

SIZE = 24
BLOCK = 1 << 16
SAVE = Save(
    CheckpointId("20261121T034205123Z-9f3a2c01", 1, 0),
    0,
    SaveRequest(None),
)


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    """A view of some part of the memory that all examples share, of any strides."""
    rank = draw(st.integers(0, 2))
    shape = [draw(st.integers(0, 4)) for _ in range(rank)]
    stride = [draw(st.integers(0, 5)) for _ in range(rank)]
    reach = sum(max(n - 1, 0) * step for n, step in zip(shape, stride, strict=True))
    return MEMORY.as_strided(shape, stride, draw(st.integers(0, SIZE - 1 - min(reach, SIZE - 1))))


MEMORY = torch.zeros(SIZE + 40, dtype=torch.int16)


def elements(tensor: torch.Tensor) -> set[int]:
    """The places in the shared memory that a view touches."""
    places = torch.arange(MEMORY.numel())
    seen = places.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return set(seen.flatten().tolist())


@given(st.lists(views(), max_size=4), views())
def test_nothing_is_owned_of_which_a_byte_is_not(
    owned: list[torch.Tensor], asked: torch.Tensor
) -> None:
    touched = set().union(*map(elements, owned)) if owned else set()
    if ownership_test(owned)(tensor_leaf(asked, "asked")[0]):
        assert elements(asked) <= touched


def window(tensor: torch.Tensor, lo: int, hi: int) -> set[int]:
    """The places of the bytes from ``lo`` to ``hi``, counted from a tensor's first element on."""
    first = tensor.storage_offset()
    return set(range(first + lo // 2, first + hi // 2))


def read_by(plan: BlockPlan, memory: list[torch.Tensor]) -> set[int]:
    """The places in the shared memory that filling a block reads."""
    gather, read = plan.gather, set[int]()
    for copy in plan.copies:
        assert not copy.raw
        read |= elements(memory[copy.tensor])
    for number, skip, size in zip(gather.tensors, gather.skips, gather.sizes, strict=True):
        read |= window(memory[number], skip, skip + size)
    return read


@given(st.lists(views(), min_size=1, max_size=3), st.lists(views(), max_size=3))
def test_what_is_copied_later_is_read_with_nothing_that_others_change(
    owned: list[torch.Tensor], others: list[torch.Tensor]
) -> None:
    captured = capture([owned, others])
    later = owned_leaves(captured.tensors, owned)
    plan = LocalPlanner().plan(captured, rank=0, world_size=1)
    changing = set().union(*map(elements, others)) - set().union(*map(elements, owned))
    for block in plan_blocks(plan, captured.tensors, 1 << 16):
        assert not changing & read_by(block.split(later)[1], captured.memory)


@given(views())
def test_dense_means_each_place_of_the_window_once(tensor: torch.Tensor) -> None:
    if not tensor.numel():
        return
    window = max(elements(tensor)) - min(elements(tensor)) + 1
    expected = len(elements(tensor)) == window == tensor.numel()
    assert is_dense(tuple(tensor.shape), tensor.stride()) == expected


def test_what_lies_between_the_elements_of_an_owned_tensor_is_not_owned() -> None:
    base = torch.zeros(8)
    is_owned = ownership_test([base[::2]])
    assert is_owned(tensor_leaf(base[::2], "own")[0])
    assert not is_owned(tensor_leaf(base[:4], "between")[0])


def test_tensors_deep_in_a_state_are_found() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter])
    deep = torch.zeros(2)
    optimizer.state[parameter] = {"history": [(1, {"deep": deep})], "count": 3}
    assert [id(each) for each in owned_tensors([optimizer])] == [id(parameter), id(deep)]


def test_what_has_no_memory_of_strides_is_passed_over() -> None:
    lazy, plain = nn.UninitializedParameter(), torch.zeros(3)
    odd = [torch.zeros(3).to_sparse(), torch.zeros(3, device="meta"), lazy]
    assert not ownership_test(odd)(tensor_leaf(plain, "plain")[0])
    facts = owned_facts([lazy, plain], [])
    assert owned_facts([lazy, plain], []) == facts
    lazy.materialize((3,))
    assert owned_facts([lazy, plain], []) != facts


def test_addresses_may_be_of_any_device() -> None:
    captured = capture({"w": torch.ones(3)})
    (leaf,) = captured.tensors
    far = replace(leaf, device="xpu:0", address=0xFF00 << 48)
    assert captured.again([far], [], [], []).addresses.tolist() == [0xFF00 << 48]


# ---- samples: changed with the tensor, and by nothing else ----

shapes = st.lists(st.integers(0, 40), max_size=3)
dtypes = st.sampled_from([torch.uint8, torch.float16, torch.float32, torch.complex128])


@st.composite
def states(draw: st.DrawFn) -> list[torch.Tensor]:
    """Tensors that are rows of larger ones, so that other bytes stand beside theirs."""
    found = []
    for shape in draw(st.lists(shapes, min_size=1, max_size=8)):
        base = torch.zeros(3, *shape, dtype=draw(dtypes))
        found.append(base[1].permute(draw(st.permutations(range(len(shape))))))
    return found


def made(state: Any) -> tuple[ByteSample, MutationDetector]:
    captured = capture(state)
    ranges = [(n, 0, leaf.window, -1) for n, leaf in enumerate(captured.tensors)]
    sample = ByteSample(captured.tensors, ranges)
    return sample, MutationDetector(captured, [], [sample])


@given(states(), st.data())
def test_a_write_to_one_that_has_reached_an_end_is_noticed_and_named(
    state: list[torch.Tensor], data: st.DataObject
) -> None:
    sample, watch = made(state)
    assert watch.changed_in(sample) is None
    number = data.draw(st.integers(0, len(state) - 1))
    size = state[number].numel()
    memory = state[number].as_strided((size,), (1,))
    at = data.draw(st.integers(0, max(size - 1, 0)))
    written = data.draw(st.sampled_from([slice(0, at + 1), slice(at, size)]))
    memory.data[written] = 1
    found = watch.changed_in(sample)
    assert (found and found.label) == (str(number) if size else None)


@given(states(), st.data())
def test_a_write_that_was_undone_is_found_in_the_block(
    state: list[torch.Tensor], data: st.DataObject
) -> None:
    captured, places = (
        capture(state),
        itertools.accumulate((each.numel() * each.itemsize for each in state), initial=0),
    )
    windows = [leaf.window for leaf in captured.tensors]
    rows = zip(range(len(state)), [0] * len(state), windows, places, strict=False)
    sample = ByteSample(captured.tensors, ranges := list(rows))
    watch = MutationDetector(captured, [], [sample])
    number = data.draw(st.integers(0, len(state) - 1))
    block = bytearray(1 + sum(windows))
    address = address_of(memoryview(block))

    def changed_in_block(value: int) -> str | None:
        state[number].data.fill_(value)
        for at, (_, _, size, place) in enumerate(ranges):
            copy_bytes(address + place, captured.tensors[at].address, size)
        state[number].data.fill_(0)
        assert watch.changed_in(sample) is None
        found = watch.changed_in(sample, address)
        return None if found is None else found.label

    assert changed_in_block(0) is None
    assert changed_in_block(1) == (str(number) if windows[number] else None)


@given(states())
def test_writes_beside_them_are_not_noticed(state: list[torch.Tensor]) -> None:
    sample, watch = made(state)
    for tensor in state:
        assert tensor._base is not None
        tensor._base[[0, 2]] = 1
    assert watch.changed_in(sample) is None


def test_memory_between_the_elements_of_a_tensor_has_no_owner() -> None:
    base = torch.zeros(100)
    sample, watch = made([base[::2], base.as_strided((3, 3), (1, 1))])
    base.fill_(1)
    assert watch.changed_in(sample) is None


# ---- captures that trainers may revoke ----


def begun(lock: StateLock) -> LockHold:
    """The hold of a save whose loop's thread is this one."""
    hold = LockHold(lock, -1)
    assert hold.begin()
    return hold


def test_a_trainer_waits_for_the_piece_that_is_being_read(
    lock: StateLock, threads: DaemonThreads
) -> None:
    hold = begun(lock)
    hold.defer(0.001)
    order: list[str] = []
    with hold.reading():
        trainer = threads.submit(noted, lock.mutating(), order, "trainer")
        with suppress(CaptureTooSlow):
            while not threading.Event().wait(0.001):
                with hold.reading():
                    pass
        order.append("read")
    trainer.result(PATIENCE)
    assert order == ["read", "trainer"]


def test_a_capture_is_not_broken_where_another_holds_on(
    lock: StateLock, threads: DaemonThreads
) -> None:
    plain, deferred = begun(lock), begun(lock)
    deferred.defer(0.001)
    trainer = threads.waiting(lock, noted, lock.mutating(), [], "")
    with pytest.raises(StateLockTimeout):
        threads.submit(noted, lock.mutating(timeout=0.05), [], "").result(PATIENCE)
    with deferred.reading():
        pass
    plain.release()
    trainer.result(PATIENCE)
    with pytest.raises(CaptureTooSlow), deferred.reading():
        pass


class DeviceReads(StreamFence):
    """The end of copies on a device that a test controls."""

    def __init__(self) -> None:
        super().__init__("", None)
        self.over = threading.Event()
        self.held_back: list[str] = []

    def passed(self) -> bool:
        return self.over.is_set()

    def hold_back(self) -> None:
        self.held_back.append(threading.current_thread().name)

    def wait(self) -> None:
        assert self.over.wait(PATIENCE)


def test_devices_of_trainers_wait_for_reads_that_are_not_over(
    lock: StateLock, threads: DaemonThreads
) -> None:
    reads = DeviceReads()
    hold = begun(lock)
    hold.release([reads])
    hold.release([reads])
    for _ in range(2):
        threads.submit(noted, lock.mutating(), [], "").result(PATIENCE)
    with lock.capturing():
        pass
    assert reads.held_back == ["trainer_0", "trainer_1"]
    reads.over.set()
    with lock.mutating():
        pass
    assert len(reads.held_back) == 2


# ---- copies that devices have still to do ----


class SlowDevice(SideStreams):
    """Takes every tensor for one of its own; copies happen when the test says so."""

    def __init__(self) -> None:
        super().__init__(())
        self.queued: list[tuple[Callable[[], object], DeviceReads]] = []

    def serves(self, device: str) -> bool:
        return True

    def launch(self, devices: Iterable[str], copy: Callable[[], object]) -> list[StreamFence]:
        assert list(devices)
        self.queued.append((copy, DeviceReads()))
        return [self.queued[-1][1]]

    def work(self) -> None:
        for copy, reads in self.queued:
            copy()
            reads.over.set()

    def forget(self) -> None:
        for _, reads in self.queued:
            reads.over.set()


def pieces_of(state: Any, later: set[int]) -> tuple[Any, list[CopyPiece], list[CopyPiece], Arena]:
    captured = capture(state)
    plan = LocalPlanner().plan(captured, rank=0, world_size=1)
    arena = Arena(BLOCK)
    soon, late = [], []
    for each in plan_blocks(plan, captured.tensors, BLOCK):
        filled = StagedBlock(SAVE, each, arena.take())
        at_once, rest = each.split(later)
        soon.append(CopyPiece(filled, at_once, last=False))
        late.append(CopyPiece(filled, rest))
    return captured, soon, late, arena


async def test_a_step_goes_on_once_all_copies_are_queued_and_its_device_waits(
    lock: StateLock, threads: DaemonThreads
) -> None:
    captured, soon, late, _ = pieces_of({"w": torch.arange(60_000.0), "b": torch.ones(5)}, {0})
    device = SlowDevice()
    out: list[StagedBlock] = []
    turn = begun(lock)
    copiers = BlockCopiers(turn, captured, device, out.extend, threads=4)
    assert copiers.threads == 1
    copiers.defer(MutationDetector(captured, [0]), 60)
    copiers.add(late)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(copiers.finish)
        step = threads.submit(noted, lock.mutating(), [], "")
        await anyio.to_thread.run_sync(step.result, PATIENCE)
        assert out == []
        assert all(reads.held_back == ["trainer_0"] for _, reads in device.queued)
        assert len(device.queued) == len(late)
        device.work()
    assert [filled.plan.offset for filled in out] == [piece.filled.plan.offset for piece in late]
    found = torch.cat([piece.filled.block.tensor[: piece.work.nbytes] for piece in late])
    header = len(found) - 60_000 * 4 - 5 * 4
    assert torch.equal(found[header:][:240_000].view(torch.float32), torch.arange(60_000.0))
    assert len(soon) == len(late)


async def test_a_save_that_fails_waits_for_its_device_before_blocks_are_used_again(
    lock: StateLock, threads: DaemonThreads
) -> None:
    captured, _, late, _ = pieces_of({"w": torch.arange(60_000.0)}, {0})
    device = SlowDevice()
    out: list[StagedBlock] = []
    turn = begun(lock)
    copiers = BlockCopiers(turn, captured, device, out.extend, threads=1)
    copiers.defer(MutationDetector(captured, range(len(captured.tensors))), 60)
    captured.memory[0].add_(1)
    copiers.add(late)
    failed: list[BaseException] = []

    async def copy() -> None:
        try:
            await copiers.copy()
        except Exception as error:
            failed.append(error)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(copy)
        first = device.queued
        with anyio.fail_after(PATIENCE):
            while len(first) < len(late):
                await anyio.lowlevel.checkpoint()
        assert failed == []
        device.work()
    assert len(failed) == 1
    assert out == []


async def test_memory_lives_until_its_device_has_read_it(lock: StateLock) -> None:
    array = np.arange(60_000, dtype=np.float32)
    alive, tensor = weakref.ref(array), torch.from_numpy(array)
    del array
    captured, _, late, _ = pieces_of({"w": tensor}, {0})
    device = SlowDevice()
    turn = begun(lock)
    copiers = BlockCopiers(turn, captured, device, lambda _: None, threads=1)
    copiers.defer(MutationDetector(captured, [0]), 60)
    copiers.add(late)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(copiers.finish)
        with anyio.fail_after(PATIENCE):
            while not is_free(lock):
                await anyio.lowlevel.checkpoint()
        tensor.data = torch.zeros(60_000)  # no version counts this
        has_lived = alive() is not None
        device.work() if has_lived else device.forget()
    assert has_lived
    found = torch.cat([piece.filled.block.tensor[: piece.work.nbytes] for piece in late])
    assert torch.equal(found[-240_000:].view(torch.float32), torch.arange(60_000.0))
    del captured, copiers, device
    assert alive() is None
