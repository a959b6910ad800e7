"""Stage 6: commit the save by the creation of one small object."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import replace
from datetime import UTC, datetime

from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from ckpipe import threads
from ckpipe.backend import PutMode
from ckpipe.catalog.complete import publish_up
from ckpipe.catalog.find import read_index
from ckpipe.catalog.summaries import filled, inspected
from ckpipe.errors import (
    CkpipeError,
    CommitConflict,
    CommitUnknown,
    ObjectNotFound,
    PermissionDenied,
    ReplicasDiffer,
    StoreError,
    StoreFull,
)
from ckpipe.events import Completed, RankCommitted, ReplicasDiffered
from ckpipe.format.codec import MAX_STORED_BYTES, decode_document, encode_document
from ckpipe.format.data_file import DataFiles, label_of
from ckpipe.format.manifest import DocumentKind, FileRow, Layout, ManifestDocument
from ckpipe.format.names import index_key, launch_id, manifest_key
from ckpipe.format.summary import REMEDY, Summary, summary_of
from ckpipe.interpreter import gc_paused
from ckpipe.ranks.agree import agree
from ckpipe.save.context import StoreContext
from ckpipe.save.links import stored_rows
from ckpipe.save.record import SaveRecord
from ckpipe.store.retry import Tries, telling
from ckpipe.types import CheckpointInfo, first_of, size_text

logger = logging.getLogger("ckpipe")

_OTHERS = "the other ranks may not have committed yet"


async def run(
    save: SaveRecord,
    context: StoreContext,
    inbox: MemoryObjectReceiveStream[DataFiles],
    out: MemoryObjectSendStream[CheckpointInfo],
) -> None:
    """Write this rank's manifest, and the index if that completes the checkpoint.

    With one rank, the index replaces the manifest. With many, this rank counts as committed before
    it checks whether the others have committed, and it waits for no rank.

    Raises:
        CommitConflict: If another writer owns the name.
        CommitUnknown: If the answer was lost and the object cannot be read back.
        CorruptCheckpoint: If another rank's manifest is damaged; this rank has committed.
        StoreError: If the store failed; nothing was written, unless this rank has committed.
    """
    id, alone = save.id, context.world_size == 1
    kind: DocumentKind = "index" if alone else "manifest"
    key = index_key(id) if alone else manifest_key(id, save.rank)
    async with inbox, out:
        async for files in inbox:
            with save.clock.timing("commit"):
                rows = stored_rows(save, context.block_bytes)
                document, data = await threads.run_sync(
                    _drawn_up, save, context, kind, files.layout, rows
                )
                await _create_or_read_back(save, context, kind, key, data)
                if context.links is not None:
                    context.links.commit(save, rows, context)
            info = CheckpointInfo(
                save.name,
                id.step,
                id.attempt,
                id.count,
                complete=alone,
                reason="" if alone else _OTHERS,
            )
            if alone:
                known = summary_of(document)
                context.catalog.summaries.learn(info.id, known)
                info = filled(replace(info, saved_at=datetime.now(UTC)), known)
            else:
                save.unsettled = info
            save.durable_seconds = save.elapsed
            save.settle(info)
            size = len(data) + files.size
            context.events.emit(RankCommitted(*save.where, save.durable_seconds, size))
            if alone:
                context.events.emit(Completed(*save.where, info, save.durable_seconds))
                await _tell_nan(save, context, document)
            else:
                with save.clock.timing("complete"):
                    if not await _completed(save, context, info):
                        continue
            await out.send(info)


async def _completed(save: SaveRecord, context: StoreContext, info: CheckpointInfo) -> bool:
    """Complete the checkpoint if this was the last commit; True if it is complete now.

    A rank that waits for the checkpoint may have seen all commits first, and written the index.
    """
    outcome = await publish_up(context.retrying, save.id, save.rank, context.world_size)
    if outcome.complete or outcome.deleted:
        save.unsettled = None
    whole, summaries = replace(info, complete=True, reason=""), context.catalog.summaries
    if outcome.index is not None:
        known = summary_of(outcome.index)
        summaries.learn(info.id, known)
        await _tell_copies(save, context, known)
        await _tell_nan(save, context, outcome.index)
        _tell_differences(save, context, outcome.index)
        whole = filled(whole, known)
    if outcome.complete:
        if outcome.index is None:  # another rank wrote it at the same time
            (whole,) = await inspected(context.retrying, [whole], summaries)
            if whole.nan or whole.differences:  # that rank may have been one that only waited
                index = await read_index(context.retrying, save.id)
                await _tell_nan(save, context, index)
                _tell_differences(save, context, index)
        context.events.emit(Completed(*save.where, whole, save.elapsed))
    return outcome.complete


async def _tell_copies(save: SaveRecord, context: StoreContext, summary: Summary) -> None:
    """Warn, once in a launch, that ranks write the same bytes."""
    save.clock.copied_bytes = summary.copied_bytes
    if not (summary.is_wasteful and context.is_first("ranks write the same bytes")):
        return
    if not await _tells(save, context, "tells-copies"):
        return
    logger.warning(
        "%s of the %s of %s are copies: ranks wrote the same tensors, with equal checksums. %s",
        size_text(summary.copied_bytes), size_text(summary.bytes), save.name, REMEDY,
    )  # fmt: skip


async def _tell_nan(save: SaveRecord, context: StoreContext, index: ManifestDocument) -> None:
    """Warn, once in a launch, that a checkpoint has NaN."""
    part = next((part for part in index.parts if part.nan), None)
    if part is None or not context.is_first("NaN"):
        return
    if context.world_size > 1 and not await _tells(save, context, "tells-nan"):
        return
    sound = None
    with contextlib.suppress(CkpipeError):
        sound = await context.catalog.without_nan(unread="skip")
    entry, count = part.nan[0]
    logger.warning(
        "%s has %d NaN, %d of them in %s of rank %d, the first tensor with some; %s. Tensors that "
        'may have NaN are named by nan={"ignore": [...]}',
        save.name, index.nan, count, label_of(index.layouts[part.layout].entries.name[entry]),
        part.rank,
        f"load(without_nan=True) loads {sound.id}, the newest without" if sound
        else "no complete checkpoint is without",
    )  # fmt: skip


def _tell_differences(save: SaveRecord, context: StoreContext, index: ManifestDocument) -> None:
    """Warn of copies that differ, once for each pair of ranks and tensor."""
    if index.differences is None or context.settings.replicas.mode == "off":
        return
    new: dict[tuple[str, int], list[int]] = {}
    for each in index.differences.found:
        for rank in each.witnesses:
            if context.is_first(f"copies of {each.owner} and {rank}: {each.tensor}"):
                new.setdefault((each.tensor, each.owner), []).append(rank)
    if not new:
        return
    for (tensor, owner), ranks in new.items():
        context.events.emit(ReplicasDiffered(*save.where, tensor, owner, tuple(ranks)))
    (tensor, owner), ranks = next(iter(new.items()))
    text = (
        f"Copies that are declared equal differ in {save.name}: rank{'s' * (len(ranks) > 1)} "
        f"{first_of(ranks)} hold{'s' * (len(ranks) == 1)} other bytes of {tensor} than rank "
        f"{owner}, which wrote it"
    )
    text += f"; so do {len(new) - 1} more pairs of tensor and rank" if len(new) > 1 else ""
    hint = f"The checkpoint is complete. `ckpipe info {save.name}` tells which ranks differ"
    logger.warning("%s. %s", text, hint)
    if context.settings.replicas.mode == "raise":
        save.differs = ReplicasDiffer(text, key=tensor, hint=hint)


async def _tells(save: SaveRecord, context: StoreContext, question: str) -> bool:
    """Agree on one rank of the launch that gives a warning; all of them if the store fails."""
    with contextlib.suppress(CkpipeError):
        decided = await agree(context.retrying, save.id.attempt, question, save.rank)
        return bool(decided == save.rank)
    return True


def _drawn_up(
    save: SaveRecord,
    context: StoreContext,
    kind: DocumentKind,
    layout: Layout,
    rows: tuple[FileRow, ...],
) -> tuple[ManifestDocument, bytes]:
    """Make this rank's manifest document, and encode it."""
    structure, part = save.contents()
    part = replace(
        part,
        files=rows,
        checksums=tuple(save.checksums),
        nan=save.nan,
        resumed_from=context.catalog.resumed_from,
        line=launch_id(save.id.attempt) if context.catalog.line is None else context.catalog.line,
    )
    report = save.report().to_data() if context.settings.keep_reports else None
    document = ManifestDocument(
        kind, save.id, context.world_size, (structure,), (layout,), (part,),
        report=report,
    )  # fmt: skip
    with gc_paused():
        return document, encode_document(document)


async def _create_or_read_back(
    save: SaveRecord, context: StoreContext, kind: DocumentKind, key: str, data: bytes
) -> None:
    """Create this rank's object once; read it back if the answer was lost."""
    tries = Tries(telling(context.retry, context.events, save.id, save.rank))
    while True:
        before, save.commit_may_exist = save.commit_may_exist, True
        try:
            return await tries.once(lambda: context.backend.put(key, data, PutMode.CREATE))
        except StoreError as error:
            if await _read_back_is_ours(save, context, kind, key, error):
                return None
            # A refused write cannot land later; a write without an answer can.
            save.commit_may_exist = before or not isinstance(error, StoreFull | PermissionDenied)
            await tries.wait_after(error)


async def _read_back_is_ours(
    save: SaveRecord, context: StoreContext, kind: DocumentKind, key: str, cause: BaseException
) -> bool:
    """Read the object back: True if it is ours, False if there is none.

    Raises:
        CommitConflict: If it is another writer's.
        CommitUnknown: If it cannot be read.
    """
    try:
        found = await context.retrying.get(key, max_bytes=MAX_STORED_BYTES)
        document = await threads.run_sync(
            lambda: decode_document(found, key=key, id=save.id, kind=kind)
        )
    except ObjectNotFound:
        return False
    except CkpipeError as error:
        raise CommitUnknown(
            f"The commit may have landed or not: the write failed with {cause!r}, and reading it "
            f"back with {error!r}",
            key=key,
            hint="Nothing was deleted. Check the store; verify() tells whether it is complete",
        ) from cause
    if any(part.rank == save.rank and part.token == save.token for part in document.parts):
        return True
    raise CommitConflict(
        "Another writer has committed under this name",
        key=key,
        hint="Two processes use one attempt id on this root; give each run its own root",
    ) from cause
