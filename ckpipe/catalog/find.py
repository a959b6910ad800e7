"""List the checkpoints of a root, and read their indexes and summaries.

Summaries (:mod:`ckpipe.format.summary`) are hints. If one cannot be written or read, the index is
read instead; the save does not fail.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial

from ckpipe.backend import Backend, Children, ObjectInfo
from ckpipe.errors import (
    CheckpointIncomplete,
    CheckpointNotFound,
    CkpipeError,
    InvalidManifest,
    LinkRefused,
    MissingObject,
    ObjectNotFound,
    StoreUnavailable,
    UsageError,
)
from ckpipe.format.codec import MAX_STORED_BYTES, MOST_ROWS, decode_document
from ckpipe.format.manifest import DocumentKind, ManifestDocument
from ckpipe.format.names import (
    DELETED,
    PINS,
    SHORT_NAME,
    SUMMARIES,
    index_id,
    index_key,
    is_own,
    launch_id,
    pin_id,
    pin_key,
    prefix,
    summary_id,
    summary_key,
    tombstone_id,
    tombstone_key,
)
from ckpipe.format.summary import (
    MOST_BYTES,
    Summary,
    decode_summary,
    encode_summary,
    summary_of,
)
from ckpipe.interpreter import gc_paused
from ckpipe.store.retry import create_once, naming_unreadable, read_decoded
from ckpipe.threads import all_of
from ckpipe.types import CheckpointId, CheckpointInfo, first_of

DELETING = "it is being deleted"
NO_INDEX = "it has no index: its save did not finish, or is not finished yet"


_LOOKS = 8
"""Number of checkpoints that are looked up one by one before tombstones and pins are listed."""

_LISTS = 16
"""Number of checkpoints whose objects are listed at the same time."""


@dataclass(frozen=True, slots=True)
class Listing:
    """The checkpoints of a root, by names that were listed at the same time.

    Args:
        found: Those with an index or a prefix, with the time of the index; None without one.
        tombstones: The tombstones of deleted ones.
        pinned: The pinned ones.
    """

    found: Mapping[CheckpointId, datetime | None]
    tombstones: Mapping[CheckpointId, ObjectInfo]
    pinned: Set[CheckpointId]

    def infos(self) -> list[CheckpointInfo]:
        """Return all checkpoints, complete or not, the newest first."""
        return [
            _info(id, self.found[id], deleted=id in self.tombstones, pinned=id in self.pinned)
            for id in sorted(self.found, reverse=True)
        ]

    def named(self) -> set[CheckpointId]:
        """Return the checkpoints that have more than a tombstone."""
        return {*self.found, *self.pinned}


def _found(root: Children) -> dict[CheckpointId, datetime | None]:
    names = (CheckpointId.parse(each.rstrip("/")) for each in root.prefixes)
    found: dict[CheckpointId, datetime | None] = {id: None for id in names if id is not None}
    for each in root.objects:
        if (id := index_id(each.key)) is not None:
            found[id] = each.modified
    return found


def _info(
    id: CheckpointId, saved_at: datetime | None, *, deleted: bool = False, pinned: bool = False
) -> CheckpointInfo:
    reason = DELETING if deleted else NO_INDEX if saved_at is None else ""
    return CheckpointInfo(
        str(id), id.step, id.attempt, id.count, complete=not reason, reason=reason,
        pinned=pinned, saved_at=saved_at,
    )  # fmt: skip


async def list_root(backend: Backend, below: str = "") -> Listing:
    """List the names at the top of a root: three delimited lists, at the same time.

    So a checkpoint that is deleted meanwhile may look complete, or incomplete for want of an index.
    A caller that uses or completes it looks for its tombstone again.

    Args:
        backend: The store.
        below: The prefix of the root, if it lies below that of the store.

    Raises:
        StoreError: If the store failed.
    """

    async def children(prefix: str) -> Children:
        found = await backend.children(below + prefix)
        if not below:
            return found
        objects = (replace(each, key=each.key.removeprefix(below)) for each in found.objects)
        return Children(tuple(objects), tuple(e.removeprefix(below) for e in found.prefixes))

    root, deleted, pins = await all_of([partial(children, each) for each in ("", DELETED, PINS)])
    return Listing(
        _found(root),
        {id: each for each in deleted.objects if (id := tombstone_id(each.key)) is not None},
        {id for each in pins.objects if (id := pin_id(each.key)) is not None},
    )


async def discover(backend: Backend) -> list[CheckpointInfo]:
    """List all checkpoints of a root, complete or not, the newest first.

    Costs the three lists of :func:`list_root`, however many checkpoints there are.

    Raises:
        StoreError: If the store failed.
    """
    return (await list_root(backend)).infos()


async def has_own(backend: Backend, id: CheckpointId, *, behind_link: bool) -> bool:
    """Tell whether there is a manifest, a group object or a data file of a checkpoint.

    Args:
        backend: The store.
        id: The checkpoint.
        behind_link: The result if its directory is a link.

    Raises:
        StoreError: If the store failed.
    """
    try:
        return any([is_own(id, each.key) async for each in backend.list(prefix(id))])
    except LinkRefused:
        return behind_link


async def present(backend: Backend, infos: Sequence[CheckpointInfo]) -> list[CheckpointInfo]:
    """Leave out those without index, manifest and data: a store may keep folders of deleted ones.

    Costs a list for each without an index and a tombstone.

    Raises:
        StoreError: If the store failed.
    """

    async def is_there(info: CheckpointInfo) -> bool:
        return info.reason != NO_INDEX or await has_own(backend, info.key, behind_link=True)

    there = await all_of([partial(is_there, each) for each in infos], _LISTS)
    return [each for each, kept in zip(infos, there, strict=True) if kept]


async def top(backend: Backend) -> tuple[CheckpointInfo | None, CheckpointId | None]:
    """Find the newest checkpoint, and the newest with an index of the greatest step.

    Costs one delimited list, and does not look whether they have a tombstone or a pin.

    Raises:
        StoreError: If the store failed.
    """
    found = _found(await backend.children(""))
    id, indexed = max(found, default=None), (id for id, saved in found.items() if saved)
    greatest = max(indexed, key=lambda id: (id.step, id), default=None)
    return None if id is None else _info(id, found[id]), greatest


async def newest_first(backend: Backend) -> AsyncGenerator[CheckpointInfo, None]:
    """Yield the checkpoints of :func:`discover`, for callers that need only the first few.

    Costs one delimited list, and two concurrent stats for each yielded checkpoint. So it does not
    list tombstones and pins, which may be many more than the checkpoints. After a few checkpoints
    it lists them all the same, since that is cheaper then.

    Raises:
        StoreError: If the store failed.
    """
    found = _found(await backend.children(""))
    ids = sorted(found, reverse=True)
    for id in ids[:_LOOKS]:
        keys = (tombstone_key(id), pin_key(id))
        deleted, pinned = await all_of([partial(stat_or_none, backend, key) for key in keys])
        yield _info(id, found[id], deleted=deleted is not None, pinned=pinned is not None)
    if len(ids) > _LOOKS:
        seen = set(map(str, ids[:_LOOKS]))
        for info in await discover(backend):
            if info.id not in seen:
                yield info


def matching(everything: Sequence[CheckpointInfo], which: int | str) -> list[CheckpointInfo]:
    """Return the checkpoints with a step, an id or a short name, in the same order."""
    match = SHORT_NAME.fullmatch(which) if isinstance(which, str) else None
    if match is None:
        return [each for each in everything if which in (each.id, each.step)]
    step, launch, count = match.groups()
    found = [
        (launch_id(each.attempt), each)
        for each in everything
        if each.step == int(step) and count in (None, str(each.count))
    ]
    exact = [each for name, each in found if name == launch]
    return exact or [each for name, each in found if name.startswith(launch)]


def pick(everything: Sequence[CheckpointInfo], which: int | str) -> CheckpointInfo:
    """Pick the newest complete checkpoint of a step, or the one of an exact id or short name.

    Args:
        everything: The checkpoints of a root, the newest first.
        which: The step, id or short name.

    Raises:
        CheckpointIncomplete: If there is only an incomplete one.
        CheckpointNotFound: If there is none.
        UsageError: If a short name stands for several.
    """
    found = matching(everything, which)
    found = [each for each in found if each.complete] or found
    if isinstance(which, str) and len(found) > 1:
        names = first_of([each.id for each in found], 8)
        raise UsageError(
            f"{which} stands for several checkpoints: {names}",
            step=found[0].step,
            hint="Name one of them by its id",
        )
    if found and found[0].complete:
        return found[0]
    step = which if isinstance(which, int) else None
    if found:
        raise CheckpointIncomplete(
            f"The checkpoint {found[0].id} is not complete: {found[0].reason}",
            step=found[0].step,
            hint="Name another step",
        )
    steps = sorted({each.step for each in everything if each.complete})
    shown = ", ".join(map(str, steps[-10:])) or "none"
    hint = "Name one of those" if steps else None
    if isinstance(which, str) and which.isdecimal():
        hint = f"A step is an int, not a string: {which}"
    elif which in ("latest", "newest", "last"):
        hint = "Name no step for the newest complete one, or one of those"
    raise CheckpointNotFound(
        f"There is no checkpoint {which!r} here; the newest complete steps are: {shown}",
        step=step,
        hint=hint,
    )


async def recheck(backend: Backend, info: CheckpointInfo) -> CheckpointInfo:
    """Update the description of an incomplete checkpoint, by its index and its tombstone.

    Raises:
        StoreError: If the store failed.
    """
    index = await stat_or_none(backend, index_key(info.key))
    if await stat_or_none(backend, tombstone_key(info.key)) is not None:
        return replace(info, complete=False, reason=DELETING)
    if index is None:
        return replace(info, complete=False, reason=NO_INDEX)
    return replace(info, complete=True, reason="", saved_at=index.modified)


async def look_up(backend: Backend, id: CheckpointId) -> CheckpointInfo | None:
    """Look up a complete checkpoint by its exact name, else None; costs three concurrent stats.

    Raises:
        StoreError: If the store failed.
    """
    keys = (index_key(id), tombstone_key(id), pin_key(id))
    index, deleted, pinned = await all_of([partial(stat_or_none, backend, key) for key in keys])
    if index is None or deleted is not None:
        return None
    return _info(id, index.modified, pinned=pinned is not None)


async def stat_or_none(backend: Backend, key: str) -> ObjectInfo | None:
    """Return the facts of an object; None if there is no such object.

    Raises:
        StoreError: If the store failed.
    """
    try:
        return await backend.stat(key)
    except ObjectNotFound:
        return None


async def check_not_deleted(backend: Backend, id: CheckpointId) -> None:
    """Raise if the deletion of a checkpoint has begun; called under a lease on it.

    Raises:
        CheckpointIncomplete: If it has a tombstone.
        StoreError: If the store failed.
    """
    if await stat_or_none(backend, tombstone_key(id)) is not None:
        raise _deleted(id)


async def check_still_there(backend: Backend, id: CheckpointId) -> None:
    """Check a checkpoint that was listed as complete again, before it is reported as damaged.

    Its lease may not have been written, so a deletion may have gone on, and a sweep may have
    removed the tombstone since. The index is deleted first, and never comes back.

    Raises:
        CheckpointIncomplete: If it has a tombstone or no index.
        StoreError: If the store failed.
    """
    await check_not_deleted(backend, id)
    if await stat_or_none(backend, index_key(id)) is None:
        raise _deleted(id)


def _deleted(id: CheckpointId) -> CheckpointIncomplete:
    return CheckpointIncomplete(
        f"The checkpoint {id} was deleted just now",
        step=id.step,
        hint="Name another step",
    )


async def read_index(backend: Backend, id: CheckpointId) -> ManifestDocument:
    """Read and validate the index of a checkpoint.

    Raises:
        MissingObject: If there is no index.
        CorruptCheckpoint: If it is damaged or hostile.
        UnsupportedVersion: If it is of a newer format.
        StoreError: If the store failed.
    """
    document, _ = await read_document(backend, id, index_key(id), "index")
    return document


async def read_document(
    backend: Backend, id: CheckpointId, key: str, kind: DocumentKind
) -> tuple[ManifestDocument, bytes]:
    """Read and validate an index, a group object or a manifest.

    Returns:
        The document, and its bytes on the store.

    Raises:
        As :func:`read_index` does.
    """
    # Layouts of manifests are merged as text, so no columns are needed.
    most_rows = MOST_ROWS if kind == "index" else 0

    def decode(data: bytes) -> tuple[ManifestDocument, bytes]:
        with gc_paused():
            return decode_document(data, key=key, id=id, kind=kind, most_rows=most_rows), data

    try:
        async with naming_unreadable(backend, id.step):
            return await read_decoded(backend, key, MAX_STORED_BYTES, decode)
    except ObjectNotFound as error:
        gone = "The index is gone" if kind == "index" else f"A {kind} of the checkpoint is gone"
        raise MissingObject(gone, step=id.step, key=key) from error


@contextlib.contextmanager
def locate_errors(step: int | None, rank: int, key: str) -> Iterator[None]:
    """Add to a store's errors which data file they concern; a lost file is a missing object."""
    try:
        yield
    except ObjectNotFound as error:
        raise MissingObject(
            f"A data file of the checkpoint is gone: {error.message}", step=step, rank=rank, key=key
        ) from error
    except CkpipeError as error:
        error.located(step=step, rank=rank)
        raise


logger = logging.getLogger("ckpipe")


async def write_summary(backend: Backend, id: CheckpointId, summary: Summary) -> None:
    """Create the summary of a checkpoint that has an index; never raises if the store fails.

    Costs one small create-only put.
    """
    try:
        data = encode_summary(id, summary)
        await create_once(backend, summary_key(id), data, durable=False)
    except CkpipeError as error:
        logger.info("%s has no summary; readers use its index instead: %s", id, error)


async def write_summary_of(backend: Backend, index: ManifestDocument | None) -> None:
    """Create the summary of an index that was just created; None if another process created it."""
    if index is not None:
        with contextlib.suppress(InvalidManifest):  # its metrics are no numbers
            await write_summary(backend, index.id, summary_of(index))


async def list_summaries(backend: Backend) -> dict[CheckpointId, list[ObjectInfo]]:
    """List the objects of summaries by checkpoint, those of other versions among them.

    Costs one delimited list.

    Raises:
        StoreError: If the store failed.
    """
    found: dict[CheckpointId, list[ObjectInfo]] = {}
    for each in (await backend.children(SUMMARIES)).objects:
        if (id := summary_id(each.key)) is not None:
            found.setdefault(id, []).append(each)
    return found


async def read_summary(
    backend: Backend,
    id: CheckpointId,
    stored: Mapping[CheckpointId, Sequence[ObjectInfo]] | None = None,
    below: str = "",
) -> Summary | None:
    """Read the summary of a checkpoint; None if there is none that can be read.

    Args:
        backend: The store.
        id: The checkpoint.
        stored: The result of :func:`list_summaries`; None if there was no list.
        below: The prefix of the root, if it lies below that of the store.

    Raises:
        StoreUnavailable: If the store does not answer.
    """
    key = summary_key(id)
    if stored is not None and all(each.key != key for each in stored.get(id, ())):
        return None
    try:
        return decode_summary(id, await backend.get(below + key, max_bytes=MOST_BYTES))
    except StoreUnavailable:
        raise
    except CkpipeError:
        return None
