"""Chunks that arrive in several reads are verified whole, and reach their tensors like others."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from stored_states import BLOCK_BYTES, ID, load, store

from ckpipe.backend import PutMode
from ckpipe.errors import ChecksumMismatch
from ckpipe.format.checksum import CHUNK_BYTES
from ckpipe.format.names import data_file_key
from ckpipe.loading.read_plan import PartialChunk, Piece
from ckpipe.loading.reader import ChunkAssembler
from ckpipe.memory.native import address_of
from ckpipe.testing import MemoryBackend

KEY = data_file_key(ID, "rank-00000.safetensors")
MIB = 1 << 20


def test_a_chunk_comes_with_its_last_fragment_whatever_their_order() -> None:
    seams = ChunkAssembler()
    data = memoryview(bytes(range(200)))
    piece = Piece(3, 0, 200, 0, 0)
    parts = [
        PartialChunk(piece, 150, 0, 50),
        PartialChunk(piece, 0, 0, 70),
        PartialChunk(piece, 70, 0, 80),
    ]
    at = address_of(data)
    assert seams.add(parts[0], at + 150) is None
    assert seams.add(parts[1], at) is None
    chunk = seams.add(parts[2], at + 70)
    assert chunk is not None
    assert bytes(chunk) == bytes(data)


def test_memory_is_used_again_and_chunks_are_kept_apart() -> None:
    seams = ChunkAssembler()
    found = []
    for number in range(20):
        data = memoryview(bytes([number]) * 1000)
        piece = Piece(number, 0, 1000, 0, 0)
        assert seams.add(PartialChunk(piece, 0, 0, 400), address_of(data)) is None
        chunk = seams.add(PartialChunk(piece, 400, 0, 600), address_of(data) + 400)
        assert chunk is not None
        assert bytes(chunk) == bytes(data)
        found.append(address_of(chunk))
        seams.give_back(chunk)
    assert len(set(found)) == 1


def test_threads_that_bring_both_ends_at_once_make_one_chunk_of_them() -> None:
    seams, meeting = ChunkAssembler(), threading.Barrier(2)
    data = memoryview(bytes(range(256)) * (CHUNK_BYTES // 256))
    half = CHUNK_BYTES // 2

    def bring(number: int, begin: int) -> memoryview | None:
        meeting.wait()
        fragment = PartialChunk(Piece(number, 0, CHUNK_BYTES, 0, 0), begin, 0, half)
        return seams.add(fragment, address_of(data) + begin)

    with ThreadPoolExecutor(2) as threads:
        for number in range(50):
            pair = [threads.submit(bring, number, begin) for begin in (0, half)]
            [chunk] = [each.result() for each in pair if each.result() is not None]
            assert chunk == data
            seams.give_back(chunk)


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
    bundle = await store(state, backend)
    target = {name: torch.zeros_like(value) for name, value in state.items()}
    await load(backend, bundle, target)
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
    bundle = await store(state, backend)
    data = bytearray(await backend.get(KEY, max_bytes=1 << 30))
    data[2 * BLOCK_BYTES + beside] ^= 1
    await backend.put(KEY, bytes(data), PutMode.OVERWRITE)
    target = {name: torch.zeros_like(value) for name, value in state.items()}
    with pytest.raises(ChecksumMismatch, match="Chunk"):
        await load(backend, bundle, target)
    for name, value in target.items():
        assert bool(((value == 0) | (value == state[name])).all())
