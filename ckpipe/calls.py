"""Calls with URLs: a load, and what the command line can.

Each blocks until its work is done, on an event loop in a thread of its own, so a coroutine or a
notebook can call it too.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing, suppress
from functools import partial
from typing import Any, SupportsIndex, TypeVar, Unpack

from ckpipe.backend import without_secrets
from ckpipe.catalog.copy import CopySettings, copy_checkpoint
from ckpipe.catalog.find import top
from ckpipe.catalog.inspect import data_bytes, describe
from ckpipe.catalog.opened import Opened
from ckpipe.convert.exports import export_url
from ckpipe.convert.importing import import_opened
from ckpipe.errors import CheckpointNotFound
from ckpipe.foreign.source import names_file, open_place, refuse_hub_id, split_file
from ckpipe.format.labels import label_filter
from ckpipe.loading.request import LoadOptions
from ckpipe.loop_thread import LoopThread
from ckpipe.memory.arena import Arena
from ckpipe.options import parameters_of, showing
from ckpipe.reading.reader import verify as verify_opened
from ckpipe.running.pipeline import SyncPipeline
from ckpipe.running.validation import Which, location, plain_step, which
from ckpipe.settings import CommonFields, PipelineFields, Settings
from ckpipe.store.registry import Access, open_store
from ckpipe.store.retry import OnRead
from ckpipe.transforms.transform import Transform, transforms_of
from ckpipe.types import (
    CheckpointDescription,
    CheckpointInfo,
    CopyResult,
    ExportResult,
    Form,
    LoadResult,
    VerifyResult,
)

T = TypeVar("T")
Url = str | os.PathLike[str]


class LoadFields(LoadOptions, CommonFields, total=False):
    """The options of a load, and fields of settings."""


@showing(LoadOptions)
def load(
    url: str | os.PathLike[str] | None = None,
    into: Any = None,
    step: Which | None = None,
    *,
    settings: Settings | None = None,
    **fields: Unpack[LoadFields],
) -> LoadResult:
    """Load a checkpoint with one call, for evaluation or inspection; write nothing.

    Opens a pipeline with ``read_only=True``, loads, and closes it; blocks until then. If the place
    has no checkpoint of ckpipe, one of another program is opened; see ``source`` of
    :meth:`ckpipe.Pipeline.load`.

    Args:
        url: The root of the checkpoints, or a checkpoint of another program: a plain path,
            ``file:///…``, or the URL of another backend.
        into: The state to load into; None makes a fresh state, on the CPU.
        step: A step, the id of a checkpoint, or its info; None takes the newest complete one.
        options: As :class:`~ckpipe.loading.request.LoadOptions` describes them.
        settings: Settings to start from.
        fields: Fields of :class:`~ckpipe.Settings`; they override ``settings``.

    Raises:
        CheckpointNotFound: If the step is absent or incomplete, or there is no complete
            checkpoint at all: the folder is absent, or what it holds is no checkpoint. Then the
            error tells what is there, and how to load it.
        CkpipeError: Any error of opening a pipeline, or of :meth:`ckpipe.Pipeline.load`.
    """
    given: dict[str, Any] = {**fields, "read_only": True}
    options = {name: given.pop(name) for name in parameters_of(LoadOptions) if name in given}
    alone = {**options, "fallback": False}  # a checkpoint of another program has no older ones
    place = location(url)
    refuse_hub_id(place or "")
    source = place if step is None else None
    if place is not None:
        given.setdefault("initial", place)
    if source is not None and names_file(source):
        root, _ = split_file(source)
        with (
            suppress(CheckpointNotFound),  # it is a folder of such a name
            SyncPipeline(root, settings=settings, **given) as pipeline,
        ):
            return pipeline.load(into, source=source, **alone)  # type: ignore[return-value]
    with SyncPipeline(place, settings=settings, **given) as pipeline:
        # One list of the root: a folder of another program is not asked for marks of ckpipe.
        backend = pipeline._engine.catalog.backend
        only_own = "initial" in fields or pipeline.settings.resume == "must"
        if source and not only_own and pipeline._call(top, backend)[0] is None:
            return pipeline.load(into, source=source, **alone)  # type: ignore[return-value]
        return _newest(pipeline, into, step, **options)


def _newest(pipeline: SyncPipeline, into: Any, step: Which | None, **options: Any) -> LoadResult:
    try:
        result = pipeline.load(into, step, **options)
    except CheckpointNotFound:
        known = pipeline.steps()
        if step is not None or not known or any(each.complete for each in known):
            raise
        result = None  # it is the root of a run
    if result is None:
        incomplete = len(pipeline.steps())
        raise CheckpointNotFound(
            f"There is no complete checkpoint in {without_secrets(pipeline.settings.url or '')}"
            + (f", and {incomplete} that are not complete" if incomplete else ""),
            hint="Check with `ckpipe ls` that this is the root of the run",
        )
    return result


def inspect(
    url: Url,
    step: Which | None = None,
    *,
    include: Sequence[str] | None = None,
    settings: Settings | None = None,
    **fields: Unpack[PipelineFields],
) -> CheckpointDescription:
    """Describe a checkpoint by its metadata; read no data, and write nothing.

    Args:
        url: The root of the checkpoints, or a checkpoint of another program: a plain path,
            ``file:///…``, or the URL of another backend.
        step: A step, the id of a checkpoint, or its info; None takes the newest complete one.
        include: Globs of the labels of tensors and values to describe; None for all.
        settings: The options of backends, and the retry settings.
        fields: Fields of :class:`~ckpipe.Settings`; they override ``settings``.

    Returns:
        Names, shapes, dtypes, sizes, sharing, values, metrics and metadata.

    Raises:
        CheckpointNotFound: If there is no such checkpoint.
        UsageError: If the place has a format that is known and not opened.
        CorruptCheckpoint: If its metadata are damaged.
        StoreError: If the store failed.
    """

    async def work(settings: Settings) -> CheckpointDescription:
        async with open_place(_url(url), settings) as place:
            info = await place.chosen(_which(step))
            async with place.opened(info, lease=False) as opened:
                return describe(opened.document, label_filter(include))

    return called(work, settings, fields)


def verify(
    url: Url,
    step: Which | None = None,
    *,
    settings: Settings | None = None,
    **fields: Unpack[PipelineFields],
) -> VerifyResult:
    """Read a whole checkpoint and check every byte, also of manifests and group objects.

    The files of another program have no checksums. Their headers and sizes and the places of
    tensors are checked, all tensors are read, and ``source`` of the result says so.

    Args:
        url: As for :func:`ckpipe.inspect`.
        step: As for :func:`ckpipe.inspect`.
        settings: The options of backends, the retry settings, and the lanes.
        fields: Fields of :class:`~ckpipe.Settings`; they override ``settings``.

    Raises:
        CheckpointNotFound: If there is no such checkpoint.
        UsageError: If the place has a format that is known and not opened.
        CorruptCheckpoint: If it is damaged, or a file of another program changed meanwhile.
        StoreError: If the store failed.
    """

    async def work(settings: Settings) -> VerifyResult:
        async with (
            open_place(_url(url), settings) as place,
            place.opened(await place.chosen(_which(step))) as opened,
        ):
            return await verified(opened, settings)

    return called(work, settings, fields)


def copy(
    source: Url,
    target: Url,
    step: Which | None = None,
    *,
    settings: Settings | None = None,
    **fields: Unpack[PipelineFields],
) -> CopyResult:
    """Copy a checkpoint of ckpipe to another root, verified, on a store of any kind.

    On the target it is complete or absent. Files that are there and whole are not copied again, so
    another call continues an interrupted copy. A damaged data file there is replaced, and nothing
    else.

    Args:
        source: The root of the checkpoint.
        target: The root of the copy; created if missing.
        step: As for :func:`ckpipe.inspect`.
        settings: The options of backends, the retry settings, lanes and the size of blocks.
        fields: Fields of :class:`~ckpipe.Settings`; they override ``settings``.

    Raises:
        CheckpointNotFound: If there is no such checkpoint.
        UsageError: If the target has a tombstone of the checkpoint.
        CommitConflict: If the target has other metadata under its name.
        CorruptCheckpoint: If the source is damaged, also if that is a manifest or group object; the
            target stays incomplete.
        StoreError: If a store failed.
    """

    async def work(settings: Settings) -> CopyResult:
        how = CopySettings.of(settings)
        async with open_place(_url(source), settings) as place:
            info = await place.own(_which(step))
            async with (
                open_store(_url(target), settings, Access.CREATE) as store,
                place.opened(info),
            ):
                return await copy_checkpoint(place.store, store, info.key, how)

    return called(work, settings, fields)


def import_checkpoint(
    source: Url,
    target: Url,
    *,
    step: SupportsIndex | None = None,
    transform: Sequence[Transform] = (),
    which: Which | None = None,
    settings: Settings | None = None,
    **fields: Unpack[PipelineFields],
) -> CheckpointInfo:
    """Take over a checkpoint of another program, or one of ckpipe with transforms.

    The result is an ordinary checkpoint of one rank, the newest on its root, with a checksum of
    every mebibyte. It is written block by block: the host memory is that of the blocks on their
    way, at most ``staging.bytes`` if that is set, whatever the size of the checkpoint. It is
    complete or absent. After an error nothing is left. After a kill a sweep removes the remains,
    and another call begins anew.

    Args:
        source: The checkpoint: a file or folder of another program, or a root of checkpoints.
        target: The root of the new checkpoint; created if missing. No other checkpoint there
            changes.
        step: The step of the new checkpoint; None for that of a checkpoint of ckpipe, else 0.
        transform: Transforms, in their order.
        which: Of a root of checkpoints, the step, id or info of the one to take; None for the
            newest complete one.
        settings: The options of backends, the retry settings, lanes and the size of blocks.
        fields: Fields of :class:`~ckpipe.Settings`; they override ``settings``.

    Returns:
        The new checkpoint. Its metadata name the source, if another program wrote that.

    Raises:
        CheckpointNotFound: If the source is no checkpoint that ckpipe opens.
        UsageError: If its format is known and not opened, or the arguments are wrong, or expanded
            tensors would take far more bytes than are stored.
        TargetMismatch: If a transform does not fit; or ranks have saved different values, which a
            checkpoint of one rank cannot hold.
        CorruptCheckpoint: If the source is damaged, or has changed meanwhile.
        StoreError: If a store failed.
    """
    transforms = transforms_of(transform)
    number = None if step is None else plain_step(step)

    async def work(settings: Settings) -> CheckpointInfo:
        places = _url(source), _url(target)
        return await imported(*places, settings, _which(which), step=number, transform=transforms)

    return called(work, settings, fields)


def export(
    url: Url,
    target: Url | None = None,
    *,
    step: Which | None = None,
    form: Form = "hf",
    part: str | None = None,
    dtype: str | None = None,
    transform: Sequence[Transform] | None = None,
    extra: Sequence[str | os.PathLike[str]] | None = None,
    file_name: str | None = None,
    max_shard_bytes: int | str | None = None,
    expanded: bool = False,
    settings: Settings | None = None,
    **fields: Unpack[PipelineFields],
) -> ExportResult:
    """Write a checkpoint, verified, in a form that other programs load.

    Nothing on the target is ever replaced. An export that was interrupted looks unfinished to its
    readers, and another call continues it. Host memory holds 128 MiB of a file at a time, or two
    tensors if these are larger; ``"torch"`` and ``"dcp"`` may take 2 MiB more for each tensor.

    Args:
        url: The root of the checkpoints: a plain path, ``file:///…``, or the URL of another
            backend.
        target: The folder to write, on a store of any kind; created if missing. As ``"torch"``, a
            name that ends in ``.pt``, ``.pth``, ``.bin``, ``.ckpt`` or ``.tar`` is the file itself.
            None writes ``<id>.<form>`` beside the checkpoint.
        step: A step, the id of a checkpoint, or its info; None takes the newest complete one.
        form: ``"hf"`` for safetensors as ``save_pretrained`` of transformers writes them,
            ``"torch"`` for a file that ``torch.load`` opens, or ``"dcp"`` for a folder that
            ``torch.distributed.checkpoint.load`` reads, on any number of ranks.
        part: The label of the part to export; None for ``model`` as ``"hf"``, and for all of the
            state otherwise.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"`` (or ``"fp32"``, ``"bf16"``,
            ``"fp16"``) for all floating-point tensors; None leaves them as they were saved.
        transform: Transforms of the checkpoint, in their order.
        extra: Files to copy beside the weights, such as ``config.json``.
        file_name: The file of ``"hf"``; None for ``model.safetensors``.
        max_shard_bytes: The largest file, as a number or text such as ``"2GB"``, unless one tensor
            is larger.
        expanded: Whether expanded tensors may take far more bytes than are stored.
        settings: Settings to start from. Their ``export`` applies to arguments that are None.
        fields: Fields of :class:`~ckpipe.Settings`; they override ``settings``.

    Raises:
        CheckpointNotFound: If there is no such checkpoint.
        UsageError: If an argument is wrong, the part is missing, or expanded tensors would take far
            more bytes than are stored.
        UnsupportedState: If the form cannot hold something; names it.
        TargetMismatch: If a transform does not fit the checkpoint.
        CommitConflict: If there is a file with other bytes, or one of another export.
        CorruptCheckpoint: If the checkpoint is damaged.
        StoreError: If a store failed.
    """
    content = {
        "part": part,
        "dtype": dtype,
        "transform": None if transform is None else transforms_of(transform),
        "extra": extra,
        "file_name": file_name,
        "max_shard_bytes": max_shard_bytes,
    }
    given: Any = {name: value for name, value in content.items() if value is not None}

    async def work(settings: Settings) -> ExportResult:
        asked = settings.override(export=given)
        place = location(target)
        return await export_url(_url(url), place, asked, form, _which(step), expanded=expanded)

    return called(work, settings, fields)


# On an open place, also for the commands


async def verified(opened: Opened, settings: Settings) -> VerifyResult:
    """Read and check all bytes of a checkpoint, and write nothing."""
    with closing(Arena(settings.staging.block_bytes)) as arena:
        return await verify_opened(opened, arena, lanes=settings.load.lanes)


async def imported(
    source: str,
    target: str,
    settings: Settings,
    chosen: int | str | None,
    *,
    step: int | None,
    transform: Sequence[Transform],
    on_read: OnRead | None = None,
    expect: Callable[[int], object] = bool,
) -> CheckpointInfo:
    """Import a checkpoint; tell of its size before its data are read, and of reads."""
    async with (
        open_place(source, settings, on_read) as place,
        place.opened(await place.chosen(chosen)) as opened,
        open_store(target, settings, Access.CREATE) as store,
    ):
        expect(data_bytes(opened.document))
        return await import_opened(opened, store, settings, step=step, transform=transform)


def called(
    work: Callable[[Settings], Awaitable[T]], settings: Settings | None, fields: PipelineFields
) -> T:
    asked = Settings(**fields) if settings is None else settings.override(**fields)
    loop = LoopThread("ckpipe call")
    try:
        return loop.call(partial(work, asked))
    finally:
        loop.close()


def _url(url: Url) -> str:
    return location(url) or ""


def _which(step: Which | None) -> int | str | None:
    return None if step is None else which(step)
