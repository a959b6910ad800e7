"""What a load reads, and what it raises if what it needs, or does not need, is gone or damaged."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anyio
import anyio.to_thread
import pytest
import torch
from anyio import create_task_group, fail_after

import ckpipe
from ckpipe.backend import PutMode
from ckpipe.errors import (
    CheckpointIncomplete,
    ShapeMismatch,
    StructureMismatch,
)
from ckpipe.testing import MemoryBackend
from tests.inner.made_up_ranks import load_as, request, store_ranks
from tests.support.pipelines import Stores, stores
from tests.support.stored_files import data_file_key, tombstone_key
from tests.support.stored_states import BLOCK_BYTES, load, opened, store

MIB = 1 << 20


class Remote(MemoryBackend):
    """A store that has nothing in memory, tells what was read, and can be told never to answer."""

    silent: frozenset[str] = frozenset()

    def __init__(self) -> None:
        super().__init__()
        self.fetched: dict[str, int] = {}
        self.reads, self.asked = 0, threading.Event()

    async def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        self.asked.set()
        if key in self.silent:
            await anyio.sleep_forever()
        await super().read_into(key, offset, buffer)
        self.fetched[key] = self.fetched.get(key, 0) + len(buffer)
        self.reads += 1


class Slow:
    """An object that a load looks at for as long as it is told to."""

    def __init__(self, value: Any, until: threading.Event | None = None) -> None:
        self.value, self.until, self.looked = value, until, threading.Event()

    def state_dict(self) -> dict[str, Any]:
        self.looked.set()
        if self.until is not None and not self.until.wait(20):
            raise TimeoutError("nobody has told it to go on")
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


async def in_thread(backend: MemoryBackend, into: Any) -> None:
    """Load on a thread with a loop of its own, which the target may block."""
    await anyio.to_thread.run_sync(lambda: anyio.run(load, backend, into))


@pytest.fixture
def shared() -> Iterator[Stores]:
    with stores() as made:
        yield made


async def test_nothing_is_read_before_the_target_was_found_to_fit() -> None:
    backend, until = Remote(), threading.Event()
    await store({"a": torch.ones(3 * MIB), "x": Slow(1)}, backend)
    target, looked = torch.zeros(3 * MIB), Slow(0, until)
    async with create_task_group() as tasks:
        tasks.start_soon(in_thread, backend, {"a": target, "x": looked})
        assert await anyio.to_thread.run_sync(looked.looked.wait, 20)
        assert backend.reads == 0
        until.set()
    assert target.all()
    assert looked.value == 1


async def test_a_load_that_is_given_up_in_the_middle_keeps_no_buffer() -> None:
    backend, target = Remote(), torch.zeros(3 * MIB)
    backend.silent = frozenset([data_file_key(await store({"a": torch.ones(3 * MIB)}, backend))])
    async with opened(backend) as pipeline:
        with fail_after(30):
            async with create_task_group() as tasks:
                tasks.start_soon(pipeline.load, {"a": target})
                await anyio.to_thread.run_sync(backend.asked.wait, 20)
                tasks.cancel_scope.cancel()
        assert await pipeline.trim() == 2 * BLOCK_BYTES
    assert not target.any()


# What goes wrong


@pytest.mark.parametrize("lost", ["gone", "silent", "damaged"])
async def test_a_target_that_does_not_fit_is_told_before_damage_of_a_file(
    lost: str,
) -> None:
    backend, target = Remote(), {"a": torch.zeros(9), "b": torch.zeros(3)}
    key = data_file_key(await store({"a": torch.ones(10), "b": torch.ones(3)}, backend))
    if lost == "gone":
        await backend.delete([key])
    elif lost == "silent":
        backend.silent = frozenset([key])
    else:
        await spoil(backend, key)
    with fail_after(20):
        for wrong, error in ((target, ShapeMismatch), ({"b": target["b"]}, StructureMismatch)):
            with pytest.raises(error):
                await load(backend, wrong)
    assert not target["a"].any()
    assert not target["b"].any()


async def spoil(backend: MemoryBackend, key: str) -> None:
    """Invert every byte of an object."""
    found = await backend.get(key, max_bytes=1 << 30)
    await backend.delete([key])
    upload = await backend.open_upload(key, size=len(found), block_bytes=len(found))
    await upload.write(0, memoryview(found.translate(bytes(range(255, -1, -1)))))
    await upload.complete()


@pytest.mark.parametrize("lost", ["gone", "silent", "damaged", "whole"])
@pytest.mark.parametrize("kind", [MemoryBackend, Remote])
async def test_what_is_wrong_with_a_file_that_is_not_needed_does_not_matter(
    kind: type[MemoryBackend], lost: str
) -> None:
    backend = kind()
    mine, other = {"a": torch.ones(3 * MIB)}, {"b": torch.full((3 * MIB,), 2.0)}
    document = await store_ranks(backend, [{"m": mine}, {"m": other}])
    unneeded = data_file_key(document.id)
    if lost == "gone":
        await backend.delete([unneeded])
    elif lost == "damaged":
        await spoil(backend, unneeded)
    elif isinstance(backend, Remote) and lost == "silent":
        backend.silent = frozenset([unneeded])
    target = {"m": {"b": torch.zeros(3 * MIB)}}
    with fail_after(20):
        result = await load_as(backend, document, 0, 2, request(target))
    assert bool((target["m"]["b"] == 2).all())
    assert result.report is not None
    needed = 12 * MIB
    if isinstance(backend, Remote):
        assert unneeded not in backend.fetched
        assert result.report.bytes == sum(backend.fetched.values())
    else:
        assert result.report.bytes == needed


def test_a_deletion_is_told_before_any_damage(
    shared: Stores,
) -> None:
    target = {"a": torch.zeros(8)}
    with ckpipe.SyncPipeline(shared.url) as pipeline:
        id = pipeline.save({"a": torch.ones(9)}, step=1).wait().id
        anyio.run(shared.memory.put, tombstone_key(id), b"{}", PutMode.CREATE)
        anyio.run(shared.memory.delete, [data_file_key(id)])
        for into in (target, {"a": torch.zeros(9)}):
            with pytest.raises(CheckpointIncomplete):
                pipeline.load(into, step=id)
            assert not into["a"].any()


def test_a_target_stays_as_it_is_if_its_checkpoint_is_deleted_meanwhile(
    shared: Stores,
) -> None:
    target = {"a": torch.zeros(1000)}
    with ckpipe.SyncPipeline(shared.url) as pipeline:
        id = pipeline.save({"a": torch.ones(1000)}, step=1).wait().id
        shared.slow.hold("put")
        with ThreadPoolExecutor(1) as threads:
            loading = threads.submit(pipeline.load, target, step=1)
            shared.slow.gate.wait_until_held()  # Before the lease is there, it is chosen to go.
            anyio.run(shared.memory.put, tombstone_key(id), b"{}", PutMode.CREATE)
            shared.slow.release()
            with pytest.raises(CheckpointIncomplete):
                loading.result(30)
    assert not target["a"].any()


# What is read


@pytest.mark.parametrize("changes", [{"strict": False}, {"include": ["small"]}])
async def test_a_load_of_some_of_it_reads_nothing_in_vain(changes: dict[str, Any]) -> None:
    backend, target = Remote(), {"small": torch.zeros(3)}
    await store({"big": torch.ones(20 * MIB), "small": torch.ones(3)}, backend)
    result = await load(backend, target, **changes)
    assert result.report is not None
    match, read = result.report.stages["match"], result.report.stages["read"]
    assert match.began + match.seconds <= read.began  # nothing was read, nor waited for, before
    assert target["small"].all()
    assert sum(backend.fetched.values()) < 3 * MIB


async def test_tens_of_thousands_of_tiny_tensors_are_read_as_expected() -> None:
    backend = Remote()
    state = {f"t{n}": torch.full((1 + n % 3,), float(n)) for n in range(10_000)}
    await store(state, backend)
    target = {name: torch.zeros_like(each) for name, each in state.items()}
    result = await load(backend, target)
    assert all(torch.equal(target[name], each) for name, each in state.items())
    assert result.report is not None
    assert result.report.reads == backend.reads == 1
