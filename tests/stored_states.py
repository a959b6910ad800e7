"""Puts a state on a store without a pipeline, for tests of what reads it."""

from __future__ import annotations

import dataclasses
from typing import Any

import anyio
import torch

from ckpipe.backend import Backend
from ckpipe.format.checksum import ChunkSums, SumTable, crc32c
from ckpipe.format.data_file import file_rows
from ckpipe.format.keys import LabelFilter
from ckpipe.format.manifest import BundleKind, ManifestDocument, RankManifest, Structure, TensorRow
from ckpipe.format.names import data_file_key
from ckpipe.loading.load import LoadRequest, restore
from ckpipe.loading.reader import verify
from ckpipe.memory.arena import Arena
from ckpipe.plan.plan import LocalPlanner, RankPlan
from ckpipe.save.program import fill_blocks, plan_blocks
from ckpipe.state.flatten import Captured, capture
from ckpipe.testing import MemoryBackend
from ckpipe.types import CheckpointId, LoadResult, VerifyResult

ID = CheckpointId("20261121T034205123Z-tests", 7, 0)
ALL = LabelFilter()
BLOCK_BYTES = 2 << 20


async def store(
    state: Any, backend: Backend, *, pickling: bool = False, rank: int = 0, world_size: int = 1
) -> ManifestDocument:
    """Writes the data files of a rank's state and returns what its manifest would say."""
    captured = capture(state, pickling=pickling)
    plan = LocalPlanner().plan(captured, rank=rank, world_size=world_size)
    sums = ChunkSums(SumTable([entry.nbytes for entry in plan.layout.entries]))
    images = _images(captured, plan, sums)
    for file, image in zip(plan.files, images, strict=True):
        upload = await backend.open_upload(
            data_file_key(ID, file.name), size=len(image), block_bytes=len(image)
        )
        await upload.write(0, memoryview(image))
        await upload.complete()
    return _bundle(captured, plan, sums, rank, world_size)


def _images(captured: Captured, plan: RankPlan, sums: ChunkSums) -> list[bytearray]:
    images = [bytearray(file.size) for file in plan.files]
    block = Arena(BLOCK_BYTES).take()
    for step in plan_blocks(plan, captured.tensors, BLOCK_BYTES):
        fill_blocks([(step, block)], captured)
        images[step.file][step.offset : step.offset + step.nbytes] = block.view[: step.nbytes]
    for number, entry in enumerate(plan.layout.entries):
        begin = len(plan.files[entry.file].header) + entry.offset
        for lo in range(0, entry.nbytes, 1 << 20):
            hi = min(lo + (1 << 20), entry.nbytes)
            data = memoryview(images[entry.file])[begin + lo : begin + hi]
            sums.add(number, lo, hi, crc32c(data))
    return images


def _bundle(
    captured: Captured, plan: RankPlan, sums: ChunkSums, rank: int, world_size: int
) -> ManifestDocument:
    rows = tuple(
        TensorRow(
            leaf.label, leaf.dtype, leaf.full_shape, torch.device(leaf.device).type, leaf.kind,
            leaf.detail, leaf.requires_grad, leaf.lazy, leaf.attributes,
        )
        for leaf in captured.tensors
    )  # fmt: skip
    part = RankManifest(
        rank=rank,
        structure=0,
        layout=0,
        values=tuple(captured.values),
        files=file_rows(plan.files, [crc32c(file.header) for file in plan.files]),
        checksums=tuple(sums.finished()),
        token="token",
        started="2026-11-21T03:42:05Z",
        writer={},
    )
    structure = Structure(captured.tree, rows, len(captured.values))
    kind: BundleKind = "index" if world_size == 1 else "manifest"
    return ManifestDocument(kind, ID, world_size, (structure,), (plan.layout,), (part,))


def request(into: Any = None, **changes: Any) -> LoadRequest:
    """A strict load of everything, changed as named."""
    plain = LoadRequest(into, ALL, strict=True, cast=False, pickling=False)
    return dataclasses.replace(plain, **changes)


async def load(
    backend: Backend, bundle: ManifestDocument, into: Any = None, **changes: Any
) -> LoadResult:
    """Loads with two lanes and blocks of 2 MiB."""
    arena = Arena(BLOCK_BYTES)
    try:
        return await restore(backend, bundle, request(into, **changes), arena, lanes=2)
    finally:
        assert arena.free_blocks == arena.blocks


async def verified(backend: Backend, bundle: ManifestDocument) -> VerifyResult:
    """Verifies with two lanes and blocks of 2 MiB."""
    arena = Arena(BLOCK_BYTES)
    try:
        return await verify(backend, bundle, arena, lanes=2)
    finally:
        assert arena.free_blocks == arena.blocks


async def round_trip(
    state: Any, into: Any = None, *, save_pickled: bool = False, **changes: Any
) -> LoadResult:
    """What a state is after it was stored and loaded."""
    backend = MemoryBackend()
    bundle = await store(state, backend, pickling=save_pickled)
    return await load(backend, bundle, into, **changes)


def run_round_trip(state: Any, into: Any = None, **changes: Any) -> LoadResult:
    """The same for tests that are not coroutines."""

    async def main() -> LoadResult:
        return await round_trip(state, into, **changes)

    return anyio.run(main)
