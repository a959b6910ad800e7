"""Completing checkpoints that somebody left full but without an index.

The last rank to commit may die before it has written the index. Whoever opens a root, lists it or
looks for something to load completes such checkpoints then. One whose manifests are damaged, or
that this process may not write to, stays as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import aclosing

from ckpipe.backend import Backend
from ckpipe.checkpoints.completion import descend
from ckpipe.checkpoints.digests import write_digest_of
from ckpipe.checkpoints.discovery import (
    NO_INDEX,
    describe,
    discover,
    look_up,
    newest_first,
    pick,
    top,
)
from ckpipe.errors import (
    CorruptCheckpoint,
    LinkRefused,
    ObjectNotFound,
    StoreError,
    UnsupportedVersion,
)
from ckpipe.format.manifest_codec import MAX_STORED_BYTES, decode_bundle
from ckpipe.format.object_names import directory
from ckpipe.tasks import to_thread
from ckpipe.tasks.lanes import run_lanes
from ckpipe.types import CheckpointId, CheckpointInfo

logger = logging.getLogger("ckpipe")

_AT_ONCE = 8
"""Incomplete checkpoints that are looked into at the same time."""


async def healed(backend: Backend, infos: Iterable[CheckpointInfo]) -> list[CheckpointInfo]:
    """The same checkpoints in the same order, those completed that could be, several at once.

    Costs one list for each incomplete one that has no manifests, and a few requests more for one
    that has some.

    Raises:
        StoreError: If the store failed to list.
    """
    found = list(infos)
    places = [place for place, info in enumerate(found) if info.reason == NO_INDEX]
    pending = iter(places)

    async def lane() -> None:
        for place in pending:
            found[place] = await heal(backend, found[place])

    await run_lanes(min(_AT_ONCE, len(places)), lane)
    return found


async def heal(backend: Backend, info: CheckpointInfo) -> CheckpointInfo:
    """What is known of a checkpoint, after completing it if nothing but its index lacks.

    Raises:
        StoreError: If the store failed to list.
    """
    id = info.key
    if info.complete or info.reason != NO_INDEX:
        return info
    world_size = await _world_size(backend, id)
    if world_size is None:
        return info
    try:
        outcome = await descend(backend, id, world_size)
    except (CorruptCheckpoint, StoreError, UnsupportedVersion) as error:
        logger.warning("%s cannot be completed: %s", info.id, error)
        return info
    await write_digest_of(backend, outcome.index)
    return await describe(backend, info) if outcome.complete else info


async def newest_likely(backend: Backend) -> CheckpointInfo | None:
    """What :func:`newest_healed` finds, or one that is being deleted just now, a look earlier.

    For who takes a lease on it and looks for its tombstone then anyway. Whether it is pinned is
    not looked up.

    Raises:
        StoreError: If the store failed.
    """
    info = await top(backend)
    return info if info is None or info.complete else await newest_healed(backend)


async def newest_healed(backend: Backend) -> CheckpointInfo | None:
    """The newest complete checkpoint of a root, or None; newer ones are completed if possible.

    Costs one delimited list and two looks, and a few requests for each that is newer and has no
    index.

    Raises:
        StoreError: If the store failed.
    """
    async with aclosing(newest_first(backend)) as infos:
        async for info in infos:
            known = await heal(backend, info)
            if known.complete:
                return known
    return None


async def find_healed(backend: Backend, which: int | str) -> CheckpointInfo:
    """What :func:`ckpipe.checkpoints.discovery.find` finds, completed first if that is possible.

    An exact id of one that is complete costs three looks, anything else the three lists of
    :func:`ckpipe.checkpoints.discovery.discover`.

    Raises:
        CheckpointIncomplete: If there is only an incomplete one.
        CheckpointNotFound: If there is none.
        StoreError: If the store failed.
    """
    id = CheckpointId.parse(which) if isinstance(which, str) else None
    exact = None if id is None else await look_up(backend, id)
    if exact is not None:
        return exact
    everything = await discover(backend)
    named = [info for info in everything if which in (info.id, info.step)]
    if named and not any(info.complete for info in named):
        everything = await healed(backend, named)
    return pick(everything, which)


async def _world_size(backend: Backend, id: CheckpointId) -> int | None:
    """How many ranks a checkpoint has, by any manifest of the first directory."""
    prefix = directory(id, 0, 0)
    try:
        key = next(iter(sorted([each.key async for each in backend.list(prefix)])), None)
        if key is None:
            return None
        data = await backend.get(key, max_bytes=MAX_STORED_BYTES)
        bundle = await to_thread.run_sync(
            lambda: decode_bundle(data, key=key, id=id, kind="manifest")
        )
    except (CorruptCheckpoint, LinkRefused, ObjectNotFound, UnsupportedVersion) as error:
        logger.warning("%s cannot be completed: %s", id, error)
        return None
    return bundle.world_size
