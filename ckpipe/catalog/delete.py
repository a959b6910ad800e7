"""Delete one checkpoint, and finish earlier deletions.

Theory. A tombstone is created first. From then on the checkpoint does not count as complete for any
process, whatever objects remain. Then the index is deleted, then manifests, then data, until a list
shows none of ckpipe's names. Other names below the prefix are left alone, and so are all objects
behind a link. A crash at any point leaves the tombstone, by which the next prune finds the
remaining objects. The tombstone itself stays for a while, so that a straggling writer of the same
checkpoint cannot revive it. An hour is enough for a checkpoint that was complete: all its ranks had
committed, and only a process that was about to write its index then, and has been stalled ever
since, could still do so. So a run that saves every minute leaves about a hundred tombstones, not
those of a whole day.

A full store has no room for a tombstone, and must not stay full because of that. Then the
checkpoint is deleted first, in the same order, and the tombstone follows into the freed room. A
crash between the two leaves the remains of a crashed save, or a checkpoint that lacks only its
index and is completed again. Only a reader whose lease had no room either may find its files gone.

A load holds a lease on its checkpoint. A leased checkpoint is not chosen for removal. If a lease
appears at the last moment, the tombstone stays and the data waits for the lease to end
(:mod:`ckpipe.catalog.leases` says why this has no gap).

**Why no pin is lost.** A process that pins holds a lease, creates the pin, and then looks for a
tombstone; if there is one, it takes the pin back, and the pin never counted. A process that removes
creates the tombstone, then looks for leases, and then for a pin. A pin without a live lease was
there before the tombstone. Every process that would remove that checkpoint sees the pin, and none
has begun to remove it; so the tombstone is taken back. If the pinning process died before it looked
for a tombstone, its lease has kept other processes away for its life, and a removal that had begun
before is finished or has crashed. The index is deleted first, so the remains of a crashed removal
do not count without the tombstone either, unless all manifests and thus all data are there.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from enum import Enum, auto

from ckpipe.backend import Backend
from ckpipe.catalog.find import (
    Listing,
    check_not_deleted,
    list_root,
    list_summaries,
    stat_or_none,
)
from ckpipe.catalog.leases import leased, under_lease
from ckpipe.errors import CheckpointIncomplete, LinkRefused, StoreFull
from ckpipe.format.names import index_key, is_own, pin_key, prefix, tombstone_key
from ckpipe.store.retry import create_once
from ckpipe.types import CheckpointId, first_of

logger = logging.getLogger("ckpipe")

RETIRED_LIFE = timedelta(hours=1)
"""Life of the tombstone of a complete checkpoint that retention has removed."""

_TOGETHER = 32
"""Least number of these tombstones to remove together: any number of them costs two requests."""

_SHOWN = 5
"""Most names that a warning lists of files that ckpipe did not write."""


class Removal(Enum):
    """The outcome of removing a checkpoint."""

    GONE = auto()
    """Its data is gone."""
    WAITS = auto()
    """No reader finds it any more; its data is removed once the leases on it have ended."""
    PINNED = auto()
    """It is pinned, and unchanged."""


async def delete(
    backend: Backend,
    id: CheckpointId,
    summaries: Sequence[str] | None = None,
    *,
    force: bool = False,
) -> Removal:
    """Delete a checkpoint; one that is gone or half deleted already is no error.

    Args:
        backend: The store.
        id: The checkpoint.
        summaries: Keys of its summaries, if the caller knows them; None costs a list.
        force: Whether to delete it even if it is pinned or leased.

    Returns:
        The outcome. :func:`finish_deletions` removes data that waits.

    Raises:
        LinkRefused: If its directory is a link; the checkpoint is unchanged then.
        StoreError: If the store failed; another call goes on where this one stopped.
    """
    if summaries is None:
        summaries = [each.key for each in (await list_summaries(backend)).get(id, [])]
    there = await _keys(backend, id)
    if force and await stat_or_none(backend, pin_key(id)):
        await backend.delete([pin_key(id)])  # other processes would cancel the deletion by it
    remove = _remove if force else _remove_unless_held
    try:
        await _mark(backend, id)
    except StoreFull:
        removal = await remove(backend, id, summaries, there)
        if removal is not Removal.GONE:
            return removal
        await _mark(backend, id)
        there = []
    return await remove(backend, id, summaries, there)


async def _keys(backend: Backend, id: CheckpointId) -> list[str]:
    return [each.key async for each in backend.list(prefix(id))]


async def _mark(backend: Backend, id: CheckpointId) -> None:
    await create_once(backend, tombstone_key(id))


async def _remove_unless_held(
    backend: Backend, id: CheckpointId, summaries: Iterable[str], there: Sequence[str] = ()
) -> Removal:
    if await leased(backend, str(id)):
        return Removal.WAITS
    if await stat_or_none(backend, pin_key(id)):
        # The pin may be newer than the tombstone; its process will then take it back.
        if await leased(backend, str(id)) or not await stat_or_none(backend, pin_key(id)):
            return Removal.WAITS
        await backend.delete([tombstone_key(id)])
        return Removal.PINNED
    return await _remove(backend, id, summaries, there)


async def _remove(
    backend: Backend, id: CheckpointId, summaries: Iterable[str], there: Sequence[str] = ()
) -> Removal:
    """Remove all objects of a checkpoint that ckpipe wrote.

    Args:
        backend: The store.
        id: The checkpoint.
        summaries: Keys of its summaries.
        there: The listed keys below its prefix, if there was a list.
    """
    await backend.delete([index_key(id)])
    removed = False
    try:
        while True:
            own = [key for key in there if is_own(id, key)]
            # Manifests vouch for data, so they are deleted before the data.
            manifests = [key for key in own if key.startswith(f"{prefix(id)}m/")]
            data = [key for key in own if not key.startswith(f"{prefix(id)}m/")]
            for each in filter(None, (manifests, data)):
                await backend.delete(each)
            removed = removed or bool(own)
            there = await _keys(backend, id)
            if not any(is_own(id, key) for key in there):
                break
    except LinkRefused as error:
        logger.warning("%s is deleted, but not the files behind a link: %s", id, error)
    else:
        if removed and there:
            logger.warning(
                "%s is deleted. ckpipe did not write these, and left them there: %s",
                id,
                first_of(sorted(there), _SHOWN),
            )
    await backend.delete([pin_key(id), *summaries])
    return Removal.GONE


async def pin(backend: Backend, id: CheckpointId) -> None:
    """Protect a checkpoint from removal until its pin is deleted.

    Raises:
        CheckpointIncomplete: If its deletion has begun.
        StoreError: If the store failed.
    """
    async with under_lease(backend, str(id)):
        created = await create_once(backend, pin_key(id))
        try:
            await check_not_deleted(backend, id)
        except CheckpointIncomplete:
            if created:
                await backend.delete([pin_key(id)])
            raise


async def finish_deletions(
    backend: Backend,
    finished: set[CheckpointId],
    *,
    forget_before: datetime,
    listing: Listing | None = None,
    retired: set[CheckpointId] | None = None,
    now: datetime | None = None,
) -> None:
    """Finish deletions that a crash or a reader delayed, and remove old tombstones.

    Deletions of pinned checkpoints are cancelled.

    Deletions without remaining objects cost no request of their own, however many there are.

    Args:
        backend: The store.
        finished: Deletions known to be finished; new ones are added, and those whose tombstone is
            gone are dropped, since no later prune asks for them.
        forget_before: Tombstones older than this are removed, by the store's own clock.
        listing: The names of the root, if the caller has listed them since it asked for the time.
        retired: Complete checkpoints that :func:`delete` has removed in this process, whose
            tombstones are removed after :data:`RETIRED_LIFE`; those whose tombstone is gone are
            dropped.
        now: The time by the store's own clock, for the retired ones.

    Raises:
        StoreError: If the store failed.
    """
    listing = await list_root(backend) if listing is None else listing
    tombs = listing.tombstones
    # This also drops a tombstone that is newer than the list; it is then only checked once more.
    finished.intersection_update(tombs)
    old = {id for id, tomb in tombs.items() if tomb.modified < forget_before}
    if retired and now is not None:
        retired.intersection_update(tombs)
        early = {id for id in retired if tombs[id].modified < now - RETIRED_LIFE}
        old |= early if len(early) >= _TOGETHER else set()
    # Old ones are checked again before the tombstone goes: a straggler may have written since.
    pending = [id for id in tombs if id in old or id not in finished]
    summaries = await list_summaries(backend) if pending else {}
    left = listing.named()
    forgotten = []
    for id in pending:
        if id in left or id in summaries:
            keys = [each.key for each in summaries.get(id, [])]
            if await _remove_unless_held(backend, id, keys) is not Removal.GONE:
                continue
        finished.add(id)
        if id in old:
            forgotten.append(tombs[id].key)
    if forgotten:
        await backend.delete(forgotten)
