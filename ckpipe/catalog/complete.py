"""Complete a checkpoint of many ranks without a coordinator.

Theory. Every object here is created once and never changed, and lists show every object whose write
has returned. A rank lists its directory after its own commit, so the last rank of a directory to
commit sees all of them. A rank that sees a full directory writes the merged object and goes on one
level up; a rank that sees the last directory full writes the index. The written bytes depend on the
manifests alone: a second writer finds the same object there already. No rank waits for another.

A rank that dies on this way leaves full directories that are not merged. A descent from the top
finds them, and the ranks that never committed; it lists only directories that lack members. A
process that opens a root, lists it or searches it for a checkpoint to load completes such
checkpoints. A checkpoint with damaged manifests, or one that this process may not write to, stays
as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile

from ckpipe import threads
from ckpipe.backend import Backend
from ckpipe.catalog.find import (
    NO_INDEX,
    discover,
    look_up,
    matching,
    newest_first,
    pick,
    present,
    read_document,
    recheck,
    stat_or_none,
    top,
    write_summary_of,
)
from ckpipe.errors import (
    CkpipeError,
    CorruptCheckpoint,
    InvalidManifest,
    LinkRefused,
    MissingObject,
    StoreError,
    UnsupportedVersion,
)
from ckpipe.format import names
from ckpipe.format.check import check_owners
from ckpipe.format.codec import encode_document
from ckpipe.format.manifest import DocumentKind, ManifestDocument
from ckpipe.format.merge import merge
from ckpipe.format.names import (
    GROUP_SIZE,
    absent_members,
    all_members,
    directory,
    group_key,
    index_key,
    level_sizes,
    member_key,
    member_of,
    members,
    merged_into,
    tombstone_key,
)
from ckpipe.interpreter import gc_paused
from ckpipe.store.retry import create_once
from ckpipe.threads import all_of
from ckpipe.types import CheckpointId, CheckpointInfo

Member = tuple[int, int]
"""Level and number of a manifest or group object."""

_READS = 8
"""Number of members that are read at the same time."""

_NOT_REBUILT = "A load needs only the index: load the checkpoint, and save it again"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of an attempt to complete a checkpoint.

    Args:
        complete: Whether it is complete now.
        index: The index, if this call created it.
        deleted: Whether it has a tombstone, so that it must not be completed.
        absent: Ranks that are known not to have committed; not always all of them.
    """

    complete: bool
    index: ManifestDocument | None = None
    deleted: bool = False
    absent: tuple[int, ...] = ()


_DELETED = Outcome(complete=False, deleted=True)


async def publish_up(backend: Backend, id: CheckpointId, rank: int, world_size: int) -> Outcome:
    """Complete a checkpoint as far as this rank's commit makes that possible.

    Costs one list unless the rank's directory is full.

    Args:
        backend: The store.
        id: The checkpoint.
        rank: The rank that has committed.
        world_size: The number of ranks.

    Raises:
        CorruptCheckpoint: If a member of a full directory is damaged.
        StoreError: If the store failed; the next caller goes on.
    """
    level, directory = 0, rank // GROUP_SIZE
    while not await _absent(backend, id, level, directory, world_size):
        target = merged_into(level, directory, world_size)
        if target is None:
            return await _write_index(backend, id, level, world_size)
        await _write_group(backend, id, target, world_size)
        level, directory = target[0], target[1] // GROUP_SIZE
    return Outcome(complete=False)


async def complete_from_top(
    backend: Backend, id: CheckpointId, world_size: int, *, most_holes: int = 1
) -> Outcome:
    """Complete a checkpoint from the top of its merge tree, or find the absent ranks.

    Args:
        backend: The store.
        id: The checkpoint.
        world_size: The number of ranks.
        most_holes: The number of directories with absent ranks after which the search ends.

    Raises:
        CorruptCheckpoint: If a member of a full directory is damaged.
        StoreError: If the store failed.
    """
    top = len(level_sizes(world_size)) - 1
    absent: list[list[int]] = []

    async def fill(level: int, directory: int) -> bool:
        """Fill a directory if all ranks below it have committed; else note the absent ones."""
        missing = await _absent(backend, id, level, directory, world_size)
        if not missing:
            return True
        if level == 0:
            absent.append(missing)
            return False
        full = True
        for number in missing:
            if len(absent) >= most_holes:
                return False
            if await fill(level - 1, number):
                await _write_group(backend, id, (level, number), world_size)
            else:
                full = False
        return full

    if await fill(top, 0):
        return await _write_index(backend, id, top, world_size)
    if await stat_or_none(backend, tombstone_key(id)):
        return _DELETED
    return Outcome(complete=False, absent=tuple(rank for ranks in absent for rank in ranks))


async def _absent(
    backend: Backend, id: CheckpointId, level: int, directory: int, world_size: int
) -> list[int]:
    keys = {each.key async for each in backend.list(names.directory(id, level, directory))}
    return absent_members(id, level, directory, world_size, keys)


async def _write_group(
    backend: Backend, id: CheckpointId, group: tuple[int, int], world_size: int
) -> None:
    level, number = group
    key = group_key(id, level, number)
    if await stat_or_none(backend, key):
        return
    merged = await _merge(backend, id, level - 1, number, world_size, group)
    if merged is not None:
        await create_once(backend, key, merged[1])  # other ranks make the same bytes


async def _write_index(backend: Backend, id: CheckpointId, level: int, world_size: int) -> Outcome:
    key, tombstone = index_key(id), tombstone_key(id)
    if await stat_or_none(backend, tombstone):
        return _DELETED
    if await stat_or_none(backend, key):
        return Outcome(complete=True)
    merged = await _merge(backend, id, level, 0, world_size, None)
    if merged is None:
        return _DELETED
    index, data = merged
    created = await create_once(backend, key, data)
    if await stat_or_none(backend, tombstone):
        # Deleted since the first check: an index must not outlive the tombstone.
        await backend.delete([key])
        return _DELETED
    return Outcome(complete=True, index=index if created else None)


async def _merge(
    backend: Backend,
    id: CheckpointId,
    level: int,
    directory: int,
    world_size: int,
    group: tuple[int, int] | None,
) -> tuple[ManifestDocument, bytes] | None:
    """Merge a full directory into a group or the index; None if the checkpoint is deleted."""
    wanted = [(level, number) for number in members(level, directory, world_size)]
    try:
        documents = await read_members(backend, id, wanted, world_size)
    except MissingObject:
        if await stat_or_none(backend, tombstone_key(id)):
            return None
        raise

    def merge_members() -> tuple[ManifestDocument, bytes]:
        with gc_paused():
            merged = merge(documents, "group" if group else "index", group)
            if group is None:
                # Readers of the index would refuse it, so it must not complete the checkpoint.
                check_owners(merged)
            return merged, encode_document(merged)

    return await threads.run_sync(merge_members)


async def read_members(
    backend: Backend, id: CheckpointId, wanted: Sequence[Member], world_size: int
) -> list[ManifestDocument]:
    """Read several members at the same time, as :func:`read_member` does; in the given order.

    Raises:
        As :func:`read_member` does.
    """
    calls = [partial(read_member, backend, id, *member, world_size) for member in wanted]
    return [member for member, _ in await all_of(calls, _READS)]


async def read_member(
    backend: Backend,
    id: CheckpointId,
    level: int,
    number: int,
    world_size: int,
    key: str | None = None,
) -> tuple[ManifestDocument, bytes]:
    """Read and validate a manifest, which is a member of level 0, or a group object.

    Args:
        backend: The store.
        id: The checkpoint.
        level: The level of the member.
        number: Its number.
        world_size: The number of ranks.
        key: Its key, if it was listed.

    Returns:
        The document, and its bytes on the store.

    Raises:
        MissingObject: If it is not there.
        CorruptCheckpoint: If it is damaged or hostile, or of another world size.
        UnsupportedVersion: If it is of a newer format.
        StoreError: If the store failed.
    """
    key = key or member_key(id, level, number)
    kind: DocumentKind = "group" if level else "manifest"
    document, data = await read_document(backend, id, key, kind)
    place = document.group if level else (0, document.parts[0].rank)
    if document.world_size != world_size:
        raise InvalidManifest(
            f"This {kind} was written by one of {document.world_size} ranks, and another says that "
            f"there are {world_size}",
            step=id.step,
            key=key,
            hint="Give attempt_id to the ranks of one launch only, which have one WORLD_SIZE",
        )
    if place != (level, number):
        raise InvalidManifest(f"This {kind} is not the one of its key", step=id.step, key=key)
    return document, data


async def list_members(backend: Backend, index: ManifestDocument) -> dict[Member, str]:
    """List the manifests and group objects that a complete checkpoint must have.

    Returns:
        Their keys as they are listed, also of those that are absent; manifests come first.

    Raises:
        StoreError: If the store failed.
    """
    wanted, keys = all_members(index.world_size), list[str]()
    with suppress(LinkRefused):  # it may be read through a link by its name
        below = f"{names.prefix(index.id)}m/"
        keys = [each.key async for each in backend.list(below)] if wanted else []
    listed = {member: key for key in keys if (member := member_of(index.id, key)) is not None}
    return {each: listed.get(each) or member_key(index.id, *each) for each in wanted}


async def read_matching(
    backend: Backend, index: ManifestDocument, member: Member, key: str
) -> bytes:
    """Read a manifest or group object of a complete checkpoint, and compare it with the index.

    The index cannot replace it, since a manifest also has the report of its save.

    Returns:
        Its bytes on the store.

    Raises:
        CorruptCheckpoint: If it is missing or damaged, or the index was not made of it.
        UnsupportedVersion: If it is of a newer format.
        StoreError: If the store failed.
    """
    level, number = member
    try:
        document, data = await read_member(backend, index.id, level, number, index.world_size, key)
        for part in document.parts:
            known = index.parts[part.rank]
            part = replace(part, structure=known.structure, layout=known.layout, witnesses=())
            if part != known:
                raise InvalidManifest("The index was not made of this object", key=key)
    except CorruptCheckpoint as error:
        error.hint = error.hint or _NOT_REBUILT
        raise error.located(step=index.step, rank=None if level else number) from error.__cause__
    return data


async def check_members(backend: Backend, index: ManifestDocument) -> None:
    """Check all manifests and group objects of a complete checkpoint, and write nothing.

    Raises:
        As :func:`read_matching` does.
    """
    listed = await list_members(backend, index)
    await all_of([partial(read_matching, backend, index, *each) for each in listed.items()], _READS)


logger = logging.getLogger("ckpipe")

_AT_ONCE = 8
"""Number of incomplete checkpoints that are repaired at the same time."""


async def repaired(backend: Backend, infos: Iterable[CheckpointInfo]) -> list[CheckpointInfo]:
    """Complete the checkpoints that can be, several at a time; return all in the same order.

    Those of which there is no object are left out. Costs two lists for each incomplete one that has
    no manifests, and a few requests more for one that has some.

    Raises:
        StoreError: If the store failed to list.
    """
    known = await all_of([partial(repair, backend, info) for info in infos], _AT_ONCE)
    return await present(backend, known)


async def repair(backend: Backend, info: CheckpointInfo, *, sure: bool = False) -> CheckpointInfo:
    """Complete a checkpoint if it lacks only its index, and describe it.

    Args:
        backend: The store.
        info: The checkpoint.
        sure: Whether the description "incomplete" must be final, as before a deletion. Errors that
            may pass are raised then, and else only logged.

    Raises:
        StoreError: If the store failed to list; with ``sure``, if it failed in any way.
        UnsupportedVersion: With ``sure``, if the checkpoint is of a newer format.
    """
    id = info.key
    if info.complete or info.reason != NO_INDEX:
        return info
    try:
        world_size = await _world_size(backend, id)
    except (CorruptCheckpoint, LinkRefused, UnsupportedVersion) as error:
        return _left(info, error, sure)
    if world_size is None:
        return info
    try:
        outcome = await complete_from_top(backend, id, world_size)
    except (CorruptCheckpoint, StoreError, UnsupportedVersion) as error:
        return _left(info, error, sure)
    await write_summary_of(backend, outcome.index)
    return await recheck(backend, info) if outcome.complete else info


def _left(info: CheckpointInfo, error: CkpipeError, sure: bool) -> CheckpointInfo:
    """Log why a checkpoint stays incomplete; with ``sure``, raise an error that may pass."""
    if isinstance(error.__cause__, StoreError) and error.__cause__.unreadable:
        error = error.__cause__  # the device may read it another time
    if sure and not isinstance(error, CorruptCheckpoint):
        raise error
    logger.warning("%s cannot be completed: %s", info.id, error)
    if isinstance(error, StoreError):
        return info
    state = "damaged" if isinstance(error, CorruptCheckpoint) else "of a newer format"
    return replace(info, reason=f"it has no index, and a manifest is {state}: {error}")


async def newest_likely(
    backend: Backend,
) -> tuple[CheckpointInfo | None, CheckpointId | None]:
    """Find the checkpoint of :func:`newest_repaired` without the request for its tombstone.

    So it may be in deletion. The caller takes a lease on it and then looks for its tombstone
    anyway. Its pin is not looked up either. The second result is the newest with an index of those
    with the greatest step.

    Raises:
        StoreError: If the store failed.
    """
    info, greatest = await top(backend)
    if info is not None and not info.complete:
        info = await newest_repaired(backend)
    return info, greatest


async def newest_repaired(backend: Backend) -> CheckpointInfo | None:
    """Find the newest complete checkpoint of a root, or None; complete newer ones if possible.

    Costs one delimited list and two stats, and a few requests for each newer one without an index.

    Raises:
        StoreError: If the store failed.
    """
    async with aclosing(newest_first(backend)) as infos:
        async for info in infos:
            known = await repair(backend, info)
            if known.complete:
                return known
    return None


async def find_repaired(backend: Backend, which: int | str) -> CheckpointInfo:
    """Find the newest complete checkpoint of a step, or the one of an id; complete it if possible.

    An exact id of a complete one costs three stats; other searches cost as much as
    :func:`discover_repaired`.

    Raises:
        CheckpointIncomplete: If there is only an incomplete one.
        CheckpointNotFound: If there is none.
        StoreError: If the store failed.
    """
    id = CheckpointId.parse(which) if isinstance(which, str) else None
    exact = None if id is None else await look_up(backend, id)
    return exact or pick(await discover_repaired(backend, which), which)


async def discover_repaired(backend: Backend, which: int | str) -> list[CheckpointInfo]:
    """List all checkpoints of a root, the newest first; complete those of a step or id if possible.

    It does not try those that are older than the newest complete one of the step. Costs the three
    lists of :func:`ckpipe.catalog.find.discover`, and more only if the newest checkpoint of the
    step or id is incomplete.

    Raises:
        StoreError: If the store failed.
    """
    everything = await discover(backend)
    newer = list(takewhile(lambda info: not info.complete, matching(everything, which)))
    known = {info.key: info for info in await repaired(backend, newer)}
    gone = {info.key for info in newer} - known.keys()
    return [known.get(info.key, info) for info in everything if info.key not in gone]


async def _world_size(backend: Backend, id: CheckpointId) -> int | None:
    """Read the number of ranks of a checkpoint from any manifest of the first directory."""
    prefix = directory(id, 0, 0)
    key = min([each.key async for each in backend.list(prefix)], default=None)
    if key is None:
        return None
    document, _ = await read_document(backend, id, key, "manifest")
    return document.world_size
