"""Checkpoints of several ranks, put on a store by one process, for tests of what loads them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ckpipe.backend import Backend
from ckpipe.format.boxes import Box
from ckpipe.format.checksum import CHUNK_BYTES, crc32c
from ckpipe.format.codec import decode_bundle, encode_bundle
from ckpipe.format.data_file import encode_header, stored_dtype
from ckpipe.format.labels import LabelFilter
from ckpipe.format.manifest import (
    Chunk,
    Entry,
    FileRow,
    Layout,
    ManifestDocument,
    RankManifest,
)
from ckpipe.format.merge import merge
from ckpipe.format.names import data_file_name
from ckpipe.loading.fill import boxed
from ckpipe.loading.load import LoadRequest, read_all
from ckpipe.memory.arena import Arena
from ckpipe.types import LoadResult
from tests.inner.manifests import ID, WRITER, manifest_of, structure_of
from tests.support.placed_tensors import rank_of

Held = Sequence[tuple[Box, int]]
"""Boxes of a tensor that a rank holds, each with the rank that writes it."""


async def store(
    state: Any, backend: Backend, *, rank: int = 0, world_size: int = 1
) -> ManifestDocument:
    """Write the data files of a rank's state and return its manifest."""
    bundle, images = manifest_of(state, rank, world_size, planned_for=world_size)
    for key, image in images.items():
        await _write(backend, key, image)
    return bundle


async def _write(backend: Backend, key: str, image: bytes) -> None:
    upload = await backend.open_upload(key, size=len(image), block_bytes=len(image))
    await upload.write(0, memoryview(image))
    await upload.complete()


def request(into: Any = None, *, include: list[str] | None = None, **changes: Any) -> LoadRequest:
    """A strict load of everything, changed as named."""
    plain = LoadRequest(into, LabelFilter(include), strict=True, cast=False, pickling=False)
    return dataclasses.replace(plain, **changes)


async def store_ranks(
    backend: Backend, states: Sequence[Any], held: Sequence[Mapping[str, Held]] | None = None
) -> ManifestDocument:
    """Write the data files of several ranks and return their index, as it is read back.

    Args:
        backend: The store.
        states: What each rank has; a tensor of which ranks hold boxes stands there whole.
        held: For each rank, the boxes of tensors by label; other tensors are its own.
    """
    manifests = []
    for rank, state in enumerate(states):
        boxes = held[rank] if held else {}
        manifest, image = _rank(rank, len(states), state, boxes)
        manifests.append(manifest)
        for file in manifest.parts[0].files:
            await _write(backend, file.key(ID), image)
    return merged(manifests)


def _read_back(bundle: ManifestDocument) -> ManifestDocument:
    return decode_bundle(encode_bundle(bundle), key="index", id=bundle.id, kind=bundle.kind)


def _rank(
    rank: int, world_size: int, state: Any, boxes: Mapping[str, Held]
) -> tuple[ManifestDocument, bytes]:
    structure, captured = structure_of(state)
    entries: list[Entry] = []
    chunks: list[Chunk] = []
    data = bytearray()
    order = sorted(range(len(structure.tensors)), key=lambda n: -captured.tensors[n].itemsize)
    rows = {}
    for number in order:
        row, tensor = structure.tensors[number], captured.memory[number]
        own: list[Chunk] = []
        parts: Sequence[tuple[Box | None, int]] = boxes.get(row.label, [(None, rank)])
        for box, owner in parts:
            if owner != rank:
                own.append(Chunk(number, None, box=box, owner=owner))
                continue
            piece = tensor if box is None else boxed(tensor, box)
            content = piece.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            dtype = stored_dtype(row.dtype)
            shape = tuple(piece.shape) if dtype else (len(content),)
            name = row.label if box is None else f"{row.label}@{_bounds(box)}"
            own.append(Chunk(number, len(entries), box=box))
            entries.append(Entry(name, dtype or "U8", shape, 0, len(data), len(content)))
            data += content
        rows[number] = own
    for number in range(len(structure.tensors)):
        chunks += rows[number]
    header = encode_header([(e.name, e.dtype, e.shape, e.offset, e.nbytes) for e in entries])
    files = (
        FileRow(data_file_name(rank, 0), len(header) + len(data), len(header), crc32c(header)),
    )
    part = RankManifest(
        rank=rank, structure=0, layout=0, values=tuple(captured.values),
        files=files if entries else (), checksums=_sums(entries, bytes(data)),
        token=f"{rank:032x}", started="2026-11-21T03:42:05.123+00:00", writer=WRITER,
    )  # fmt: skip
    layout = Layout(tuple(entries), tuple(chunks))
    bundle = ManifestDocument("manifest", ID, world_size, (structure,), (layout,), (part,))
    return bundle, header + bytes(data) if entries else b""


def _bounds(box: Box) -> str:
    return ":".join(",".join(map(str, side)) for side in box)


def _sums(entries: Sequence[Entry], data: bytes) -> tuple[int, ...]:
    return tuple(
        crc32c(data[lo : min(lo + CHUNK_BYTES, row.offset + row.nbytes)])
        for row in entries
        for lo in range(row.offset, row.offset + row.nbytes, CHUNK_BYTES)
    )


async def load_as(
    backend: Backend, bundle: ManifestDocument, rank: int, world_size: int, request: LoadRequest
) -> LoadResult:
    """Load as one rank of a world, with two lanes and blocks of 2 MiB."""
    arena = Arena(2 << 20)
    ready = await read_all(
        backend, bundle, request, arena, lanes=2, rank=rank, world_size=world_size
    )
    return await ready.apply()


async def store_planned(
    backend: Backend, make_state: Callable[[int], Any], world_size: int
) -> ManifestDocument:
    """Save as each rank of a world would, with what ckpipe plans for it; return the index.

    Args:
        backend: The store.
        make_state: Makes the state of a rank, while this process is it.
        world_size: How many ranks there are.
    """
    manifests = []
    for rank in range(world_size):
        with rank_of(rank, world_size):
            manifests.append(
                await store(make_state(rank), backend, rank=rank, world_size=world_size)
            )
    return merged(manifests)


def merged(manifests: Sequence[ManifestDocument]) -> ManifestDocument:
    """The index of manifests, as it is read back."""
    return _read_back(merge([_read_back(each) for each in manifests], "index"))
