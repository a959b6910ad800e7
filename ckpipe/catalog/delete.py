"""Deletion of one checkpoint, and of what earlier deletions have left.

Theory. A tombstone is created first, and from then on the checkpoint does not count as complete for
any process, whatever is still there. Then the index goes, then manifests, then data, until a list
shows none of ckpipe's names. Other names below the prefix are left alone, and so is all that is
reached through a link. A crash anywhere leaves a tombstone, by which the next prune finds what is
left. The tombstone itself stays for a while, so that a straggling writer of the same checkpoint
cannot bring it back to life. An hour is enough for one that was complete: all its ranks had
committed, and only a process that was about to write its index then, and has stood still ever
since, could still do so. A run that saves every minute so leaves about a hundred tombstones, and
not those of a whole day.

A full store has no room for a tombstone, and must not stay full for that: then the checkpoint goes
first, in the same order, and the tombstone follows into the room that it leaves. A crash between
the two leaves what a crashed save leaves, or a checkpoint that is whole but for its index and is
completed again. Only a reader whose lease had no room either may find its files gone.

Who loads a checkpoint holds a lease on it. A leased one is not chosen for removal; should a lease
appear at the last moment, the tombstone stays and the data waits for the lease to end
(:mod:`ckpipe.catalog.leases` says why this has no gap).

**Why no pin is lost.** Who pins holds a lease, creates the pin, and then looks for a tombstone:
with one, the pin is taken back and was none. Who removes looks for leases once the tombstone is
there, and then for a pin. A pin without a live lease was there before the tombstone. Every process
that would remove that checkpoint sees it, and none has begun to; so the tombstone is taken back.
Where who pinned died before the look, the lease has kept others off for its life, and a removal
that had begun before is through or has crashed; as the index goes first, what a crash leaves counts
for nothing without the tombstone either, unless all of its manifests and so all of its data are
there.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from enum import Enum, auto

from ckpipe.backend import Backend, ObjectInfo, PutMode
from ckpipe.catalog.find import Listing, list_root, owned_sidecars, stat_or_none
from ckpipe.catalog.leases import leased
from ckpipe.errors import LinkRefused, ObjectExists, StoreFull
from ckpipe.format.names import index_key, is_own, pin_key, prefix, tombstone_key
from ckpipe.types import CheckpointId

logger = logging.getLogger("ckpipe")

RETIRED_LIFE = timedelta(hours=1)
"""How long the tombstone stays of a complete checkpoint that retention has removed."""

_TOGETHER = 32
"""So many of these tombstones are removed together, for each time costs two requests."""

_SHOWN = 5
"""So many names that ckpipe did not write are told of a deleted checkpoint."""


class Removal(Enum):
    """The outcome of removing a checkpoint."""

    GONE = auto()
    """Its data is gone."""
    WAITS = auto()
    """No reader finds it any more; its data goes once the leases on it have ended."""
    PINNED = auto()
    """It is pinned, and it is as it was."""


async def delete(
    backend: Backend,
    id: CheckpointId,
    digests: Sequence[str] | None = None,
    *,
    force: bool = False,
) -> Removal:
    """Delete a checkpoint; one that is gone or half deleted already is no error.

    Args:
        backend: The store.
        id: The checkpoint.
        digests: Keys of its digest, if the caller knows them; None costs a list.
        force: Whether it goes even if it is pinned or a lease is held on it.

    Returns:
        What has become of it. :func:`finish_deletions` removes what waits.

    Raises:
        LinkRefused: If its directory is a link; it is as it was then.
        StoreError: If the store failed; deleting again goes on where it stopped.
    """
    if digests is None:
        digests = [each.key for each in (await owned_sidecars(backend)).get(id, [])]
    there = await _keys(backend, id)
    if force and await stat_or_none(backend, pin_key(id)):
        await backend.delete([pin_key(id)])  # by which others would call the deletion off
    remove = _remove if force else _remove_unless_held
    try:
        await _mark(backend, id)
    except StoreFull:
        removal = await remove(backend, id, digests, there)
        if removal is not Removal.GONE:
            return removal
        await _mark(backend, id)
        there = []
    return await remove(backend, id, digests, there)


async def has_own(backend: Backend, id: CheckpointId) -> bool:
    """Tell whether anything of a checkpoint lies below its prefix that deleting it would remove.

    Raises:
        StoreError: If the store failed.
    """
    try:
        return any(is_own(id, key) for key in await _keys(backend, id))
    except LinkRefused:
        return False


async def _keys(backend: Backend, id: CheckpointId) -> list[str]:
    return [each.key async for each in backend.list(prefix(id))]


async def _mark(backend: Backend, id: CheckpointId) -> None:
    with contextlib.suppress(ObjectExists):
        await backend.put(tombstone_key(id), b"{}", PutMode.CREATE)


async def _remove_unless_held(
    backend: Backend, id: CheckpointId, digests: Iterable[str], there: Sequence[str] = ()
) -> Removal:
    if await leased(backend, str(id)):
        return Removal.WAITS
    if await stat_or_none(backend, pin_key(id)):
        # It may be of a process that has come since and will take it back.
        if await leased(backend, str(id)) or not await stat_or_none(backend, pin_key(id)):
            return Removal.WAITS
        await backend.delete([tombstone_key(id)])
        return Removal.PINNED
    return await _remove(backend, id, digests, there)


async def _remove(
    backend: Backend, id: CheckpointId, digests: Iterable[str], there: Sequence[str] = ()
) -> Removal:
    """Remove all that is a checkpoint's own.

    Args:
        backend: The store.
        id: The checkpoint.
        digests: Keys of its digest.
        there: What a list has shown below its prefix, if one was made.
    """
    await backend.delete([index_key(id)])
    removed = False
    try:
        while True:
            own = [key for key in there if is_own(id, key)]
            # What vouches for data goes before the data.
            manifests = [key for key in own if key.startswith(f"{prefix(id)}m/")]
            data = [key for key in own if not key.startswith(f"{prefix(id)}m/")]
            for each in filter(None, (manifests, data)):
                await backend.delete(each)
            removed = removed or bool(own)
            there = await _keys(backend, id)
            if not any(is_own(id, key) for key in there):
                break
    except LinkRefused as error:
        logger.warning("%s is deleted, but not what lies behind a link: %s", id, error)
    else:
        if removed and there:
            more = f" and {len(there) - _SHOWN} more" if len(there) > _SHOWN else ""
            logger.warning(
                "%s is deleted. ckpipe did not write these, and left them there: %s%s",
                id, ", ".join(sorted(there)[:_SHOWN]), more,
            )  # fmt: skip
    await backend.delete([pin_key(id), *digests])
    return Removal.GONE


async def finish_deletions(
    backend: Backend,
    finished: set[CheckpointId],
    *,
    forget_before: datetime,
    listing: Listing | None = None,
    retired: set[CheckpointId] | None = None,
    now: datetime | None = None,
) -> None:
    """Go on with deletions that a crash or a reader held up, and forget old tombstones.

    Those of pinned checkpoints are called off.

    Deletions of which nothing is left cost no request of their own, however many there are.

    Args:
        backend: The store.
        finished: Deletions known to be through; added to, and rid of those whose tombstone is
            gone, which no later prune asks for.
        forget_before: Tombstones older than this are removed, by the store's own clock.
        listing: The names of the root, if the caller has listed them since it asked for the time.
        retired: Complete checkpoints that :func:`delete` has removed in this process, whose
            tombstones go after :data:`RETIRED_LIFE`; rid of those whose tombstone is gone.
        now: The time by the store's own clock, for these.

    Raises:
        StoreError: If the store failed.
    """
    listing = await list_root(backend) if listing is None else listing
    tombs = listing.tombstones
    # One that came since the list goes too, and is only looked at once more.
    finished.intersection_update(tombs)
    old = {id for id, tomb in tombs.items() if tomb.modified < forget_before}
    if retired and now is not None:
        retired.intersection_update(tombs)
        early = {id for id in retired if tombs[id].modified < now - RETIRED_LIFE}
        old |= early if len(early) >= _TOGETHER else set()
    # Old ones once more before the tombstone goes: a straggler may have written since.
    pending = [id for id in tombs if id in old or id not in finished]
    digests: dict[CheckpointId, list[ObjectInfo]] = await owned_sidecars(backend) if pending else {}
    left = listing.named()
    forgotten = []
    for id in pending:
        if id in left or id in digests:
            keys = [each.key for each in digests.get(id, [])]
            if await _remove_unless_held(backend, id, keys) is not Removal.GONE:
                continue
        finished.add(id)
        if id in old:
            forgotten.append(tombs[id].key)
    if forgotten:
        await backend.delete(forgotten)
