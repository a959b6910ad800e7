"""Write checkpoints in forms that other programs load: ``torch.save``, Hugging Face's, or DCP's.

An export lies in a target, or beside its checkpoint in a folder ``<id>.<form>``. No retention
touches it. It is made from the checkpoint itself, and every byte is verified, so tensors are whole
however many ranks held them. Files are created and never replaced. The file by which a reader finds
the others comes last: an interrupted export does not look like a finished one, and repeating it
gives the same files. An existing file is compared byte for byte: its name does not tell which part
of a state, or which version of torch, it was made from.

A file is filled in windows, which bound the memory. The tensors of a load are views of the window,
so that the reader puts verified bytes in their place. Several ranks plan the same files
(:mod:`ckpipe.convert.export_forms`) and divide them; the store tells when all are there.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from functools import partial
from typing import get_args

import anyio
import torch

from ckpipe import threads
from ckpipe.backend import Backend, without_secrets
from ckpipe.catalog.copy import CopySettings, aborted_on_error, block_bytes_for
from ckpipe.catalog.find import stat_or_none
from ckpipe.catalog.inspect import batches, data_bytes
from ckpipe.catalog.leases import EXPORTING, under_lease
from ckpipe.catalog.opened import Opened
from ckpipe.convert.export_forms import ENDS, File, Gap, Part, plan_files, size_of
from ckpipe.errors import (
    CheckpointIncomplete,
    CommitConflict,
    ObjectExists,
    UsageError,
)
from ckpipe.events import CheckpointExported
from ckpipe.loading.labelled_tensors import LabelledTensors
from ckpipe.loading.wrappers import dequantized
from ckpipe.memory.arena import Arena
from ckpipe.options import one_of
from ckpipe.reading.fill import with_lazy_bits
from ckpipe.save.context import SaveContext
from ckpipe.save.follow_up import until_complete
from ckpipe.save.save import Save
from ckpipe.settings import Settings
from ckpipe.state.tensors import lazy_bits
from ckpipe.store.registry import Access, open_store
from ckpipe.store.retry import OnRead, RetryPolicy, logging_policy, pauses, retrying
from ckpipe.types import ExportResult, Form, first_of

_WINDOW_BYTES = 64 << 20
"""The bytes of a file that are read at a time, unless a single tensor is larger. While they are
written, the next ones are read."""

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.02, 1.0

_ELSEWHERE = "Delete that file or its folder and export again, or export to another target"


async def export(
    opened: Opened,
    arena: Arena,
    settings: Settings,
    form: Form,
    policy: RetryPolicy,
    target: Backend,
    folder: str,
    *,
    name: str | None = None,
    expanded: bool = False,
    rank: int = 0,
    world_size: int = 1,
) -> tuple[tuple[str, ...], int]:
    """Write a checkpoint in another form; repeating it changes nothing.

    Args:
        opened: The checkpoint.
        arena: Lends the blocks that are read into; used on the caller's thread only.
        settings: The settings, with the content of the export.
        form: The form.
        policy: The retry policy for writing blocks.
        target: The target store, which retries its requests too.
        folder: The folder there, with a ``/`` at its end; empty for the root.
        name: The name of the file, if the form has only one; None for that of the form.
        expanded: Whether it may write far more bytes than the checkpoint stores.
        rank: The number of this process among those that write the export together.
        world_size: Their number.

    Returns:
        The names of its files, and their size together.

    Raises:
        UsageError: If the part to export is missing, or takes far more bytes than are stored.
        TargetMismatch: If a transform does not fit the checkpoint.
        UnsupportedState: If the form cannot hold something; names it.
        CommitConflict: If there is already a file with other bytes, or one of another export.
        CheckpointIncomplete: If files of other ranks do not come in time.
        CorruptCheckpoint: If the checkpoint is damaged, or another program has changed it.
        StoreError: If the store failed; repeating the export continues it.
    """
    before = (await target.children(folder)).objects
    there = {each.key.removeprefix(folder) for each in before}
    plan = partial(plan_files, opened, form, settings.export, expanded=expanded)
    opened, files = await threads.run_sync(plan)
    tensors = await threads.run_sync(LabelledTensors, opened)
    if name is not None:
        files = [replace(each, name=name) for each in files]
    names, last = [each.name for each in files], files[-1]
    work = _Writer(opened, tensors, arena, settings, policy, target, folder)
    # Weights of another export might be taken by a reader of this one, unless it names its file.
    if name is None and (
        others := sorted(each for each in there.difference(names) if each.endswith(ENDS))
    ):
        raise work.conflict("This file belongs to another export", others[0])
    # Other ranks may be on machines without these files.
    extra = await threads.run_sync(_extra_files, settings.export.extra) if rank == 0 else []
    for file in [*extra, *files[rank:-1:world_size]]:
        await work.write(file)
    if rank == 0:
        for file in [each for number, each in enumerate(files[:-1]) if number % world_size]:
            # One that lay there before may have other bytes, which no reader would notice.
            await (work.write(file) if file.name in there else work.until_there(file))
        await work.write(last)
    else:
        await work.until_there(last)
    beside = [os.path.basename(each) for each in settings.export.extra]
    size = sum([(await target.stat(folder + each)).size for each in beside])
    size += sum(size_of(part) for each in files for part in each.parts)
    return (*names[:-1], *beside, last.name), size


def _extra_files(paths: Sequence[str | os.PathLike[str]]) -> list[File]:
    """Read the files that are to lie beside the weights."""
    files = []
    for path in paths:
        try:
            with open(path, "rb") as file:
                files.append(File(os.path.basename(path), [file.read()]))
        except OSError as error:
            raise UsageError(
                f"The extra file {path} cannot be read: {error.strerror}",
                hint="Name each file with its path",
            ) from error
    names = [each.name for each in files]
    if len(set(names)) < len(names) or any(each.endswith(ENDS) for each in names):
        raise UsageError(
            f"Extra files need names of their own; these are {first_of(names, 8)}",
            hint="Leave out files of weights, which the export writes",
        )
    return files


class _Writer:
    """Write the files of an export from a checkpoint to a store.

    Args:
        opened: The checkpoint, as the files were planned from it.
        tensors: Its tensors.
        arena: Lends the blocks that are read into.
        settings: The numbers of lanes, the size of blocks, and the time to wait for other ranks.
        policy: The retry policy for writing blocks.
        target: The target store.
        folder: The folder there, with a ``/`` at its end; empty for the root.
    """

    def __init__(
        self,
        opened: Opened,
        tensors: LabelledTensors,
        arena: Arena,
        settings: Settings,
        policy: RetryPolicy,
        target: Backend,
        folder: str,
    ) -> None:
        self._settings, self._policy, self._target, self._folder = settings, policy, target, folder
        self._opened, self._tensors, self._arena = opened, tensors, arena
        self._windows = [memoryview(b"")] * 2
        dtype = settings.export.dtype
        self._unwrap = None if dtype is None else partial(dequantized, dtype)

    def conflict(self, text: str, name: str) -> CommitConflict:
        """Return the error for a file that is in the way."""
        return CommitConflict(
            text, step=self._opened.document.step, key=self._folder + name, hint=_ELSEWHERE
        )

    async def write(self, file: File) -> None:
        """Write a file, which becomes visible as a whole, or compare it with the one there.

        Raises:
            CommitConflict: If there is a file with other bytes.
            CorruptCheckpoint: If the checkpoint is damaged, or another program has changed it.
            StoreError: If a store failed.
        """
        target, key, size = self._target, self._folder + file.name, sum(map(size_of, file.parts))
        conflict = self.conflict("A file with other bytes has the name of this one", file.name)
        block_bytes = block_bytes_for(size, self._settings.staging.block_bytes, target.limits)
        there = await stat_or_none(target, key)
        if there is None:
            upload = await target.open_upload(key, size=size, block_bytes=block_bytes)

            async def send(offset: int, block: memoryview) -> None:
                await retrying(self._policy, lambda: upload.write(offset, block))

            async with aborted_on_error(upload):
                await self._each_block(file, block_bytes, send)
                await self._opened.check_unchanged()
                try:
                    await retrying(self._policy, upload.complete)
                    return
                except ObjectExists:
                    await upload.abort()
            there = await target.stat(key)

        async def compare(offset: int, block: memoryview) -> None:
            found = memoryview(bytearray(len(block)))
            await target.read_into(key, offset, found)
            if found != block:
                raise conflict

        if there.size != size:
            raise conflict
        await self._each_block(file, block_bytes, compare)

    async def _each_block(
        self, file: File, block_bytes: int, use: Callable[[int, memoryview], Awaitable[None]]
    ) -> None:
        """Fill a file window by window, and use its blocks, some at a time."""

        async def use_all(start: int, blocks: memoryview) -> None:
            offsets = range(0, len(blocks), block_bytes)
            calls = [partial(use, start + at, blocks[at : at + block_bytes]) for at in offsets]
            await threads.all_of(calls, self._settings.upload.lanes)

        start, filled = 0, memoryview(b"")
        for parts in batches(file.parts, size_of, _WINDOW_BYTES):
            whole = len(filled) - len(filled) % block_bytes
            rest = filled[whole:]
            window = self._window(len(rest) + sum(map(size_of, parts)))
            window[: len(rest)] = rest
            fill = partial(self._fill, window, len(rest), parts)
            await threads.all_of([partial(use_all, start, filled[:whole]), fill])
            start, filled = start + whole, window
        await use_all(start, filled)

    def _window(self, nbytes: int) -> memoryview:
        """Return memory on a page, that of the last window but one if it is large enough."""
        self._windows.reverse()
        if len(self._windows[0]) < nbytes:
            memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._windows[0] = memoryview(memory)
        return self._windows[0][:nbytes]

    async def _fill(self, memory: memoryview, at: int, parts: Sequence[Part]) -> None:
        """Put parts of a file into a window, from an offset in it on."""
        window = torch.frombuffer(memory, dtype=torch.uint8)
        views: list[tuple[str, torch.Tensor]] = []
        for part in parts:
            if isinstance(part, Gap):
                if [each.nbytes for each in part.tensors.values()] != [part.nbytes]:
                    window[at : at + part.nbytes].zero_()  # they may leave bytes between them
                for label, like in part.tensors.items():
                    offset = at // like.itemsize + int(like.storage_offset())
                    view = torch.empty(0, dtype=like.dtype)
                    view.set_(window.untyped_storage(), offset, like.shape, like.stride())
                    views.append((label, with_lazy_bits(view, lazy_bits(like))))
            else:
                memory[at : at + len(part)] = part
            at += size_of(part)
        wrapped = {label for label, _ in views} & self._tensors.wrappers
        plain = [each for each in views if each[0] not in wrapped]
        boxes = [(label, (0,) * view.dim(), view) for label, view in plain]
        lanes = self._settings.load.lanes
        await self._tensors.fill(boxes, self._arena, lanes)
        if wrapped:
            found = await self._tensors.read(wrapped, self._arena, lanes, self._unwrap)
            for label, view in views:
                if label in wrapped:
                    view.copy_(found[label])

    async def until_there(self, file: File) -> None:
        """Wait until a file is there, which another rank may write.

        Raises:
            CheckpointIncomplete: If it has not come for ``incomplete_after_seconds``.
            StoreError: If the store failed.
        """
        limit, key = self._settings.incomplete_after_seconds, self._folder + file.name
        until = time.monotonic() + limit
        for pause in pauses(until, _FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS):
            await anyio.sleep(pause)
            if await stat_or_none(self._target, key) is not None:
                return
        raise CheckpointIncomplete(
            f"The export is not whole: another rank has not written this file, and none came "
            f"within incomplete_after_seconds ({limit:g} s)",
            step=self._opened.document.step,
            key=key,
            hint="Look at the errors of the other ranks, and export again with `ckpipe export`, "
            "which continues it",
        )


async def export_url(
    url: str,
    target: str | None,
    settings: Settings,
    form: Form,
    step: int | str | None,
    *,
    expanded: bool = False,
    on_read: OnRead | None = None,
    expect: Callable[[int], object] = bool,
) -> ExportResult:
    """Write the checkpoint of a root in another form.

    Args:
        url: The root.
        target: The folder to write, or as ``"torch"`` the file, if its name ends like one; None
            for a folder beside the checkpoint.
        settings: The settings, with the content of the export.
        form: The form.
        step: The step or id of the checkpoint; None for the newest complete one.
        expanded: Whether the export may have far more bytes than the checkpoint.
        on_read: Called as bytes are read.
        expect: Called with the bytes of the checkpoint.

    Raises:
        CheckpointNotFound: If there is no such checkpoint.
        UsageError: If there is no such form.
        CkpipeError: As :func:`export` does.
    """
    from ckpipe.foreign.files import TORCH_FILES  # a run that saves does without them
    from ckpipe.foreign.source import open_place, split_file

    one_of("form", form, *get_args(Form))
    root, name = target or url, None
    if target is not None and form == "torch" and target.endswith(TORCH_FILES):
        root, name = split_file(target)
    access = Access.CHANGE if target is None else Access.CREATE
    async with (
        open_place(url, settings, on_read) as place,
        place.opened(await place.chosen(step)) as opened,
    ):
        if target is None and opened.unverified:
            raise UsageError(
                f"{place.name} is a checkpoint of another program, beside which nothing is written",
                hint="Name the folder to write",
            )
        expect(data_bytes(opened.document))
        async with open_store(root, settings, access) as store:
            with closing(Arena(settings.staging.block_bytes)) as arena:
                folder = f"{opened.id}.{form}/" if target is None else ""
                files, size = await export(
                    opened, arena, settings, form, CopySettings.of(settings).policy, store, folder,
                    name=name, expanded=expanded,
                )  # fmt: skip
    where = without_secrets(f"{root.rstrip('/')}/{folder}").rstrip("/") or "/"
    return ExportResult(opened.id, opened.document.step, where, files, size)


@asynccontextmanager
async def exported(context: SaveContext, save: Save) -> AsyncIterator[None]:
    """Export the save of the ``with`` block, if it or, when it is final, the settings request it.

    All ranks export together. Meanwhile no retention removes the checkpoint: neither that of this
    process nor that of its worker or of another rank. For those there is a lease before the save
    begins.

    Args:
        context: The context of the save.
        save: The save.

    Raises:
        TimeoutError: If the other ranks do not commit within ``incomplete_after_seconds``.
        CkpipeError: Any error of :func:`ckpipe.convert.exports.export`.
    """
    form = save.request.export or context.settings.final_format
    policy = logging_policy(context.settings.upload)
    if form == "ckpipe" or not (save.request.final or save.request.export):
        yield
        return
    catalog, folder = context.store.catalog, f"{save.name}.{form}/"
    catalog.loading[save.name] += 1  # protects it even if no lease can be written
    try:
        async with under_lease(context.store.retrying, save.name + EXPORTING):
            yield
            with save.clock.timing("export"):
                info = save.committed.result()
                if not info.complete:
                    seconds = context.settings.incomplete_after_seconds
                    info = await until_complete(context.store, info, seconds)
                async with catalog.opened(info.key) as opened:
                    done = await export(
                        opened, context.arena, context.settings, form, policy, opened.store, folder,
                        rank=context.rank, world_size=context.world_size,
                    )  # fmt: skip
    finally:
        catalog.loading[save.name] -= 1
    context.events.emit(CheckpointExported(*save.where, folder, *done))
