"""Checkpoints in forms that other programs load: one file of ``torch.save``, or those of a hub.

An export lies in a folder ``<id>.torch`` or ``<id>.hf``, beside its checkpoint or on another
store, that no retention touches. It is made from the checkpoint itself, every byte verified, so
that tensors are whole however many ranks held them. Files are created and never replaced, and the
one by which a reader finds the others comes last: an export that was cut short is not seen as one,
and made again it is the same.

Source of the sharded form: the files that ``save_pretrained`` of transformers 5 writes, shards
``model-00001-of-0000N.safetensors`` and ``model.safetensors.index.json``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import anyio
import anyio.from_thread
import torch

from ckpipe.backend import Backend
from ckpipe.checkpoints.copying_checkpoints import block_bytes_for
from ckpipe.checkpoints.inspection import check_expansion, leaf_labels, tensor_bytes
from ckpipe.errors import UnsupportedState, UsageError
from ckpipe.exports.export_file import ExportFile, ExportPlace
from ckpipe.format.data_file import encode_header
from ckpipe.format.dtypes import DTYPES, stored_dtype
from ckpipe.format.keys import LabelFilter
from ckpipe.format.manifest import Bundle, TensorRow
from ckpipe.loads.restore import LoadRequest, restore
from ckpipe.loads.tensor_reading import read_tensors
from ckpipe.memory.arena import Arena
from ckpipe.stores.retrying import RetryPolicy
from ckpipe.tasks import to_thread

INDEX = "model.safetensors.index.json"
TORCH_FILE = "state.pt"

_BATCH_BYTES = 256 << 20
"""How many bytes of tensors are held in memory, unless a single one is larger."""


@dataclass(frozen=True, slots=True)
class ExportSettings:
    """How to export.

    Args:
        format: ``"torch"`` or ``"hf"``.
        part: The label of what to export; None chooses by the format.
        max_shard_bytes: How large a shard may be, unless a single tensor is larger.
        block_bytes: Bytes of a block on the way to the store.
        lanes: Reads under way at once.
        policy: How often to try.
        pickling: Whether pickled objects may be made, for ``"torch"``.
        expanded: Whether ``"hf"`` may write far more bytes than the checkpoint stores.
    """

    format: Literal["torch", "hf"]
    part: str | None
    max_shard_bytes: int
    block_bytes: int
    lanes: int
    policy: RetryPolicy
    pickling: bool = False
    expanded: bool = False


@dataclass(frozen=True, slots=True)
class Exported:
    """What was exported.

    Args:
        folder: The folder on the store, relative to the root.
        files: Names of its files.
        bytes: Their size together.
    """

    folder: str
    files: tuple[str, ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class _Named:
    """A tensor of an export: its name there, and its row in the checkpoint."""

    name: str
    row: TensorRow

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self.row)


async def export(
    backend: Backend,
    bundle: Bundle,
    arena: Arena,
    settings: ExportSettings,
    target: Backend | None = None,
) -> Exported:
    """Writes a checkpoint in another form; doing so again changes nothing.

    Args:
        backend: The store of the checkpoint, whose requests are tried again.
        bundle: The checkpoint's index, validated.
        arena: Lends the blocks that are read into; used on the caller's thread only.
        settings: What to write.
        target: Where it goes, whose requests are tried again too; None for beside the checkpoint.

    Raises:
        UsageError: If the part to export is not there, or takes far more than is stored of it.
        UnsupportedState: If a tensor has a dtype that safetensors lacks, or, for ``"torch"``, the
            checkpoint holds pickled objects and these are refused.
        CommitConflict: If a file with other bytes lies there already.
        CorruptCheckpoint: If the checkpoint is damaged.
        StoreError: If the store failed; exporting again goes on.
    """
    work = _Exporting(backend, bundle, arena, settings, target or backend)
    return await (work.torch() if settings.format == "torch" else work.hf())


class _Exporting:
    def __init__(
        self,
        backend: Backend,
        bundle: Bundle,
        arena: Arena,
        settings: ExportSettings,
        target: Backend,
    ) -> None:
        self._backend, self._bundle, self._arena = backend, bundle, arena
        self._target = target
        self._settings = settings
        self._folder = f"{bundle.id}.{settings.format}/"
        self._written = 0

    async def torch(self) -> Exported:
        """One file that ``torch.load`` reads."""
        state = await self._state()
        counter = _Counter()
        # Twice, since the store wants to know the size before the first block.
        await to_thread.run_sync(_save, state, counter)
        file = await self._open(TORCH_FILE, counter.size)
        async with file:
            await to_thread.run_sync(_save, state, _Feed(file))
        return Exported(self._folder, (TORCH_FILE,), self._written)

    async def hf(self) -> Exported:
        """Sharded safetensors with an index."""
        tensors = named_tensors(self._bundle, self._settings.part)
        if not self._settings.expanded:
            sizes = {each.row.label: each.nbytes for each in tensors}
            check_expansion("An export", [self._bundle], sum(sizes.values()), sizes)
        shards = list(shards_of(tensors, self._settings))
        names = [
            f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, 1 + len(shards))
        ]
        for name, shard in zip(names, shards, strict=True):
            await self._shard(name, shard)
        weights = {
            each.name: name for name, shard in zip(names, shards, strict=True) for each in shard
        }
        total = sum(each.nbytes for shard in shards for each in shard)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weights.items()))}
        body = json.dumps(index, indent=2).encode()
        await self._place(INDEX).put(body)
        return Exported(self._folder, (*names, INDEX), self._written + len(body))

    async def _state(self) -> Any:
        request = LoadRequest(
            None, LabelFilter(), strict=True, cast=False, pickling=self._settings.pickling,
            per_rank="rank0",
        )  # fmt: skip
        lanes = self._settings.lanes
        state = (
            await restore(self._backend, self._bundle, request, self._arena, lanes=lanes)
        ).state
        for key in (self._settings.part or "").split(".") if self._settings.part else ():
            if not isinstance(state, Mapping) or key not in state:
                raise _no_part(self._settings.part)
            state = state[key]
        return state

    async def _shard(self, name: str, shard: list[_Named]) -> None:
        offset, entries = 0, []
        for each in shard:
            entries.append((each.name, _dtype(each.row), each.row.shape, offset, each.nbytes))
            offset += each.nbytes
        header = encode_header(entries)
        async with await self._open(name, len(header) + offset) as file:
            await file.write(memoryview(header))
            for batch in _cut(shard, _BATCH_BYTES):
                labels = {each.row.label for each in batch}
                tensors = await read_tensors(
                    self._backend, self._bundle, labels, self._arena, lanes=self._settings.lanes
                )
                for each in batch:
                    data = await to_thread.run_sync(_bytes_of, tensors[each.row.label])
                    await file.write(data)

    async def _open(self, name: str, size: int) -> ExportFile:
        self._written += size
        wanted, place = self._settings.block_bytes, self._place(name)
        block_bytes = block_bytes_for(size, wanted, self._target.limits)
        upload = await self._target.open_upload(place.key, size=size, block_bytes=block_bytes)
        return ExportFile(upload, place, size, block_bytes)

    def _place(self, name: str) -> ExportPlace:
        key, step = self._folder + name, self._bundle.id.step
        return ExportPlace(self._target, key, step, self._settings.policy)


class _Counter:
    """Takes what ``torch.save`` writes, and counts it."""

    size = 0

    def write(self, data: Any) -> int:
        """Counts bytes."""
        size = memoryview(data).nbytes
        self.size += size
        return size

    def flush(self) -> None:
        """Nothing is held back."""


class _Feed:
    """Takes what ``torch.save`` writes in a worker thread to a file on the loop."""

    def __init__(self, file: ExportFile) -> None:
        self._file = file

    def write(self, data: Any) -> int:
        """Writes bytes."""
        view = memoryview(data).cast("B")
        anyio.from_thread.run(self._file.write, view)
        return len(view)

    def flush(self) -> None:
        """The blocks are flushed as they are full."""


def _save(state: Any, file: Any) -> None:
    torch.save(state, file)


def named_tensors(bundle: Bundle, part: str | None) -> list[_Named]:
    """The tensors to export with their names, those with the widest items first.

    Args:
        bundle: The index.
        part: The label of what holds them; None takes ``model`` if the state has it at its top or
            one level below, else all of the state.

    Raises:
        UsageError: If there is no such part, or no tensor in it.
    """
    rows: dict[str, TensorRow] = {}
    for structure in bundle.structures:
        for label, number in leaf_labels(structure.tree, "tensor"):
            rows.setdefault(label, structure.tensors[number])
    beginning = _model_of(rows) if part is None else f"{part}."
    found = [
        _Named(label.removeprefix(beginning), row)
        for label, row in rows.items()
        if label.startswith(beginning)
    ]
    if not found:
        raise _no_part(part)
    return sorted(found, key=lambda each: -DTYPES[each.row.dtype].itemsize)


def _model_of(labels: Iterable[str]) -> str:
    for label in labels:
        top, _, rest = label.partition(".")
        if top == "model" and rest:
            return "model."
    for label in labels:
        top, below, rest = (*label.split(".", 2), "", "")[:3]
        if below == "model" and rest:
            return f"{top}.model."
    return ""


def _no_part(part: str | None) -> UsageError:
    what = "no tensors" if part is None else f"nothing to export under {part!r}"
    hint = "Set export.part, or --part of the command, to a label of the state"
    return UsageError(f"The checkpoint has {what}", hint=hint)


def shards_of(tensors: list[_Named], settings: ExportSettings) -> Iterator[list[_Named]]:
    """Cuts tensors into shards."""
    yield from _cut(tensors, settings.max_shard_bytes)


def _cut(tensors: list[_Named], most: int) -> Iterator[list[_Named]]:
    """Groups tensors, in their order, so that each group has so many bytes or is one alone."""
    group: list[_Named] = []
    filled = 0
    for each in tensors:
        if group and filled + each.nbytes > most:
            yield group
            group, filled = [], 0
        group.append(each)
        filled += each.nbytes
    if group:
        yield group


def _dtype(row: TensorRow) -> str:
    name = stored_dtype(DTYPES[row.dtype])
    if name is None:
        raise UnsupportedState(
            f"safetensors has no dtype {row.dtype}", key=row.label, hint='Use final_format="torch"'
        )
    return name


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if not math.prod(plain.shape):
        return memoryview(b"")
    array: Any = plain.view(torch.uint8).numpy()
    return memoryview(array)


__all__ = ["INDEX", "TORCH_FILE", "ExportSettings", "Exported", "export", "named_tensors"]
