"""Damaged checkpoints: every flipped bit is found, and nothing unverified reaches the target."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ckpipe
from ckpipe.backend import ObjectReader, PutMode
from ckpipe.errors import (
    ChecksumMismatch,
    CorruptCheckpoint,
    MissingObject,
    PermissionDenied,
    StoreError,
    StoreUnavailable,
    TruncatedObject,
    UsageError,
)
from ckpipe.testing import MemoryBackend
from tests.support.stored_files import data_file_key, document_of, entries_of, index_key, sealed
from tests.support.stored_states import load, opened, store, verified

MIB = 1 << 20


class BufferedBackend(MemoryBackend):
    """A store that only the event loop can read, as remote ones are."""

    def open_object(self, key: str) -> ObjectReader | None:
        return None


@dataclass(frozen=True)
class Opened:
    """An object that a thread reads by a function of its store.

    Args:
        key: Its key.
        read: Reads a range; it is told whether that is in memory.
        cold: The bytes that are not in memory.
    """

    key: str
    read: Callable[[str, int, memoryview, bool], None]
    cold: range
    size = 1 << 60

    def is_cached(self, offset: int, size: int) -> bool:
        return offset >= self.cold.stop or self.cold.start >= offset + size

    def read_into(self, offset: int, buffer: memoryview, *, cached: bool) -> None:
        assert threading.current_thread() is not threading.main_thread()
        self.read(self.key, offset, buffer, cached)


class PartlyCached(MemoryBackend):
    """A store that has all but a few bytes of each object in memory."""

    cold, fetched = range(5 * MIB + 3, 5 * MIB + 9), 0

    def open_object(self, key: str) -> ObjectReader | None:
        return Opened(key, self.read_here, self.cold)

    def read_here(self, key: str, offset: int, buffer: memoryview, cached: bool) -> None:
        if not cached:
            self.fetched += len(buffer)
        anyio.run(self.read_into, key, offset, buffer)


class ReadInThreads(MemoryBackend):
    """A store that threads read themselves, for as often as it can; then it is asked on the loop.

    Args:
        reads: How often.
    """

    def __init__(self, reads: int = 1 << 30) -> None:
        super().__init__()
        self.left, self.here, self.asked = reads, 0, 0

    def open_object(self, key: str) -> ObjectReader | None:
        return Opened(key, self.read_here, range(1 << 40))

    def read_here(self, key: str, offset: int, buffer: memoryview, cached: bool) -> None:
        if self.left == 0:
            raise StoreUnavailable("The disk does not answer", key=key)
        self.left -= 1
        self.here += 1
        anyio.run(MemoryBackend.read_into, self, key, offset, buffer)

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


async def saved_file(backend: MemoryBackend, state: Any) -> tuple[str, bytes]:
    """Save a state; return the key of its data file, and the file."""
    key = data_file_key(await store(state, backend))
    return key, await backend.get(key, max_bytes=1 << 40)


async def damage(backend: MemoryBackend, key: str, at: int) -> None:
    data = bytearray(await backend.get(key, max_bytes=1 << 40))
    data[at] ^= 1 << (at % 8)
    await backend.put(key, bytes(data), PutMode.OVERWRITE)


async def test_what_is_not_in_memory_is_read_and_the_rest_is_not() -> None:
    backend, target = PartlyCached(), blank()
    await store(state(), backend)
    await load(backend, target)
    for ours, theirs in zip(leaves(target), leaves(state()), strict=True):
        assert torch.equal(torch.as_tensor(ours), torch.as_tensor(theirs))
    assert len(backend.cold) <= backend.fetched <= 2 * MIB


@pytest.mark.parametrize("reads", [0, 2, 1 << 30])
async def test_a_store_that_threads_can_read_is_asked_on_the_loop_for_the_rest(reads: int) -> None:
    backend, target = ReadInThreads(reads), blank()
    await store(state(), backend)
    result = await load(backend, target)
    for ours, theirs in zip(leaves(target), leaves(state()), strict=True):
        assert torch.equal(torch.as_tensor(ours), torch.as_tensor(theirs))
    assert result.report is not None
    assert result.report.reads == backend.here + backend.asked > 2
    assert backend.here == min(reads, result.report.reads)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(where=st.floats(0, 1, exclude_max=True), kind=st.sampled_from(BACKENDS))
def test_a_flipped_bit_anywhere_is_found(where: float, kind: type[MemoryBackend]) -> None:
    async def main() -> None:
        backend, target = kind(), blank()
        key, data = await saved_file(backend, state())
        at = int(where * len(data))
        await damage(backend, key, at)
        with pytest.raises(ChecksumMismatch):
            await verified(backend)
        if at >= entries_of(data)[0]:
            with pytest.raises(ChecksumMismatch) as caught:
                await load(backend, target)
            assert caught.value.target_touched is not is_blank(target)
            assert partly_loaded(target)
            assert target["n"] == 0

    anyio.run(main)


@pytest.mark.parametrize("kind", BACKENDS)
async def test_an_error_names_what_is_damaged(kind: type[MemoryBackend]) -> None:
    backend, target = kind(), blank()
    key, data = await saved_file(backend, state())
    await damage(backend, key, entries_of(data)[1]["big"] + 2 * MIB + 5)
    with pytest.raises(ChecksumMismatch) as caught:
        await load(backend, target)
    error = caught.value
    assert (error.step, error.rank, error.key) == (7, 0, key)
    assert "Chunk 2 of 'big'" in str(error)
    assert torch.count_nonzero(target["big"].view(-1)[2 * MIB // 4 : 3 * MIB // 4]) == 0


async def test_small_chunks_before_one_that_is_damaged_are_delivered() -> None:
    backend = BufferedBackend()
    saved = [torch.full((2, 3), n + 1.0) for n in range(60)]
    key, data = await saved_file(backend, saved)
    begins = entries_of(data)[1]
    names = sorted(begins, key=lambda name: begins[name])
    await damage(backend, key, begins[names[40]] + 7)
    # Only every third takes bytes as they are.
    target = [torch.zeros(3, 2).t() if n % 3 else torch.zeros(2, 3) for n in range(60)]
    with pytest.raises(ChecksumMismatch, match=f"Chunk 0 of '{names[40]}'") as caught:
        await load(backend, target)
    assert caught.value.target_touched
    whole = set(names[:40])
    for n, (found, expected) in enumerate(zip(target, saved, strict=True)):
        assert torch.equal(found, expected if str(n) in whole else torch.zeros(2, 3))


async def test_a_first_chunk_that_is_damaged_leaves_the_target_untouched() -> None:
    backend = BufferedBackend()
    saved = {"x": torch.ones(10)}
    key, data = await saved_file(backend, saved)
    await damage(backend, key, entries_of(data)[0])
    target = {"x": torch.zeros(10)}
    with pytest.raises(ChecksumMismatch) as caught:
        await load(backend, target)
    assert not caught.value.target_touched
    assert is_blank(target)


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("left", [0, 5000, -1])
async def test_a_truncated_file_is_found(kind: type[MemoryBackend], left: int) -> None:
    backend = kind()
    key, data = await saved_file(backend, state())
    await backend.put(key, data[:left], PutMode.OVERWRITE)
    for reading in (
        load(backend, blank()),
        load(backend),
        verified(backend),
    ):
        with pytest.raises(TruncatedObject) as caught:
            await reading
        assert (caught.value.step, caught.value.rank, caught.value.key) == (7, 0, key)


def test_a_truncated_local_file_touches_nothing(tmp_path: Path) -> None:
    with ckpipe.SyncPipeline(tmp_path) as pipeline:
        pipeline.save({name: torch.ones(9 * MIB // 4) for name in "abc"}, step=1).wait()
    (file,) = tmp_path.rglob("*.safetensors")
    os.truncate(file, file.stat().st_size - 5)
    target = {name: torch.zeros(9 * MIB // 4) for name in "abc"}
    with ckpipe.SyncPipeline(tmp_path) as pipeline, pytest.raises(TruncatedObject) as caught:
        pipeline.load(target)
    assert not caught.value.target_touched
    assert not any(tensor.any() for tensor in target.values())


async def test_a_file_that_grew_does_not_verify() -> None:
    backend = MemoryBackend()
    key, data = await saved_file(backend, state())
    await backend.put(key, data + b"\0", PutMode.OVERWRITE)
    with pytest.raises(ChecksumMismatch, match="were saved"):
        await verified(backend)


@pytest.mark.parametrize("kind", BACKENDS)
async def test_a_missing_file_is_found(kind: type[MemoryBackend]) -> None:
    backend, target = kind(), blank()
    key, _ = await saved_file(backend, state())
    await backend.delete([key])
    for reading in (load(backend, target), verified(backend)):
        with pytest.raises(MissingObject) as caught:
            await reading
        assert (caught.value.step, caught.value.key) == (7, key)
        assert not caught.value.target_touched
    assert is_blank(target)


class FailingBackend(BufferedBackend):
    """Serves a number of reads, then no more."""

    def __init__(self, reads: int, error: Exception) -> None:
        super().__init__()
        self.left, self.error = reads, error

    async def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        if self.left == 0:
            raise self.error
        self.left -= 1
        await super().read_into(key, offset, buffer)


@pytest.mark.parametrize("kind", [StoreUnavailable, StoreError, PermissionDenied])
async def test_a_store_that_fails_at_any_read_fails_the_load_with_its_own_error(
    kind: type[StoreError],
) -> None:
    for reads in range(100):
        backend = FailingBackend(reads, kind("The store is gone"))
        await store(state(), backend)
        target = blank()
        try:
            await load(backend, target, settings={"upload": {"retries": 0}})
        except kind as error:
            found = error
        else:
            assert reads >= 3
            return
        assert (found.step, found.rank) == (7, 0)
        assert found.target_touched is not is_blank(target)
        assert partly_loaded(target)
    raise AssertionError("the load never got through")


async def test_an_error_of_another_kind_has_a_note_on_a_target_that_is_partly_filled() -> None:
    noted = []
    for reads in (0, 2):
        backend, target = FailingBackend(reads, BufferError("broken")), blank()
        await store(state(), backend)
        with pytest.raises(BufferError, match="broken") as caught:
            await load(backend, target)
        noted.append("partly filled" in str(getattr(caught.value, "__notes__", "")))
        assert noted[-1] is not is_blank(target)
    assert noted == [False, True]


class Refusing:
    """An object that refuses its state by an error of ckpipe."""

    def state_dict(self) -> dict[str, Any]:
        return {"n": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise UsageError("not this one")


async def test_an_object_that_refuses_its_state_leaves_a_target_that_is_touched() -> None:
    backend, target = MemoryBackend(), {"x": torch.zeros(3), "object": Refusing()}
    await store({"x": torch.ones(3), "object": Refusing()}, backend)
    with pytest.raises(UsageError, match="not this one") as caught:
        await load(backend, target)
    assert caught.value.target_touched


async def test_boxes_that_fail_say_whether_a_tensor_is_touched() -> None:
    for reads in (0, 2):
        backend, box = FailingBackend(reads, StoreError("gone")), torch.zeros(3 * MIB // 4 + 77, 2)
        await store(state(), backend)
        async with opened(backend) as pipeline:
            with pytest.raises(StoreError, match="gone") as caught:
                await pipeline.read_boxes(7, [("big", (0, 0), box)])
        assert caught.value.target_touched is bool(box.any()) is (reads > 0)


class Unsteady(ReadInThreads):
    """Fails a number of reads of threads in a way that may pass, or may not.

    Args:
        failures: How many.
        error: How.
    """

    def __init__(self, failures: int, error: type[StoreError]) -> None:
        super().__init__()
        self.failures, self.error = failures, error

    def read_here(self, key: str, offset: int, buffer: memoryview, cached: bool) -> None:
        if self.failures:
            self.failures -= 1
            raise self.error("The disk has a bad day", key=key)
        super().read_here(key, offset, buffer, cached)


async def test_a_thread_that_fails_to_read_has_it_tried_again_where_that_may_help() -> None:
    once: dict[str, Any] = {"settings": {"upload": {"retries": 1, "backoff_seconds": 0.001}}}
    backend, target = Unsteady(2, StoreUnavailable), blank()
    await store(state(), backend)
    await load(backend, target, **once)
    assert backend.asked == 2
    assert torch.equal(target["big"], state()["big"])
    backend = Unsteady(1, StoreError)
    key, _ = await saved_file(backend, state())
    with pytest.raises(StoreError, match="bad day") as caught:
        await load(backend, blank(), **once)
    assert (caught.value.step, caught.value.rank, caught.value.key) == (7, 0, key)


async def with_chunks(saved: torch.Tensor, *chunks: dict[str, Any]) -> MemoryBackend:
    """A store on which one tensor is saved, whose index has other chunks than were written."""
    backend = MemoryBackend()
    key = index_key(await store({"x": saved}, backend))
    document = document_of(await backend.get(key, max_bytes=1 << 20))
    plain = {"tensor": 0, "entry": 0, "offset": 0, "stride": None, "original_stride": None,
             "box": None, "owner": None}  # fmt: skip
    rows = [plain | each for each in chunks]
    document["layouts"][0]["chunks"] = {name: [row[name] for row in rows] for name in plain}
    await backend.put(key, sealed(document), PutMode.OVERWRITE)
    return backend


@pytest.mark.parametrize(
    "chunks",
    [
        (),
        ({"box": [[0, 0], [2, 3]]},),
        ({"box": [[0, 0], [3, 3]]}, {"offset": 36, "box": [[2, 0], [4, 3]]}),
        ({"box": [[0, 0], [5, 3]]},),
        ({"offset": 4},),
        ({"entry": 1},),
        ({"offset": -4},),
        ({"stride": [4, 1]},),
        ({"stride": [3]},),
        ({"original_stride": [0, 1]},),
        ({"original_stride": [1 << 50, 1]},),
        ({"owner": 1},),
    ],
)
@pytest.mark.parametrize("fresh", [True, False])
async def test_elements_without_bytes_are_found_before_the_first_write(
    chunks: tuple[dict[str, Any], ...], fresh: bool
) -> None:
    backend = await with_chunks(torch.ones(4, 3), *chunks)
    target = {"x": torch.zeros(4, 3)}
    if not fresh and chunks and chunks[0].get("original_stride") == [1 << 50, 1]:
        return  # strides of a fresh tensor do not matter to a live one
    with pytest.raises(CorruptCheckpoint):
        await load(backend, None if fresh else target)
    assert is_blank(target)
