"""Ranks that a test makes up: what each plans, stores and loads, alone or all together."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from ckpipe import GlobalPlanner
from ckpipe.backend import Backend
from ckpipe.catalog.opened import Opened
from ckpipe.format.boxes import Box
from ckpipe.format.checksum import CHUNK_BYTES, crc32c
from ckpipe.format.codec import decode_document, encode_document
from ckpipe.format.data_file import encode_header, stored_dtype
from ckpipe.format.labels import LabelFilter
from ckpipe.format.manifest import (
    Chunk,
    Entry,
    FileRow,
    Layout,
    ManifestDocument,
    RankManifest,
    Structure,
    TensorRow,
    trees_of,
)
from ckpipe.format.merge import merge
from ckpipe.format.names import data_file_name
from ckpipe.format.tree import Node, version_of
from ckpipe.loading.load import read_all
from ckpipe.loading.request import LoadRequest
from ckpipe.memory.arena import Arena
from ckpipe.plan.assignment import assign, describe
from ckpipe.plan.global_plan import PlanRounds, SharedPlan, divide
from ckpipe.plan.plan import LocalPlanner, RankPlan, SourceRange, assemble
from ckpipe.reading.fill import boxed
from ckpipe.state.flatten import Captured, OpenedState, flatten
from ckpipe.state.placements import Mesh, Placement, Sharding, sharding
from ckpipe.state.tensors import TensorLeaf
from ckpipe.types import CheckpointId, LoadResult
from tests.support.placed_tensors import rank_of

GAP = 64
"""Bytes between tensors, so that none of them overlap."""


@dataclass(frozen=True)
class Tensor:
    """A tensor of a state: a shape for one that is plain, a sharding for a DTensor.

    ``tied`` names the tensor whose memory it shares.
    """

    label: str
    layout: tuple[int, ...] | Sharding
    dtype: str = "float32"
    tied: str | None = None


def mesh(*shape: int, ranks: Sequence[int] | None = None) -> Mesh:
    """A mesh of ranks in an order, or of all from 0 on."""
    return Mesh(shape, tuple(range(math.prod(shape)) if ranks is None else ranks))


def on(where: Mesh, shape: tuple[int, ...], *dims: int | None) -> Sharding:
    """A tensor on a mesh, cut along the dimensions given; None for replicated."""
    return sharding(where, tuple(Placement(dim) for dim in dims), shape)


def held_by(rank: int, tensors: Iterable[Tensor]) -> list[TensorLeaf]:
    """What the walk would find of tensors on a rank."""
    address, places, leaves = 1 << 20, dict[str, int](), list[TensorLeaf]()
    for each in tensors:
        dtype: torch.dtype = getattr(torch, each.dtype)
        spread = each.layout if isinstance(each.layout, Sharding) else None
        local = each.layout if not isinstance(each.layout, Sharding) else None
        if spread is not None:
            local = spread.local_shape(rank)
        data = torch.empty((0,) if local is None else local, dtype=dtype, device="meta")
        if each.label not in places:
            places[each.label] = places[each.tied] if each.tied else address
            address += data.nbytes + GAP
        leaves.append(
            TensorLeaf(
                each.label, each.dtype, tuple(data.shape), data.stride(), "cpu", "tensor",
                None, False, "", places[each.label], data.nbytes, data.nbytes, True, None, spread,
            )
        )  # fmt: skip
    return leaves


def planned(
    rank: int, world_size: int, tensors: Iterable[Tensor], replicated: Iterable[str] = ()
) -> RankPlan:
    """The local plan of a rank for a made up state.

    Args:
        rank: The rank.
        world_size: How many ranks there are.
        tensors: The tensors that it holds.
        replicated: Labels of plain tensors of which the state says that they are replicated.
    """
    captured = captured_by(rank, tensors, replicated)
    return LocalPlanner().plan(captured, rank=rank, world_size=world_size)


def gpt2(where: Mesh, *dims: int | None, dtype: str = "float32") -> list[Tensor]:
    """GPT-2 of 124 million parameters, its head tied to its embedding."""
    width = 768
    shapes: dict[str, tuple[int, ...]] = {"wte": (50257, width), "wpe": (1024, width)}
    for n in range(12):
        for name, shape in {
            "ln_1.weight": (width,), "ln_1.bias": (width,),
            "attn.c_attn.weight": (width, 3 * width), "attn.c_attn.bias": (3 * width,),
            "attn.c_proj.weight": (width, width), "attn.c_proj.bias": (width,),
            "ln_2.weight": (width,), "ln_2.bias": (width,),
            "mlp.c_fc.weight": (width, 4 * width), "mlp.c_fc.bias": (4 * width,),
            "mlp.c_proj.weight": (4 * width, width), "mlp.c_proj.bias": (width,),
        }.items():  # fmt: skip
            shapes[f"h.{n}.{name}"] = shape
    shapes |= {"ln_f.weight": (width,), "ln_f.bias": (width,)}
    found = [Tensor(label, on(where, shape, *dims), dtype) for label, shape in shapes.items()]
    return [*found, Tensor("lm_head", on(where, shapes["wte"], *dims), dtype, tied="wte")]


def llama70b(where: Mesh, *dims: int | None) -> list[Tensor]:
    """The parameters of a model with the shapes of Llama 3 70B."""
    width, wide, keys = 8192, 28672, 1024
    shapes: dict[str, tuple[int, ...]] = {"embed": (128256, width), "head": (128256, width)}
    for n in range(80):
        for name, shape in {
            "q": (width, width), "k": (keys, width), "v": (keys, width), "o": (width, width),
            "gate": (wide, width), "up": (wide, width), "down": (width, wide),
            "norm_1": (width,), "norm_2": (width,),
        }.items():  # fmt: skip
            shapes[f"layers.{n}.{name}"] = shape
    shapes["norm"] = (width,)
    return [Tensor(name, on(where, shape, *dims), "bfloat16") for name, shape in shapes.items()]


State = Callable[[int], Sequence[Tensor]]
"""The tensors of each rank."""


def captured_by(rank: int, tensors: Iterable[Tensor], replicated: Iterable[str] = ()) -> Captured:
    """What the walk would find on a rank, with the labels of what is said to be replicated."""
    leaves, marked = held_by(rank, tensors), frozenset(replicated)
    numbers = {n: None for n, leaf in enumerate(leaves) if leaf.label in marked}
    return Captured(Node("absent"), leaves, [], numbers)


class Ranks:
    """The planners of a world; each has a connection of its own to one store.

    Args:
        connect: Makes connections.
        size: How many ranks there are.
        seconds: How long they wait for each other.
    """

    def __init__(self, connect: Callable[[], Any], size: int, seconds: float = 20.0) -> None:
        self.planners = [GlobalPlanner(connect(), timeout_seconds=seconds) for _ in range(size)]

    def plan(
        self,
        save: str,
        state: State,
        replicated: Sequence[str] = (),
        *,
        ranks: Sequence[int] | None = None,
    ) -> list[RankPlan | Exception]:
        """Has some or all of the ranks plan one save, at the same time."""
        size = len(self.planners)
        chosen = range(size) if ranks is None else ranks

        def one(rank: int) -> RankPlan | Exception:
            captured = captured_by(rank, state(rank), replicated)
            try:
                return self.planners[rank].plan_save(
                    captured, save=f"run/{save}", rank=rank, world_size=size
                )
            except Exception as error:
                return error

        with ThreadPoolExecutor(len(chosen)) as pool:
            return list(pool.map(one, chosen))

    def plans(self, save: str, state: State, replicated: Sequence[str] = ()) -> list[RankPlan]:
        """The plans of all ranks, which all come to one."""
        found = []
        for each in self.plan(save, state, replicated):
            if isinstance(each, Exception):
                raise each
            found.append(each)
        return found


@contextmanager
def hurried(seconds: float, present: Sequence[int]) -> Iterator[None]:
    """Ranks of this process wait only so long for others meanwhile.

    Args:
        seconds: How long, from when all that are present have made their offers.
        present: Which ranks those are; they find each other however busy the machine is.
    """
    agree, awaited = PlanRounds._agree, PlanRounds._awaited

    def agree_soon(rounds: PlanRounds, *args: Any) -> Any:
        patient, rounds._seconds = rounds._seconds, seconds
        try:
            return agree(rounds, *args)
        finally:
            rounds._seconds = patient

    def awaited_once_met(rounds: PlanRounds, keys: Sequence[str]) -> bool:
        save = keys[0].partition("/")[0]
        while not rounds._store.check([f"{save}/offer/{rank}" for rank in present]):
            os.sched_yield()
        return awaited(rounds, keys)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlanRounds, "_agree", agree_soon)
        patch.setattr(PlanRounds, "_awaited", awaited_once_met)
        yield


def written(plans: Iterable[RankPlan]) -> list[list[str]]:
    """The names of the entries that each rank writes, sorted."""
    return [sorted(entry.name for entry in plan.layout.entries) for plan in plans]


def nbytes(tensor: Tensor) -> int:
    """The bytes of a whole tensor."""
    shape = tensor.layout.shape if isinstance(tensor.layout, Sharding) else tensor.layout
    dtype: torch.dtype = getattr(torch, tensor.dtype)
    return math.prod(shape) * dtype.itemsize


def written_bytes(plan: RankPlan) -> int:
    """How much a rank writes."""
    return sum(entry.nbytes for entry in plan.layout.entries)


def check_balance(sizes: Iterable[int], mean: float) -> None:
    """Check that no rank writes more or less than the others by more than five percent."""
    for size in sizes:
        assert 0.95 * mean <= size <= 1.05 * mean


def jointly(
    size: int, captured: Callable[[int], Captured], ranks: Sequence[int] | None = None
) -> list[RankPlan]:
    """The plans of all or some ranks, decided as rank 0 would, without a store."""
    states = [captured(rank) for rank in range(size)]
    described = [
        describe(each.tensors, each.replicated, rank=rank, world_size=size)
        for rank, each in enumerate(states)
    ]
    plans = []
    answers = assign([each.offer for each in described], [each.private for each in described])
    for rank in range(size) if ranks is None else ranks:
        own = described[rank]
        pairs = zip(own.offer, answers[rank], strict=True)
        shared = SharedPlan(1, 0, "", {each.name: (each, cuts) for each, cuts in pairs})
        units = divide(shared, states[rank].tensors, own.shares, rank=rank)
        plans.append(assemble(states[rank], units, rank=rank, world_size=size))
    return plans


Identity = tuple[str, str, tuple[int, ...], Box | None]


def unwritten(plans: Sequence[RankPlan], states: Sequence[Captured]) -> list[Identity]:
    """What ranks leave to others that these do not write; a checkpoint with such never counts."""

    def identities(rank: int) -> list[tuple[int | None, Identity]]:
        leaves = states[rank].tensors
        return [
            (row.owner, (leaf.label, leaf.dtype, leaf.full_shape, row.box))
            for row in plans[rank].layout.chunks
            for leaf in [leaves[row.tensor]]
        ]

    rows = [identities(rank) for rank in range(len(plans))]
    own = [{what for owner, what in each if owner is None} for each in rows]
    return [
        what
        for each in rows
        for owner, what in each
        if owner is not None and what not in own[owner]
    ]


ID = CheckpointId("20261121T034205123Z-golden", 500, 0)
WRITER = {"ckpipe": "0.1.0", "torch": "2.13.0", "python": "3.11.7"}
LIMIT = 1 << 30


@dataclass(frozen=True, slots=True)
class Borrowed:
    """A tensor that a rank holds and another rank has written.

    Args:
        owner: The rank that wrote it.
        entry: The number of the entry among the owner's; None if this rank cannot know it.
    """

    owner: int
    entry: int | None = None


def capture(state: Any, select: LabelFilter | None = None) -> Captured:
    """What the walk finds in a state."""
    return flatten(OpenedState(state), select or LabelFilter(), pickling=False).captured


def structure_of(state: Any) -> tuple[Structure, Captured]:
    """The structure of a state as a manifest has it, and what the walk found."""
    captured = capture(state)
    rows = tuple(
        TensorRow(
            leaf.label, leaf.dtype, leaf.full_shape, leaf.device, leaf.kind, leaf.detail,
            leaf.requires_grad, leaf.lazy, leaf.attributes,
        )
        for leaf in captured.tensors
    )  # fmt: skip
    version = version_of(trees_of(captured.tree, rows))
    return Structure(
        captured.tree, rows, len(captured.values), captured.optimizers, version
    ), captured


def manifest_of(
    state: dict[Any, Any],
    rank: int = 0,
    world_size: int = 1,
    *,
    borrowed: dict[str, Borrowed] | None = None,
    planned_for: int = 1,
    **fields: Any,
) -> tuple[ManifestDocument, dict[str, bytes]]:
    """The manifest of a rank, and its data files by name.

    Args:
        state: What the rank holds.
        rank: The rank.
        world_size: How many ranks there are.
        borrowed: Which of the tensors at the state's top level others have written.
        planned_for: For how many ranks the plan is made that says what this one writes.
        fields: More fields of the part.
    """
    borrowed = borrowed or {}
    structure, held = structure_of(state)
    _, written = structure_of({key: item for key, item in state.items() if key not in borrowed})
    plan = LocalPlanner().plan(written, rank=rank, world_size=planned_for)
    numbers = {row.label: number for number, row in enumerate(structure.tensors)}
    chunks = [
        chunk._replace(tensor=numbers[written.tensors[chunk.tensor].label])
        for chunk in plan.layout.chunks
    ]
    chunks += [
        Chunk(numbers[label], each.entry, owner=each.owner) for label, each in borrowed.items()
    ]
    images = images_of(written, plan)
    part = RankManifest(
        rank=rank,
        structure=0,
        layout=0,
        values=tuple(held.values),
        files=tuple(file.row for file in plan.files),
        checksums=_checksums(plan, list(images.values())),
        token=f"{rank:032x}",
        started="2026-11-21T03:42:05.123+00:00",
        writer=WRITER,
        **fields,
    )
    layout = Layout(plan.layout.entries, chunks)
    return ManifestDocument("manifest", ID, world_size, (structure,), (layout,), (part,)), images


def images_of(captured: Captured, plan: RankPlan) -> dict[str, bytes]:
    """The data files of a plan by key, put together in the simplest way."""
    images = {}
    for file in plan.files:
        image = bytearray(file.row.size)
        image[: len(file.header)] = file.header
        for number in file.entries:
            begin = len(file.header) + plan.layout.entries[number].offset
            for source in plan.sources[number]:
                at = begin + source.offset
                data = _source_bytes(captured, source)
                image[at : at + source.nbytes] = data
        assert len(image) == file.row.size
        images[file.row.key(ID)] = bytes(image)
    return images


def _source_bytes(captured: Captured, source: SourceRange) -> bytes:
    leaf, memory = captured.tensors[source.tensor], captured.memory[source.tensor]
    if source.skip is None:
        tensor = memory.resolve_conj().resolve_neg()
        if source.part is not None:
            tensor = tensor[tuple(map(slice, *source.part))]
        tensor = tensor.contiguous()
        return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    storage = memory.untyped_storage()
    begin = leaf.address - storage.data_ptr() + source.skip
    return bytes(storage[begin : begin + source.nbytes])


def _checksums(plan: RankPlan, images: list[bytes]) -> tuple[int, ...]:
    sums = []
    for row in plan.layout.entries:
        begin = len(plan.files[row.file].header) + row.offset
        data = images[row.file][begin : begin + row.nbytes]
        sums += [crc32c(data[lo : lo + CHUNK_BYTES]) for lo in range(0, len(data), CHUNK_BYTES)]
    return tuple(sums)


Held = Sequence[tuple[Box, int]]
"""Boxes of a tensor that a rank holds, each with the rank that writes it."""


async def store(
    state: Any, backend: Backend, *, rank: int = 0, world_size: int = 1
) -> ManifestDocument:
    """Write the data files of a rank's state and return its manifest."""
    document, images = manifest_of(state, rank, world_size, planned_for=world_size)
    for key, image in images.items():
        await _write(backend, key, image)
    return document


async def _write(backend: Backend, key: str, image: bytes) -> None:
    upload = await backend.open_upload(key, size=len(image), block_bytes=len(image))
    await upload.write(0, memoryview(image))
    await upload.complete()


def request(into: Any = None, *, include: list[str] | None = None, **changes: Any) -> LoadRequest:
    """A strict load of everything, changed as named."""
    return LoadRequest(into, include=include, **changes)


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


def _read_back(document: ManifestDocument) -> ManifestDocument:
    return decode_document(
        encode_document(document), key="index", id=document.id, kind=document.kind
    )


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
    document = ManifestDocument("manifest", ID, world_size, (structure,), (layout,), (part,))
    return document, header + bytes(data) if entries else b""


def _bounds(box: Box) -> str:
    return ":".join(",".join(map(str, side)) for side in box)


def _sums(entries: Sequence[Entry], data: bytes) -> tuple[int, ...]:
    return tuple(
        crc32c(data[lo : min(lo + CHUNK_BYTES, row.offset + row.nbytes)])
        for row in entries
        for lo in range(row.offset, row.offset + row.nbytes, CHUNK_BYTES)
    )


async def load_as(
    backend: Backend, document: ManifestDocument, rank: int, world_size: int, request: LoadRequest
) -> LoadResult:
    """Load as one rank of a world, with two lanes and blocks of 2 MiB."""
    arena = Arena(2 << 20)
    opened = Opened(backend, document)
    ready = await read_all(opened, request, arena, lanes=2, rank=rank, world_size=world_size)
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
