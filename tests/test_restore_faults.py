"""Damaged checkpoints: every flipped bit is found, and nothing unverified reaches the target."""

from __future__ import annotations

import threading
from typing import Any

import anyio
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stored_states import ID, load, store, verified

from ckpipe.backend import CachedRange, PutMode
from ckpipe.errors import (
    ChecksumMismatch,
    CorruptCheckpoint,
    InvalidManifest,
    MissingObject,
    StoreError,
    StoreUnavailable,
    TruncatedObject,
)
from ckpipe.format.manifest import Chunk, Layout, ManifestDocument
from ckpipe.format.names import data_file_key
from ckpipe.loading import reader as reading_module
from ckpipe.store.retry import RetryingBackend, RetryPolicy
from ckpipe.testing import MemoryBackend

KEY = data_file_key(ID, "rank-00000.safetensors")
MIB = 1 << 20


class BufferedBackend(MemoryBackend):
    """A store that has nothing in memory, as remote ones have not."""

    async def cached(self, key: str, offset: int, size: int) -> CachedRange | None:
        return None


class PartlyCached(BufferedBackend):
    """A store that has all but a few bytes of each object in memory."""

    cold, fetched = range(5 * MIB + 3, 5 * MIB + 9), 0

    async def cached(self, key: str, offset: int, size: int) -> CachedRange | None:
        wanted = range(offset, offset + size)
        if wanted.start < self.cold.stop and self.cold.start < wanted.stop:
            return None
        return await MemoryBackend.cached(self, key, offset, size)

    async def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        self.fetched += len(buffer)
        await super().read_into(key, offset, buffer)


class ReadInThreads(BufferedBackend):
    """A store that threads read themselves, for as often as it can; then it is asked on the loop.

    Args:
        reads: How often.
    """

    def __init__(self, reads: int = 1 << 30) -> None:
        super().__init__()
        self.left, self.here, self.asked = reads, 0, 0

    def read_here(self, key: str, offset: int, buffer: memoryview) -> bool:
        if self.left == 0:
            return False
        self.left -= 1
        self.here += 1
        assert threading.current_thread() is not threading.main_thread()
        anyio.run(MemoryBackend.read_into, self, key, offset, buffer)
        return True

    async def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        self.asked += 1
        await super().read_into(key, offset, buffer)


BACKENDS = [MemoryBackend, BufferedBackend, PartlyCached, ReadInThreads]


def state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    shared = torch.randn(100, generator=generator)
    return {
        "big": torch.randn(3 * MIB // 4 + 77, 2, generator=generator),
        "small": [torch.randn(3, generator=generator) for _ in range(20)],
        "shared": [shared[:60], shared[40:]],
        "strided": torch.randn(6, 4, generator=generator).t(),
        "n": 1,
    }


def blank() -> dict[str, Any]:
    return {
        "big": torch.zeros(3 * MIB // 4 + 77, 2),
        "small": [torch.zeros(3) for _ in range(20)],
        "shared": [torch.zeros(60), torch.zeros(60)],
        "strided": torch.zeros(4, 6),
        "n": 0,
    }


def leaves(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        tree = list(tree.values())
    return [leaf for part in tree for leaf in leaves(part)] if isinstance(tree, list) else [tree]


def is_blank(tree: Any) -> bool:
    return not any(torch.as_tensor(leaf).any() for leaf in leaves(tree))


def partly_loaded(tree: Any) -> bool:
    """Whether every element is either untouched or what was saved."""
    pairs = zip(leaves(tree), leaves(state()), strict=True)
    return all(
        bool(((torch.as_tensor(a) == 0) | (torch.as_tensor(a) == torch.as_tensor(b))).all())
        for a, b in pairs
    )


async def damage(backend: MemoryBackend, at: int) -> None:
    data = bytearray(await backend.get(KEY, max_bytes=1 << 40))
    data[at] ^= 1 << (at % 8)
    await backend.put(KEY, bytes(data), PutMode.OVERWRITE)


@pytest.mark.parametrize("kind", BACKENDS)
async def test_a_whole_checkpoint_loads_and_verifies(kind: type[MemoryBackend]) -> None:
    backend, target = kind(), blank()
    bundle = await store(state(), backend)
    await load(backend, bundle, target)
    for ours, theirs in zip(leaves(target), leaves(state()), strict=True):
        assert torch.equal(torch.as_tensor(ours), torch.as_tensor(theirs))
    result = await verified(backend, bundle)
    (file,) = bundle.parts[0].files
    assert (result.files, result.bytes) == (1, file.size)


async def test_what_is_not_in_memory_is_read_and_the_rest_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reading_module, "_CACHED_BYTES", 2 * MIB)
    backend, target = PartlyCached(), blank()
    bundle = await store(state(), backend)
    await load(backend, bundle, target)
    for ours, theirs in zip(leaves(target), leaves(state()), strict=True):
        assert torch.equal(torch.as_tensor(ours), torch.as_tensor(theirs))
    assert len(backend.cold) <= backend.fetched <= 2 * MIB


@pytest.mark.parametrize("reads", [0, 2, 1 << 30])
async def test_a_store_that_threads_can_read_is_asked_on_the_loop_for_the_rest(reads: int) -> None:
    backend, target = ReadInThreads(reads), blank()
    bundle = await store(state(), backend)
    result = await load(backend, bundle, target)
    for ours, theirs in zip(leaves(target), leaves(state()), strict=True):
        assert torch.equal(torch.as_tensor(ours), torch.as_tensor(theirs))
    assert result.report is not None
    assert result.report.reads == backend.here + backend.asked > 2
    assert backend.here == min(reads, result.report.reads)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(where=st.floats(0, 1, exclude_max=True), kind=st.sampled_from(BACKENDS))
def test_a_flipped_bit_anywhere_is_found(where: float, kind: type[MemoryBackend]) -> None:
    async def main() -> None:
        backend, target = kind(), blank()
        bundle = await store(state(), backend)
        (file,) = bundle.parts[0].files
        at = int(where * file.size)
        await damage(backend, at)
        with pytest.raises(ChecksumMismatch):
            await verified(backend, bundle)
        if at >= file.header_bytes:
            with pytest.raises(ChecksumMismatch) as caught:
                await load(backend, bundle, target)
            assert caught.value.target_touched is not is_blank(target)
            assert partly_loaded(target)
            assert target["n"] == 0

    anyio.run(main)


@pytest.mark.parametrize("kind", BACKENDS)
async def test_an_error_names_what_is_damaged(kind: type[MemoryBackend]) -> None:
    backend, target = kind(), blank()
    bundle = await store(state(), backend)
    data = bundle.layouts[0]
    number = next(n for n, row in enumerate(data.entries) if row.name == "big")
    begin = bundle.parts[0].files[0].header_bytes + data.entries[number].offset
    await damage(backend, begin + 2 * MIB + 5)
    with pytest.raises(ChecksumMismatch) as caught:
        await load(backend, bundle, target)
    error = caught.value
    assert (error.step, error.rank, error.key) == (7, 0, KEY)
    assert "Chunk 2 of 'big'" in str(error)
    assert torch.count_nonzero(target["big"].view(-1)[2 * MIB // 4 : 3 * MIB // 4]) == 0


async def test_small_chunks_before_one_that_is_damaged_are_delivered() -> None:
    backend = BufferedBackend()
    saved = [torch.full((2, 3), n + 1.0) for n in range(60)]
    bundle = await store(saved, backend)
    entries = sorted(bundle.layouts[0].entries, key=lambda row: row.offset)
    begin = bundle.parts[0].files[0].header_bytes
    await damage(backend, begin + entries[40].offset + 7)
    # Only every third takes bytes as they are.
    target = [torch.zeros(3, 2).t() if n % 3 else torch.zeros(2, 3) for n in range(60)]
    with pytest.raises(ChecksumMismatch, match=f"Chunk 0 of '{entries[40].name}'") as caught:
        await load(backend, bundle, target)
    assert caught.value.target_touched
    whole = {row.name for row in entries[:40]}
    for n, (found, expected) in enumerate(zip(target, saved, strict=True)):
        assert torch.equal(found, expected if str(n) in whole else torch.zeros(2, 3))


async def test_a_first_chunk_that_is_damaged_leaves_the_target_untouched() -> None:
    backend = BufferedBackend()
    saved = {"x": torch.ones(10)}
    bundle = await store(saved, backend)
    await damage(backend, bundle.parts[0].files[0].header_bytes)
    target = {"x": torch.zeros(10)}
    with pytest.raises(ChecksumMismatch) as caught:
        await load(backend, bundle, target)
    assert not caught.value.target_touched
    assert is_blank(target)


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("left", [0, 5000, -1])
async def test_a_truncated_file_is_found(kind: type[MemoryBackend], left: int) -> None:
    backend = kind()
    bundle = await store(state(), backend)
    data = await backend.get(KEY, max_bytes=1 << 40)
    await backend.put(KEY, data[:left], PutMode.OVERWRITE)
    for reading in (
        load(backend, bundle, blank()),
        load(backend, bundle),
        verified(backend, bundle),
    ):
        with pytest.raises(TruncatedObject) as caught:
            await reading
        assert (caught.value.step, caught.value.rank, caught.value.key) == (7, 0, KEY)


async def test_a_file_that_grew_does_not_verify() -> None:
    backend = MemoryBackend()
    bundle = await store(state(), backend)
    data = await backend.get(KEY, max_bytes=1 << 40)
    await backend.put(KEY, data + b"\0", PutMode.OVERWRITE)
    with pytest.raises(ChecksumMismatch, match="were saved"):
        await verified(backend, bundle)


@pytest.mark.parametrize("kind", BACKENDS)
async def test_a_missing_file_is_found(kind: type[MemoryBackend]) -> None:
    backend, target = kind(), blank()
    bundle = await store(state(), backend)
    await backend.delete([KEY])
    for reading in (load(backend, bundle, target), verified(backend, bundle)):
        with pytest.raises(MissingObject) as caught:
            await reading
        assert (caught.value.step, caught.value.key) == (7, KEY)
        assert not caught.value.target_touched
    assert is_blank(target)


class FailingBackend(BufferedBackend):
    """Serves a number of reads, then no more."""

    def __init__(self, reads: int) -> None:
        super().__init__()
        self.left = reads

    async def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        if self.left == 0:
            raise StoreUnavailable("The store is gone", key=key)
        self.left -= 1
        await super().read_into(key, offset, buffer)


async def test_a_store_that_fails_at_any_read_fails_the_load_with_its_own_error() -> None:
    for reads in range(100):
        backend = FailingBackend(reads)
        bundle = await store(state(), backend)
        target = blank()
        try:
            await load(backend, bundle, target)
        except StoreUnavailable as error:
            found = error
        else:
            assert reads >= 3
            return
        assert (found.step, found.rank) == (7, 0)
        assert partly_loaded(target)
    raise AssertionError("the load never got through")


class Unsteady(ReadInThreads):
    """Fails a number of reads of threads in a way that may pass, or may not.

    Args:
        failures: How many.
        error: How.
    """

    def __init__(self, failures: int, error: type[StoreError]) -> None:
        super().__init__()
        self.failures, self.error = failures, error

    def read_here(self, key: str, offset: int, buffer: memoryview) -> bool:
        if self.failures:
            self.failures -= 1
            raise self.error("The disk has a bad day", key=key)
        return super().read_here(key, offset, buffer)


async def test_a_thread_that_fails_to_read_has_it_tried_again_where_that_may_help() -> None:
    policy = RetryPolicy(1, 0.001, 0.001, 60)
    backend, target = Unsteady(2, StoreUnavailable), blank()
    bundle = await store(state(), backend)
    await load(RetryingBackend(backend, policy), bundle, target)
    assert backend.asked == 2
    assert torch.equal(target["big"], state()["big"])
    backend = Unsteady(1, StoreError)
    bundle = await store(state(), backend)
    with pytest.raises(StoreError, match="bad day") as caught:
        await load(RetryingBackend(backend, policy), bundle, blank())
    assert (caught.value.step, caught.value.rank, caught.value.key) == (7, 0, KEY)


def with_chunks(bundle: ManifestDocument, chunks: tuple[Chunk, ...]) -> ManifestDocument:
    (layout,) = bundle.layouts
    changed = Layout(layout.entries, chunks)
    return ManifestDocument(bundle.kind, bundle.id, 1, bundle.structures, (changed,), bundle.parts)


@pytest.mark.parametrize(
    "chunks",
    [
        (),
        (Chunk(0, 0, box=((0, 0), (2, 3))),),
        (Chunk(0, 0, box=((0, 0), (3, 3))), Chunk(0, 0, 36, box=((2, 0), (4, 3)))),
        (Chunk(0, 0, box=((0, 0), (5, 3))),),
        (Chunk(0, 0, offset=4),),
        (Chunk(0, 1),),
        (Chunk(0, 0, offset=-4),),
        (Chunk(0, 0, stride=(4, 1)),),
        (Chunk(0, 0, stride=(3,)),),
        (Chunk(0, 0, original_stride=(0, 1)),),
        (Chunk(0, 0, original_stride=(1 << 50, 1)),),
        (Chunk(0, 0, owner=1),),
    ],
)
@pytest.mark.parametrize("fresh", [True, False])
async def test_elements_without_bytes_are_found_before_the_first_write(
    chunks: tuple[Chunk, ...], fresh: bool
) -> None:
    backend = MemoryBackend()
    bundle = await store({"x": torch.ones(4, 3)}, backend)
    target = {"x": torch.zeros(4, 3)}
    if not fresh and chunks and chunks[0].original_stride == (1 << 50, 1):
        return  # strides of a fresh tensor do not matter to a live one
    with pytest.raises(InvalidManifest) as caught:
        await load(backend, with_chunks(bundle, chunks), None if fresh else target)
    assert caught.value.key == "x"
    assert is_blank(target)


async def test_a_tensor_in_several_boxes_is_put_together() -> None:
    backend = MemoryBackend()
    saved = torch.arange(12.0).reshape(4, 3)
    bundle = await store({"x": saved}, backend)
    chunks = (Chunk(0, 0, box=((0, 0), (1, 3))), Chunk(0, 0, 12, box=((1, 0), (4, 3))))
    target = {"x": torch.zeros(3, 4).t()}
    await load(backend, with_chunks(bundle, chunks), target)
    assert torch.equal(target["x"], saved)
    assert torch.equal((await load(backend, with_chunks(bundle, chunks))).state["x"], saved)


async def test_corruption_is_one_family() -> None:
    assert issubclass(ChecksumMismatch, CorruptCheckpoint)
    assert issubclass(InvalidManifest, CorruptCheckpoint)
