"""Write checkpoints in forms that other programs load: a file of ``torch.save``, or a hub's.

An export lies in a folder ``<id>.torch`` or ``<id>.hf``, beside its checkpoint or on another
store. No retention touches it. It is made from the checkpoint itself, and every byte is verified,
so tensors are whole however many ranks held them. Files are created and never replaced. The file
by which a reader finds the others comes last: an interrupted export does not look like a finished
one, and repeating it gives the same files. An existing file is compared byte for byte: its name
does not tell which part of a state, or which version of torch, it was made from.

Source of the sharded form: the files that ``save_pretrained`` of transformers 5 writes, shards
``model-00001-of-0000N.safetensors`` and ``model.safetensors.index.json``.
"""

from __future__ import annotations

import glob
import json
import math
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import anyio
import anyio.from_thread
import torch

from ckpipe import threads
from ckpipe.backend import Backend, Upload
from ckpipe.catalog.copy import aborted_on_error, block_bytes_for
from ckpipe.catalog.inspect import check_expansion, leaf_labels, tensor_bytes
from ckpipe.catalog.leases import EXPORTING, under_lease
from ckpipe.errors import CommitConflict, ObjectExists, UnsupportedState, UsageError
from ckpipe.events import CheckpointExported
from ckpipe.format.checksum import crc32c
from ckpipe.format.data_file import encode_header, item_bytes, stored_dtype
from ckpipe.format.labels import label_filter
from ckpipe.format.manifest import ManifestDocument, TensorRow
from ckpipe.format.tree import wrappers_in
from ckpipe.loading.load import LoadRequest, read_all, read_tensors
from ckpipe.memory.arena import Arena
from ckpipe.save.context import SaveContext
from ckpipe.save.follow_up import until_complete
from ckpipe.save.save import Save
from ckpipe.settings import Settings
from ckpipe.store.retry import RetryPolicy, create_once, logging_policy, retrying

INDEX = "model.safetensors.index.json"
TORCH_FILE = "state.pt"

Item = TypeVar("Item")

_Named = tuple[str, TensorRow]
"""A tensor of an export: its name there, and its row in the checkpoint."""

_BATCH_BYTES = 256 << 20
"""The bytes of tensors in memory at a time, unless a single tensor is larger."""


@dataclass(frozen=True, slots=True)
class Exported:
    """The result of an export.

    Args:
        folder: The folder on the store, relative to the root.
        files: Names of its files.
        bytes: Their size together.
    """

    folder: str
    files: tuple[str, ...]
    bytes: int


async def export(
    backend: Backend,
    bundle: ManifestDocument,
    arena: Arena,
    settings: Settings,
    form: Literal["torch", "hf"],
    policy: RetryPolicy,
    target: Backend | None = None,
    *,
    expanded: bool = False,
) -> Exported:
    """Write a checkpoint in another form; repeating it changes nothing.

    Args:
        backend: The store of the checkpoint, which retries its requests.
        bundle: The checkpoint's index, validated.
        arena: Lends the blocks that are read into; used on the caller's thread only.
        settings: The settings, with the part to export and its form.
        form: ``"torch"`` or ``"hf"``.
        policy: The retry policy for writing blocks.
        target: The target store, which retries its requests too; None for beside the checkpoint.
        expanded: Whether ``"hf"`` may write far more bytes than the checkpoint stores.

    Raises:
        UsageError: If the part to export is missing, or takes far more bytes than are stored.
        UnsupportedState: If a tensor has a dtype that safetensors lacks, or, for ``"torch"``, the
            checkpoint holds pickled objects and these are refused.
        CommitConflict: If there is already a file with other bytes.
        CorruptCheckpoint: If the checkpoint is damaged.
        StoreError: If the store failed; repeating the export continues it.
    """
    folder = f"{bundle.id}.{form}/"
    work = _Exporting(backend, bundle, arena, settings, policy, target or backend, folder)
    return await (work.torch() if form == "torch" else work.hf(expanded=expanded))


@dataclass(slots=True)
class _Exporting:
    backend: Backend
    bundle: ManifestDocument
    arena: Arena
    settings: Settings
    policy: RetryPolicy
    target: Backend
    folder: str
    written: int = 0

    async def torch(self) -> Exported:
        """Write one file that ``torch.load`` reads."""
        state = await self._state()
        counter = _Sink()
        # Twice, since the store needs the size before the first block.
        await threads.run_sync(_save, state, counter)
        async with self._file(TORCH_FILE, counter.size) as file:
            await threads.run_sync(_save, state, _Sink(file))
        return Exported(self.folder, (TORCH_FILE,), self.written)

    async def hf(self, *, expanded: bool) -> Exported:
        """Write sharded safetensors with an index."""
        asked = self.settings.export
        tensors = named_tensors(self.bundle, asked.part, asked.dtype)
        if not expanded:
            sizes = {row.label: tensor_bytes(row) for _, row in tensors}
            check_expansion("An export", [self.bundle], sum(sizes.values()), sizes)
        shards = list(batches(tensors, _nbytes, self.settings.export.max_shard_bytes))
        names = [
            f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, 1 + len(shards))
        ]
        for name, shard in zip(names, shards, strict=True):
            await self._shard(name, shard)
        weights = {
            tensor: name for name, shard in zip(names, shards, strict=True) for tensor, _ in shard
        }
        total = sum(map(_nbytes, tensors))
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weights.items()))}
        body = json.dumps(index, indent=2).encode()
        key = self.folder + INDEX
        if not await create_once(self.target, key, body):
            await self._check(key, len(body), await threads.run_sync(crc32c, body), 1 << 20)
        return Exported(self.folder, (*names, INDEX), self.written + len(body))

    async def _state(self) -> Any:
        part, dtype = self.settings.export.part, self.settings.export.dtype
        _check_wrappers(self.bundle, f"{part}." if part else "", dtype)
        # What is not exported need not be dequantised.
        select = label_filter([glob.escape(part)] if part and dtype else None)
        request = LoadRequest(
            select=select, strict=False,
            pickling=self.settings.pickle == "allow", per_rank="rank0", dequantized=dtype,
        )  # fmt: skip
        ready = await read_all(
            self.backend, self.bundle, request, self.arena, lanes=self.settings.load.lanes
        )
        state = (await ready.apply()).state
        for key in part.split(".") if part else ():
            if not isinstance(state, Mapping) or key not in state:
                raise _no_part(part)
            state = state[key]
        return state

    async def _shard(self, name: str, shard: list[_Named]) -> None:
        offset, entries = 0, []
        for tensor, row in shard:
            entries.append((tensor, _dtype(row), row.shape, offset, tensor_bytes(row)))
            offset += tensor_bytes(row)
        header = encode_header(entries)
        async with self._file(name, len(header) + offset) as file:
            await file.write(memoryview(header))
            for batch in batches(shard, _nbytes, _BATCH_BYTES):
                labels = {row.label for _, row in batch}
                tensors = await read_tensors(
                    self.backend, self.bundle, labels, self.arena, lanes=self.settings.load.lanes,
                    dequantized=self.settings.export.dtype,
                )  # fmt: skip
                for _, row in batch:
                    data = await threads.run_sync(_bytes_of, tensors[row.label])
                    await file.write(data)

    @asynccontextmanager
    async def _file(self, name: str, size: int) -> AsyncIterator[ExportFile]:
        """Open a file that becomes visible after the ``with`` block; an error leaves nothing."""
        self.written += size
        key, wanted = self.folder + name, self.settings.staging.block_bytes
        block_bytes = block_bytes_for(size, wanted, self.target.limits)
        upload = await self.target.open_upload(key, size=size, block_bytes=block_bytes)
        file = ExportFile(upload, self.policy, min(size, block_bytes))
        async with aborted_on_error(upload):
            yield file
            await file.flush()
            try:
                await retrying(self.policy, upload.complete)
            except ObjectExists:
                await self._check(key, size, file.sum, max(1, min(size, block_bytes)))
                await upload.abort()

    async def _check(self, key: str, size: int, sum: int, block_bytes: int) -> None:
        """Compare an existing file with the file of this export.

        Args:
            key: The key of the file.
            size: The size of the export's file in bytes.
            sum: Its CRC-32C.
            block_bytes: The bytes of one read.

        Raises:
            CommitConflict: If the files differ.
            StoreError: If the store failed.
        """
        if (await self.target.stat(key)).size == size:
            found, buffer = 0, memoryview(bytearray(min(size, block_bytes)))
            for offset in range(0, size, block_bytes):
                block = buffer[: size - offset]
                await self.target.read_into(key, offset, block)
                found = await threads.run_sync(crc32c, block, found)
            if found == sum:
                return
        raise CommitConflict(
            "A file with other bytes has the name of this export's file",
            step=self.bundle.id.step,
            key=key,
            hint="Delete its folder and export again, or export to another target",
        )


class _Sink:
    """Count the bytes that ``torch.save`` writes in a worker thread, and pass them to a file.

    Args:
        file: A file on the loop; None only counts.
    """

    def __init__(self, file: ExportFile | None = None) -> None:
        self._file, self.size = file, 0

    def write(self, data: Any) -> int:
        """Take bytes."""
        view = memoryview(data).cast("B")
        self.size += len(view)
        if self._file is not None:
            anyio.from_thread.run(self._file.write, view)
        return len(view)

    def flush(self) -> None:
        """Do nothing: a block of the file is flushed when it is full."""


def _save(state: Any, file: Any) -> None:
    torch.save(state, file)


def _nbytes(tensor: _Named) -> int:
    return tensor_bytes(tensor[1])


def named_tensors(
    bundle: ManifestDocument, part: str | None, dtype: str | None = None
) -> list[_Named]:
    """List the tensors to export with their names, those with the widest elements first.

    Args:
        bundle: The index.
        part: The label of the part to export; None takes ``model`` if the state has it at its top
            or one level below, else all of the state.

        dtype: The dtype to which wrapper tensors are dequantised; None refuses them.

    Raises:
        UsageError: If there is no such part, or no tensor in it.
        UnsupportedState: If there is a wrapper tensor in it, and no dtype.
    """
    rows: dict[str, TensorRow] = {}
    for structure in bundle.structures:
        wrappers = wrappers_in(structure)
        inside = tuple(f"{label}." for label, _ in wrappers)
        for label, number in leaf_labels(structure.tree, "tensor"):
            if not label.startswith(inside):
                rows.setdefault(label, structure.tensors[number])
        for label, node in wrappers:
            rows.setdefault(label, TensorRow(label, dtype or "", tuple(node[1]["size"])))
    beginning = _model_of(rows) if part is None else f"{part}."
    _check_wrappers(bundle, beginning, dtype)
    found = [
        (label.removeprefix(beginning), row)
        for label, row in rows.items()
        if label.startswith(beginning)
    ]
    if not found:
        raise _no_part(part)
    return sorted(found, key=lambda each: -(item_bytes(each[1].dtype) or 0))


def _check_wrappers(bundle: ManifestDocument, beginning: str, dtype: str | None) -> None:
    for structure in bundle.structures if dtype is None else ():
        for label, node in wrappers_in(structure):
            if f"{label}.".startswith(beginning):
                raise UnsupportedState(
                    f"This is a wrapper tensor of {node[1]['class']}, which other programs cannot "
                    "read",
                    key=label,
                    hint="Set export.dtype, or --dtype of the command, to dequantise it",
                )


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


def batches(
    items: Iterable[Item], nbytes: Callable[[Item], int], most: int
) -> Iterator[list[Item]]:
    """Group items, in their order, so that a group has at most ``most`` bytes or one item."""
    group: list[Item] = []
    filled = 0
    for each in items:
        size = nbytes(each)
        if group and filled + size > most:
            yield group
            group, filled = [], 0
        group.append(each)
        filled += size
    if group:
        yield group


def _dtype(row: TensorRow) -> str:
    name = stored_dtype(row.dtype)
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


class ExportFile:
    """A file being written, from its beginning to its end.

    Args:
        upload: The upload that was opened for it.
        policy: The retry policy for writing blocks.
        block_bytes: The size of all blocks except the last.
    """

    def __init__(self, upload: Upload, policy: RetryPolicy, block_bytes: int) -> None:
        self._upload, self._policy = upload, policy
        self._block = memoryview(bytearray(block_bytes))
        self._offset = self._filled = 0
        self.sum = 0

    async def write(self, data: memoryview) -> None:
        """Write the next bytes.

        Raises:
            StoreError: If the store failed.
        """
        while data:
            take = min(len(data), len(self._block) - self._filled)
            self._block[self._filled : self._filled + take] = data[:take]
            self._filled += take
            data = data[take:]
            if self._filled == len(self._block):
                await self.flush()

    async def flush(self) -> None:
        """Write the block that is being filled, unless it is empty."""
        if not self._filled:
            return
        block, offset = self._block[: self._filled], self._offset
        self.sum = await threads.run_sync(crc32c, block, self.sum)
        await retrying(self._policy, lambda: self._upload.write(offset, block))
        self._offset += self._filled
        self._filled = 0


@asynccontextmanager
async def exported(context: SaveContext, save: Save) -> AsyncIterator[None]:
    """Export the save of the ``with`` block, if it is final and the settings request an export.

    With several ranks, rank 0 exports. Meanwhile no retention removes the checkpoint: neither that
    of this process nor that of its worker or of another rank. For those there is a lease before the
    save begins.

    Args:
        context: The context of the save.
        save: The save.

    Raises:
        TimeoutError: If the other ranks do not commit within ``incomplete_after_seconds``.
        CkpipeError: Any error of :func:`ckpipe.export.export`.
    """
    form, policy = context.settings.final_format, logging_policy(context.settings.upload)
    if form == "ckpipe" or context.rank != 0 or not save.request.final:
        yield
        return
    catalog = context.store.catalog
    catalog.loading[save.name] += 1  # protects it even if no lease can be written
    try:
        async with under_lease(context.store.retrying, save.name + EXPORTING):
            yield
            with save.clock.timing("export"):
                info = save.committed.result()
                if not info.complete:
                    seconds = context.settings.incomplete_after_seconds
                    info = await until_complete(context.store, info, seconds)
                async with catalog.reading(info.key) as bundle:
                    done = await export(
                        context.store.retrying,
                        bundle,
                        context.arena,
                        context.settings,
                        form,
                        policy,
                    )
    finally:
        catalog.loading[save.name] -= 1
    context.events.emit(CheckpointExported(*save.where, done.folder, done.files, done.bytes))
