"""Chunks that arrive in several reads are verified whole, and reach their tensors like others."""

from __future__ import annotations

import pytest
import torch
from stored_files import data_file_key
from stored_states import BLOCK_BYTES, load, store

from ckpipe.backend import PutMode
from ckpipe.errors import ChecksumMismatch
from ckpipe.testing import MemoryBackend

MIB = 1 << 20


class Ranges(MemoryBackend):
    """A store that has nothing in memory, and notes which ranges it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.ranges: list[tuple[int, int]] = []

    async def cached(self, key: str, offset: int, size: int) -> None:
        return None

    async def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        self.ranges.append((offset, offset + len(buffer)))
        await super().read_into(key, offset, buffer)


def odd_state() -> dict[str, torch.Tensor]:
    """Tensors of odd sizes, whose chunks lie across the edges of parts."""
    generator = torch.Generator().manual_seed(3)
    return {
        f"t{count}": torch.randint(0, 1 << 30, (count,), dtype=torch.int32, generator=generator)
        for count in (MIB // 2 + 1, 100, MIB + 3, 9 * MIB // 10)
    }


@pytest.mark.parametrize("kind", [Ranges, MemoryBackend])
async def test_what_lies_across_edges_is_loaded(kind: type[MemoryBackend]) -> None:
    backend, state = kind(), odd_state()
    await store(state, backend)
    target = {name: torch.zeros_like(value) for name, value in state.items()}
    await load(backend, target)
    for name, value in state.items():
        assert torch.equal(target[name], value)
    if isinstance(backend, Ranges):
        edges = range(BLOCK_BYTES, max(end for _, end in backend.ranges), BLOCK_BYTES)
        assert len(edges) > 3
        for begin, end in backend.ranges:
            assert not any(begin < edge < end for edge in edges)


@pytest.mark.parametrize("beside", [-1, 0])
async def test_a_flipped_bit_on_either_side_of_an_edge_is_found(beside: int) -> None:
    backend, state = Ranges(), odd_state()
    key = data_file_key(await store(state, backend))
    data = bytearray(await backend.get(key, max_bytes=1 << 30))
    data[2 * BLOCK_BYTES + beside] ^= 1
    await backend.put(key, bytes(data), PutMode.OVERWRITE)
    target = {name: torch.zeros_like(value) for name, value in state.items()}
    with pytest.raises(ChecksumMismatch, match="Chunk"):
        await load(backend, target)
    for name, value in target.items():
        assert bool(((value == 0) | (value == state[name])).all())
