"""Measure one size of a simulated world; every measure runs in its own process.

Times are seconds of CPU: nothing here waits, and other programs do not count.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import os
import resource
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import default_planner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from worlds import ID, World, near

import ckpipe
from ckpipe.backend import PutMode
from ckpipe.catalog.complete import publish_up
from ckpipe.catalog.manifest_selection import read_near
from ckpipe.format.codec import decode_document, encode_document
from ckpipe.format.labels import LabelFilter
from ckpipe.format.manifest import ManifestDocument
from ckpipe.format.merge import merge
from ckpipe.format.names import GROUP_SIZE, index_key, manifest_key
from ckpipe.interpreter import gc_paused
from ckpipe.loading.load import match_all
from ckpipe.loading.request import LoadRequest
from ckpipe.loading.stateful import InspectionMemo
from ckpipe.planning import LocalPlanner, fingerprint
from ckpipe.reading.read_plan import plan_reads
from ckpipe.state.capture_cache import capture_cache_of
from ckpipe.state.flatten import Flattened, OpenedState, flatten
from ckpipe.store.registry import register_backend
from ckpipe.testing import MemoryBackend
from ckpipe.testing.wrappers import Operation, Result, WrappedBackend

TENSORS, SHARDS, ROUNDS, SAMPLES = 1000, 64, 7, 4
Figures = dict[str, float]


def best(call: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Measure the least milliseconds of CPU of several calls, which do not wait."""
    times = []
    for _ in range(rounds):
        gc.collect()
        with gc_paused():
            began = time.process_time()
            call()
            times.append(time.process_time() - began)
    return min(times) * 1e3


def warm(call: Callable[[], object], rounds: int = 10 * ROUNDS) -> float:
    """Measure consecutive calls in the same way, with all data in the processor's caches.

    A collection between two calls reads every object of the process, and fills the caches with
    them; so does a training step with its own data.
    """
    gc.collect()
    times = []
    with gc_paused():
        for _ in range(rounds):
            began = time.process_time()
            call()
            times.append(time.process_time() - began)
    return min(times) * 1e3


def plan(ranks: int) -> Figures:
    """Measure one rank's plan of a thousand tensors, in one and several replicas, in ms."""
    found: Figures = {}
    for name, replicas in (("sharded", 1), ("two replicas", 2), ("replicated", ranks)):
        world = World(ranks, TENSORS, replicas)
        costs = []
        for rank in near(ranks, SAMPLES):
            plan_it = LocalPlanner().plan
            captured = world.captured(rank)
            costs.append(best(partial(plan_it, captured, rank=rank, world_size=ranks)))
        found[f"plan ms, {name}"] = max(costs)
    return found | walked(ranks)


def walked(ranks: int) -> Figures:
    """Measure the walk over a thousand DTensors, the first and later ones, in ms."""
    dist.init_process_group("fake", rank=ranks - 1, world_size=ranks, store=FakeStore())
    mesh = init_device_mesh("cpu", (ranks,))
    world, state = World(ranks, TENSORS), {}
    for label, spread in zip(world.labels(), world.shardings, strict=True):
        local = torch.zeros(spread.local_shape(ranks - 1) or (0,))
        shape = torch.Size(spread.shape)
        stride = torch.empty(shape, device="meta").stride()
        state[label] = DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride
        )
    select = LabelFilter()

    def walk() -> Flattened:
        return flatten(OpenedState(state), select, pickling=False)

    first = walk()
    cache, known = capture_cache_of(first), fingerprint(first.captured)

    def again() -> None:
        captured = None if cache is None else cache.capture(OpenedState(state), select)
        captured = captured or walk().captured
        assert captured.derived(fingerprint) == known

    cold = best(lambda: fingerprint(walk().captured))
    return {"walk ms": cold, "cached ms": warm(again), "cached ms, cold caches": best(again)}


def dcp(ranks: int) -> Figures:
    """Measure DCP's plan of all ranks, made on one rank from the plans of each, in seconds."""
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    mesh = init_device_mesh("cpu", (ranks,))
    world, state = World(ranks, TENSORS), {}
    for label, spread in zip(world.labels(), world.shardings, strict=True):
        local = torch.zeros(spread.local_shape(0) or (0,))
        shape = torch.Size(spread.shape)
        stride = torch.empty(shape, device="meta").stride()
        state[label] = DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride
        )
    began = time.process_time()
    local_plan = default_planner.create_default_local_save_plan(state, True)
    local_ms = (time.process_time() - began) * 1e3
    plans = [_of_rank(local_plan, rank) for rank in range(ranks)]
    began = time.process_time()
    default_planner.create_default_global_save_plan(plans)
    return {"dcp local ms": local_ms, "dcp global s": time.process_time() - began}


def _of_rank(plan: Any, rank: int) -> Any:
    """Convert the plan of rank 0 to the plan of another rank."""
    items = []
    for item in plan.items:
        chunk, index = item.tensor_data.chunk, item.index
        offsets = torch.Size((rank * chunk.sizes[0], *chunk.offsets[1:]))
        data = dataclasses.replace(
            item.tensor_data, chunk=dataclasses.replace(chunk, offsets=offsets)
        )
        items.append(
            dataclasses.replace(
                item, index=dataclasses.replace(index, offset=offsets), tensor_data=data
            )
        )
    return dataclasses.replace(plan, items=items)


class Counted(WrappedBackend):
    """Count requests and received bytes."""

    def __init__(self, inner: MemoryBackend) -> None:
        super().__init__(inner)
        self.verbs: Counter[str] = Counter()
        self.bytes = 0

    async def around(self, operation: Operation, call: Callable[[], Awaitable[Result]]) -> Result:
        self.verbs[operation.verb] += 1
        result = await call()
        if isinstance(result, bytes):
            self.bytes += len(result)
        return result


def requests(ranks: int) -> Figures:
    """Count the requests of a save by a rank that is not the last, after its first save."""
    backend = Counted(MemoryBackend())
    register_backend("counted", lambda url: backend)
    os.environ.update(RANK=str(ranks // 2), WORLD_SIZE=str(ranks))
    state = {f"w{n}": torch.zeros(8) for n in range(10)}
    with ckpipe.SyncPipeline("counted://", attempt_id="scale") as pipeline:
        for step in range(3):
            before = backend.verbs.total()
            pipeline.save(state, step=step).wait()
            pipeline._engine.loop.submit(pipeline._engine.drain, staged_only=False).result()
    return {"requests": float(backend.verbs.total() - before)}


def index(ranks: int) -> Figures:
    """Measure seconds, memory and bytes of the index of a world, from real manifests."""
    return asyncio.run(_index(ranks))


async def _index(ranks: int) -> Figures:
    world, backend = World(ranks, SHARDS), Counted(MemoryBackend())
    manifest_bytes = 0
    for rank in range(ranks):
        data = encode_document(world.manifest(rank))
        manifest_bytes += len(data)
        await backend.put(manifest_key(ID, rank), data, PutMode.CREATE)
    before = _peak_bytes()
    began = time.process_time()
    last = 0.0
    for rank in [*range(GROUP_SIZE - 1, ranks - 1, GROUP_SIZE), ranks - 1]:
        since = time.process_time()
        await publish_up(backend, ID, rank, ranks)
        last = time.process_time() - since
    built, peak = time.process_time() - began, _peak_bytes()
    size = (await backend.stat(index_key(ID))).size
    found = {
        "index s": built,
        "last commit s": last,
        "peak MiB": peak / 2**20,
        "peak of merging MiB": (peak - before) / 2**20,
        "bytes per shard": size / (ranks * SHARDS),
        "index MB": size / 1e6,
        "manifest KB": manifest_bytes / ranks / 1e3,
    }
    return found | await _near(backend, ranks)


async def _near(backend: Counted, ranks: int) -> Figures:
    """Measure the metadata that one rank reads to load its own save."""
    backend.verbs.clear()
    backend.bytes = 0
    began = time.process_time()
    if await read_near(backend, ID, ranks // 2, ranks) is None:
        data = await backend.get(index_key(ID), max_bytes=1 << 30)
        decode_document(data, key="index", id=ID, kind="index")
    seconds = time.process_time() - began
    return {
        "load: metadata requests": float(backend.verbs["get"]),
        "load: metadata KB": backend.bytes / 1e3,
        "load: metadata ms": seconds * 1e3,
    }


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def load(ranks: int) -> Figures:
    """Measure the plan of a load of all chunks of a world, a thousand of each rank, in seconds."""
    world = World(ranks, TENSORS)
    manifests = [_read_back(world.manifest(rank)) for rank in range(ranks)]
    data = encode_document(merge(manifests, "index"))
    with gc_paused():
        began = time.process_time()
        document = decode_document(data, key="index", id=ID, kind="index")
        decoded = time.process_time() - began
    shapes = zip(world.labels(), world.shardings, strict=True)
    target = {label: torch.zeros(spread.shape) for label, spread in shapes}
    request = LoadRequest(target)

    def planned() -> None:
        matched = match_all(document, request, 0, 1, InspectionMemo())
        plan_reads(matched.targets.stored.data, matched.targets.rounds[0].needs, 16 << 20, 4096)

    return {
        "chunks": float(ranks * TENSORS),
        "index read s": decoded,
        "load plan s": best(planned, 3) / 1e3,
    }


def _read_back(document: ManifestDocument) -> ManifestDocument:
    return decode_document(encode_document(document), key="manifest", id=ID, kind="manifest")


MEASURES: dict[str, Callable[[int], Figures]] = {
    each.__name__: each for each in (plan, dcp, requests, index, load)
}
