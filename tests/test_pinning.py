"""What becomes of staging memory that CUDA registers, or will not; no device is needed."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import settle

import ckpipe
from ckpipe.memory import arena as arena_module
from ckpipe.memory import cuda
from ckpipe.memory.arena import Arena

BLOCK = 64 << 10


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
    with ckpipe.SyncPipeline(tmp_path, **settings) as pipeline:
        for step in range(3):
            pipeline.save({"w": torch.full((BLOCK,), float(step))}, step=step).wait()
            settle(pipeline)
        segments = pipeline._engine.site.arena._segments
        assert segments
        assert all(each.descriptor is not None for each in segments), "the worker has no other"
        ranges = [(each.tensor.data_ptr(), each.tensor.numel()) for each in segments]
        assert registrar.registered == ranges
        assert registrar.asked == len(ranges)
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
