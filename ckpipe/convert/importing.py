"""Take a checkpoint over as one of ckpipe's: read it block by block, and store it as a save does.

Theory. The data files of the result are planned from the manifest of the source, with the
transforms applied: each tensor gets an entry, in which it lies row by row. Only memory that several
tensors share, or that has strides, becomes an entry as it is, so that they share it again. A block
of a data file is then a set of boxes of stored tensors, which the reader of loads fills, and the
last four stages of a save bring it to the store (:mod:`ckpipe.save.deliver`). So the checkpoint is
complete or absent, and an import that failed leaves nothing. One that was killed leaves an
incomplete checkpoint, which a sweep removes; the next import begins anew.
"""

from __future__ import annotations

import math
import platform
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from operator import add
from typing import Any

import anyio
import numpy as np
import torch
from anyio.streams.memory import MemoryObjectSendStream

from ckpipe.catalog.inspect import check_expansion
from ckpipe.catalog.leases import under_lease
from ckpipe.catalog.opened import Opened
from ckpipe.errors import PerRankValue, StructureMismatch, first_error
from ckpipe.events import EventBus
from ckpipe.format.boxes import flat_range_boxes
from ckpipe.format.data_file import (
    BlockRange,
    DataFile,
    DataFiles,
    EntryRange,
    stored_dtype,
)
from ckpipe.format.labels import Json, LabelFilter
from ckpipe.format.manifest import (
    Chunk,
    Entry,
    Layout,
    ManifestDocument,
    RankManifest,
    Structure,
    TensorRow,
)
from ckpipe.format.tree import walk
from ckpipe.memory.arena import Arena, Block
from ckpipe.plan.plan import lay_out
from ckpipe.ranks.launch import draft_launch
from ckpipe.ranks.world import Topology
from ckpipe.reading.chunks import StoredTensor, StoredTensors
from ckpipe.reading.reader import Reader, lane_buffers
from ckpipe.reading.saved_state import (
    keep_generators_apart,
    labels_of,
    refuse_unread,
    state_for,
)
from ckpipe.reading.targets import Targets
from ckpipe.save.context import StoreContext
from ckpipe.save.deliver import deliver
from ckpipe.save.record import UNKNOWN, FilledBlock, SaveRecord
from ckpipe.settings import Retention, Settings
from ckpipe.state.placements import HeldBox
from ckpipe.store.retry import RetryingBackend
from ckpipe.threads import run_sync
from ckpipe.transforms.edit import placed
from ckpipe.transforms.scales import refuse_codes
from ckpipe.transforms.transform import Transform, transformed
from ckpipe.types import CheckpointId, CheckpointInfo, first_of
from ckpipe.version import __version__


async def import_opened(
    opened: Opened,
    target: RetryingBackend,
    settings: Settings,
    *,
    step: int | None = None,
    transform: Sequence[Transform] = (),
) -> CheckpointInfo:
    """Write a checkpoint of one rank that has the state of another checkpoint.

    Args:
        opened: The other checkpoint.
        target: The store of the new one.
        settings: The number of lanes, the size of blocks, and the bound of memory.
        step: The step of the new one; None for that of the other, or 0.
        transform: Transforms, in their order.

    Raises:
        TargetMismatch: If a transform does not fit, or ranks have saved different values.
        UsageError: If the tensors take far more bytes than are stored.
        CorruptCheckpoint: If the other is damaged, or a foreign file has changed meanwhile.
        StoreError: If a store failed.
    """
    unpruned = settings.model_copy(update={"retention": Retention()})
    store = StoreContext.of(unpruned, target.inner, EventBus(), 0, 1)
    size, most = store.block_bytes, target.limits.max_blocks
    plan = await run_sync(_planned, opened.document, transform, size, most and most * size)
    launch = await draft_launch(target, None, Topology(0, 1))
    budget, lanes = settings.staging.bytes, settings.load.lanes
    room = lanes + settings.upload.lanes
    if budget is not None:  # which the read buffers share
        lanes = max(1, min(lanes, budget // size // 3))
        room = max(1, min(room, budget // size - lanes))
    async with under_lease(target, launch.id):
        attempt = await launch.claim()
        id = CheckpointId(attempt, (opened.document.step or 0) if step is None else step, 0)
        out, inbox = anyio.create_memory_object_stream[FilledBlock](math.inf)
        with closing(Arena(size)) as arena, lane_buffers(arena, opened.store, lanes) as buffers:
            record = _Import(id, plan, arena, anyio.Semaphore(room))
            try:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(_fill, record, opened, buffers, out)
                    await deliver(record, store, inbox)
            except BaseException as error:
                await launch.withdraw()
                if isinstance(error, ExceptionGroup):
                    raise first_error(error) from None
                raise
    return record.committed.result()


@dataclass(frozen=True, slots=True)
class _ImportPlan:
    """The data files of an import.

    Args:
        structure: The structure of its state.
        part: Its manifest, without data files.
        files: Its data files.
        stored: The tensors of the source.
        fills: For each entry, the tensor of the source that fills it.
    """

    structure: Structure
    part: RankManifest
    files: DataFiles
    stored: StoredTensors
    fills: Sequence[StoredTensor]


@dataclass(slots=True)
class _EntryDraft:
    """An entry, the bytes of its items, the tensor that fills it, and its chunks."""

    entry: Entry
    item: int
    fill: StoredTensor
    chunks: list[Chunk]


def _planned(
    document: ManifestDocument,
    transform: Sequence[Transform],
    block_bytes: int,
    max_file_bytes: int | None,
) -> _ImportPlan:
    if transform:
        document, _ = transformed(document, transform, LabelFilter())
    saved = state_for(document, 0, 1, "raise")
    saved = keep_generators_apart(saved, document, 0, 1, "raise")
    if own := sorted(labels_of(saved)):
        raise PerRankValue(
            f"The ranks have saved different values of {first_of(own)}, and an import has one rank",
            key=own[0],
            hint="Leave them out with the transform Drop, or copy the checkpoint with ckpipe.copy",
        )
    for node, label in walk(saved.tree):
        if node.kind == "value":
            refuse_unread(saved.values[node.head], label)
    stored = StoredTensors(document, saved.rows, saved.homes)
    for row in saved.rows:
        refuse_codes(row, row.cast or row.dtype, row.label)
    rows = [replace(row, dtype=row.cast or row.dtype) for row in saved.rows]
    drafts: dict[Any, _EntryDraft] = {}
    for number, row in enumerate(rows):
        _add(drafts, number, row, stored)
    found = sorted(drafts.values(), key=lambda draft: -draft.item)  # so that all are aligned
    sizes = {draft.entry.name: draft.entry.nbytes for draft in found}
    hint = "Leave the tensor out with the transform Drop, or do not convert it"
    check_expansion("An import", [document], sum(sizes.values()), sizes, hint)
    files, entries = lay_out([draft.entry for draft in found], 0, max_file_bytes)
    chunks = [each._replace(entry=n) for n, draft in enumerate(found) for each in draft.chunks]
    layout = Layout(entries, sorted(chunks, key=lambda chunk: chunk.tensor))
    version = max(each.version for each in document.structures)
    optimizers = tuple(saved.optimizers.values())
    return _ImportPlan(
        Structure(saved.tree, tuple(rows), len(saved.values), optimizers, version),
        _manifest(document, saved.values),
        DataFiles(tuple(files), layout, list(_blocks(files, entries, block_bytes))),
        stored,
        [draft.fill for draft in found],
    )


def _manifest(document: ManifestDocument, values: Sequence[Json]) -> RankManifest:
    """Make the manifest of the one rank, without data files."""
    first = document.parts[0]
    return RankManifest(
        rank=0,
        structure=0,
        layout=0,
        values=tuple(values),
        files=(),
        checksums=(),
        token=secrets.token_hex(16),
        started=datetime.now(UTC).isoformat(timespec="milliseconds"),
        writer={
            "ckpipe": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "planner": "import",
        },
        metadata={"imported_from": document.source} if document.source else first.metadata,
        metrics=first.metrics,
    )


def _add(
    drafts: dict[Any, _EntryDraft], number: int, row: TensorRow, stored: StoredTensors
) -> None:
    """Add a tensor to its entry, which tensors that share memory have together."""
    tensor = stored[number]
    copies = stored.copies(tensor)
    first, near = next(iter(copies), None), tensor.near
    itemsize = tensor.loaded_dtype.itemsize
    nbytes = math.prod(row.shape) * itemsize
    entry = Entry(row.label, stored_dtype(row.dtype) or "U8", row.shape, 0, 0, nbytes)
    if entry.dtype == "U8":
        entry = entry._replace(shape=(nbytes,))
    chunk = Chunk(number, None, 0, None, tensor.fresh_stride)
    key: Any = number
    if first is not None and first.shared:
        key = copies, row.shape, row.dtype, row.lazy
        whole = len(copies) == len(near) == 1 and first.inside is first.target is None
        if whole and tensor.row.cast is None:
            key, size = ("memory", first.entry), stored.data.sizes[first.entry]
            ((part, place),) = near
            chunk = chunk._replace(offset=first.start, stride=first.stride)
            if first.stride is not None or row.lazy or nbytes < size:
                itemsize, entry = 1, Entry(f"{row.label}~window", "U8", (size,), 0, 0, size)
            memory = TensorRow(row.label, "uint8", (size,))
            near = [(part, Chunk(number, place.entry))]
            tensor = StoredTensor(number, memory, torch.uint8, None, near)
        elif whole and first.stride is not None and not row.lazy:
            with suppress(StructureMismatch):  # else its memory is read whole for each block
                near = [(part, each) for part, place in near for each in placed(place, row, ())]
                tensor = StoredTensor(number, tensor.row, tensor.dtype, None, near)
    draft = drafts.get(key)
    if draft is None:
        draft = drafts[key] = _EntryDraft(entry, itemsize, tensor, [])
    elif itemsize > draft.item:
        draft.entry, draft.item = entry, itemsize
    draft.chunks.append(chunk)


def _blocks(
    files: Sequence[DataFile], entries: Sequence[Entry], block_bytes: int
) -> Iterator[BlockRange]:
    """Cut data files into blocks."""
    for number, file in enumerate(files):
        count = -(-file.row.size // block_bytes)
        spans: list[list[EntryRange]] = [[] for _ in range(count)]
        for place in file.entries:
            start, nbytes, done = len(file.header) + entries[place].offset, entries[place].nbytes, 0
            while done < nbytes:
                block, at = divmod(start + done, block_bytes)
                end = min(nbytes, done + block_bytes - at)
                spans[block].append(EntryRange(place, done, end, at))
                done = end
        for block in range(count):
            offset = block * block_bytes
            size = min(block_bytes, file.row.size - offset)
            yield BlockRange(number, offset, size, tuple(spans[block]))


@dataclass(eq=False)
class _Filled(FilledBlock):
    memory: Block


class _Import(SaveRecord):
    """The record of an import.

    Args:
        id: The checkpoint.
        plan: Its data files.
        arena: Lends its blocks.
        room: Admits as many of them as the bound of memory permits.
    """

    def __init__(
        self, id: CheckpointId, plan: _ImportPlan, arena: Arena, room: anyio.Semaphore
    ) -> None:
        super().__init__(id, 0, time.perf_counter(), plan.part.token)
        self.plan, self.arena, self.room = plan, arena, room
        self.files = plan.files
        self.sealed = plan.structure, plan.part

    @property
    def waits(self) -> bool:
        """See :class:`~ckpipe.save.record.SaveRecord`."""
        return True

    def free(self, filled: _Filled) -> None:
        """Give back the memory of a block that is no longer in use."""
        self.arena.give(filled.memory)
        self.room.release()


async def _fill(
    record: _Import,
    opened: Opened,
    buffers: Sequence[memoryview],
    out: MemoryObjectSendStream[FilledBlock],
) -> None:
    """Fill all blocks in lanes, and let the commit begin if no foreign file has changed."""
    plan, blocks = record.plan, iter(record.plan.files.blocks)

    async def lane(buffer: memoryview) -> None:
        reader = Reader(opened, plan.stored.data, [buffer])
        for each in blocks:
            await record.room.acquire()
            memory = record.arena.take()
            targets = Targets(plan.stored, cast=True)
            await run_sync(_note, plan, each, memory, targets)
            for round in targets.rounds:
                await reader.read(round.needs, round.destinations)
            await run_sync(targets.finish)
            sums = np.full(len(plan.files.cuts(each).slots), UNKNOWN, np.int64)
            out.send_nowait(_Filled(record, each, memory.view[: each.nbytes], sums, memory))

    async with out:
        async with anyio.create_task_group() as tasks:
            for buffer in buffers:
                tasks.start_soon(lane, buffer)
        await opened.check_unchanged()
        record.copied.set()


def _note(plan: _ImportPlan, block: BlockRange, memory: Block, targets: Targets) -> None:
    """Write the header, and note the tensors that fill the rest of a block."""
    header = plan.files.files[block.file].header[block.offset : block.offset + block.nbytes]
    memory.view[: len(header)] = header
    for span in block.spans:
        tensor = plan.fills[span.entry]
        values = memory.tensor[span.at : span.at + span.hi - span.lo].view(tensor.loaded_dtype)
        begin, done = span.lo // values.itemsize, 0
        for starts, sizes in flat_range_boxes(tensor.shape, begin, begin + len(values)):
            box = starts, tuple(map(add, starts, sizes))
            count = math.prod(sizes)
            part = values[done : done + count].view(sizes)
            targets.fill(tensor, part, tensor.label, (HeldBox(box, (0,) * len(sizes)),))
            done += count
    targets.settle()
