"""Captures that trainers may press, and copies that devices have still to do."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest
import torch
from lock_actors import PATIENCE, DaemonThreads, is_free, noted, until

from ckpipe.errors import CaptureTooSlow, StateLockTimeout
from ckpipe.format.keys import LabelFilter
from ckpipe.lock.late_copies import MutationDetector
from ckpipe.lock.state_lock import LockHold, StateLock
from ckpipe.memory.arena import Arena
from ckpipe.memory.cuda import SideStreams, StreamFence
from ckpipe.plan.plan import LocalPlanner
from ckpipe.save.program import plan_blocks
from ckpipe.save.save import Save, SaveRequest, StagedBlock
from ckpipe.save.stage import BlockCopiers, CopyPiece
from ckpipe.state.flatten import capture
from ckpipe.types import CheckpointId

BLOCK = 1 << 16
SAVE = Save(
    CheckpointId("20261121T034205123Z-9f3a2c01", 1, 0),
    0,
    SaveRequest(None, LabelFilter(), {}, {}, final=False, thread=-1),
)


# ---- the lock ----


def test_a_trainer_waits_for_the_piece_that_is_being_read(
    lock: StateLock, threads: DaemonThreads
) -> None:
    capture = lock.acquire_capture(thread=-1)
    hold = LockHold(lock, -1, capture)
    hold.defer(0.001)
    order: list[str] = []
    with hold.reading():
        trainer = threads.submit(noted, lock.mutating(), order, "trainer")
        pressed = threading.Event()
        while not pressed.wait(0.001):
            if capture.revoked:
                pressed.set()
        order.append("read")
    trainer.result(PATIENCE)
    assert order == ["read", "trainer"]


def test_a_capture_is_not_broken_where_another_holds_on(
    lock: StateLock, threads: DaemonThreads
) -> None:
    plain, deferred = (LockHold(lock, -1, lock.acquire_capture(thread=-1)) for _ in range(2))
    deferred.defer(0.001)
    trainer = threads.submit(noted, lock.mutating(), [], "")
    until(lock, waiters=1)
    with pytest.raises(StateLockTimeout), lock.mutating(timeout=0.05):
        pass
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
    token = lock.acquire_capture(thread=-1)
    lock.release_capture(token, fences=[reads])
    lock.release_capture(token, fences=[reads])
    for _ in range(2):
        threads.submit(noted, lock.mutating(), [], "").result(PATIENCE)
    with lock.capturing():
        pass
    assert reads.held_back == ["trainer_0", "trainer_1"]
    reads.over.set()
    with lock.mutating():
        pass
    assert len(reads.held_back) == 2


# ---- copies from a device that is not there ----


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
    turn = LockHold(lock, -1, lock.acquire_capture(thread=-1))
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
    turn = LockHold(lock, -1, lock.acquire_capture(thread=-1))
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
    turn = LockHold(lock, -1, lock.acquire_capture(thread=-1))
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
